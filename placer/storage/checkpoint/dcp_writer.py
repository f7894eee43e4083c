"""Write a folder in `torch.distributed.checkpoint`'s format; each process writes its part.

Tables are divided into blocks of consecutive ids, and one process writes each block. Processes
fetch a block's rows in *rounds*. In a round, every process requests one block or none from the
processes that hold its rows, and writes it. So a process needs memory for one more block.

`torch.distributed.checkpoint.save` is not used. It would load all blocks of a process at once, or
in another order than the rounds, and it waits forever if a process fails within a round.
"""

import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from placer.errors import CheckpointError
from placer.executor.distributed.collectives import rank_lost
from placer.files.atomic import FileRecord, HashedFile, StrPath
from placer.files.folders import HiddenFolder
from placer.storage.checkpoint.dcp_reader import NAME
from placer.storage.checkpoint.table_blocks import Name, NamedTables, Round, rounds_of
from placer.storage.tensor_rows import AnyTensor, TensorRows, block_rows, row_blocks

FORMAT_VERSION = "1.0.0"
"""Version that PyTorch 2.13 writes. Earlier versions write none, but can read such files."""


def save_folder(
    path: StrPath,
    named: Sequence[NamedTables],
    tensors: Mapping[Name, AnyTensor],
    *,
    if_there: str,
) -> None:
    """Write tables and other tensors to a folder, which appears when it is complete.

    See `write_folder`. If the folder exists, raise an error that advises `if_there`; if that is
    empty, replace the folder.
    """
    hidden = HiddenFolder(Path(path))

    def begin() -> None:
        if hidden.target.exists() and if_there:
            raise CheckpointError(f"{path} is there already; {if_there}")
        hidden.begin()

    try:
        write_folder(hidden, named, tensors, begin, lambda files: hidden.publish())
    finally:
        hidden.discard()


