"""HBM that reading a shard needs besides its rows: staged copies and exchange buffers."""

import math

import numpy as np
import numpy.typing as npt

from placer.profile.profile import TableProfile
from placer.tables import Table

Float = npt.NDArray[np.float64]


def exchange_buffer_bytes(table: Table, samples: int, lookups: float, width: int) -> float:
    """Bytes of a server's output of one step and of its gradient.

    Pooled features give one row of `width` columns for each of the `samples` samples that
    the server handles, unpooled ones a row for each of the `lookups` lookups.
    """
    vectors = output_vectors(table, samples, lookups)
    return 2.0 * vectors * table.weight_bytes_per_row(width)


def output_vectors(table: Table, samples: float, lookups: float) -> float:
    """Vectors that a server of `lookups` of a step's lookups returns: bags, or single rows."""
    total = table.lookups_per_sample
    unpooled = sum(f.lookups_per_sample for f in table.features if f.pooling == "none")
    bags = samples * sum(f.pooling != "none" and f.coverage > 0 for f in table.features)
    return bags + (lookups * unpooled / total if total else 0.0)


def staging_buffer_bytes(table: Table, unique_rows: Float | float, width: int) -> Float:
    """Bytes for a step's staged rows, their state included.

    The number of distinct rows varies from step to step: four standard deviations of a
    sum of independent draws, at most √unique each, are kept in hand. The result is not
    rounded to rows, so that it is concave in `unique_rows`: a chord never lies above it,
    which bounds of HBM rely on.
    """
    rows: Float = np.asarray(unique_rows, dtype=np.float64)
    size: Float = (rows + 4 * np.sqrt(rows)) * table.bytes_per_row(width)
    return size


def slice_members(ranks: npt.NDArray[np.int64], rows: tuple[int, int, int]) -> Float:
    """How many members of a slice of ranks lie within each of the segments, shape (m,)."""
    start, stop, step = rows
    below: Float = np.ceil((np.clip(ranks, start, stop) - start) / step)
    return np.diff(below)


def slice_lookup_share(profile: TableProfile, rows: tuple[int, int, int]) -> float:
    """Share of the table's lookups that a slice of ranks takes."""
    return float(slice_members(profile.cdf.ranks, rows) @ profile.cdf.row_share)


def slice_unique(profile: TableProfile, rows: tuple[int, int, int], lookups: float) -> float:
    """Expected distinct rows of a slice of ranks in a step of `lookups` lookups of the table."""
    widths = np.diff(profile.cdf.ranks)
    touched = np.diff(profile.cdf.unique_at_ranks(lookups)) / widths
    return float(slice_members(profile.cdf.ranks, rows) @ touched)


def shard_buffer_bytes(
    profile: TableProfile,
    rows: tuple[int, int, int],
    width: int,
    *,
    samples: int,
    staged: bool,
    returns_bags: bool,
) -> int:
    """Buffer bytes of one shard on each device that serves it.

    Parameters
    ----------
    samples : int
        Samples of a step whose lookups the device serves.
    staged : bool
        Whether the step's distinct rows are copied to HBM.
    returns_bags : bool
        Whether the buffers of pooled output are charged to this shard. The shards of one
        table on one device pool into one output, so one of them is charged. Lookups without
        pooling are charged to the shard that they read.
    """
    table = profile.table
    lookups = samples * table.lookups_per_sample
    size = 0.0
    if staged:
        size += float(staging_buffer_bytes(table, slice_unique(profile, rows, lookups), width))
    share = slice_lookup_share(profile, rows)
    size += exchange_buffer_bytes(table, samples if returns_bags else 0, lookups * share, width)
    return math.ceil(size)
