"""From the shards of one plan to those of the next: what has not changed is kept."""

from dataclasses import dataclass

import numpy as np

from placer.files import StrPath, sha256_file
from placer.plan.order import Ranks
from placer.plan.plan import Plan
from placer.plan.verify import verify
from placer.storage.row_blocks import chunk_rows, row_blocks
from placer.storage.shards.shard_file import ShardLayout, shard_writer
from placer.storage.shards.shard_folder import (
    NewShards,
    ShardFile,
    ShardFolder,
    files_by_table,
    new_shards,
    open_shards,
    refuse_other_plan,
)
from placer.storage.shards.shard_rows import gather, ids_at, same_ids
from placer.storage.shards.transfers import Transfers, schedule, transfers_of


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was done.

    Attributes
    ----------
    transfers : Transfers
        Rows by device, as `schedule` counts them.
    kept_files, written_files : int
        Files that are those of the older folder (or of a replica), and those with rows of several.
    kept_file_bytes, written_file_bytes : int
        Of these, what was not and what was written to disk; on a file system without hard links
        kept files are written too.
    """

    transfers: Transfers
    kept_files: int
    written_files: int
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
    are written from the files that hold their rows, a bounded number at a time; rows are known
    by their ids, whatever the row orders. Optimizer state goes with its rows.

    Parameters
    ----------
    shards : ShardFolder or path
        Stays as it is. The new folder shares files with it: write none of them in place.
    new : Plan
    path : str or path
        The folder to make; it appears when it is complete.
    old : Plan, optional
        The plan that `shards` is believed to be of; by default the one that it has in it. Bytes
        are counted between its devices and those of `new`.
    verify_files : bool
        Whether the SHA-256 of every file that is kept or read is compared first. Without it
        kept files are not read, and of others only the rows that are needed.

    Raises
    ------
    PlanMismatchError
        If the folder is not of `old`, or `new` has tables that `old` lacks or has otherwise.
    PlanError
        If the newer plan is unsound.
    CheckpointError
        If a file is missing or damaged.
    PlacerError
        If there is something at `path`, or it cannot be written; nothing is left there then.
    """
    if not isinstance(shards, ShardFolder):
        shards = open_shards(shards, verify=verify_files)
    if old is None:
        old = shards.plan
    refuse_other_plan(shards, old)
    verify(new)
    planned = schedule(old, new)
    with new_shards(path, new) as made:
        work = _Resharding(made, old, shards)
        for copies in (copies for parts in files_by_table(new).values() for copies in parts):
            work.make(copies)
        made.finish(shards.manifest.checkpoint.model_dump(), shards.updates)
    return Resharded(
        planned.transfers,
        work.files["kept"],
        work.files["written"],
        work.bytes["kept"],
        work.bytes["written"],
    )


class _Resharding:
    """Makes one shard's files after the other, and counts."""

    def __init__(self, made: NewShards, old: Plan, shards: ShardFolder) -> None:
        self._made, self._old, self._shards = made, old, shards
        self._orders: dict[str, tuple[Ranks, bool]] = {}
        self.files = {"kept": 0, "written": 0}
        self.bytes = {"kept": 0, "written": 0}

    def make(self, copies: tuple[ShardFile, ...]) -> None:
        """Make the files of a shard: the first one of what there is, the others of the first."""
        first, *others = copies
        kept = self._unchanged(first.layout)
        if kept is None:
            self._write(first)
            sha256 = sha256_file(self._made.target(first))
            self._made.add(first, sha256)
            self._count("written", first, written=True)
        else:
            source = self._nearest(kept, first)
            self._shards.check(source)
            sha256 = self._shards.manifest.files[source.name].sha256
            copied = self._made.link(self._shards.path / source.name, first, sha256)
            self._count("kept", first, written=copied)
        for other in others:
            copied = self._made.link(self._made.target(first), other, sha256)
            self._count("kept", other, written=copied)

    def _count(self, kind: str, file: ShardFile, *, written: bool) -> None:
        self.files[kind] += 1
        self.bytes["written" if written else "kept"] += file.layout.size_bytes

    def _order(self, table: str) -> tuple[Ranks, bool]:
        """The newer row order of a table, and whether it is the older one."""
        if table not in self._orders:
            order = Ranks.in_plan(self._made.plan, table)
            same = np.array_equal(order.listed, self._shards.order_of(table).listed)
            self._orders[table] = order, same
        return self._orders[table]

    def _unchanged(self, layout: ShardLayout) -> tuple[ShardFile, ...] | None:
        """Files of an older shard with the same rows in the same order."""
        table, shard = layout.table.name, layout.shard
        (order, same), older_order = self._order(table), self._shards.order_of(table)
        for files in self._shards.files[table]:
            older = files[0].layout.shard
            if older.cols != shard.cols or older.row_count != shard.row_count:
                continue
            if same:
                equal = range(*older.rows) == range(*shard.rows)
            else:
                equal = same_ids((older_order, older), (order, shard))
            if equal:
                return files
        return None

    def _write(self, file: ShardFile) -> None:
        """Write a shard's file from the files that hold its rows."""
        layout, shard = file.layout, file.layout.shard
        order, _ = self._order(layout.table.name)
        with shard_writer(self._made.target(file), layout) as writer:
            for start, stop in row_blocks(shard.row_count, chunk_rows(layout.row_bytes)):
                chunk = gather(
                    self._shards,
                    layout,
                    layout.tensors,
                    ids_at(order, shard, start, stop),
                    lambda sources: self._nearest(sources, file),
                )
                positions = np.arange(start, stop, dtype=np.int64)
                for name, rows in chunk.items():
                    writer.write(layout.tensors[name], positions, rows)

    def _nearest(self, sources: tuple[ShardFile, ...], file: ShardFile) -> ShardFile:
        """The replica that a device has its rows from."""
        older, newer = sources[0].layout.shard, file.layout.shard
        steps = transfers_of(self._old, self._made.plan, older, newer)
        home = next(was for _, was, now in steps if now == file.home)
        return next(source for source in sources if source.home == home)
