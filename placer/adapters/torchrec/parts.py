"""A plan's tables as TorchRec has to hold them: whole, or as two tables of hot and cold rows.

TorchRec has one kernel and one sharding type for a table. Where a plan has more, its rows are
divided in two at one rank, and each side is a table by itself. Where only the order of rows is not
that of ids, and the table is divided by rows, it is one table of rows in that order. Either way ids
become ranks before the lookup.

Tables that grow are row-wise, behind a multi-probe zero-collision hash (MPZCH).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from placer.adapters.torchrec.sharding import Sharding, sharding_of
from placer.errors import PlanMismatchError
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Shard
from placer.tables import Table

Staged = Literal["uva", "cached"]
"""How TorchRec reads the rows that a plan stages."""


@dataclass(frozen=True, slots=True)
class Part:
    """A table of TorchRec's that holds the ranks `start`..`stop` of a plan's table."""

    # The table's own name, where it is whole and its rows are in the order of ids; else that name
    # with ``__hot``, ``__cold`` or ``__ranked`` behind it.
    name: str
    table: Table  # As TorchRec has it: of `stop` − `start` rows.
    source: str  # Name of the plan's table.
    start: int
    stop: int
    sharding: Sharding  # How TorchRec places it.

    @property
    def remapped(self) -> bool:
        """Whether ids must become ranks before this table is read."""
        return self.name != self.source


def parts_of(plan: Plan, table: Table, *, staged_as: Staged | None = None) -> tuple[Part, ...]:
    """Return the tables that TorchRec needs for a table of a plan.

    Rows that the plan stages, which TorchRec cannot do, are read in place or through a cache of the
    plan's staging rows, as `staged_as` says. Raises PlanMismatchError, which names the table and
    says why, if TorchRec has no such placement.
    """
    shards = tuple(_readable(shard, staged_as) for shard in plan.shards_by_table[table.name])
    if not shards:
        raise PlanMismatchError(f"the plan has no shard of table {table.name!r}")
    hosts = plan.topology.hosts_by_id
    for shard in shards:
        if any(device in hosts for device in shard.devices):
            raise PlanMismatchError(
                f"table {table.name!r}: rows {list(shard.rows)} are served by "
                f"{', '.join(shard.devices)}; TorchRec's ranks are GPUs"
            )
    try:
        sharding = sharding_of(plan.topology, table, shards)
    except PlanMismatchError as refusal:
        edge = _edge(plan, table, shards)
        if edge is None:
            if any(shard.lookup == "staged" for shard in shards):
                hint = "or say staged_as='uva' or 'cached' to have staged rows read so"
                raise PlanMismatchError(f"{refusal}; {hint}") from None
            raise
        return tuple(
            _part(plan, table, shards, *span, name)
            for span, name in (((0, edge), "hot"), ((edge, table.rows), "cold"))
        )
    ordered = plan.order_of(table.name).kind == "profile"
    row_wise = sharding.kind in ("row_wise", "table_row_wise", "grid_shard")
    name = f"{table.name}__ranked" if ordered and row_wise else table.name
    return (Part(name, table, table.name, 0, table.rows, sharding),)


def _readable(shard: Shard, staged_as: Staged | None) -> Shard:
    """Return a shard whose staged rows are read as the user said."""
    if shard.lookup != "staged" or staged_as is None or not shard.row_count:
        return shard
    lookup: Lookup = staged_as
    cache_rows = max(1, shard.staging_rows) if staged_as == "cached" else 0
    return replace(shard, lookup=lookup, cache_rows=cache_rows, staging_rows=0)


def _edge(plan: Plan, table: Table, shards: Sequence[Shard]) -> int | None:
    """Return the rank at which TorchRec can have a table as two, if there is one.

    On its two sides rows are read or replicated in different ways: two tables are for that, and
    not for row blocks of other sizes than TorchRec's.
    """
    edges = sorted({start for shard in shards if (start := shard.rows[0])})
    for edge in edges:
        hot = {(s.lookup, len(s.devices) > 1) for s in shards if s.rows[0] < edge}
        cold = {(s.lookup, len(s.devices) > 1) for s in shards if s.rows[1] > edge}
        if hot & cold:
            continue
        try:
            for span in ((0, edge), (edge, table.rows)):
                _part(plan, table, shards, *span, "")
        except PlanMismatchError:
            continue
        return edge
    return None


def _part(
    plan: Plan, table: Table, shards: Sequence[Shard], start: int, stop: int, suffix: str
) -> Part:
    """Return the part of a table with the ranks `start`..`stop`."""
    name = f"{table.name}__{suffix}"
    own = replace(table, name=name, rows=stop - start)
    moved = [
        replace(shard, table=name, rows=(first - start, last - start, step))
        for shard in shards
        for first, last, step in (shard.rows,)
        if shard.row_count and start <= first and last <= stop
    ]
    return Part(name, own, table.name, start, stop, sharding_of(plan.topology, own, moved))


def with_fixed_rows(plan: Plan) -> Plan:
    """Return the plan with tables that grow as fixed ones, in row blocks as TorchRec has them.

    They get as many rows on each GPU, up to one more than the plan has there.
    """
    if not plan.growing:
        return plan
    tables = dict(plan.tables_by_name)
    shards: list[Shard] = []
    for name in plan.growing:
        own = row_wise_shards(plan, name, "TorchRec's MPZCH", eviction="lru", admission=1, ttl=0)
        size = max(shard.row_count for shard in own)
        tables[name] = replace(tables[name], rows=size * len(own))
        shards += [
            replace(shard, rows=(size * rank, size * (rank + 1), 1))
            for rank, shard in enumerate(own)
        ]
    fixed = tuple(shard for shard in plan.shards if shard.table not in plan.growing)
    return replace(plan, tables=tuple(tables.values()), shards=(*fixed, *shards), growing={})


def row_wise_shards(plan: Plan, table: str, trainer: str, **has: Any) -> list[Shard]:
    """Return the shards of a table that grows, one a GPU, all as many rows or one less.

    Raises PlanMismatchError if it has others, or grows in another way than `has` says, which the
    `trainer` has alone. No row is of one id for good, so that any slices of so many rows are alike.
    """
    how, gpus = plan.growing[table], [gpu.id for gpu in plan.topology.gpus]
    for name, value in has.items():
        if getattr(how, name) != value:
            raise PlanMismatchError(
                f"table {table!r} grows with {name} {getattr(how, name)}, which {trainer} does not "
                f"have; set it to {value} in the plan, and run `placer verify --seal`"
            )
    dim, most = plan.tables_by_name[table].dim, -(-how.rows // len(gpus))
    held = [shard for shard in plan.shards_by_table[table] if shard.row_count]
    own = {shard.devices: shard for shard in held if shard.width == dim}
    is_even = all(shard.row_count in (most, most - 1) for shard in held)
    if not is_even or len(held) != len(gpus) or set(own) != {(gpu,) for gpu in gpus}:
        raise PlanMismatchError(
            f"table {table!r} grows, and {trainer} has such tables in slices of as many rows on "
            f"each of the {len(gpus)} GPUs; make its shards' rows [i, {how.rows}, {len(gpus)}] on "
            "the i-th, from 0, in the plan, and run `placer verify --seal`"
        )
    return [own[(gpu,)] for gpu in gpus]
