"""What a step looks up in slices of ranks, by a table's access CDF, and what GPUs exchange for it.

Bytes are what `placer.executor.distributed` sends, kind by kind, as `Topology.exchange_s` takes
them: those that are spread evenly over all GPUs, one's own included, which costs nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from placer.plan.buffers import STEPS_IN_FLIGHT, output_vectors, slice_members
from placer.profile.table_profile import TableProfile
from placer.tables import Table

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@lru_cache(maxsize=4096)
def slice_load(
    profile: TableProfile, rows: tuple[int, int, int], step_lookups: float
) -> tuple[float, float]:
    """Return lookups and expected distinct rows of a slice of ranks in a step."""
    cdf = profile.cdf
    members = slice_members(cdf.ranks, rows)
    touched = _row_load(profile, step_lookups)
    return float(members @ cdf.row_share) * step_lookups, float(members @ touched)


@lru_cache(maxsize=4096)
def _row_load(profile: TableProfile, step_lookups: float) -> Float:
    """Return probability that a step touches a row of each segment of the CDF, shape (m,)."""
    touched: Float = np.diff(profile.unique_at_ranks(step_lookups)) / np.diff(profile.cdf.ranks)
    return touched


class Load(NamedTuple):
    """What a step does in a slice of ranks, as a function of how many of them are in HBM."""

    hot_rows: Int  # Shape (m,): from none to all, strictly increasing.
    # Shape (5, m): lookups, and expected distinct rows, that fall in the hot rows and in the
    # others; ones.
    counts: Float
    # Shape (m,): distinct rows of all steps in flight that fall in the others.
    cold_in_flight: Float

    def with_points(self, rows: Sequence[int]) -> "Load":
        """Return the load with points at some more numbers of rows in HBM."""
        more = np.union1d(self.hot_rows, rows)
        values = np.vstack((self.counts, self.cold_in_flight))
        of_rows = np.stack([np.interp(more, self.hot_rows, row) for row in values])
        return Load(more, of_rows[:-1], of_rows[-1])

    @property
    def all_counts(self) -> tuple[float, float]:
        """Lookups and expected distinct rows of the whole slice."""
        lookups, unique = self.counts[:2, -1] + self.counts[2:4, -1]
        return float(lookups), float(unique)


@lru_cache(maxsize=1024)
def load_of(
    profile: TableProfile,
    rows: tuple[int, int, int],
    step_lookups: float,
    steps_at_ends: bool = False,
) -> Load:
    """Return the load of a slice of ranks; with `steps_at_ends`, also one row from each end.

    Cached, as a solver asks for all column slices of a slice in a row, and machines of as many GPUs
    have the same. Not to be written to.
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
    sums[1] *= step_lookups  # The last: so that all rows have all lookups, to the bit.
    left = sums[1:, -1:] - sums[1:]
    counts = np.concatenate((sums[1:3], left[:2], np.ones((1, left.shape[1]))))
    return Load(sums[0].astype(np.int64), counts, left[2])


@lru_cache(maxsize=2048)
def _row_loads(profile: TableProfile, step_lookups: float) -> Float:
    """Return what each row of a segment of the CDF counts, shape (4, m).

    One row, its share of lookups, and the probabilities that a step and all steps in flight touch
    it.
    """
    share, once = profile.cdf.row_share, _row_load(profile, step_lookups)
    in_flight = _row_load(profile, STEPS_IN_FLIGHT * step_lookups)
    return np.stack((np.ones_like(share), share, once, in_flight))


ID_BYTES = 8
"""An id is an int64 on the wire and in memory."""

LENGTH_BYTES = 4
"""The length of a bag is an int32 on the wire."""

OUTPUT_BYTES = 4
"""A column of a pooled row, or of a gradient, is a float32 whatever the weights are. Between GPUs
it may be of 16 bits: `Problem.exchange_dtype`."""


def returned_vectors(table: Table, samples: float, lookups: float, *, all_rows: bool) -> float:
    """Return vectors that a server of `lookups` of a step's lookups returns.

    As `output_vectors`, but for bags under max: a server that does not have `all_rows` of the
    table returns the rows one by one.
    """
    vectors = output_vectors(table, samples, lookups)
    largest = [f for f in table.features if f.pooling == "max" and f.coverage > 0]
    if all_rows or not largest:
        return vectors
    total = table.lookups_per_sample
    share = sum(f.lookups_per_sample for f in largest) / total if total else 0.0
    return vectors - samples * len(largest) + lookups * share


def may_return_fewer(table: Table) -> bool:
    """Return whether servers of some rows each may return fewer vectors than one of all rows.

    Bags under max that are mostly empty are vectors for the one, and hardly any rows for the
    others, which return one for each other bag too.
    """
    bags = [f for f in table.features if f.pooling != "none" and f.coverage > 0]
    largest = [f for f in bags if f.pooling == "max"]
    rows = sum(f.lookups_per_sample for f in largest)
    return rows + len(bags) - len(largest) < len(largest)


def length_bytes(table: Table, samples: float) -> float:
    """Lengths of the bags of all features that read a table: ids come with them."""
    return samples * sum(feature.coverage > 0 for feature in table.features) * LENGTH_BYTES


def replica_bytes(width: int, unique: float, touched: float, replicas: int, gpus: int) -> float:
    """Return the sparse all-reduce of the gradients of replicated rows, each with its id.

    The `unique` rows that the samples of one replica read are dealt out over the replicas to be
    added up, and the totals of all `touched` ones go to all of them.
    """
    crossing = (unique + touched) * (width * OUTPUT_BYTES + ID_BYTES) * (replicas - 1) / replicas
    return with_own_part(crossing, gpus)


def row_sum_bytes(table: Table, unique: float, column_slices: int, gpus: int) -> float:
    """Σ g² of the rows of a column slice, which row-wise Adagrad sends to all other slices.

    Each column slice is taken to be on a GPU of its own.
    """
    if table.optimizer != "rowwise_adagrad":
        return 0.0
    return with_own_part(unique * OUTPUT_BYTES * max(0, column_slices - 1), gpus)


def with_own_part(crossing_bytes: float, gpus: int) -> float:
    """Return bytes that, spread evenly over all GPUs, send so many to others."""
    return crossing_bytes * gpus / (gpus - 1) if gpus > 1 else 0.0
