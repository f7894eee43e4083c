"""Slices of ranks: where two of them meet, and which of them are one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RowSlice:
    """The row ranks ``range(start, stop, step)``."""

    start: int
    stop: int
    step: int = 1

    @property
    def count(self) -> int:
        """Rows in it."""
        return len(self.members)

    @property
    def members(self) -> range:
        """The row ranks."""
        return range(self.start, self.stop, self.step)

    def trimmed(self) -> "RowSlice":
        """Return the same non-empty rows, ending right after the last; one row has step 1."""
        return RowSlice(self.start, self.members[-1] + 1, self.step if self.count > 1 else 1)

    def first_from(self, low: int) -> int:
        """Return the first of start, start + step, … that is at least `low`."""
        return self.start if self.start >= low else low + (self.start - low) % self.step

    def meet(self, other: "RowSlice") -> "RowSlice | None":
        """Return rows that both have; None where there are none."""
        low, high = max(self.start, other.start), min(self.stop, other.stop)
        common = math.gcd(self.step, other.step)
        if low >= high or (self.start - other.start) % common:
            return None
        # Chinese remainders: start + k·step ≡ other.start (mod other.step).
        modulus = other.step // common
        distance = (other.start - self.start) // common
        k = distance * pow(self.step // common, -1, modulus) % modulus if modulus > 1 else 0
        met = RowSlice(self.start + k * self.step, high, self.step * modulus)
        common_rows = RowSlice(met.first_from(low), high, met.step)
        return common_rows if common_rows.start < high else None

    def local(self, rows: "RowSlice") -> "RowSlice":
        """Return a slice of this slice's rows, as a slice of their positions in it."""
        first = (rows.start - self.start) // self.step
        stride = rows.step // self.step
        if rows.count == 1:
            return RowSlice(first, first + 1)
        return RowSlice(first, first + (rows.count - 1) * stride + 1, stride)


def joined(slices: Iterable[RowSlice]) -> tuple[RowSlice, ...]:
    """Return the same disjoint rows as few slices, ordered by start; slices in sequence are joined.

    Equal rows give equal slices, whatever shards they came from, if they are sliced alike.
    """
    merged: list[RowSlice] = []
    ends: dict[tuple[int, int], int] = {}  # (next row, step) → position in `merged`
    for part in sorted(part.trimmed() for part in slices if part.count):
        at = ends.pop((part.start, part.step), None)
        if at is None:
            at = len(merged)
            merged.append(part)
        last = part.members[-1]
        merged[at] = RowSlice(merged[at].start, last + 1, part.step)
        ends[last + part.step, part.step] = at
    return tuple(sorted(part.trimmed() for part in merged))


def refined(partitions: Iterable[tuple[RowSlice, ...]]) -> tuple[RowSlice, ...]:
    """Return the coarsest slices of which each lies in one slice of every partition."""
    parts: tuple[RowSlice, ...] | None = None
    for partition in partitions:
        if parts is None:
            parts = partition
            continue
        parts = tuple(
            met for one in parts for other in partition if (met := one.meet(other)) is not None
        )
    return tuple(sorted(part.trimmed() for part in parts or ()))
