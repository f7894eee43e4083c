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
    """How TorchRec places one table."""

    kind: ShardingType  # Its sharding type.
    kernel: Kernel  # Its compute kernel.
    # In TorchRec's order: of a grid, the row blocks of one column slice after the other. Row-wise
    # ones may be empty.
    blocks: tuple[Block, ...]
    # Rows of the caches over rows of the table, for ``fused_uvm_caching``.
    load_factor: float | None = None


def even_blocks(rows: int, ways: int) -> list[tuple[int, int]]:
    """Return TorchRec's row blocks of ceil(rows / ways) as (start, stop); the last may be empty."""
    size = -(-rows // ways)
    return [(min(rows, size * way), min(rows, size * (way + 1))) for way in range(ways)]


def sharding_of(topology: Topology, table: Table, shards: Sequence[Shard]) -> Sharding:
    """Return the shards of `table` as TorchRec would name them.

    Raises PlanMismatchError if TorchRec has no such placement; the message says why.
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
    # The first block of each column slice.
    slices = {block.first_column: block for block in sorted(blocks, reverse=True, key=_position)}
    firsts = [slices[column] for column in sorted(slices)]
    columns_divided = any(block.width < table.dim for block in blocks)
    if columns_divided:
        width = firsts[0].width
        starts = list(range(0, table.dim, width))
        if {block.width for block in firsts} != {width} or [*sorted(slices)] != starts:
            widths = ", ".join(str(block.width) for block in firsts)
            raise refuse(f"column slices of {widths} of its {table.dim} columns are not even")
    if all(block.rows == table.rows for block in blocks):
        return "column_wise" if columns_divided else "table_wise", blocks
    known: dict[ShardingType, list[Block]] = {}
    if not columns_divided:
        known["row_wise"] = _row_blocks(table, firsts[0], list(range(len(topology.gpus))))
    if all(feature.pooling != "none" for feature in table.features):
        kind: ShardingType = "grid_shard" if columns_divided else "table_row_wise"
        hosts = [topology.gpus[first.rank].host for first in firsts]
        known[kind] = [
            block
            for first, host in zip(firsts, hosts, strict=True)
            for block in _row_blocks(
                table, first, [rank for rank, gpu in enumerate(topology.gpus) if gpu.host == host]
            )
        ]
    for kind, expected in known.items():
        if sorted(blocks) == sorted(block for block in expected if block.rows):
            return kind, tuple(expected)
    if columns_divided and not known:
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


def _position(block: Block) -> tuple[int, int]:
    return block.first_row, block.first_column


def _row_blocks(table: Table, first: Block, ranks: list[int]) -> list[Block]:
    """Return TorchRec's blocks of the columns of `first` on these ranks."""
    return [
        first._replace(rows=stop - start, first_row=start, rank=rank)
        for (start, stop), rank in zip(even_blocks(table.rows, len(ranks)), ranks, strict=True)
    ]
