"""What the keys of a table did."""

from typing import NamedTuple


class KeyCounts(NamedTuple):
    """Counters since the beginning, of lookups or of rows.

    Attributes
    ----------
    hits, misses : int
        Lookups whose key had a row, and all others.
    waiting, refused : int
        Misses that row 0 served: keys that were not read often enough yet, and those for which no
        row could be taken back, as open steps read all of them.
    admitted, evicted, expired : int
        Rows given to a key, and taken back for another one or after `Growing.ttl`.
    """

    hits: int
    misses: int
    waiting: int
    refused: int
    admitted: int
    evicted: int
    expired: int

    @property
    def hit_rate(self) -> float:
        """Share of lookups whose key had a row; 0 without lookups."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def live(self) -> int:
        """Keys that have rows now."""
        return self.admitted - self.evicted - self.expired
