"""HBM that reading a shard needs besides its rows.

Room for staged copies, exchange buffers, and integers that say what each lookup reads. A
trainer that looks ahead prepares the next step while one trains, so `STEPS_IN_FLIGHT` steps
need staged rows and integers at once.
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
"""The step that trains, and the next one, whose rows are on their way."""

INDEX_BYTES_HELD_PER_LOOKUP = 16
"""Integers of one lookup from when its step is prepared to the step's end, whatever its row's tier.

Its place, its position in the order of rows, the start of its run of equal rows and that run's
place, all int32, on the GPU that serves it. Measured by tests/executor/test_executor_memory.py."""

INDEX_BYTES_PASSING_PER_LOOKUP = 8
"""Bytes of one lookup that come and go while its rows are updated, beside sums of its row's parts.

Its bag in the order of rows, 4, and 4 for what PyTorch's allocator rounds up and for lists of the
lookups that a host pools. The next step is prepared before."""

SUM_BYTES_PER_LOOKUP_AND_COLUMN = 2 * 4 / 128
"""Sums of the parts of rows that are read often: two rows of float32 for 128 lookups."""


_FLOAT32_BYTES = 4


def exchange_buffer_bytes(table: Table, samples: int, lookups: float, width: int) -> float:
    """Return bytes of a server's output of one step and of its gradient, which are float32.

    Pooled features give one row of `width` columns for each of the `samples` samples that
    the server handles, unpooled ones a row for each of the `lookups` lookups.
    """
    vectors = output_vectors(table, samples, lookups)
    return 2.0 * vectors * width * _FLOAT32_BYTES


def output_vectors(table: Table, samples: float, lookups: float) -> float:
    """Return the vectors that a server of `lookups` lookups returns: bags, or single rows."""
    total = table.lookups_per_sample
    unpooled = sum(f.lookups_per_sample for f in table.features if f.pooling == "none")
    bags = samples * sum(f.pooling != "none" and f.coverage > 0 for f in table.features)
    return bags + (lookups * unpooled / total if total else 0.0)


def index_buffer_bytes(table: Table, lookups: float, width: int, ahead: bool = True) -> float:
    """Return bytes of the integers of all steps in flight, for a server of `lookups` of each.

    Linear in lookups, so that cutting a table by rows neither saves any nor adds any. Without
    looking `ahead`, one step is in flight.

    >>> from placer import Feature
    >>> table = Table("ads", rows=1000, dim=64, features=(Feature("ad"),))
    >>> index_buffer_bytes(table, 1000, 64), index_buffer_bytes(table, 1000, 64, ahead=False)
    (44000.0, 28000.0)
    """
    steps = STEPS_IN_FLIGHT if ahead else 1
    each = table.lookups_per_sample
    # Lookups are sorted while there are no outputs and gradients yet, in the room of these.
    room = exchange_buffer_bytes(table, 1, each, width) / each if each else SORT_BYTES_PER_LOOKUP
    # The bags in order of rows take the place of the sums that follow.
    passing = INDEX_BYTES_PASSING_PER_LOOKUP + max(4.0, width * SUM_BYTES_PER_LOOKUP_AND_COLUMN)
    passing += max(0.0, SORT_BYTES_PER_LOOKUP - room)
    return lookups * (steps * INDEX_BYTES_HELD_PER_LOOKUP + passing)


def staged_rows(unique_rows: Float | float) -> Float:
    """Return rows to keep room for where the steps in flight touch `unique_rows` rows on average.

    The number of distinct rows varies from step to step: four standard deviations of a sum of
    independent draws, at most √unique each, are kept in hand. Not rounded to rows, so that it is
    concave in `unique_rows`: a chord never lies above it, which bounds of HBM rely on. What two
    steps in flight share is staged once.
    """
    rows: Float = np.asarray(unique_rows, dtype=np.float64)
    kept: Float = rows + 4 * np.sqrt(rows)
    return kept


def staging_buffer_bytes(table: Table, unique_rows: Float | float, width: int) -> Float:
    """Return bytes of `staged_rows(unique_rows)` rows, their state and bookkeeping included."""
    return staged_rows(unique_rows) * (table.bytes_per_row(width) + ROW_CACHE_ENTRY_BYTES)


def slice_members(ranks: npt.NDArray[np.int64], rows: tuple[int, int, int]) -> Float:
    """Return how many members of a slice of ranks lie within each of the segments, shape (m,)."""
    start, stop, step = rows
    # Not `np.clip` and `np.diff`, which take longer than what they do: solvers ask very often.
    below: Float = np.ceil((np.minimum(np.maximum(ranks, start), stop) - start) / step)
    return below[1:] - below[:-1]


def slice_lookup_share(profile: TableProfile, rows: tuple[int, int, int]) -> float:
    """Return the share of the table's lookups that a slice of ranks takes."""
    return float(slice_members(profile.cdf.ranks, rows) @ profile.cdf.row_share)


def slice_unique(profile: TableProfile, rows: tuple[int, int, int], lookups: float) -> float:
    """Return expected distinct rows of a slice of ranks in `lookups` lookups of the table."""
    widths = np.diff(profile.cdf.ranks)
    touched = np.diff(profile.unique_at_ranks(lookups)) / widths
    return float(slice_members(profile.cdf.ranks, rows) @ touched)


def cache_slices(shard: Shard) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the ranks of a shard that its cache holds, and the others.

    A cache filled by frequency holds the shard's hottest rows; without one, none.
    """
    start, stop, step = shard.rows
    edge = min(stop, start + shard.cache_rows * step)
    return (start, edge, step), (edge, stop, step)


def with_buffers(
    profile: TableProfile, shard: Shard, *, samples: int, returns_bags: bool, ahead: bool = True
) -> Shard:
    """Return the shard with the `staging_rows` and `buffer_bytes` that reading it needs.

    Of what a cached shard's steps touch, the rows that its cache holds are not staged. Each serving
    device handles the lookups of `samples` samples. The shards of one table on one device pool into
    one output, so `returns_bags` charges its buffers to one of them; lookups without pooling are
    charged to the shard that they read.
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
    """Return shards with their buffers, for the samples of a step on all GPUs together.

    Of a table's shards on a GPU the first one returns bags.
    """
    made, returned = [], set()
    for shard in shards:
        key = (shard.table, shard.devices, shard.cols)
        own, bags = samples // len(shard.devices), key not in returned
        returned.add(key)
        made.append(with_buffers(profile[shard.table], shard, samples=own, returns_bags=bags))
    return made
