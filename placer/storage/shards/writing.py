"""Write the shards of a plan, from a checkpoint or from the shards of another plan."""

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
from placer.plan.fields import Shard
from placer.plan.plan import Int, Plan, Ranks
from placer.plan.verify import refuse_growing, verify
from placer.storage.manifest import STATES, Checkpoint, write_manifest
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
"""Most files open at a time. Systems allow a few thousand."""


def write_shards(plan: Plan, checkpoint: Checkpoint, path: StrPath) -> ShardFolder:
    """Write the tables of a checkpoint as a plan divides them: one file for each shard and device.

    Tables need not fit in memory: each is read once, a limited number of rows at a time. Replicas
    are hard links to one file, or copies if the file system lacks links. The folder appears when it
    is complete. Open a checkpoint of any plan with
    `placer.training.checkpoint.open_checkpoint`.

    Raises PlanError if the plan is unsound. Raises CheckpointError if the checkpoint lacks a table
    or its optimizer state, or has another shape or dtype. Raises PlacerError if `path` exists or
    cannot be written. Then nothing is left there.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from placer import Plan, Shard, Table, Topology
    >>> from placer.storage.manifest import Position
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
    """What `reshard` did."""

    difference: PlanDiff  # Rows by device.
    # Files linked or copied from the older folder or a replica, and files written row by row.
    kept_files: int
    written_files: int
    # Bytes of hard links, and bytes written to disk. Without hard links, kept files are also
    # written.
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
    """Make the shards of a new plan from those of an older plan, equal to those of `write_shards`.

    A new file with the rows and columns of an older file becomes a hard link to it. Other files are
    written by `write_shards`. Rows are matched by their ids, for any row orders, and optimizer
    state follows its rows. The new folder appears when it is complete. The older folder does not
    change, but both share files, so never write to these files in place.

    `old` is the plan that `shards` should have; by default, the plan in the folder. Moved bytes are
    counted from its devices to those of `new`. With `verify_files`, check the SHA-256 of every file
    that is kept or read. Without it, kept files are not read, and other files only in blocks that
    are needed.

    Raises PlanMismatchError if the folder has another plan than `old`, or `new` has a table that
    `old` lacks or has in another shape. Raises PlanError if `new` is unsound. Raises
    CheckpointError if a file is missing or damaged. Raises PlacerError if `path` exists or cannot
    be written.
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
    """Write a folder of shards, which appears when it is complete; link files of `older`."""
    refuse_growing(plan, "a folder of shards")
    with new_folder(path) as folder:
        made = _NewShards(folder, plan)
        for name, files in files_by_table(plan).items():
            made.write([each for each in files if not made.keeps(each, older)], tensors[name])
        made.finish(checkpoint)
    return made


def ids_at(order: Ranks, shard: Shard, start: int, stop: int) -> Int:
    """Return the ids of a shard's rows ``start..stop``, shape (stop − start,).

    >>> ids_at(Ranks.of([7, 3]), Shard("t", (0, 100, 1), (0, 8), ("gpu:0",), "hbm", "device"), 0, 4)
    array([7, 3, 0, 1])
    """
    first, _, step = shard.rows
    return order.ids(first + step * np.arange(start, stop, dtype=np.int64))


def same_ids(one: tuple[Ranks, Shard], other: tuple[Ranks, Shard]) -> bool:
    """Return whether two shards with equally many rows have the same ids in the same order."""
    return all(
        np.array_equal(ids_at(*one, start, stop), ids_at(*other, start, stop))
        for start, stop in row_blocks(one[1].row_count, MOST_ROWS)
    )


class _NewShards:
    """Writes a folder of shards."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        self.entries: dict[str, ShardEntry] = {}  # Written files, by name.
        # Files kept from the older folder or a replica; and those of them that are hard links.
        self.kept: set[str] = set()
        self.linked: set[str] = set()

    def keeps(self, copies: Sequence[ShardFile], older: ShardFolder | None) -> bool:
        """Link files to an older file with the same rows in the same order, if there is one."""
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
        """Write shards of one table. Read the table once for each `_MOST_OPEN` files."""
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
        """Return the path of a file, after making its folder."""
        path = self.path / file.name
        path.parent.mkdir(exist_ok=True)
        return path

    def _link(self, source: Path, copies: Sequence[ShardFile], sha256: str) -> None:
        """Make hard links to an existing file, or copies of it."""
        for file in copies:
            path = self._place(file)
            try:
                path.hardlink_to(source)
                self.linked.add(file.name)
            except OSError:  # The file system has no links, or is another one.
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
    """Create a shard's new file and yield its descriptor; sync it to disk afterwards."""
    with path.open("xb", buffering=0) as made:
        _write_at(made.fileno(), file.header, 0)
        os.ftruncate(made.fileno(), file.size_bytes)
        yield made.fileno()
        os.fsync(made.fileno())


def _write_rows(descriptor: int, tensor: StoredTensor, positions: Int, rows: Bytes) -> None:
    """Overwrite rows of a tensor at any positions. `rows` is uint8 of shape (n, row_bytes)."""
    if not positions.size:
        return
    content = np.ascontiguousarray(rows)
    # Write neighbouring rows in one call. Rows outside of the row order are all neighbours.
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    for first, last in pairwise([0, *breaks.tolist(), positions.size]):
        at = tensor.offset + int(positions[first]) * tensor.row_bytes
        _write_at(descriptor, content[first:last].data, at)


def _write_at(descriptor: int, content: "bytes | memoryview", at: int) -> None:
    left = memoryview(content).cast("B")
    while left:  # On a nearly full disk, a call may write a part.
        done = os.pwrite(descriptor, left, at)
        left, at = left[done:], at + done
