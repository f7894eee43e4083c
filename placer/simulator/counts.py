"""What the simulator counts in a step, part by part."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]

ExchangeKind = Literal[
    "lengths", "ids", "outputs", "gradients", "replica counts", "replicas", "rows"
]
"""What processes send each other: lengths of bags; ids; pooled rows; their gradients; how many
replicated rows follow, and their summed gradients; Σ g² of column-sliced rows."""

EXCHANGE_KINDS: tuple[ExchangeKind, ...] = get_args(ExchangeKind)


@dataclass(frozen=True, eq=False)
class _Counts:
    """Arrays of counts of one shape."""

    @classmethod
    def zeros(cls, *shape: int) -> Self:
        """Return all counts zero."""
        return cls(*(np.zeros(shape, dtype=np.int64) for _ in fields(cls)))

    def __add__(self, other: Self) -> Self:
        """Return sums of both counts."""
        return type(self)(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


@dataclass(frozen=True, eq=False)
class PartCounts(_Counts):
    """Counts of one step, or of many; int64 arrays of shape (parts,)."""

    # Lookups, and the distinct rows among them.
    lookups: Int
    rows: Int
    # Those whose row had a copy in HBM before the step; of staged and cached parts alone.
    hit_lookups: Int
    hit_rows: Int
    staged_rows: Int  # Rows that were copied to HBM.
    # Of staged and cached parts: those that got no entry and were read where they are.
    in_place_lookups: Int
    in_place_rows: Int
    written_back_rows: Int  # Updated copies that had to make room.
    vectors: Int  # Of parts that the host pools: vectors that it returns.
    # Of replicated parts: rows whose gradients, summed over all holders, are applied in one more
    # pass, and those of them that had a copy in HBM.
    update_rows: Int
    update_hit_rows: Int


@dataclass(frozen=True, eq=False)
class Served(_Counts):
    """What processes return for each table; int64 arrays of shape (tables, processes)."""

    # Pooled rows, or single ones, that leave for the samples' own process, itself included.
    output_vectors: Int
    output_bytes: Int
    request_bytes: Int  # Ids and lengths of bags that come from other processes, before a step.
    # Pooled rows that go to other processes and gradients that come from there; summed gradients of
    # replicated rows, and Σ g², that go to others: within a step.
    returned_bytes: Int
    pooled_bytes: Int  # Those of them that are pooled rows: ahead of the dense layers.


def nothing_sent(processes: int) -> dict[ExchangeKind, Int]:
    """Zeros of every kind."""
    return {kind: np.zeros((processes, processes), np.int64) for kind in EXCHANGE_KINDS}


@dataclass(frozen=True, slots=True, eq=False)
class StepCounts:
    """What a batch does under a plan, or several together."""

    samples: int  # Of all processes together.
    parts: PartCounts
    # Shape (row caches,): HBM entries of each of `Arrangement.row_caches` that hold a row
    # once the step's rows are there; of several steps the most.
    held: Int
    # Shape (row caches,): distinct pooled rows of the steps in flight: with fewer entries,
    # some stay in place. Of several steps the most.
    needed: Int
    served: Served
    # Of each kind, shape (processes, processes): bytes that each process sends to each, itself
    # included.
    sent: Mapping[ExchangeKind, Int]
    steps: int = 1

    def __add__(self, later: "StepCounts") -> "StepCounts":
        """Return these steps and later ones together."""
        return StepCounts(
            self.samples + later.samples,
            self.parts + later.parts,
            np.maximum(self.held, later.held),
            np.maximum(self.needed, later.needed),
            self.served + later.served,
            {kind: self.sent[kind] + later.sent[kind] for kind in EXCHANGE_KINDS},
            self.steps + later.steps,
        )
