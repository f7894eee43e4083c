"""Writes a folder in `torch.distributed.checkpoint`'s format, every rank its part.

Tables are cut into blocks of consecutive ids, which are dealt to the ranks. A block's rows come
from the ranks that hold them in *rounds*: in each, every rank asks for one block or for none, and
writes it before the next. So a rank has one block of a table beyond what it holds, whatever the
plan is, and what is written is what `nn.EmbeddingBag` would have saved.
"""

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

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
from placer.storage.checkpoint.sink import Sink, Written
from placer.storage.checkpoint.table_blocks import Name, NamedTables, block_rows, rounds_of
from placer.storage.tensor_rows import AnyTensor, in_rows


def write_folder(
    folder: Path,
    named: Sequence[NamedTables],
    tensors: Mapping[Name, AnyTensor],
    *,
    target: Path,
    begin: Callable[[], None],
    finish: Callable[[], None] = lambda: None,
) -> dict[str, Written]:
    """Write tables and other tensors into a folder; all ranks that share the tables must.

    Parameters
    ----------
    folder : Path
        One that all ranks see, where `begin` has made an empty one.
    named : sequence of NamedTables
    tensors : mapping of Name to tensor
        What all ranks have alike; the first one writes them.
    target : Path
        What errors call the folder: where it is to be in the end.
    begin, finish : callable
        Called on the first rank, before any rank writes and when all have written; the others wait
        for it, and an error there is one on all.

    Returns
    -------
    mapping of file name to Written
        The files that this rank wrote.

    Raises
    ------
    CheckpointError
        On all ranks, if one of them cannot write, as on a full disk.
    BackendError
        If a rank is lost.
    """
    groups = [each.tables.group for each in named]
    group = groups[0] if groups else None
    worlds = {each.tables.world for each in named}
    if len(worlds) > 1:
        raise CheckpointError(
            f"the tables are spread over different numbers of ranks: {sorted(worlds)}; save them "
            "one by one"
        )
    rank, world = (named[0].tables.rank, named[0].tables.world) if named else (0, 1)
    planner = _Planner(named, tensors, rank)
    writer = _Writer(folder, begin, finish)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=group,
                # Else it finds out by itself, and older versions of PyTorch cannot be told.
                **({"no_dist": True} if group is None and dist.is_initialized() else {}),
            )
    except CheckpointException as failure:
        _raise_first(failure, target, planner.lost)
    except RuntimeError as error:
        if world == 1:
            raise
        if isinstance(planner.lost, BackendError):
            raise planner.lost from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendError(
            f"rank {rank} of {world}: exchanging what ranks have written failed: {reason}. Another "
            "rank died, or did not come in time; see the output of the others, and start again "
            "from the last checkpoint"
        ) from error
    return writer.files.written


def _raise_first(failure: CheckpointException, folder: Path, lost: BaseException | None) -> None:
    """Raise what went wrong on the first rank that failed: the same words on all."""
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
    """Knows what this rank writes, and gets it in rounds."""

    def __init__(
        self, named: Sequence[NamedTables], tensors: Mapping[Name, AnyTensor], rank: int
    ) -> None:
        self.lost: BaseException | None = None
        self._rank = rank
        self._rounds = rounds_of(named)
        self._next = 0
        self._items: list[WriteItem] = []
        self._number_of: dict[MetadataIndex, int] = {}
        self._here: dict[MetadataIndex, Callable[[], Tensor]] = {}
        paths = list(tensors)
        if rank == 0:
            for name, tensor in tensors.items():
                self._add_tensor(name, tensor)
        for each in named:
            each.tables.settle()
            for name, of_table in each.tensors.items():
                paths.append(name)
                if rank == 0 and not of_table.shape[0]:
                    self._add_tensor(name, torch.empty(of_table.shape, dtype=of_table.dtype))
        for number, each_round in enumerate(self._rounds):
            own, span = each_round.names[rank], each_round.asked[rank]
            if own is not None and span is not None:
                offsets = (span.start, *(0 for _ in span.tensor.shape[1:]))
                item = _item(
                    own,
                    span.tensor.dtype,
                    span.tensor.shape,
                    offsets,
                    span.shape,
                )
                self._items.append(item)
                self._number_of[item.index] = number
        self._paths = {".".join(path): path for path in paths}
        if len(self._paths) < len(paths):
            raise CheckpointError("two tensors have one name; rename one of them")

    def _add_tensor(self, name: Name, tensor: AnyTensor) -> None:
        rows = in_rows(tensor)
        shape = rows.shape
        height = shape[0] if shape else 1
        step = block_rows(rows.size_bytes // max(height, 1)) if shape else 1
        for start in range(0, max(height, 1), step):
            stop = min(start + step, height)
            offsets = (start, *(0 for _ in shape[1:])) if shape else ()
            sizes = (stop - start, *shape[1:]) if shape else ()
            item = _item(name, rows.dtype, shape, offsets, sizes)
            self._items.append(item)
            self._here[item.index] = partial(rows.read, start, stop)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the state dict is empty."""

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
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
        assert block is not None, "this rank asked for it"
        return block

    def finish_rounds(self) -> None:
        """Bring the others what they ask for after this rank's last block."""
        while self.lost is None and self._next < len(self._rounds):
            self._take_round()

    def _take_round(self) -> Tensor | None:
        now = self._rounds[self._next]
        self._next += 1
        try:
            return now.tables.bring(now.asked)
        except BaseException as error:
            self.lost = error  # The ranks are out of step.
            raise


def _item(
    name: Name,
    dtype: torch.dtype,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> WriteItem:
    at = torch.Size(offsets)
    whole = tuple(sizes) == tuple(shape)
    return WriteItem(
        MetadataIndex(".".join(name), at),
        WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(at, torch.Size(sizes)),
            TensorProperties(dtype),
            torch.Size(shape),
        ),
    )


class _Writer(FileSystemWriter):
    """One file for each rank, whose blocks are asked for in their order, one at a time."""

    def __init__(self, folder: Path, begin: Callable[[], None], finish: Callable[[], None]) -> None:
        # Copies ahead would ask for blocks before their turn. `Sink` flushes files to disk.
        super().__init__(folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.files = _Files()
        self.fs = self.files
        self._begin, self._finish, self._is_first = begin, finish, True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn who is first."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_first = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is; no rank writes before all have come through here."""
        if self._is_first:
            self._begin()
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; if that fails, bring the others theirs all the same."""
        try:
            return super().write_data(plan, planner)
        finally:
            cast(_Planner, planner).finish_rounds()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata: on the first rank, when all have written theirs."""
        super().finish(metadata, results)
        self._finish()


class _Files(FileSystem):
    """Files that go through `Sink`."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """A file to write; what failed is raised at its end."""
        assert mode == "wb", "nothing else is asked of a writer"
        sink = Sink(Path(path))
        try:
            yield sink
        finally:
            sink.close()
        self.written[Path(path).name.removesuffix(".tmp")] = sink.finish()
