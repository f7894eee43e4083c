"""What one unit of embedding work takes: the constants of the step equation.

`cost_models.step_equation.work` says how much there is to do of what; these say how long each
unit of it takes. Bandwidths and measurements are sources of them.
"""

from operator import add
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

ReadKind = Literal["device", "staged", "uva", "host", "hit", "miss"]
"""How rows are read: as a shard's `lookup`, but that a cache has hits and misses."""

READ_KINDS: tuple[ReadKind, ...] = ("device", "staged", "uva", "host", "hit", "miss")


Amount = npt.NDArray[Any] | float
"""Of one shard, or an array of many."""


class Rates(NamedTuple):
    """Seconds that a resource is busy for each unit of what a shard does in a step."""

    # For a lookup, forward and backward, and for a byte of weights of its row.
    lookup_s: float = 0.0
    lookup_byte_s: float = 0.0
    # For a distinct row that the step touches, and for a byte of its weights and state.
    row_s: float = 0.0
    row_byte_s: float = 0.0
    # For a vector that a host returns, and for a byte of it.
    vector_s: float = 0.0
    vector_byte_s: float = 0.0

    def __add__(self, other: "Rates") -> "Rates":  # type: ignore[override]
        """Return both one after the other."""
        return Rates(*map(add, self, other))


NOTHING = Rates()


class ReadCosts(NamedTuple):
    """Seconds of each resource that reading and updating rows in one way takes."""

    # Of the GPU: its memory, and its way to its host. They are added.
    hbm: Rates = NOTHING
    link: Rates = NOTHING
    dram: Rates = NOTHING  # Of the host's memory, which its GPUs share.


class UnitCosts(NamedTuple):
    """Seconds of one GPU for each unit of work on one table; none is negative.

    All shards of a table have the same, so that a plan costs what its shards cost. For falling,
    convex curves no unit of ``staged``, ``uva`` and ``miss`` may be cheaper, HBM and link
    together, than one of ``device`` and ``hit``.

    Shards of a table with the same columns on one GPU are a *group*: they are pooled into one
    output. What kernels take that serve many tables at once is in `cost_models.arenas`.
    """

    # By how rows are read; a cache's hits and misses each by themselves.
    device: ReadCosts
    staged: ReadCosts
    uva: ReadCosts
    host: ReadCosts
    hit: ReadCosts
    miss: ReadCosts
    column_slice_s: float = 0.0  # For a group that has only some of the table's columns.
    shard_s: float = 0.0  # For each shard.
    # For a vector that a GPU returns, and for a byte of it: written, and its gradient read. Once
    # for a group.
    output_vector_s: float = 0.0
    output_byte_s: float = 0.0
    # For a byte that a GPU spreads evenly over all GPUs, itself included.
    exchange_byte_s: float = 0.0
    # For a row that a cache has room for, whether the step reads it or not.
    cache_row_s: float = 0.0
    # For a lookup whose id a map turns into a place; see `cost_models.step_equation.work`.
    mapped_lookup_s: float = 0.0
    # For a lookup of a group of which the host pools some rows, whichever row it reads.
    pooled_lookup_s: float = 0.0
    # For a byte, state included, of a distinct row that has only some of the table's columns.
    sliced_row_byte_s: float = 0.0

    def read(self, kind: ReadKind) -> ReadCosts:
        """Return costs of reading rows in this way."""
        costs: ReadCosts = getattr(self, kind)
        return costs


SHAPE = (len(READ_KINDS), len(ReadCosts._fields), len(Rates._fields))
"""Kinds of read, resources (HBM, link, DRAM), and rates."""
