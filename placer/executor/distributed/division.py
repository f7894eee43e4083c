"""Divide a plan's tables over ranks: which rank holds which rows and columns."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from operator import attrgetter
from typing import TYPE_CHECKING

from placer.errors import PlanMismatchError
from placer.executor.memory.layout import LOOKUP_ORDER, columns_of
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.tables import OptimizerName, Table
from placer.topology.topology import Topology


def trimmed(rows: range) -> range:
    """Return the same rows with `stop` right after the last row; a single row has step 1."""
    return range(rows.start, rows[-1] + 1, rows.step if len(rows) > 1 else 1)


def meet(one: range, other: range) -> range:
    """Return the rows that both slices have."""
    low, high = max(one.start, other.start), min(one.stop, other.stop)
    common = math.gcd(one.step, other.step)
    if low >= high or (one.start - other.start) % common:
        return range(0)
    # Chinese remainders: start + k·step ≡ other.start (mod other.step).
    modulus = other.step // common
    k = (other.start - one.start) // common * pow(one.step // common, -1, modulus) % modulus
    step = one.step * modulus
    return range(low + (one.start + k * one.step - low) % step, high, step)


def positions(part: range, rows: range) -> range:
    """Return the positions in a slice of some of its rows."""
    first, last = part.index(rows[0]), part.index(rows[-1])
    return range(first, last + 1, rows.step // part.step if len(rows) > 1 else 1)


def joined(slices: Iterable[range]) -> tuple[range, ...]:
    """Join disjoint slices that continue one another; return all slices ordered by start.

    So shards with other boundaries give equal slices if they have equal rows and strides.
    """
    merged: list[range] = []
    ends: dict[tuple[int, int], int] = {}  # (next row, step) → position in `merged`
    for part in sorted(map(trimmed, filter(None, slices)), key=attrgetter("start")):
        at = ends.pop((part.start, part.step), None)
        if at is None:
            at = len(merged)
            merged.append(part)
        merged[at] = range(merged[at].start, part.stop, part.step)
        ends[part[-1] + part.step, part.step] = at
    return tuple(merged)


def refined(partitions: Iterable[Sequence[range]]) -> tuple[range, ...]:
    """Return the coarsest slices that each lie within one slice of every partition."""
    parts, *others = partitions
    for other in others:
        parts = [met for one, two in product(parts, other) if (met := meet(one, two))]
    return tuple(sorted(map(trimmed, parts), key=attrgetter("start")))


if TYPE_CHECKING:
    from placer.executor.distributed.table_routes import Router

_MOST_PARTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of a column slice that the same ranks hold; each rank holds them as a separate table."""

    name: str  # Name of this separate table, unique among targets.
    table: Table  # The whole table.
    cols: tuple[int, int]
    # The target's rows as row ranks, slice by slice. If it has all rows of a table, its row r is
    # id r instead of row rank r.
    parts: tuple[range, ...]
    holders: tuple[int, ...]  # Ranks; several if the rows are replicated.
    # Targets with equal `peers` have other columns of the same rows, which row-wise Adagrad needs
    # for Σ g²; empty if there is no such need.
    peers: str = ""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(map(len, self.parts))

    @property
    def bases(self) -> tuple[int, ...]:
        """First row in the target of each part."""
        return tuple(accumulate(map(len, self.parts), initial=0))[:-1]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.cols[1] - self.cols[0]

    @property
    def by_id(self) -> bool:
        """Whether the target's rows are ids, because it has all rows of the table."""
        return self.parts == (range(0, self.table.rows),)

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold the target."""
        return len(self.holders) > 1

    def holder_for(self, rank: int) -> int:
        """Return the rank that serves a rank's samples: the same rank if it has a copy."""
        if rank in self.holders:
            return rank
        return self.holders[rank % len(self.holders)]


@dataclass(frozen=True, slots=True)
class ColumnSlice:
    """A range of columns of a table, and the targets that hold its rows."""

    cols: tuple[int, int]
    targets: tuple[Target, ...]
    router: "Router | None" = None  # The target of each row; None if one target has all rows.


def servers_of(plan: Plan) -> tuple[str, ...]:
    """Return the hosts without a GPU that serve shards, in the order of the topology."""
    serving = {device for shard in plan.shards for device in shard.devices}
    return tuple(host.id for host in plan.topology.servers if host.id in serving)


