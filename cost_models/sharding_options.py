"""The sharding options that solvers search, for cost models that can cost all of them."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement
from typing import Literal

from cost_models.base import ANY_SHARE, IN_DRAM, Cold, ColdHome, ShardingOption
from placer.problem import Problem
from placer.tables import ColdDType, Table

COLUMN_MULTIPLE = 16
"""Widths of column slices are multiples of this many columns, which keeps rows aligned."""

SECTOR_MULTIPLE = 8
"""Two column slices are multiples of this many columns: the 32 bytes that a GPU reads at once."""

_FINE_ROW_SLICES = 8
_MOST_COLUMN_SLICES = 8
_ANY_COLUMN_SLICES = 4
_ANY_UNITS = 16
"""Up to this many column slices may differ in width, if the table has at most this many units."""

_GRID_ROW_SLICES = (2, 4, 8)
_GRID_COLUMN_SLICES = (2, 4)

_REPLICATED_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of a table's lookups that fall in replicated rows, if not all rows are replicated."""

_LEAST_SHARED_BYTES = 1 << 20
"""Smaller tables have all or none of their cold rows on a drive, as parts free little memory."""

_HEAVY = 0.5
"""Try replicated rows for tables with at least this share of one GPU's part of all bytes looked up.
Also try them for tables with unpooled features, as that saves the exchange of each lookup."""

_REPLICATED_HBM_SHARE = 0.25
"""Replicas of one table take at most this share of the smallest GPU's memory."""


def standard_options(
    problem: Problem, table: int, colds: tuple[Cold, ...]
) -> tuple[ShardingOption, ...]:
    """Return the sharding options of table number `table`, coarse options first.

    docs/solvers.md lists them. The first of `colds` goes with all of them. Other ways to read cold
    rows, and other homes of cold rows (`cold_homes`), only go with whole tables, powers of two of
    row slices and even column slices; caches and reading in place with fewer of these.
    """
    spec, gpus = problem.profile.tables[table].table, len(problem.topology.serving)
    usual, is_counted = colds[0], problem.profile.tables[table].counts is not None
    homes = cold_homes(problem, spec) if "staged" in colds else ()
    options = [
        *_grids(spec, gpus, usual),
        *(
            option._replace(home=home)
            for home in homes
            for option in _other_colds(spec, gpus, "staged")
        ),
        *(
            option
            for cold in colds[1:]
            for option in _other_colds(spec, gpus, cold, is_counted=is_counted)
        ),
        *_replicated(problem, table, usual),
    ]

    def coarseness(option: ShardingOption) -> tuple[object, ...]:
        is_usual = (option.cold, option.home) == (usual, IN_DRAM)
        return option.replicated_rows > 0, option.shard_count, not is_usual, option

    return tuple(sorted(options, key=coarseness))


def cold_homes(problem: Problem, table: Table) -> tuple[ColdHome, ...]:
    """Return the homes that cold rows may have besides DRAM in the table's own element type.

    If all hosts with GPUs have drives, all cold rows or any share of the coldest may be there.
    Rows of float32 tables may have each type of the problem's `widths`, there and in DRAM.
    """
    topology = problem.topology
    has_drives = all(host.drive is not None for host in topology.hosts if topology.gpus_of(host.id))
    some = (1.0, ANY_SHARE) if table.total_bytes >= _LEAST_SHARED_BYTES else (1.0,)
    shares = (0.0, *some) if has_drives else (0.0,)
    dtypes: tuple[ColdDType | Literal[""], ...] = ("",)
    if table.dtype == "float32":  # The executor does not narrow other tables.
        dtypes += tuple(dtype for dtype in problem.widths if dtype != "float32")
    homes = [ColdHome(share, dtype) for dtype in dtypes for share in shares]
    return tuple(homes[1:])


def _coarse_row_slices(spec: Table, gpus: int) -> list[int]:
    """Return numbers of row slices: powers of two, and one slice for each GPU."""
    most = max(1, min(gpus, spec.rows))
    return sorted({2**k for k in range(most.bit_length()) if 2**k <= most} | {most})


