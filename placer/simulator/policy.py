"""Which rows a cache keeps: the executor's own policies, and caches of others."""

from collections.abc import Callable
from typing import Protocol, get_args

import numpy as np
import numpy.typing as npt

from placer.errors import PlacerError
from placer.executor.names import Policy
from placer.simulator.names import CACHE_POLICIES, CachePolicy


class BatchCache(Protocol):
    """A cache of the rows of one part, asked batch by batch.

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


def cache_factory(policy: CachePolicy) -> CacheFactory | None:
    """How the caches of a policy are made; None for those of the executor's pool.

    Raises
    ------
    PlacerError
        If there is no such policy.
    """
    if policy in get_args(Policy):
        return None
    if policy not in CACHE_POLICIES:
        raise PlacerError(
            f"no cache policy is called {policy!r}; choose from {', '.join(CACHE_POLICIES)}"
        )
    from placer.simulator import caches

    return caches.FACTORIES[policy]
