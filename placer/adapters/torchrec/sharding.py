"""Translate a plan's tables to TorchRec: one sharding type, kernel and cache load factor each.

Plans that TorchRec cannot hold are refused, and so are those that it would train wrong without an
error; docs/torchrec.md lists both.

A table whose rows are read in two ways becomes two tables, divided at one row rank. A table that is
divided by rows in another order than by id becomes one table with its rows in that order. In both
cases ids become row ranks before the lookup. Tables that grow are row-wise, behind a multi-probe
zero-collision hash (MPZCH).
"""

import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from placer.errors import PlanMismatchError
from placer.plan.fields import Lookup, Shard
from placer.plan.plan import Plan
from placer.plan.verify import verify
from placer.tables import Table
from placer.topology.topology import Topology
from placer.units import counted, listed

_Refuse = Callable[[str], PlanMismatchError]

ShardingType = Literal[
    "table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"
]
Kernel = Literal["fused", "fused_uvm", "fused_uvm_caching", "dense"]

KERNELS: dict[str, Kernel] = {
    "device": "fused",
    "uva": "fused_uvm",
    "cached": "fused_uvm_caching",
}
"""TorchRec's kernel for each lookup kind that TorchRec supports. Replicas use ``dense``."""


class Block(NamedTuple):
    """A part of a table on one rank: its size, first row and first column."""

    rows: int
    width: int
    first_row: int
    first_column: int
    rank: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """How TorchRec places one table."""

    kind: ShardingType  # Its sharding type.
    kernel: Kernel  # Its compute kernel.
    # In TorchRec's order. A grid lists all row blocks of its first column slice, then those of its
    # second, and so on. Row-wise blocks may be empty.
    blocks: tuple[Block, ...]
    # Cached rows / rows of the table, for ``fused_uvm_caching``.
    load_factor: float | None = None


