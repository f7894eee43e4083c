"""Writes a folder in `torch.distributed.checkpoint`'s format, each process its part.

Tables are divided into blocks of consecutive ids, and each block has a process that writes it. A
block's rows come from the processes that hold them in *rounds*: in each, every process requests
one block or none, and writes it before the next. So a process has one block of a table beyond what
it holds, whatever the plan is, and what is written is what `nn.EmbeddingBag` would have saved.
"""

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from placer.errors import BackendError, CheckpointError
from placer.executor.distributed.lost_ranks import rank_lost
from placer.files import FileRecord, HashedFile
from placer.folders import HiddenFolder
from placer.storage.checkpoint.table_blocks import Name, NamedTables, rounds_of
from placer.storage.row_blocks import block_rows, row_blocks
from placer.storage.tensor_rows import AnyTensor, TensorRows


def save_folder(
    path: str | os.PathLike[str],
    named: Sequence[NamedTables],
    tensors: Mapping[Name, AnyTensor],
    *,
    if_there: str,
) -> None:
    """Write tables and other tensors to a folder, which appears when it is complete.

    Parameters
    ----------
    path, named, tensors
        See `write_folder`.
    if_there : str
        What the error advises if there is a folder already; if empty, that one is replaced.

    Raises
    ------
    CheckpointError, BackendError
        See `write_folder`; or if there is a folder already.
    """
    hidden = HiddenFolder(Path(path))

    def begin() -> None:
        if hidden.target.exists() and if_there:
            raise CheckpointError(f"{path} is there already; {if_there}")
        hidden.begin()

    try:
        write_folder(hidden, named, tensors, begin=begin, finish=hidden.publish)
    finally:
        hidden.discard()


