"""Counts of the simulator: of a step or of many, by part, table and process."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]

ExchangeKind = Literal[
    "lengths", "ids", "outputs", "gradients", "replica counts", "replicas", "rows"
]
"""Kinds of data that processes send each other: lengths of bags; ids; pooled rows; their gradients;
counts of replicated rows, and the summed gradients of these rows; Σ g² of column-sliced rows."""

EXCHANGE_KINDS: tuple[ExchangeKind, ...] = get_args(ExchangeKind)


@dataclass(frozen=True, eq=False)
class _Counts:
    """Arrays of counts with equal shapes."""

    @classmethod
    def zeros(cls, *shape: int) -> Self:
        return cls(*(np.zeros(shape, dtype=np.int64) for _ in fields(cls)))

    def __add__(self, other: Self) -> Self:
        return type(self)(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


@dataclass(frozen=True, eq=False)
class PartCounts(_Counts):
    """Counts of one step, or of many; int64 arrays of shape (parts,)."""

    # Lookups, and distinct rows that they read.
    lookups: Int
    rows: Int
    # For staged and cached parts: lookups and rows with a copy in HBM before the step.
    hit_lookups: Int
    hit_rows: Int
    staged_rows: Int  # Rows that were copied to HBM.
    # For staged and cached parts: lookups and rows without an HBM entry, which were read in DRAM.
    in_place_lookups: Int
    in_place_rows: Int
    written_back_rows: Int  # Updated copies that were evicted from HBM.
    vectors: Int  # For parts that the host pools: vectors that it returns.
    # For replicated parts: rows to update in another pass, with gradients summed over all holders;
    # and how many of them had a copy in HBM.
    update_rows: Int
    update_hit_rows: Int


@dataclass(frozen=True, eq=False)
class Served(_Counts):
    """Data that processes serve, by table; int64 arrays of shape (tables, processes)."""

    # Pooled or single rows that go to the samples' processes, the serving process included.
    output_vectors: Int
    output_bytes: Int
    request_bytes: Int  # Ids and lengths of bags from other processes, sent before a step.
    # Sent within a step: pooled rows to other processes, and their gradients back; summed gradients
    # of replicated rows and Σ g² to others.
    returned_bytes: Int
    pooled_bytes: Int  # The pooled rows among them, sent before the dense layers.


def nothing_sent(processes: int) -> dict[ExchangeKind, Int]:
    """Return zero bytes for every kind, shape (processes, processes)."""
    return {kind: np.zeros((processes, processes), np.int64) for kind in EXCHANGE_KINDS}


@dataclass(frozen=True, slots=True, eq=False)
class StepCounts:
    """Counts of one batch under a plan, or of several together."""

    samples: int  # Samples of all processes together.
    parts: PartCounts
    # Shape (row caches,): HBM entries of each of `Arrangement.row_caches` that hold a row after
    # copying the step's rows. The maximum over steps.
    held: Int
    # Shape (row caches,): distinct rows of the steps in flight that want an entry. With fewer
    # entries, some rows are read in place. The maximum over steps.
    needed: Int
    served: Served
    # By kind, shape (processes, processes): bytes from each process to each, itself included.
    sent: Mapping[ExchangeKind, Int]
    steps: int = 1

    def __add__(self, later: "StepCounts") -> "StepCounts":
        """Return the counts of these and later steps together."""
        return StepCounts(
            self.samples + later.samples,
            self.parts + later.parts,
            np.maximum(self.held, later.held),
            np.maximum(self.needed, later.needed),
            self.served + later.served,
            {kind: self.sent[kind] + later.sent[kind] for kind in EXCHANGE_KINDS},
            self.steps + later.steps,
        )