def _grids(spec: Table, gpus: int, cold: Cold) -> Iterator[ShardingOption]:
    """Yield options with row slices, with column slices, and with both."""
    coarse = _coarse_row_slices(spec, gpus)
    most = coarse[-1]
    for row_slices in sorted({*range(1, min(most, _FINE_ROW_SLICES) + 1), *coarse}):
        yield ShardingOption(row_slices, cold=cold)
    for widths in _column_widths(spec, gpus):
        yield ShardingOption(1, widths, cold=cold)
    for slices in _GRID_COLUMN_SLICES:
        if even := even_widths(spec.dim, slices):
            for row_slices in _GRID_ROW_SLICES:
                if row_slices <= most and row_slices * slices <= gpus:
                    yield ShardingOption(row_slices, even, cold=cold)


def _other_colds(
    spec: Table, gpus: int, cold: Cold, *, is_counted: bool = False
) -> Iterator[ShardingOption]:
    """Yield coarse options with `cold`, a way to read cold rows that is not the usual one."""
    coarse = _coarse_row_slices(spec, gpus)
    # Reading in place only helps if HBM is short of buffers.
    if cold == "uva" and not is_counted:
        coarse = sorted({1, coarse[-1]})
    if cold == "cached":  # It saves the row map of a split, which row slices need anyway.
        coarse = [1]
    for row_slices in coarse:
        yield ShardingOption(row_slices, cold=cold)
    if cold == "uva":
        return
    for slices in _GRID_COLUMN_SLICES:
        if (even := even_widths(spec.dim, slices)) and slices <= gpus:
            yield ShardingOption(1, even, cold=cold)


def _replicated(problem: Problem, table: int, cold: Cold) -> Iterator[ShardingOption]:
    """Yield options that replicate all rows, or the hottest rows of a heavy table."""
    profile, gpus = problem.profile.tables[table], len(problem.topology.gpus)
    spec = profile.table
    if gpus == 1:
        return
    least_hbm = min(gpu.memory_bytes for gpu in problem.topology.gpus)
    room = least_hbm * _REPLICATED_HBM_SHARE / spec.bytes_per_row()
    if 0 < spec.rows <= room:
        yield ShardingOption(replicated_rows=spec.rows, cold=cold)
    unpooled = any(feature.pooling == "none" for feature in spec.features)
    lookup_bytes = spec.lookups_per_sample * spec.weight_bytes_per_row()
    heavy = lookup_bytes * gpus >= _HEAVY * problem.lookup_bytes_per_sample
    if spec.rows <= gpus or not (unpooled or heavy):
        return
    for rows in sorted({profile.cdf.hot_rows_for(share) for share in _REPLICATED_SHARES}):
        if 0 < rows <= room and rows + gpus <= spec.rows:
            for row_slices in sorted({1, 2, 3, 4, gpus}):
                if row_slices <= gpus:
                    yield ShardingOption(row_slices, replicated_rows=rows, cold=cold)


def even_widths(dim: int, slices: int) -> tuple[int, ...]:
    """Return even widths of `slices` column slices, wide ones first; empty if too narrow."""
    units = dim // COLUMN_MULTIPLE
    if dim % COLUMN_MULTIPLE or slices > units:
        return ()
    narrow, wider = divmod(units, slices)
    return tuple(
        COLUMN_MULTIPLE * (narrow + 1 if column_slice < wider else narrow)
        for column_slice in range(slices)
    )


def _column_widths(spec: Table, gpus: int) -> Iterator[tuple[int, ...]]:
    if gpus == 1 or spec.dim % COLUMN_MULTIPLE:
        return
    units = spec.dim // COLUMN_MULTIPLE
    for wide in range(spec.dim - SECTOR_MULTIPLE, (spec.dim - 1) // 2, -SECTOR_MULTIPLE):
        yield wide, spec.dim - wide
    for slices in range(3, min(_MOST_COLUMN_SLICES, gpus, units) + 1):
        if slices > _ANY_COLUMN_SLICES or units > _ANY_UNITS:
            yield even_widths(spec.dim, slices)
            continue
        for parts in _partitions(units, slices):
            yield tuple(COLUMN_MULTIPLE * part for part in parts)


@cache
def _partitions(units: int, slices: int) -> list[tuple[int, ...]]:
    """Return all ways to write `units` as a sum of `slices` falling numbers."""
    # Falling numbers, because the order of the slices does not matter.
    falling = combinations_with_replacement(range(units - slices + 1, 0, -1), slices)
    return [parts for parts in falling if sum(parts) == units]
