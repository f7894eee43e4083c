"""Our search, and TorchRec's proposers beside it, as proposers of TorchRec's planner.

TorchRec's planner takes each proposer's proposals to a partitioner, rates what comes back, and
keeps the best. Importing this needs torchrec.
"""

from typing import Any

import numpy as np
from torchrec.distributed.planner.types import Proposer
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption

from solvers.torchrec.planning import Planning, has_ranks


class OwnSearch(Proposer):  # type: ignore[misc]
    """Our search as a proposer of one proposal."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._proposal: list[TorchRecOption] | None = None

    def load(self, search_space: list[TorchRecOption], enumerator: Any = None) -> None:
        """Hand the search space to the search."""
        self._proposal = self._planning.begin(search_space, enumerator)

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: there is no other proposal."""

    def propose(self) -> list[TorchRecOption] | None:
        """The one proposal, and then none."""
        proposal, self._proposal = self._proposal, None
        return proposal


class Again(Proposer):  # type: ignore[misc]
    """Our search once more, from the best plan of TorchRec's proposers."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._done = False

    def load(self, search_space: list[TorchRecOption], enumerator: Any = None) -> None:
        """Nothing: the first search has the search space."""
        self._done = False

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: there is no other proposal."""

    def propose(self) -> list[TorchRecOption] | None:
        """Options with ranks, once."""
        if self._done:
            return None
        self._done = True
        return self._planning.again()


class Limited(Proposer):  # type: ignore[misc]
    """A proposer of TorchRec's that ends when it has no time left, or nothing to gain.

    Parameters
    ----------
    placements : int or None
        Tables that it may have placed, all proposals together.
    """

    def __init__(self, proposer: Any, planning: Planning, placements: int | None) -> None:
        self._proposer = proposer
        self._planning = planning
        self._placements = placements
        self._left: float = 0
        self._enumerator: Any = None
        self._is_loaded = False

    def load(self, search_space: list[TorchRecOption], enumerator: Any = None) -> None:
        """Wait until the proposer is needed; the search space is that of `planning`."""
        self._enumerator, self._is_loaded = enumerator, False
        self._left = np.inf if self._placements is None else self._placements

    def propose(self) -> list[TorchRecOption] | None:
        """The next proposal."""
        if self._left <= 0 or self._planning.others_are_idle:
            return None
        if not self._is_loaded:
            space = self._planning.for_proposers()
            self._proposer.load(search_space=space, enumerator=self._enumerator)
            self._is_loaded = True
        proposal: list[TorchRecOption] | None = self._proposer.propose()
        self._left -= len(proposal or ())
        return proposal

    def feedback(
        self,
        partitionable: bool,
        plan: list[TorchRecOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Any = None,
    ) -> None:
        """Pass on what became of the proposal."""
        if partitionable and plan is not None and perf_rating is not None and has_ranks(plan):
            self._planning.note(plan, perf_rating)
        self._proposer.feedback(
            partitionable=partitionable,
            plan=plan,
            perf_rating=perf_rating,
            storage_constraint=storage_constraint,
        )


__all__ = ["Again", "Limited", "OwnSearch"]