def write_folder(
    folder: HiddenFolder,
    named: Sequence[NamedTables],
    tensors: Mapping[Name, AnyTensor],
    begin: Callable[[], None],
    finish: Callable[[dict[str, FileRecord]], None],
) -> None:
    """Write tables and other tensors; all processes that share the tables must call this.

    All processes must see the folder and pass equal `tensors`, which the first process writes. The
    first process calls `begin` before any process writes, and `finish` with the written files by
    name after all have written. Others wait, and raise its errors too. All processes raise
    CheckpointError if one cannot write, and BackendError if one is lost.
    """
    worlds = {each.tables.world for each in named}
    if len(worlds) > 1:
        raise CheckpointError(
            f"the tables are spread over different numbers of ranks: {sorted(worlds)}; save them "
            "one by one"
        )
    names = [*tensors, *(name for each in named for name in each.tensors)]
    paths = {".".join(name): name for name in names}
    if len(paths) < len(names):
        raise CheckpointError("two tensors have one name; rename one of them")
    saving = _Saving(folder.target, named)
    saving.together(begin if saving.rank == 0 else lambda: None)
    parts = saving.together(lambda: saving.write(folder.partial, tensors))

    def complete() -> None:
        if saving.rank == 0:
            file = HashedFile(folder.partial / NAME)
            blocks = [block for own, _ in parts for block in own]
            pickle.dump(_metadata(blocks, paths, folder.partial), file)
            files = {NAME: file.finish()}
            for _, own in parts:
                files |= own
            finish(files)

    saving.together(complete)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of a tensor that a process wrote."""

    name: Name
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int]
    place: tuple[str, int, int]  # File, first byte, number of bytes.


class _Saving:
    """Writes a folder together with other processes."""

    def __init__(self, folder: Path, named: Sequence[NamedTables]) -> None:
        tables = named[0].tables if named else None
        self.rank, self.world = (tables.rank, tables.world) if tables else (0, 1)
        self._group = tables.group if tables else None
        self._folder, self._named = folder, named
        self._rounds = iter(rounds_of(named))
        self._is_out_of_step = False  # Whether a round failed here; others may wait in it.

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do work on every process; return all results, or raise the first process's error."""
        result: Any = None
        fault: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            # The others wait in the round, and this process would wait here. So it leaves, and they
            # notice its closed connections.
            if self._is_out_of_step and self.world > 1:
                raise
            fault = error
        said: list[Any] = [(result, fault)]
        if self._group is not None:
            said *= self.world
            try:
                dist.all_gather_object(said, (result, fault), group=self._group)
            except RuntimeError as error:
                members = dist.get_process_group_ranks(self._group)
                doing = "exchanging what ranks have written"
                raise rank_lost(self.rank, members, doing, error) from error
        first = next((each for _, each in said if each is not None), None)
        if isinstance(first, OSError):
            raise CheckpointError(
                f"cannot write checkpoint {self._folder}: {first.strerror or first}"
            ) from first
        if first is not None:
            raise first
        return [each for each, _ in said]

    def write(
        self, folder: Path, tensors: Mapping[Name, AnyTensor]
    ) -> tuple[list[_Block], dict[str, FileRecord]]:
        """Write this process's file, if it has anything to write; return its blocks and record."""
        blocks: list[_Block] = []
        path = folder / f"__{self.rank}_0.distcp"
        file: HashedFile | None = None

        def add(name: Name, shape: Sequence[int], rows: tuple[int, int], values: Tensor) -> None:
            nonlocal file
            file = file or HashedFile(path)
            start = file.tell()
            values = values.detach().cpu().contiguous()
            if values.untyped_storage().size() != values.nbytes:
                values = values.clone()
            torch.save(values, cast(Any, file))
            place = path.name, start, file.tell() - start
            blocks.append(_Block(name, tuple(shape), values.dtype, rows, place))

        try:
            for name, tensor in self._own(tensors).items():
                step = block_rows(tensor.row_bytes) if tensor.shape else 1
                for start, stop in row_blocks(max(tensor.rows, 1), step):
                    rows = start, min(stop, tensor.rows)
                    add(name, tensor.shape, rows, tensor.read(*rows))
            for now in self._rounds:
                values = self._fetch(now)
                block_name, block = now.names[self.rank], now.requests[self.rank]
                if block_name is not None and block is not None and values is not None:
                    add(block_name, block.tensor.shape, (block.start, block.stop), values)
        finally:
            if file is not None:
                file.close()
            if not self._is_out_of_step:  # Others still request its rows.
                for now in self._rounds:
                    self._fetch(now)
        return blocks, {} if file is None else {path.name: file.finish()}

    def _own(self, tensors: Mapping[Name, AnyTensor]) -> dict[Name, TensorRows]:
        """Return the tensors that this process writes besides blocks; only the first has any."""
        own = dict(tensors)
        for each in self._named:
            each.tables.synchronize()
            for name, tensor in each.tensors.items():
                if not tensor.shape[0]:  # It has no block.
                    own[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if self.rank:
            return {}
        return {name: TensorRows.of(tensor) for name, tensor in own.items()}

    def _fetch(self, now: Round) -> Tensor | None:
        try:
            return now.tables.fetch(now.requests)
        except BaseException:
            self._is_out_of_step = True
            raise


def _metadata(blocks: Sequence[_Block], paths: Mapping[str, Name], folder: Path) -> Metadata:
    """Return metadata of all written blocks, as `torch.distributed.checkpoint` writes it."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places = {}
    for block in blocks:
        name, (start, stop) = ".".join(block.name), block.rows
        size, rest = torch.Size(block.shape), block.shape[1:]
        offsets = torch.Size((start, *[0] * len(rest)) if size else ())
        chunk = ChunkStorageMetadata(offsets, torch.Size((stop - start, *rest) if size else ()))
        new = TensorStorageMetadata(TensorProperties(block.dtype), size, [])
        chunks = tensors.setdefault(name, new).chunks
        places[MetadataIndex(name, offsets, len(chunks))] = _StorageInfo(*block.place)
        chunks.append(chunk)
    # Other torch tools restore the nested state dict from these paths.
    metadata = Metadata({**tensors}, planner_data=dict(paths), storage_data=places)
    metadata.storage_meta = StorageMeta(checkpoint_id=folder, save_id=str(uuid.uuid4()))
    metadata.version = FORMAT_VERSION  # Older versions of the class have no such argument.
    return metadata
