"""Counts which rows go from where to where between two plans."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from placer.errors import PlanMismatchError, TopologyError
from placer.plan.diff import (
    Home,
    MoveKind,
    PlanDiff,
    common_parts,
    diff,
    homes_of,
    steps_to,
)
from placer.plan.migration import Migration, migration
from placer.plan.plan import Plan
from placer.plan.shard import Shard

TransferKind = Literal["kept"] | MoveKind


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows of a table that a device has, and where it has them from.

    Attributes
    ----------
    table : str
    kind : str
        ``kept`` where source and target are one, else that of `placer.plan.diff.Move`.
    source, target : Home
    size_bytes : int
        Weights and optimizer state.
    """

    table: str
    kind: TransferKind
    source: Home
    target: Home
    size_bytes: int

    @property
    def moves(self) -> bool:
        """Whether the bytes are copied to other memory."""
        return self.kind not in ("kept", "served elsewhere")


@dataclass(frozen=True, slots=True)
class Transfers:
    """All of a reshard's.

    Attributes
    ----------
    transfers : tuple of Transfer
        By table, kind, source and target.
    dropped_tables : tuple of str
        Tables of the older plan that the newer one lacks.
    """

    transfers: tuple[Transfer, ...]
    dropped_tables: tuple[str, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay in the memory that they are in."""
        return sum(one.size_bytes for one in self.transfers if not one.moves)

    @property
    def moved_bytes(self) -> int:
        """Bytes that are copied to other memory: those of `PlanDiff.moved_bytes`."""
        return sum(one.size_bytes for one in self.transfers if one.moves)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What resharding would do, from the plans alone.

    Attributes
    ----------
    transfers : Transfers
    migration : Migration or None
        How long a running machine takes for it over its links; None where rows move between
        hosts that no link joins, and so by way of files alone.
    """

    transfers: Transfers
    migration: Migration | None


def transfers_of(
    old: Plan, new: Plan, source: Shard, target: Shard
) -> list[tuple[TransferKind, Home, Home]]:
    """For each device of a newer shard, which copy of an older one it has its rows from."""
    was, now = homes_of(source), homes_of(target)
    kept: list[tuple[TransferKind, Home, Home]] = [
        ("kept", home, home) for home in now if home in was
    ]
    steps = steps_to(old, new, was, now)
    return kept + [(kind, near, home) for kind, near, home in steps if home is not None]


def schedule(old: Plan, new: Plan) -> Schedule:
    """What resharding from a plan to another would keep and move, without any rows.

    Raises
    ------
    PlanMismatchError
        If a table is new, or has another shape, dtype or optimizer; names each.
    PlanError
        If one of the plans does not cover a table.

    Examples
    --------
    >>> from placer import Plan, Shard, Table, Topology
    >>> old, new = (
    ...     Plan(
    ...         (Table("t", 6, 2, optimizer="sgd"),),
    ...         Topology.parse("2xh100"),
    ...         (Shard("t", (0, 6, 1), (0, 2), (f"gpu:{gpu}",), "hbm", "device"),),
    ...     )
    ...     for gpu in range(2)
    ... )
    >>> schedule(old, new).transfers.moved_bytes
    48
    """
    difference = diff(old, new)
    dropped = check_tables(difference)
    totals: dict[tuple[str, TransferKind, Home, Home], int] = defaultdict(int)
    for table in new.tables:
        for source, target, rows, width in common_parts(old, new, table.name):
            for step in transfers_of(old, new, source, target):
                totals[table.name, *step] += rows * table.bytes_per_row(width)
    counted = sorted(totals.items(), key=lambda item: (item[0][0], str(item[0])))
    transfers = tuple(Transfer(*key, size_bytes) for key, size_bytes in counted)
    try:
        duration = migration(difference)
    except TopologyError:
        duration = None
    return Schedule(Transfers(transfers, dropped), duration)


def check_tables(difference: PlanDiff) -> tuple[str, ...]:
    """Names of the dropped tables; raises `PlanMismatchError` if there are tables without rows."""
    faults = [
        f"table {one.table!r} is new"
        if one.status == "added"
        else f"table {one.table!r} has another shape: {one.detail}"
        for one in difference.tables
        if one.status in ("added", "reshaped")
    ]
    if faults:
        raise PlanMismatchError(
            f"there are no rows for the newer plan: {'; '.join(faults)}; `placer "
            "reshard OLD NEW --grow` draws new rows, and carries the others over by their ids"
        )
    return tuple(one.table for one in difference.tables if one.status == "removed")
