"""Count the HBM that reading a shard needs besides its rows.

It is for staged copies, exchange buffers, and integers that say what each lookup reads. With
look-ahead, the next step is prepared while one trains, so `STEPS_IN_FLIGHT` steps need staged rows
and integers at the same time.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, SORT_BYTES_PER_LOOKUP
from placer.plan.shard import Shard
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import Table

Float = npt.NDArray[np.float64]

STEPS_IN_FLIGHT = 2
"""Steps in flight: the step that trains, and the next step, whose rows are being copied."""

INDEX_BYTES_HELD_PER_LOOKUP = 16
"""Bytes of integers of one lookup, from its step's preparation to the step's end, on any tier.

Its place, its position in the order of rows, the start of its run of equal rows and that run's
place, all int32, on the GPU that serves it. Measured by tests/executor/test_executor_memory.py."""

INDEX_BYTES_PASSING_PER_LOOKUP = 8
"""Temporary bytes of one lookup while rows are updated, without sums of parts of rows.

4 for its bag in the order of rows. 4 for rounding of PyTorch's allocator, and for lists of lookups
that a host pools. The next step is prepared before."""

SUM_BYTES_PER_LOOKUP_AND_COLUMN = 2 * 4 / 128
"""Bytes for sums of parts of rows that are read often: two float32 rows for 128 lookups."""


_FLOAT32_BYTES = 4


def exchange_buffer_bytes(table: Table, samples: int, lookups: float, width: int) -> float:
    """Return bytes of a server's float32 output of one step and of its gradient.

    Pooled features have one vector of `width` columns for each of the server's `samples` samples.
    Unpooled features have one for each of its `lookups` lookups.
    """
    vectors = output_vectors(table, samples, lookups)
    return 2.0 * vectors * width * _FLOAT32_BYTES


def output_vectors(table: Table, samples: float, lookups: float) -> float:
    """Return the number of vectors that a server outputs: bags, or single rows of lookups."""
    total = table.lookups_per_sample
    unpooled = sum(f.lookups_per_sample for f in table.features if f.pooling == "none")
    bags = samples * sum(f.pooling != "none" and f.coverage > 0 for f in table.features)
    return bags + (lookups * unpooled / total if total else 0.0)


def index_buffer_bytes(table: Table, lookups: float, width: int, ahead: bool = True) -> float:
    """Return bytes of integers of all steps in flight, for a server with `lookups` lookups a step.

    They are linear in lookups, so dividing a table by rows does not change their sum. Without
    looking `ahead`, one step is in flight.

    >>> from placer import Feature
    >>> table = Table("ads", rows=1000, dim=64, features=(Feature("ad"),))
    >>> index_buffer_bytes(table, 1000, 64), index_buffer_bytes(table, 1000, 64, ahead=False)
    (44000.0, 28000.0)
    """
    steps = STEPS_IN_FLIGHT if ahead else 1
    each = table.lookups_per_sample
    # Sorting uses the memory of outputs and gradients, which do not exist yet.
    room = exchange_buffer_bytes(table, 1, each, width) / each if each else SORT_BYTES_PER_LOOKUP
    # Bags in the order of rows use the memory of the sums that follow.
    passing = INDEX_BYTES_PASSING_PER_LOOKUP + max(4.0, width * SUM_BYTES_PER_LOOKUP_AND_COLUMN)
    passing += max(0.0, SORT_BYTES_PER_LOOKUP - room)
    return lookups * (steps * INDEX_BYTES_HELD_PER_LOOKUP + passing)


def staged_rows(unique_rows: Float | float) -> Float:
    """Return the rows of a staging buffer, if the steps in flight read `unique_rows` on average.

    The number of distinct rows varies from step to step. So add four standard deviations of a sum
    of independent draws, each at most √unique. The result is not rounded, so that it is concave in
    `unique_rows`: bounds of HBM need that no chord lies above it. Rows that two steps in flight
    share are staged once.
    """
    rows: Float = np.asarray(unique_rows, dtype=np.float64)
    kept: Float = rows + 4 * np.sqrt(rows)
    return kept


def staging_buffer_bytes(table: Table, unique_rows: Float | float, width: int) -> Float:
    """Return bytes of `staged_rows(unique_rows)` rows, with their state and bookkeeping."""
    return staged_rows(unique_rows) * (table.bytes_per_row(width) + ROW_CACHE_ENTRY_BYTES)


def slice_members(ranks: npt.NDArray[np.int64], rows: tuple[int, int, int]) -> Float:
    """Return the number of members of a slice of ranks in each segment, shape (m,)."""
    start, stop, step = rows
    # `np.clip` and `np.diff` have more overhead, and solvers call this very often.
    below: Float = np.ceil((np.minimum(np.maximum(ranks, start), stop) - start) / step)
    return below[1:] - below[:-1]


def slice_lookup_share(profile: TableProfile, rows: tuple[int, int, int]) -> float:
    """Return the share of the table's lookups that fall in a slice of ranks."""
    return float(slice_members(profile.cdf.ranks, rows) @ profile.cdf.row_share)


def slice_unique(profile: TableProfile, rows: tuple[int, int, int], lookups: float) -> float:
    """Return the expected number of distinct rows of a slice in `lookups` lookups of the table."""
    widths = np.diff(profile.cdf.ranks)
    touched = np.diff(profile.unique_at_ranks(lookups)) / widths
    return float(slice_members(profile.cdf.ranks, rows) @ touched)


def cache_slices(shard: Shard) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the slice of a shard's ranks that its cache holds, and the slice of the others.

    A cache filled by frequency holds the shard's hottest rows. Without a cache, the first is empty.
    """
    start, stop, step = shard.rows
    edge = min(stop, start + shard.cache_rows * step)
    return (start, edge, step), (edge, stop, step)


def with_buffers(
    profile: TableProfile, shard: Shard, *, samples: int, returns_bags: bool, ahead: bool = True
) -> Shard:
    """Return the shard with the `staging_rows` and `buffer_bytes` that reading it needs.

    Rows in a cache are not staged. Each serving device handles the lookups of `samples` samples.
    Shards of one table on one device pool into one output, so only the shard with `returns_bags`
    counts its buffers. Each shard counts the outputs of its own unpooled lookups.
    """
    table, width = profile.table, shard.width
    all_lookups = samples * table.lookups_per_sample
    lookups = all_lookups * slice_lookup_share(profile, shard.rows)
    size = exchange_buffer_bytes(table, samples if returns_bags else 0, lookups, width)
    size += index_buffer_bytes(table, lookups, width, ahead)
    staging_rows = 0
    if shard.lookup in ("staged", "cached"):
        _, cold = cache_slices(shard)
        unique = slice_unique(profile, cold, STEPS_IN_FLIGHT * all_lookups)
        size += float(staging_buffer_bytes(table, unique, width))
        staging_rows = min(len(range(*cold)), math.floor(staged_rows(unique)))
    return replace(shard, staging_rows=staging_rows, buffer_bytes=math.ceil(size))


def buffered(shards: Iterable[Shard], profile: Profile, samples: int) -> list[Shard]:
    """Return shards with their buffers. `samples` is the batch of all GPUs together.

    On each GPU, the first shard of a table's columns returns bags.
    """
    made, returned = [], set()
    for shard in shards:
        key = (shard.table, shard.devices, shard.cols)
        own, bags = samples // len(shard.devices), key not in returned
        returned.add(key)
        made.append(with_buffers(profile[shard.table], shard, samples=own, returns_bags=bags))
    return made
