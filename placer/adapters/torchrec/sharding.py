"""A table's shards in TorchRec's words: one sharding type, one kernel, one cache load factor.

What a plan can say beyond that, TorchRec cannot hold: rows staged or pooled by the host, rows
of one table in both tiers, strided row slices, uneven column slices or blocks, replicas of a part.
Nor may what it would accept be passed on: it takes uneven row blocks, and blocks on other ranks
than their number, without a word, and then trains other rows than it should.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from placer.errors import PlanMismatchError
from placer.plan.shard import Shard
from placer.tables import Table
from placer.topology.topology import Topology

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
"""TorchRec's kernel for each way to read rows that it has; replicas are ``dense``."""


class Block(NamedTuple):
    """A part of a table on one rank: its size, its first row and column."""

    rows: int
    width: int
    first_row: int
    first_column: int
    rank: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """How TorchRec places one table.

    Attributes
    ----------
    kind : str
        Its sharding type.
    kernel : str
        Its compute kernel.
    blocks : tuple of Block
        In TorchRec's order: of a grid, the row blocks of one column slice after the other.
        Row-wise ones may be empty.
    load_factor : float or None
        Rows of the caches over rows of the table, for ``fused_uvm_caching``.
    """

    kind: ShardingType
    kernel: Kernel
    blocks: tuple[Block, ...]
    load_factor: float | None = None


def even_blocks(rows: int, ways: int) -> list[tuple[int, int]]:
    """TorchRec's row blocks as (start, stop): ceil(rows / ways) each, so the last may be empty."""
    size = -(-rows // ways)
    return [(min(rows, size * way), min(rows, size * (way + 1))) for way in range(ways)]


def host_ranks(topology: Topology, host: str) -> list[int]:
    """Ranks of the GPUs of a host."""
    return [rank for rank, gpu in enumerate(topology.gpus) if gpu.host == host]


def sharding_of(topology: Topology, table: Table, shards: Sequence[Shard]) -> Sharding:
    """The shards of `table` as TorchRec would name them.

    Raises
    ------
    PlanMismatchError
        If TorchRec has no such placement; the message says why.
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
    largest = max(parts, key=lambda shard: shard.row_count)
    if lookups == ["cached"]:
        factor = largest.cache_rows / largest.row_count
        for shard in parts:
            if abs(shard.cache_rows - factor * shard.row_count) > 1:
                raise refuse(
                    f"caches of {shard.cache_rows} of {shard.row_count} rows and of "
                    f"{largest.cache_rows} of {largest.row_count}; a table has one load factor"
                )
        return Sharding(kind, KERNELS["cached"], blocks, factor)
    return Sharding(kind, KERNELS[lookups[0]], blocks)


def _require_known(table: Table, shard: Shard, gpus: Set[str], refuse: _Refuse) -> None:
    """Raise unless TorchRec has such a shard: its lookup, contiguous rows, replicas of all."""
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
    blocks = tuple(
        Block(shard.row_count, shard.width, shard.rows[0], shard.cols[0], rank)
        for shard, rank in parts
    )
    rows_divided = any(block.rows < table.rows for block in blocks)
    columns_divided = any(block.width < table.dim for block in blocks)
    if rows_divided and columns_divided:
        return "grid_shard", _grid(topology, table, blocks, refuse)
    if columns_divided:
        _require_even_columns(table, blocks, refuse)
        return "column_wise", blocks
    if not rows_divided:
        return "table_wise", blocks
    for kind, ranks in _row_groups(topology, table, parts[0][1]):
        edges = even_blocks(table.rows, len(ranks))
        expected = [
            Block(stop - start, table.dim, start, 0, rank)
            for (start, stop), rank in zip(edges, ranks, strict=True)
        ]
        if list(blocks) == [block for block in expected if block.rows]:
            return kind, tuple(expected)
    counts = ", ".join(str(block.rows) for block in blocks[:8])
    raise refuse(
        f"row blocks of {counts} rows; TorchRec has blocks of ceil(rows / GPUs) rows, the i-th "
        "on the i-th GPU, over all GPUs or, if they are pooled, over those of one host"
    )


def _require_even_columns(table: Table, columns: Sequence[Block], refuse: _Refuse) -> None:
    width = columns[0].width
    starts = [block.first_column for block in columns]
    if {block.width for block in columns} != {width} or starts != list(range(0, table.dim, width)):
        widths = ", ".join(str(block.width) for block in columns)
        raise refuse(f"column slices of {widths} of its {table.dim} columns are not even")


def _grid(
    topology: Topology, table: Table, blocks: Sequence[Block], refuse: _Refuse
) -> tuple[Block, ...]:
    """Even column slices, each in even row blocks over the GPUs of one host."""
    if any(feature.pooling == "none" for feature in table.features):
        raise refuse("it is sharded by rows and by columns at once, but its lookups are not pooled")
    by_column: dict[int, list[Block]] = {}
    for block in blocks:
        by_column.setdefault(block.first_column, []).append(block)
    _require_even_columns(table, [by_column[first][0] for first in sorted(by_column)], refuse)
    expected: list[Block] = []
    for first in sorted(by_column):
        host = topology.gpus[by_column[first][0].rank].host
        ranks = host_ranks(topology, host)
        edges = even_blocks(table.rows, len(ranks))
        expected += [
            Block(stop - start, by_column[first][0].width, start, first, rank)
            for (start, stop), rank in zip(edges, ranks, strict=True)
        ]
    if sorted(blocks) != sorted(block for block in expected if block.rows):
        raise refuse(
            "it is sharded by rows and by columns; TorchRec has grids of even column slices, each "
            "of which has blocks of ceil(rows / GPUs) rows, in order, on the GPUs of one host"
        )
    return tuple(expected)


def _row_groups(
    topology: Topology, table: Table, first_rank: int
) -> list[tuple[ShardingType, list[int]]]:
    """Groups of ranks that may share a table's rows; `first_rank` has its first block."""
    groups: list[tuple[ShardingType, list[int]]] = [("row_wise", list(range(len(topology.gpus))))]
    if all(feature.pooling != "none" for feature in table.features):
        host = topology.gpus[first_rank].host
        groups.append(("table_row_wise", host_ranks(topology, host)))
    return groups
