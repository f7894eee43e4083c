"""The ways to cut a table that are searched, for models that can cost any cut."""

from collections.abc import Iterator

from cost_models.base import Cold, ShardingOption
from placer.problem import Problem
from placer.tables import Table

COLUMN_MULTIPLE = 16
"""Strips are multiples of so many columns, so that their rows stay aligned."""

SECTOR_MULTIPLE = 8
"""Two strips are multiples of so many: the 32 bytes that a GPU reads at least."""

_FINE_WAYS = 8
_MOST_STRIPS = 8
_ANY_STRIPS = 4
_ANY_UNITS = 16
"""Strips up to so many may have any widths, in tables of up to so many strips' columns."""

_GRID_WAYS = (2, 4, 8)
_GRID_STRIPS = (2, 4)

_HEAD_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of a table's lookups that replicated rows take, where they are not all rows."""

_HEAVY = 0.5
"""Tables with so large a share of a GPU's part of all bytes looked up have replicated rows.
So have those of which each lookup is returned by itself, where that saves its exchange."""

_HEAD_HBM_SHARE = 0.25
"""Replicas of one table take at most this share of the smallest GPU."""


def standard_options(
    problem: Problem, table: int, colds: tuple[Cold, ...]
) -> tuple[ShardingOption, ...]:
    """Cuts of table number `table`, coarse ones first.

    Row slices: 1 to 8, powers of two up to all GPUs, and all GPUs. Strips of columns: two
    to four of any widths, or five to eight as even as can be. Grids of 2, 4 or 8 row slices
    and 2 or 4 strips. All rows replicated; or, of heavy tables, the rows that take a tenth to
    nine tenths of the lookups, with the others in a few row slices. Ways to read cold rows
    other than the first of `colds` go with whole tables, powers of two of row slices, and even
    strips; reading in place with whole tables and one row slice for each GPU.
    """
    profile = problem.profile.tables[table]
    spec, gpus = profile.table, len(problem.topology.gpus)
    most = max(1, min(gpus, spec.rows))
    usual = colds[0]
    coarse = sorted({2**k for k in range(most.bit_length()) if 2**k <= most} | {most})
    row_slices = sorted({*range(1, min(most, _FINE_WAYS) + 1), *coarse})
    found = [ShardingOption(w, cold=usual) for w in row_slices]
    found += [ShardingOption(1, column_widths, cold=usual) for column_widths in _strips(spec, gpus)]
    for strips in _GRID_STRIPS:
        if even := even_widths(spec.dim, strips):
            grid_ways = [w for w in _GRID_WAYS if w <= most and w * strips <= gpus]
            found += [ShardingOption(w, even, cold=usual) for w in grid_ways]
    for cold in colds[1:]:
        if cold == "uva":  # A way out where HBM is short of buffers, never the best elsewhere.
            found += [ShardingOption(w, cold=cold) for w in sorted({1, most})]
            continue
        found += [ShardingOption(w, cold=cold) for w in coarse]
        for strips in _GRID_STRIPS:
            if (even := even_widths(spec.dim, strips)) and strips <= gpus:
                found.append(ShardingOption(1, even, cold=cold))
    if gpus > 1:
        least_hbm = min(gpu.memory_bytes for gpu in problem.topology.gpus)
        room = least_hbm * _HEAD_HBM_SHARE / spec.bytes_per_row()
        if 0 < spec.rows <= room:
            found.append(ShardingOption(replicated_rows=spec.rows, cold=usual))
        unpooled = any(feature.pooling == "none" for feature in spec.features)
        mine = spec.lookups_per_sample * spec.weight_bytes_per_row()
        heads: set[int] = set()
        if spec.rows > gpus and (
            unpooled or mine * gpus >= _HEAVY * problem.lookup_bytes_per_sample
        ):
            heads = {profile.cdf.hot_rows_for(share) for share in _HEAD_SHARES}
        for replicated_rows in sorted(heads):
            if 0 < replicated_rows <= room and replicated_rows + gpus <= spec.rows:
                found += [
                    ShardingOption(w, replicated_rows=replicated_rows, cold=usual)
                    for w in sorted({1, 2, 3, 4, gpus})
                    if w <= gpus
                ]
    return tuple(
        sorted(
            found,
            key=lambda option: (
                option.replicated_rows > 0,
                option.shard_count,
                option.cold != usual,
                option,
            ),
        )
    )


def even_widths(dim: int, strips: int) -> tuple[int, ...]:
    """Widths of `strips` strips as even as can be, the wider ones first; none if too narrow."""
    units = dim // COLUMN_MULTIPLE
    if dim % COLUMN_MULTIPLE or strips > units:
        return ()
    narrow, wider = divmod(units, strips)
    return tuple(
        COLUMN_MULTIPLE * (narrow + 1 if column_slice < wider else narrow)
        for column_slice in range(strips)
    )


def _strips(spec: Table, gpus: int) -> Iterator[tuple[int, ...]]:
    if gpus == 1 or spec.dim % COLUMN_MULTIPLE:
        return
    units = spec.dim // COLUMN_MULTIPLE
    for wide in range(spec.dim - SECTOR_MULTIPLE, (spec.dim - 1) // 2, -SECTOR_MULTIPLE):
        yield wide, spec.dim - wide
    for strips in range(3, min(_MOST_STRIPS, gpus, units) + 1):
        if strips > _ANY_STRIPS or units > _ANY_UNITS:
            yield even_widths(spec.dim, strips)
            continue
        for parts in _partitions(units, strips, units):
            yield tuple(COLUMN_MULTIPLE * part for part in parts)


def _partitions(units: int, strips: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `units` as a sum of `strips` falling numbers of at most `most`."""
    if strips == 1:
        if 0 < units <= most:
            yield (units,)
        return
    # Falling, because which of the strips is left of the others does not matter.
    for first in range(min(most, units - strips + 1), (units - 1) // strips, -1):
        for rest in _partitions(units - first, strips - 1, first):
            yield first, *rest
