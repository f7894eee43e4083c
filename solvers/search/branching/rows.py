"""Rows of a sparse linear program, block by block."""

from typing import Any

import numpy as np

from solvers.model.knapsack import Float


class Rows:
    """Rows of a sparse program, collected block by block."""

    def __init__(self) -> None:
        self.count = 0
        self._entries: list[tuple[Any, ...]] = []
        self._limits: list[tuple[Float, Float]] = []

    def block(self, count: int, low: Any, high: Any) -> int:
        """So many further rows; the first one's number."""
        first = self.count
        self._limits.append((np.broadcast_to(low, count), np.broadcast_to(high, count)))
        self.count += count
        return first

    def add(self, rows: Any, columns: Any, values: Any) -> None:
        """Entries, of which any may be one for all."""
        self._entries.append(tuple(np.broadcast_arrays(rows, columns, values)))

    @property
    def limits(self) -> tuple[Any, Any]:
        """Lower and upper limits, shapes (rows,)."""
        low, high = (np.concatenate(each) for each in zip(*self._limits, strict=True))
        return low.astype(np.float64), high.astype(np.float64)

    def matrix(self, columns: int) -> Any:
        """All entries, those of one place summed."""
        from scipy import sparse

        rows, at, values = (
            np.concatenate([np.ravel(entry[number]) for entry in self._entries])
            for number in range(3)
        )
        shape = self.count, columns
        return sparse.csr_matrix((values.astype(np.float64), (rows, at)), shape)
