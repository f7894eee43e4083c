"""Which rows a cache keeps: the executor's own policies, and caches of others."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt


class BatchCache(Protocol):
    """A cache of the rows of one part, stepped batch by batch.

    Attributes
    ----------
    capacity, held : int
        Rows that it has room for, and those that it holds.
    """

    capacity: int
    held: int

    def step(
        self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Which rows were there before this batch's rows enter.

        Parameters
        ----------
        rows : int64, shape (n,)
            Distinct, ascending, from 0 on.
        counts : int64, shape (n,)
            Lookups of each.

        Returns
        -------
        bool array, shape (n,)
        """
        ...

    def holds(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows are there now: bool, shape (n,)."""
        ...


CacheFactory = Callable[[int, int], BatchCache]
"""Makes the cache of a part from its entries and its rows."""