def ranks_of_devices(topology: Topology, world: int, servers: Sequence[str] = ()) -> dict[str, int]:
    """Return the rank of each GPU and host.

    GPU i of N is rank ``i · world // N``. With fewer ranks than GPUs, neighbouring GPUs share a
    rank. With more, some ranks have no rows and only contribute samples. Shards that a host serves
    are on the rank of its first GPU. `servers` are hosts with separate ranks, which are the last
    ranks, in this order.
    """
    world -= len(servers)
    if world < 1:
        raise PlanMismatchError(f"{world} ranks cannot hold a plan; start at least one")
    gpus = topology.gpus
    ranks = {gpu.id: index * world // len(gpus) for index, gpu in enumerate(gpus)}
    for index, host in enumerate(topology.hosts):
        attached = topology.gpus_of(host.id)
        spread = index * world // len(topology.hosts)
        ranks[host.id] = ranks[attached[0].id] if attached else spread
    ranks.update({server: world + number for number, server in enumerate(servers)})
    return ranks


def holders_of(shard: Shard, ranks: Mapping[str, int]) -> tuple[int, ...]:
    """Return the distinct ranks that hold a shard, ascending."""
    return tuple(sorted({ranks[device] for device in shard.devices}))


def divide(
    plan: Plan, ranks: Mapping[str, int], optimizers: Mapping[str, OptimizerName]
) -> dict[str, tuple[ColumnSlice, ...]]:
    """Return the column slices of each table with rows, from left to right.

    Raises PlanMismatchError if a table with row-wise Adagrad has rows with only some columns
    replicated.
    """
    return {
        table.name: tuple(_divide_table(plan, table, ranks, optimizers[table.name]))
        for table in plan.tables
        if table.rows
    }


_Held = dict[tuple[int, ...], tuple[range, ...]]


def _divide_table(
    plan: Plan, table: Table, ranks: Mapping[str, int], optimizer: OptimizerName
) -> Iterator[ColumnSlice]:
    shards = [shard for shard in plan.shards_by_table[table.name] if shard.row_count]
    by_columns = list(columns_of(table, [(shard.cols, shard) for shard in shards]))
    column_slices: list[tuple[tuple[int, int], _Held]] = []
    for cols, own in by_columns:
        gathered: dict[tuple[int, ...], list[range]] = defaultdict(list)
        for shard in own:
            gathered[holders_of(shard, ranks)].append(range(*shard.rows))
        held = {holders: joined(gathered[holders]) for holders in sorted(gathered)}
        if len(held) == 1:
            held = dict.fromkeys(held, (range(0, table.rows),))
        if column_slices and column_slices[-1][1] == held:  # The same ranks hold these columns.
            column_slices[-1] = (column_slices[-1][0][0], cols[1]), held
        else:
            column_slices.append((cols, held))
    if optimizer == "rowwise_adagrad" and len(column_slices) > 1:
        yield from _aligned(table, column_slices, [own for _, own in by_columns])
        return
    for cols, held in column_slices:
        targets = tuple(
            Target(_name(table, cols, holders), table, cols, parts, holders)
            for holders, parts in held.items()
        )
        yield ColumnSlice(cols, targets)


def _aligned(
    table: Table,
    column_slices: list[tuple[tuple[int, int], _Held]],
    shards: list[tuple[Shard, ...]],
) -> Iterator[ColumnSlice]:
    """Yield column slices that all have the same row slices, so that Σ g² of rows can be added."""
    atoms = _common_slices(table, [held for _, held in column_slices], shards)
    placed = [(cols, [_holders(atom, held) for atom in atoms]) for cols, held in column_slices]
    for index, atom in enumerate(atoms):
        owners = [holders_of_atoms[index] for _, holders_of_atoms in placed]
        if any(len(holders) > 1 for holders in owners) and len(set(owners)) > 1:
            raise PlanMismatchError(
                f"table {table.name!r}: some columns of row ranks {atom.start}..{atom.stop} are "
                "replicated and others are not; row-wise Adagrad needs the whole row at once, so "
                "replicate all columns of these rows on the same GPUs, or none"
            )
    for cols, owners in placed:
        targets = tuple(
            Target(
                f"{_name(table, cols, holders)} part {index}",
                table,
                cols,
                (atom,),
                holders,
                f"{table.name} part {index}",
            )
            for index, (atom, holders) in enumerate(zip(atoms, owners, strict=True))
        )
        yield ColumnSlice(cols, targets)


def _common_slices(
    table: Table, held: list[_Held], shards: list[tuple[Shard, ...]]
) -> tuple[range, ...]:
    """Return the coarsest row slices that divide the rows of every column slice.

    `shards` are grouped by range of columns.
    """
    atoms = refined([tuple(part for parts in one.values() for part in parts) for one in held])
    if not all(_ascending(atom, shards) for atom in atoms):
        sliced = (tuple(range(*shard.rows) for shard in own) for own in shards)
        atoms = refined([atoms, *sliced])
    if len(atoms) > _MOST_PARTS:
        raise PlanMismatchError(
            f"table {table.name!r}: its columns are divided into row slices so differently that "
            f"{len(atoms)} parts would have to be matched for row-wise Adagrad; divide all "
            "columns of a table at the same rows"
        )
    return atoms


def _holders(atom: range, held: _Held) -> tuple[int, ...]:
    return next(ranks for ranks, parts in held.items() if any(meet(part, atom) for part in parts))


def _ascending(rows: range, shards: list[tuple[Shard, ...]]) -> bool:
    """Return whether arenas, which sort rows by lookup kind, keep these rows in ascending order.

    Only then do ranks with different columns have the same rows in the same order.
    """
    for own in shards:
        met = sorted(
            (part.start, part[-1], LOOKUP_ORDER[shard.lookup])
            for shard in own
            if (part := meet(range(*shard.rows), rows))
        )
        for (_, last, kind), (first, _, other) in pairwise(met):
            if first < last or other < kind:
                return False
    return True


def _name(table: Table, cols: tuple[int, int], holders: tuple[int, ...]) -> str:
    name = table.name
    if cols != (0, table.dim):
        name += f" columns {cols[0]}..{cols[1]}"
    if len(holders) > 1:
        return f"{name} on ranks {', '.join(map(str, holders))}"
    return f"{name} on rank {holders[0]}"
