"""What one unit of embedding work takes: the constants of the step equation.

The equation (`cost_models.step_equation.equation`) says how much there is to do of what; these say
how long each unit of it takes. Bandwidths, measurements and learned models are sources of them.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from cost_models.base import Float

ReadKind = Literal["device", "staged", "uva", "host", "hit", "miss"]
"""How rows are read: as a shard's `lookup`, but that a cache has hits and misses."""

READ_KINDS: tuple[ReadKind, ...] = ("device", "staged", "uva", "host", "hit", "miss")


class PerUnit(NamedTuple):
    """Seconds for a lookup, for a distinct row and for a vector of one piece, bytes included."""

    lookup_s: float
    row_s: float
    vector_s: float

    def __add__(self, other: "PerUnit") -> "PerUnit":  # type: ignore[override]
        """Both resources' together."""
        return PerUnit(*(mine + more for mine, more in zip(self, other, strict=True)))

    def seconds(
        self, lookups: Float | float, rows: Float | float, vectors: Float | float
    ) -> Float | float:
        """Time for so many of each, of any shape."""
        time = lookups * self.lookup_s + rows * self.row_s
        return time + vectors * self.vector_s if self.vector_s else time


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds that a resource is busy for each unit of what a shard does in a step.

    Attributes
    ----------
    lookup_s, lookup_byte_s : float
        For a lookup, forward, backward and all, and for a byte of weights of its row.
    row_s, row_byte_s : float
        For a distinct row that the step touches, and for a byte of its weights and state.
    vector_s, vector_byte_s : float
        For a vector that a host returns, and for a byte of it.
    """

    lookup_s: float = 0.0
    lookup_byte_s: float = 0.0
    row_s: float = 0.0
    row_byte_s: float = 0.0
    vector_s: float = 0.0
    vector_byte_s: float = 0.0

    def of(self, weight_bytes: float, row_bytes: float, vector_bytes: float) -> PerUnit:
        """The same for rows and vectors of so many bytes."""
        return PerUnit(
            self.lookup_s + weight_bytes * self.lookup_byte_s,
            self.row_s + row_bytes * self.row_byte_s,
            self.vector_s + vector_bytes * self.vector_byte_s,
        )

    def __add__(self, other: "Rates") -> "Rates":
        """Both one after the other."""
        return Rates(
            *(getattr(self, unit.name) + getattr(other, unit.name) for unit in fields(Rates))
        )


NOTHING = Rates()


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """Seconds of each resource that reading and updating rows in one way takes.

    Attributes
    ----------
    hbm, link : Rates
        Of the GPU: its memory, and its way to its host. They are added.
    dram : Rates
        Of the host's memory, which its GPUs share.
    """

    hbm: Rates = NOTHING
    link: Rates = NOTHING
    dram: Rates = NOTHING


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Seconds of one GPU for each unit of work on one table; none is negative.

    All pieces of a table have the same, so that a plan costs what its pieces cost. For falling,
    convex curves no unit of ``staged``, ``uva`` and ``miss`` may be cheaper, hbm and link
    together, than one of ``device`` and ``hit``.

    Attributes
    ----------
    device, staged, uva, host, hit, miss : ReadCosts
        By how rows are read; a cache's hits and misses each by themselves.
    output_vector_s, output_byte_s : float
        For a vector that a GPU returns, and for a byte of it: written, and its gradient read.
        Once for all shards of a table with the same columns on a GPU.
    exchange_byte_s : float
        For a byte that a GPU spreads evenly over all GPUs, itself included.
    cache_row_s : float
        For a row that a cache has room for, whether the step reads it or not.
    piece_s : float
        For the shards of a table with the same columns on a GPU, together.
    strip_s : float
        On top of that where the table is cut by columns.
    pool_s : float
        On top of that where any of them is staged or cached.
    split_s, split_lookup_s : float
        On top of that, and for each of their lookups, where their rows are read in several ways.
    shard_s : float
        For each shard.
    """

    device: ReadCosts
    staged: ReadCosts
    uva: ReadCosts
    host: ReadCosts
    hit: ReadCosts
    miss: ReadCosts
    output_vector_s: float = 0.0
    output_byte_s: float = 0.0
    exchange_byte_s: float = 0.0
    piece_s: float = 0.0
    shard_s: float = 0.0
    cache_row_s: float = 0.0
    strip_s: float = 0.0
    pool_s: float = 0.0
    split_s: float = 0.0
    split_lookup_s: float = 0.0

    def read(self, kind: ReadKind) -> ReadCosts:
        """Costs of reading rows in this way."""
        costs: ReadCosts = getattr(self, kind)
        return costs
