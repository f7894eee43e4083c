"""Expected lookups and distinct rows of slices of ranks, and the bytes that GPUs exchange for them.

Loads come from a table's access CDF. Bytes are those that `placer.executor.distributed` sends,
counted as in `Topology.exchange_s`: spread evenly over all GPUs, including the free part to itself.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cost_models.base import Float, Int
from placer.plan.memory import STEPS_IN_FLIGHT, output_vectors, slice_members
from placer.profile.table_profile import TableProfile
from placer.tables import Table


@lru_cache(maxsize=4096)
def slice_load(
    profile: TableProfile, rows: tuple[int, int, int], step_lookups: float
) -> tuple[float, float]:
    """Return the expected lookups and distinct rows of a slice of ranks in a step."""
    cdf = profile.cdf
    members = slice_members(cdf.ranks, rows)
    touched = _row_load(profile, step_lookups)
    return float(members @ cdf.row_share) * step_lookups, float(members @ touched)


@lru_cache(maxsize=4096)
def _row_load(profile: TableProfile, step_lookups: float) -> Float:
    """Return for each segment of the CDF the probability that a step touches a row, (m,)."""
    touched: Float = np.diff(profile.unique_at_ranks(step_lookups)) / profile.cdf.widths
    return touched


class Load(NamedTuple):
    """A step's work in a slice of ranks, as a function of its number of rows in HBM."""

    hot_rows: Int  # Shape (m,): from none to all, strictly increasing.
    # Shape (5, m): lookups and distinct rows of hot rows; lookups and distinct rows of cold rows;
    # ones.
    counts: Float
    # Shape (m,): distinct cold rows of all steps in flight.
    cold_in_flight: Float

    def with_points(self, rows: Sequence[int]) -> "Load":
        """Return the load with interpolated points at these numbers of rows in HBM, too."""
        more = np.union1d(self.hot_rows, rows)
        values = np.vstack((self.counts, self.cold_in_flight))
        of_rows = np.stack([np.interp(more, self.hot_rows, row) for row in values])
        return Load(more, of_rows[:-1], of_rows[-1])

    @property
    def all_counts(self) -> tuple[float, float]:
        """The lookups and expected distinct rows of the whole slice."""
        lookups, unique = self.counts[:2, -1] + self.counts[2:4, -1]
        return float(lookups), float(unique)


@lru_cache(maxsize=1024)
def load_of(
    profile: TableProfile,
    rows: tuple[int, int, int],
    step_lookups: float,
    steps_at_ends: bool = False,
) -> Load:
    """Return the load of a slice of ranks; `steps_at_ends` adds points one row from each end.

    Do not write to it: it is cached, as all column slices and machines of equal size share it.
    """
    if steps_at_ends:
        load = load_of(profile, rows, step_lookups)
        last = int(load.hot_rows[-1])
        return load.with_points([min(1, last), max(0, last - 1)])
    members = slice_members(profile.cdf.ranks, rows)
    loads = _row_loads(profile, step_lookups)
    if not members.all():  # A thin slice has no member in some segments.
        kept = members > 0
        members, loads = members[kept], loads[:, kept]
    sums = np.zeros((4, members.size + 1))
    np.cumsum(members * loads, axis=1, out=sums[:, 1:])
    sums[1] *= step_lookups  # Multiply last, so that all rows have exactly all lookups.
    left = sums[1:, -1:] - sums[1:]
    counts = np.concatenate((sums[1:3], left[:2], np.ones((1, left.shape[1]))))
    return Load(sums[0].astype(np.int64), counts, left[2])


@lru_cache(maxsize=2048)
def _row_loads(profile: TableProfile, step_lookups: float) -> Float:
    """Return values of one row in each segment of the CDF, shape (4, m).

    They are 1, the row's share of lookups, and the probabilities that a step and that all steps in
    flight touch the row.
    """
    share, once = profile.cdf.row_share, _row_load(profile, step_lookups)
    in_flight = _row_load(profile, STEPS_IN_FLIGHT * step_lookups)
    return np.stack((np.ones_like(share), share, once, in_flight))


ID_BYTES = 8
"""Bytes of an id: an int64 when it is sent and in memory."""

SORT_BYTES_PER_LOOKUP = 112
"""HBM bytes to sort one (row, bag) pair of 12 bytes: 96 for four radix passes that read and write
it, and 16 for a histogram pass with its ids."""

LENGTH_BYTES = 4
"""Bytes of a bag's length: an int32 when it is sent."""

OUTPUT_BYTES = 4
"""Bytes of a column of a pooled row or gradient: a float32 for all types of weights. The exchange
between GPUs may have 16 bits: `Problem.exchange_dtype`."""


def returned_vectors(table: Table, samples: float, lookups: float, *, all_rows: bool) -> float:
    """Return the number of vectors that a server returns for its `lookups` of a step.

    It is that of `output_vectors`, except for max pooling: a server without `all_rows` of the table
    returns these rows one by one.
    """
    vectors = output_vectors(table, samples, lookups)
    largest = [f for f in table.features if f.pooling == "max" and f.coverage > 0]
    if all_rows or not largest:
        return vectors
    total = table.lookups_per_sample
    share = sum(f.lookups_per_sample for f in largest) / total if total else 0.0
    return vectors - samples * len(largest) + lookups * share


def may_return_fewer(table: Table) -> bool:
    """Return whether servers of some rows may return fewer vectors than a server of all rows.

    That happens with max pooling of mostly empty bags: a server of all rows returns a vector for
    each bag, a server of some rows only the few rows. Both return a vector for each other bag.
    """
    bags = [f for f in table.features if f.pooling != "none" and f.coverage > 0]
    largest = [f for f in bags if f.pooling == "max"]
    rows = sum(f.lookups_per_sample for f in largest)
    return rows + len(bags) - len(largest) < len(largest)


def replica_bytes(width: int, unique: float, touched: float, replicas: int, gpus: int) -> float:
    """Return the bytes of the sparse all-reduce of replicated rows' gradients, with row ids.

    Each replica sends its samples' `unique` rows to the replicas that add them up. The sums of all
    `touched` rows then go to all replicas.
    """
    crossing = (unique + touched) * (width * OUTPUT_BYTES + ID_BYTES) * (replicas - 1) / replicas
    return with_own_part(crossing, gpus)


def with_own_part(crossing_bytes: float, gpus: int) -> float:
    """Return all bytes, own part included, if `crossing_bytes` of them go to other GPUs."""
    return crossing_bytes * gpus / (gpus - 1) if gpus > 1 else 0.0