def even_blocks(rows: int, ways: int) -> list[tuple[int, int]]:
    """Return TorchRec's blocks of ceil(rows / ways) rows as (start, stop). Some may be empty."""
    size = -(-rows // ways)
    return [(min(rows, size * way), min(rows, size * (way + 1))) for way in range(ways)]


def sharding_of(topology: Topology, table: Table, shards: Sequence[Shard]) -> Sharding:
    """Return TorchRec's sharding of a table that a plan divides into `shards`.

    Raises PlanMismatchError if TorchRec has no such placement. The message says why.
    """

    def refuse(reason: str) -> PlanMismatchError:
        return PlanMismatchError(f"TorchRec cannot place table {table.name!r} so: {reason}")

    ranks = topology.gpu_numbers
    parts = [shard for shard in shards if shard.row_count] or list(shards[:1])
    for shard in parts:
        _require_known(table, shard, ranks.keys(), refuse)
        if len(shard.devices) > 1:
            blocks = tuple(Block(table.rows, table.dim, 0, 0, rank) for rank in range(len(ranks)))
            return Sharding("data_parallel", "dense", blocks)
    lookups = sorted({shard.lookup for shard in parts})
    if len(lookups) > 1:
        raise refuse(
            f"its shards are read in different ways ({', '.join(lookups)}); a table has one "
            "kernel, so its rows are not split between HBM and DRAM"
        )
    placed = [
        (shard, ranks[shard.devices[0]])
        for shard in sorted(parts, key=lambda shard: (shard.rows[0], shard.cols))
    ]
    kind, blocks = _blocks(topology, table, placed, refuse)
    factor = None
    if lookups == ["cached"]:
        largest = max(parts, key=lambda shard: shard.row_count)
        factor = largest.cache_rows / largest.row_count
        for shard in parts:
            if abs(shard.cache_rows - factor * shard.row_count) > 1:
                raise refuse(
                    f"caches of {shard.cache_rows} of {shard.row_count} rows and of "
                    f"{largest.cache_rows} of {largest.row_count}; a table has one load factor"
                )
    return Sharding(kind, KERNELS[lookups[0]], blocks, factor)


def _require_known(table: Table, shard: Shard, gpus: Set[str], refuse: _Refuse) -> None:
    """Raise unless TorchRec supports the shard's lookup, row slice and replicas."""
    if shard.lookup not in KERNELS:
        raise refuse(f"its rows are read by lookup {shard.lookup!r}; use device, uva or cached")
    if shard.rows[2] != 1 and shard.row_count > 1:
        raise refuse(
            f"rows {list(shard.rows)} are strided; TorchRec shards rows in contiguous blocks"
        )
    whole = shard.row_count == table.rows and shard.width == table.dim
    everywhere = whole and set(shard.devices) == gpus and shard.lookup == "device"
    if len(shard.devices) > 1 and not everywhere:
        raise refuse(
            f"rows {list(shard.rows)} are replicated on {len(shard.devices)} GPUs; "
            f"TorchRec replicates whole tables in the HBM of all {len(gpus)}"
        )


def _blocks(
    topology: Topology,
    table: Table,
    parts: list[tuple[Shard, int]],
    refuse: _Refuse,
) -> tuple[ShardingType, tuple[Block, ...]]:
    blocks = [
        Block(shard.row_count, shard.width, shard.rows[0], shard.cols[0], rank)
        for shard, rank in parts
    ]
    # The first block of each column slice.
    slices = {block.first_column: block for block in reversed(blocks)}
    firsts = [slices[column] for column in sorted(slices)]
    width, is_pooled = firsts[0].width, all(own.pooling != "none" for own in table.features)
    columns_divided = width < table.dim
    even = [(start, width) for start in range(0, table.dim, width)]
    if [(first.first_column, first.width) for first in firsts] != even:
        widths = ", ".join(str(block.width) for block in firsts)
        raise refuse(f"column slices of {widths} of its {table.dim} columns are not even")
    whole: ShardingType = "column_wise" if columns_divided else "table_wise"
    known = {whole: [first._replace(rows=table.rows) for first in firsts]}
    if not columns_divided:
        known["row_wise"] = _row_blocks(table, firsts[0], list(range(len(topology.gpus))))
    if is_pooled:
        hosts = [topology.gpus[first.rank].host for first in firsts]
        known["grid_shard" if columns_divided else "table_row_wise"] = [
            block
            for first, host in zip(firsts, hosts, strict=True)
            for block in _row_blocks(
                table, first, [rank for rank, gpu in enumerate(topology.gpus) if gpu.host == host]
            )
        ]
    for kind, expected in known.items():
        if sorted(blocks) == sorted(b for b in expected if b.rows or not table.rows):
            return kind, tuple(expected)
    if columns_divided and not is_pooled:
        raise refuse("it is sharded by rows and by columns at once, but its lookups are not pooled")
    if columns_divided:
        raise refuse(
            "it is sharded by rows and by columns; TorchRec has grids of even column slices, each "
            "of which has blocks of ceil(rows / GPUs) rows, in order, on the GPUs of one host"
        )
    counts = ", ".join(str(block.rows) for block in blocks[:8])
    raise refuse(
        f"row blocks of {counts} rows; TorchRec has blocks of ceil(rows / GPUs) rows, the i-th "
        "on the i-th GPU, over all GPUs or, if they are pooled, over those of one host"
    )


def _row_blocks(table: Table, first: Block, ranks: list[int]) -> list[Block]:
    """Divide the rows of the column slice that `first` begins, as TorchRec does over `ranks`."""
    return [
        first._replace(rows=stop - start, first_row=start, rank=rank)
        for (start, stop), rank in zip(even_blocks(table.rows, len(ranks)), ranks, strict=True)
    ]


Staged = Literal["uva", "cached"]
"""How TorchRec reads rows that a plan stages: in place or through a cache."""


@dataclass(frozen=True, slots=True)
class Part:
    """A TorchRec table that holds the row ranks `start`..`stop` of a plan's table."""

    # The name of the plan's table if this part is all of it, in id order. Otherwise that name
    # followed by ``__hot``, ``__cold`` or ``__ranked``.
    name: str
    table: Table  # TorchRec's table of `stop` − `start` rows.
    source: str  # Name of the plan's table.
    start: int
    stop: int
    sharding: Sharding  # How TorchRec places it.

    @property
    def remapped(self) -> bool:
        """Whether ids must become row ranks before lookups in this table."""
        return self.name != self.source


def parts_of(plan: Plan, table: Table, *, staged_as: Staged | None = None) -> tuple[Part, ...]:
    """Return the tables that TorchRec needs for a table of a plan.

    TorchRec cannot stage rows. `staged_as` says whether it reads staged rows in place (``uva``) or
    through a cache as large as the plan's staging buffer (``cached``). Raises PlanMismatchError if
    TorchRec has no such placement. The message names the table and says why.
    """
    if not table.name or "." in table.name:
        raise PlanMismatchError(
            f"TorchRec cannot have a table of the name {table.name!r}, as its tables are modules, "
            "whose names have no dots and are not empty; name the table otherwise, with "
            "--feature-table FEATURE=TABLE of `placer profile`"
        )
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
        of = f"table {table.name!r}: rows {list(shard.rows)} are"
        if shard.memory == "ssd":
            raise PlanMismatchError(
                f"{of} on a drive, which TorchRec has not; plan without --ssd, or for a machine "
                "file without drives"
            )
        if shard.dtype not in (None, table.dtype):
            raise PlanMismatchError(
                f"{of} {shard.dtype}, and in TorchRec all rows are {table.dtype}, as the table is; "
                "plan without --widths"
            )
    try:
        sharding = sharding_of(plan.topology, table, shards)
    except PlanMismatchError as refusal:
        sides = _sides(plan, table, shards)
        if sides:
            return sides
        if any(shard.lookup == "staged" for shard in shards):
            hint = "or say staged_as='uva' or 'cached' (--staged-as) to have staged rows read so"
            raise PlanMismatchError(f"{refusal}; {hint}") from None
        raise
    ordered = plan.order_of(table.name).kind == "profile"
    row_wise = sharding.kind in ("row_wise", "table_row_wise", "grid_shard")
    name = f"{table.name}__ranked" if ordered and row_wise else table.name
    return (Part(name, table, table.name, 0, table.rows, sharding),)


def _readable(shard: Shard, staged_as: Staged | None) -> Shard:
    """Return the shard with its staged rows read as the user said."""
    if shard.lookup != "staged" or staged_as is None or not shard.row_count:
        return shard
    lookup: Lookup = staged_as
    cache_rows = max(1, shard.staging_rows) if staged_as == "cached" else 0
    return replace(shard, lookup=lookup, cache_rows=cache_rows, staging_rows=0)


def _sides(plan: Plan, table: Table, shards: Sequence[Shard]) -> tuple[Part, ...]:
    """Return a table's hot and cold rows as two TorchRec tables, or nothing if that is impossible.

    Only divide a table whose hot and cold rows are read or replicated in different ways. Two tables
    are no way around TorchRec's sizes of row blocks.
    """
    for edge in sorted({start for shard in shards if (start := shard.rows[0])}):
        hot = {(s.lookup, len(s.devices) > 1) for s in shards if s.rows[0] < edge}
        cold = {(s.lookup, len(s.devices) > 1) for s in shards if s.rows[1] > edge}
        if hot & cold:
            continue
        spans = (0, edge, "hot"), (edge, table.rows, "cold")
        try:
            return tuple(_part(plan, table, shards, *span) for span in spans)
        except PlanMismatchError:
            continue
    return ()


def _part(
    plan: Plan, table: Table, shards: Sequence[Shard], start: int, stop: int, suffix: str
) -> Part:
    """Return the part of a table with the row ranks `start`..`stop`."""
    name = f"{table.name}__{suffix}"
    own = replace(table, name=name, rows=stop - start)
    moved = [
        replace(shard, table=name, rows=(first - start, last - start, step))
        for shard in shards
        for first, last, step in (shard.rows,)
        if shard.row_count and start <= first and last <= stop
    ]
    return Part(name, own, table.name, start, stop, sharding_of(plan.topology, own, moved))


def with_even_growing(plan: Plan, trainer: str, **has: Any) -> Plan:
    """Return the plan with each growing table's rows spread evenly over all GPUs, in their order.

    TorchRec and dynamicemb support no other placement of these tables, of which rows have no fixed
    ids: all shards of as many rows are alike. A warning names the tables that are moved. `has`
    names properties of `plan.growing[table]` and the only values that `trainer` supports.

    Raises PlanMismatchError if a table has other values, or its rows are read in several ways or by
    hosts. Raises PlanError or CapacityError if the plan is not sound, before or after.
    """
    verify(plan)
    gpus, moved = [gpu.id for gpu in plan.topology.gpus], []
    shards = [shard for shard in plan.shards if shard.table not in plan.growing]
    for name, how in plan.growing.items():
        for rule, value in has.items():
            if getattr(how, rule) != value:
                raise PlanMismatchError(
                    f"table {name!r} grows with {rule} {getattr(how, rule)}, which {trainer} does "
                    f"not have; set it to {value} in the plan, and run `placer verify --seal`"
                )
        dim, most = plan.tables_by_name[name].dim, -(-how.rows // len(gpus))
        held = [shard for shard in plan.shards_by_table[name] if shard.row_count]
        own = {shard.devices: shard for shard in held if shard.width == dim}
        is_even = len(held) == len(gpus) and all(shard.row_count <= most for shard in held)
        if is_even and own.keys() == {(gpu,) for gpu in gpus}:
            shards += [own[(gpu,)] for gpu in gpus]
            continue
        ways = {(shard.memory, shard.lookup, shard.dtype) for shard in held}
        if len(ways) > 1 or held[0].lookup == "host":
            raise PlanMismatchError(
                f"table {name!r} grows, and {trainer} has as many rows of such a table on each of "
                f"the {len(gpus)} GPUs; make its shards' rows [i, {how.rows}, {len(gpus)}] on the "
                "i-th, from 0, in the plan, and run `placer verify --seal`"
            )
        moved.append(name)
        even = replace(
            held[0],
            cols=(0, dim),
            cache_rows=-(-sum(shard.cache_rows for shard in held) // len(gpus)),
            staging_rows=-(-sum(shard.staging_rows for shard in held) // len(gpus)),
            buffer_bytes=sum(shard.buffer_bytes for shard in held),
        )
        shards += [
            replace(even, rows=(number, how.rows, len(gpus)), devices=(gpu,))
            for number, gpu in enumerate(gpus)
        ]
    plan = replace(plan, shards=tuple(shards))
    if moved:
        words = f"spread evenly over {counted(len(gpus), 'GPU')}; {trainer} supports nothing else"
        warnings.warn(f"rows of the growing {listed(moved, 3)} are {words}", stacklevel=3)
        verify(plan)
    return plan


def with_fixed_rows(plan: Plan) -> Plan:
    """Return the plan of `with_even_growing` with its growing tables made fixed.

    They are in TorchRec's even row blocks. Every GPU gets as many rows of such a table as the plan
    gives to one of them at most.
    """
    tables = dict(plan.tables_by_name)
    shards = [shard for shard in plan.shards if shard.table not in plan.growing]
    for name in plan.growing:
        own = plan.shards_by_table[name]
        size = max(shard.row_count for shard in own)
        tables[name] = replace(tables[name], rows=size * len(own))
        shards += [
            replace(shard, rows=(size * rank, size * (rank + 1), 1))
            for rank, shard in enumerate(own)
        ]
    return replace(plan, tables=tuple(tables.values()), shards=tuple(shards), growing={})
