"""Bytes that GPUs exchange in a step: what `placer.executor.distributed` sends, kind by kind.

Each function gives bytes as `Topology.exchange_s` takes them: those that are spread evenly over
all GPUs, one's own included, which costs nothing.
"""

from placer.plan.buffers import output_vectors
from placer.tables import Table

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