def write_folder(
    folder: HiddenFolder,
    named: Sequence[NamedTables],
    tensors: Mapping[Name, AnyTensor],
    *,
    begin: Callable[[], None],
    finish: Callable[[], None] = lambda: None,
) -> dict[str, FileRecord]:
    """Write tables and other tensors; all processes that share the tables must call it.

    Parameters
    ----------
    folder : HiddenFolder
        One that all processes see.
    named : sequence of NamedTables
    tensors : mapping of Name to tensor
        What all processes have alike; the first one writes them.
    begin, finish : callable
        Called on the first process: one begins the folder before any process writes, the other
        comes when all have written. The others wait, and an error there is one on all.

    Returns
    -------
    mapping of file name to FileRecord
        The files that this process wrote.

    Raises
    ------
    CheckpointError
        On all processes, if one of them cannot write, as on a full disk.
    BackendError
        If a process is lost.
    """
    worlds = {each.tables.world for each in named}
    if len(worlds) > 1:
        raise CheckpointError(
            f"the tables are spread over different numbers of ranks: {sorted(worlds)}; save them "
            "one by one"
        )
    group = named[0].tables.group if named else None
    planner = _Planner(named, tensors)
    writer = _Writer(folder.partial, begin, finish)
    # Else it finds out by itself; older versions of PyTorch lack the argument.
    alone = {"no_dist": True} if group is None and dist.is_initialized() else {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save({}, storage_writer=writer, planner=planner, process_group=group, **alone)
    except CheckpointException as failure:
        _raise_first(failure, folder.target, planner.lost)
    except _OutOfStep as error:
        raise (error.__cause__ or error) from None
    except RuntimeError as error:
        if planner.world == 1:
            raise
        _raise_lost(error, planner)
    return writer.files.written


def _raise_lost(error: RuntimeError, planner: "_Planner") -> NoReturn:
    """Raise what is known of a process that no longer answers."""
    if isinstance(planner.lost, BackendError):
        raise planner.lost from error
    doing = "exchanging what ranks have written"
    raise rank_lost(planner.rank, planner.members, doing, error) from error


def _raise_first(failure: CheckpointException, folder: Path, lost: BaseException | None) -> None:
    """Raise what went wrong on the first process that failed: the same words on all."""
    if isinstance(lost, BackendError):
        raise lost
    _, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
    if isinstance(error, OSError):
        raise CheckpointError(
            f"cannot write checkpoint {folder}: {error.strerror or error}"
        ) from error
    if not isinstance(error, Exception):  # Ctrl-C and the like.
        raise error
    raise error from failure


class _Planner(SavePlanner):
    """Knows what this process writes, and fetches it in rounds."""

    def __init__(self, named: Sequence[NamedTables], tensors: Mapping[Name, AnyTensor]) -> None:
        tables = named[0].tables if named else None
        self.rank, self.world = (tables.rank, tables.world) if tables else (0, 1)
        group = tables.group if tables else None
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        self.lost: BaseException | None = None
        self._rounds = rounds_of(named)
        self._next = 0
        self._items: list[WriteItem] = []
        self._number_of: dict[MetadataIndex, int] = {}
        self._here: dict[MetadataIndex, Callable[[], Tensor]] = {}
        own = dict(tensors)
        names = [*tensors, *(name for each in named for name in each.tensors)]
        for each in named:
            each.tables.synchronize()
            for name, tensor in each.tensors.items():
                if not tensor.shape[0]:  # No block of it is in any round.
                    own[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if self.rank == 0:
            for name, held in own.items():
                self._add_tensor(name, TensorRows.of(held))
        for number, each_round in enumerate(self._rounds):
            block_name, block = each_round.names[self.rank], each_round.requests[self.rank]
            if block_name is not None and block is not None:
                rows = block.start, block.stop
                index = self._add(block_name, block.tensor.shape, block.tensor.dtype, rows)
                self._number_of[index] = number
        self._paths = {".".join(name): name for name in names}
        if len(self._paths) < len(names):
            raise CheckpointError("two tensors have one name; rename one of them")

    def _add_tensor(self, name: Name, tensor: TensorRows) -> None:
        step = block_rows(tensor.row_bytes) if tensor.shape else 1
        for start, stop in row_blocks(max(tensor.rows, 1), step):
            stop = min(stop, tensor.rows)
            index = self._add(name, tensor.shape, tensor.dtype, (start, stop))
            self._here[index] = partial(tensor.read, start, stop)

    def _add(
        self, name: Name, shape: Sequence[int], dtype: torch.dtype, rows: tuple[int, int]
    ) -> MetadataIndex:
        """Add rows ``start..stop`` of a tensor to what this process writes."""
        start, stop = rows
        offsets = torch.Size((start, *(0 for _ in shape[1:])) if shape else ())
        sizes = torch.Size((stop - start, *shape[1:]) if shape else ())
        item = WriteItem(
            MetadataIndex(".".join(name), offsets),
            WriteItemType.TENSOR if sizes == tuple(shape) else WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), torch.Size(shape)
            ),
        )
        self._items.append(item)
        return item.index

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the state dict is empty."""

    def create_local_plan(self) -> SavePlan:
        """What this process writes."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are, and what they are together."""
        plans, metadata = create_default_global_save_plan(all_plans)
        # By this other tools of torch's find the nested state dict again.
        return plans, dataclasses.replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of an item, after the rounds that come before it."""
        here = self._here.get(write_item.index)
        if here is not None:
            return here().contiguous()
        wanted = self._number_of[write_item.index]
        while self._next < wanted:
            self._take_round()
        block = self._take_round()
        assert block is not None, "this process requested it"
        return block

    def finish_rounds(self) -> None:
        """Send the others what they request after this process's last block."""
        while self.lost is None and self._next < len(self._rounds):
            self._take_round()

    def _take_round(self) -> Tensor | None:
        now = self._rounds[self._next]
        self._next += 1
        try:
            return now.tables.fetch(now.requests)
        except BaseException as error:
            self.lost = error
            if self.world == 1:
                raise
            raise _OutOfStep("a round of a checkpoint failed") from error


class _OutOfStep(Exception):
    """A round failed here, while other processes may wait in it.

    What a process meets in its part of a save is pickled and told to all. They would wait for each
    other, these in the round and this one in the telling. So it is not told: pickling it raises it,
    this process leaves the save, and the others find its connections closed.
    """

    def __reduce__(self) -> NoReturn:
        raise self


class _Writer(FileSystemWriter):
    """One file for each process, whose blocks are resolved in their order, one at a time."""

    def __init__(self, folder: Path, begin: Callable[[], None], finish: Callable[[], None]) -> None:
        # Copies ahead would take blocks before their turn. `HashedFile` flushes files to disk.
        super().__init__(folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.files = _Files()
        self.fs = self.files
        self._begin, self._finish, self._is_first = begin, finish, True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn who is first."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_first = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is; no process writes before all have come through here."""
        if self._is_first:
            self._begin()
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's part; if that fails, send the others theirs all the same."""
        try:
            return super().write_data(plan, planner)
        finally:
            cast(_Planner, planner).finish_rounds()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata: on the first process, when all have written theirs."""
        super().finish(metadata, results)
        self._finish()


class _Files(FileSystem):
    """Files that go through `HashedFile`."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """A file to write; what failed is raised at its end."""
        assert mode == "wb", "a writer needs nothing else"
        file = HashedFile(Path(path))
        try:
            yield file
        finally:
            file.close()
        self.written[Path(path).name.removesuffix(".tmp")] = file.finish()
