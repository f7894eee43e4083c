"""From the tables of a checkpoint, or of other shards, to the shards of a plan."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from placer.executor.tensor_names import UPDATES
from placer.files import StrPath, sha256_file, sync_folder
from placer.folders import new_folder
from placer.plan.diff import PlanDiff, diff
from placer.plan.order import Int, Ranks
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.plan.verify import refuse_growing, verify
from placer.storage.manifest import write_manifest
from placer.storage.run_state import STATES, Checkpoint
from placer.storage.shards.shard_folder import (
    FORMAT_VERSION,
    MANIFEST,
    PLAN,
    Bytes,
    ShardEntry,
    ShardFile,
    ShardFolder,
    ShardManifest,
    checkpoint_of_shards,
    files_by_table,
    held_rows,
    open_shards,
    placement_sha256,
    refuse_other_plan,
)
from placer.storage.shards.table_files import tensors_by_table
from placer.storage.tensor_rows import (
    MOST_ROWS,
    NAMES,
    StoredTensor,
    TensorRows,
    bytes_of,
    chunk_rows,
    row_blocks,
)

_MOST_OPEN = 256
"""Files that are open at a time: systems allow some thousand."""


def write_shards(plan: Plan, checkpoint: Checkpoint, path: StrPath) -> ShardFolder:
    """Write the tables of a checkpoint as a plan lays them out, one file a shard and device.

    Each table is read once, a bounded number of rows at a time, and its rows go to the files
    of the shards that have them: no table has to fit in memory. Replicas are one file that has
    a name for each device (a hard link, where the file system has them). The folder appears when it
    is complete. `placer.training.checkpoint.open_checkpoint` opens checkpoints, of any plan.

    Raises PlanError if the plan is unsound. Raises CheckpointError if the checkpoint lacks a table
    or its optimizer state, or has another shape or dtype. Raises PlacerError if there is something
    at `path`, or it cannot be written; nothing is left there then.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from placer import Plan, Shard, Table, Topology
    >>> from placer.storage.run_state import Position
    >>> shard = Shard("t", (0, 6, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("t", 6, 2, optimizer="sgd"),), Topology.parse("1xh100"), (shard,))
    >>> weights = {"embeddings": {"t.weight": torch.rand(6, 2)}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shards = write_shards(plan, Checkpoint(Position(step=3), {}, weights), f"{folder}/new")
    >>> shards.step, [file.name for (file,) in shards.files["t"]]
    (3, ['gpu%3A0.hbm/00000-t.safetensors'])
    """
    verify(plan)
    _write(plan, checkpoint, tensors_by_table(plan, checkpoint), path)
    return open_shards(path)


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was done."""

    difference: PlanDiff  # Rows by device.
    # Files that are those of the older folder (or of a replica), and those with rows of several.
    kept_files: int
    written_files: int
    # Of these, what was not and what was written to disk; on a file system without hard links kept
    # files are written too.
    kept_file_bytes: int
    written_file_bytes: int


def reshard(
    shards: ShardFolder | StrPath,
    new: Plan,
    path: StrPath,
    *,
    old: Plan | None = None,
    verify_files: bool = True,
) -> Resharded:
    """Make the folder of a plan from that of another one, byte for byte as from a checkpoint.

    Files whose rows and columns are those of an older file become hard links to it. The others
    are written as `write_shards` writes them; rows are known by their ids, whatever the row
    orders. Optimizer state goes with its rows. The new folder appears when it is complete, and
    shares files with the older one, which stays as it is: write none of them in place.

    `old` is the plan that `shards` is believed to be of; by default the one that it has in it.
    Bytes are counted between its devices and those of `new`. With `verify_files`, the SHA-256 of
    every file that is kept or read is compared first. Without it kept files are not read, and of
    others only blocks of rows of which some are needed.

    Raises PlanMismatchError if the folder is not of `old`, or `new` has tables that `old` lacks or
    has otherwise; PlanError if the newer plan is unsound; CheckpointError if a file is missing or
    damaged; PlacerError if there is something at `path`, or it cannot be written.
    """
    if not isinstance(shards, ShardFolder):
        shards = open_shards(shards, verify=verify_files)
    refuse_other_plan(shards, old or shards.plan)
    verify(new)
    difference = diff(old or shards.plan, new)
    difference.check_rows()
    checkpoint = checkpoint_of_shards(shards)
    made = _write(new, checkpoint, tensors_by_table(shards.plan, checkpoint), path, shards)
    every = [(name, entry.size_bytes) for name, entry in made.entries.items()]
    written_bytes = sum(size for name, size in every if name not in made.linked)
    return Resharded(
        difference,
        len(made.kept),
        len(every) - len(made.kept),
        sum(size for _, size in every) - written_bytes,
        written_bytes,
    )


def _write(
    plan: Plan,
    checkpoint: Checkpoint,
    tensors: Mapping[str, Mapping[str, TensorRows]],
    path: StrPath,
    older: ShardFolder | None = None,
) -> "_NewShards":
    """Write a folder of shards, which appears when it is complete; keep files of an older one."""
    refuse_growing(plan, "a folder of shards")
    with new_folder(path) as folder:
        made = _NewShards(folder, plan)
        for name, files in files_by_table(plan).items():
            made.write([each for each in files if not made.keeps(each, older)], tensors[name])
        made.finish(checkpoint)
    return made


def ids_at(order: Ranks, shard: Shard, start: int, stop: int) -> Int:
    """Return ids at rows ``start..stop`` of a shard, shape (stop − start,).

    >>> ids_at(Ranks.of([7, 3]), Shard("t", (0, 100, 1), (0, 8), ("gpu:0",), "hbm", "device"), 0, 4)
    array([7, 3, 0, 1])
    """
    first, _, step = shard.rows
    return order.ids(first + step * np.arange(start, stop, dtype=np.int64))


def same_ids(one: tuple[Ranks, Shard], other: tuple[Ranks, Shard]) -> bool:
    """Compare the ids of two shards of as many rows, of whatever row orders, in their order."""
    return all(
        np.array_equal(ids_at(*one, start, stop), ids_at(*other, start, stop))
        for start, stop in row_blocks(one[1].row_count, MOST_ROWS)
    )


class _NewShards:
    """A folder of shards that is being written."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        self.entries: dict[str, ShardEntry] = {}  # What has been written, by the file's name.
        # Files that an earlier checkpoint has already; of them, those that were linked, not copied.
        self.kept: set[str] = set()
        self.linked: set[str] = set()

    def keeps(self, copies: Sequence[ShardFile], older: ShardFolder | None) -> bool:
        """Make files of an older one that has the same rows in the same order, if there is one."""
        if older is None:
            return False
        table, shard = copies[0].table.name, copies[0].shard
        own, order = (Ranks.in_plan(self.plan, table), shard), older.order_of(table)
        for file, *_ in older.files[table]:
            was = file.shard
            is_alike = (was.cols, was.row_count) == (shard.cols, shard.row_count)
            if is_alike and same_ids((order, was), own):
                older.check(file)
                self._link(older.path / file.name, copies, older.manifest.files[file.name].sha256)
                return True
        return False

    def write(
        self, files: Sequence[tuple[ShardFile, ...]], tensors: Mapping[str, TensorRows]
    ) -> None:
        """Write shards of one table, reading it once, or once for so many as may be open."""
        for first in range(0, len(files), _MOST_OPEN):
            own = files[first : first + _MOST_OPEN]
            self._write([copies[0] for copies in own], tensors)
            for copies in own:
                path = self._place(copies[0])
                sha256 = sha256_file(path)
                self._add(copies[0], sha256)
                self._link(path, copies[1:], sha256)

    def _write(self, files: Sequence[ShardFile], tensors: Mapping[str, TensorRows]) -> None:
        order = Ranks.in_plan(self.plan, files[0].table.name)
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(_made(self._place(file), file)) for file in files]
            for name, rows in tensors.items():
                for start, stop in row_blocks(rows.rows, chunk_rows(rows.row_bytes)):
                    ranks = order.ranks(np.arange(start, stop, dtype=np.int64))
                    held = [held_rows(ranks, file.shard) for file in files]
                    if not any(where.size for where, _ in held):
                        continue
                    values = bytes_of(rows.read(start, stop)).numpy().reshape(stop - start, -1)
                    for file, descriptor, (where, places) in zip(files, opened, held, strict=True):
                        tensor = file.tensors[name]
                        own = values[where][:, tensor.columns(*file.shard.cols)]
                        _write_rows(descriptor, tensor, places, own)

    def _place(self, file: ShardFile) -> Path:
        """Return where a file belongs; its own folder is there."""
        path = self.path / file.name
        path.parent.mkdir(exist_ok=True)
        return path

    def _link(self, source: Path, copies: Sequence[ShardFile], sha256: str) -> None:
        """Make files of one that is there already."""
        for file in copies:
            path = self._place(file)
            try:
                path.hardlink_to(source)
                self.linked.add(file.name)
            except OSError:  # Another file system, or one without links.
                shutil.copyfile(source, path)
                sync_folder(path)
            self.kept.add(file.name)
            self._add(file, sha256)

    def _add(self, file: ShardFile, sha256: str) -> None:
        shard = file.shard
        self.entries[file.name] = ShardEntry(
            table=shard.table,
            rows=list(shard.rows),
            cols=list(shard.cols),
            device=file.home.device,
            memory=file.home.memory,
            tensors={
                name: {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
                for name, tensor in file.tensors.items()
            },
            size_bytes=file.size_bytes,
            sha256=sha256,
        )

    def finish(self, checkpoint: Checkpoint) -> None:
        """Write the plan and ``shards.json``."""
        self.plan.save(self.path / PLAN)
        updates = checkpoint.tensors.get(STATES, {}).get(UPDATES)
        manifest = ShardManifest(
            format_version=FORMAT_VERSION,
            plan_sha256=placement_sha256(self.plan),
            checkpoint=checkpoint.position,
            updates=None if updates is None else int(TensorRows.of(updates).whole()),
            files=dict(sorted(self.entries.items())),
        )
        body = manifest.model_dump(exclude={"sha256"})
        write_manifest(self.path / MANIFEST, body, end="\n")
        for folder in {(self.path / name).parent for name in self.entries}:
            sync_folder(folder)


@contextlib.contextmanager
def _made(path: Path, file: ShardFile) -> Iterator[int]:
    """Make a shard's file, which must not exist, to be written; afterwards it is on disk."""
    with path.open("xb", buffering=0) as made:
        _write_at(made.fileno(), file.header, 0)
        os.ftruncate(made.fileno(), file.size_bytes)
        yield made.fileno()
        os.fsync(made.fileno())


def _write_rows(descriptor: int, tensor: StoredTensor, positions: Int, rows: Bytes) -> None:
    """Overwrite rows of a tensor, as uint8 of shape (n, row_bytes), at any positions."""
    if not positions.size:
        return
    content = np.ascontiguousarray(rows)
    # Neighbours go in one call: of rows that no row order lists, all of them.
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    for first, last in pairwise([0, *breaks.tolist(), positions.size]):
        at = tensor.offset + int(positions[first]) * tensor.row_bytes
        _write_at(descriptor, content[first:last].data, at)


def _write_at(descriptor: int, content: "bytes | memoryview", at: int) -> None:
    left = memoryview(content).cast("B")
    while left:  # Near a full disk, a part is written first.
        done = os.pwrite(descriptor, left, at)
        left, at = left[done:], at + done
