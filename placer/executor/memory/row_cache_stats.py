"""What a row cache counts."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class RowCacheStats:
    """Lookups of a row cache since its counters were last reset.

    Attributes
    ----------
    lookups, hit_lookups : int
        Lookups of staged and cached rows, and those whose row had an entry before the step.
    rows, hit_rows : int
        The same with each row counted once a step.
    in_place_rows : int
        Rows that got no entry.
    written_back_rows : int
        Evicted rows that had been updated.
    """

    lookups: int = 0
    hit_lookups: int = 0
    rows: int = 0
    hit_rows: int = 0
    in_place_rows: int = 0
    written_back_rows: int = 0

    def __add__(self, other: "RowCacheStats") -> "RowCacheStats":
        """Both row caches' together."""
        return RowCacheStats(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that hit; None where there were none."""
        return self.hit_lookups / self.lookups if self.lookups else None

    @property
    def row_hit_rate(self) -> float | None:
        """Share of the steps' distinct rows that hit; None where there were none."""
        return self.hit_rows / self.rows if self.rows else None

    @property
    def in_place_share(self) -> float | None:
        """Share of the steps' distinct rows that got no entry; None where there were none."""
        return self.in_place_rows / self.rows if self.rows else None
