"""Writes a folder in `torch.distributed.checkpoint`'s format, each process its part.

Tables are divided into blocks of consecutive ids, and each block has a process that writes it. A
block's rows come from the processes that hold them in *rounds*: in each, every process requests
one block or none, and writes it before the next. So a process has one block of a table beyond what
it holds, whatever the plan is, and what is written is what `nn.EmbeddingBag` would have saved.

`torch.distributed.checkpoint.save` is not used: it would load all blocks of a process at once, or
in another order than the rounds, and it waits for ever where a process fails within a round.
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
from placer.files import FileRecord, HashedFile, StrPath
from placer.folders import HiddenFolder
from placer.storage.checkpoint.dcp_reader import NAME
from placer.storage.checkpoint.table_blocks import Name, NamedTables, Round, rounds_of
from placer.storage.tensor_rows import AnyTensor, TensorRows, block_rows, row_blocks

FORMAT_VERSION = "1.0.0"
"""What PyTorch 2.13 writes; earlier versions write none, and all of them read it."""


def save_folder(
    path: StrPath,
    named: Sequence[NamedTables],
    tensors: Mapping[Name, AnyTensor],
    *,
    if_there: str,
) -> None:
    """Write tables and other tensors to a folder, which appears when it is complete.

    See `write_folder`. `if_there` is what the error advises if there is a folder already; if it is
    empty, that one is replaced.
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
    """Write tables and other tensors; all processes that share the tables must call it.

    All of them see the folder, and have the other tensors alike, which the first one writes. There,
    `begin` begins the folder before any process writes, and `finish` comes when all have written,
    with the files by their names; the others wait, and an error there is one on all. On all
    processes, raises CheckpointError if one of them cannot write, and BackendError if one is lost.
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
    """Rows of a tensor that a process has written."""

    name: Name
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int]
    place: tuple[str, int, int]  # A file, where the bytes begin in it, and how many there are.


class _Saving:
    """The processes that write a folder together, and what this one writes."""

    def __init__(self, folder: Path, named: Sequence[NamedTables]) -> None:
        tables = named[0].tables if named else None
        self.rank, self.world = (tables.rank, tables.world) if tables else (0, 1)
        self._group = tables.group if tables else None
        self._folder, self._named = folder, named
        self._rounds = iter(rounds_of(named))
        self._is_out_of_step = False  # A round failed here, while others may wait in it.

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on every process; return what each has, or raise the first one's error."""
        result: Any = None
        fault: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            # The others would wait in the round, and this process here: it leaves, and they find
            # its connections closed.
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
        """Write this process's file, and say what is where in it; there is none for nothing."""
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
            if not self._is_out_of_step:  # The others still request what this process holds.
                for now in self._rounds:
                    self._fetch(now)
        return blocks, {} if file is None else {path.name: file.finish()}

    def _own(self, tensors: Mapping[Name, AnyTensor]) -> dict[Name, TensorRows]:
        """Return what the first process writes besides its blocks."""
        own = dict(tensors)
        for each in self._named:
            each.tables.synchronize()
            for name, tensor in each.tensors.items():
                if not tensor.shape[0]:  # No block of it is in any round.
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
    """Describe what all processes have written, as `torch.distributed.checkpoint` does."""
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
    # By their paths other tools of torch's find the nested state dict again.
    metadata = Metadata({**tensors}, planner_data=dict(paths), storage_data=places)
    metadata.storage_meta = StorageMeta(checkpoint_id=folder, save_id=str(uuid.uuid4()))
    metadata.version = FORMAT_VERSION  # Which earlier versions of the class do not take.
    return metadata
