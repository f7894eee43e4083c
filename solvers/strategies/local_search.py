"""Local search: the cost greedy's plan, annealed, then improved by chosen moves until time is up.

`solvers.search.annealing` makes many random moves, `solvers.search.moves` the chosen ones
(move, swap, reshard), `solvers.search.iterated` leads out of their local optima.
"""

from dataclasses import dataclass, field

from solvers.model.instance import Instance
from solvers.result import Limits
from solvers.search.annealing import AnnealingParams, prepare
from solvers.search.iterated import IteratedParams
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import annealing, cost_greedy, iterated


@dataclass(frozen=True, slots=True)
class LocalSearchParams:
    """Knobs of `LocalSearch`.

    Attributes
    ----------
    greedy_share, annealing_share : float
        Shares of the time that is left when each of these stages begins.
    """

    greedy_share: float = 0.5
    annealing_share: float = 0.8
    annealing: AnnealingParams = field(default_factory=AnnealingParams)
    iterated: IteratedParams = field(default_factory=IteratedParams)


class LocalSearch(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "local-search"

    def __init__(self, params: LocalSearchParams = LocalSearchParams()) -> None:
        self.params = params

    def prepare(self, limits: Limits) -> None:
        """Compile annealing's moves."""
        prepare(limits)

    def stages(self, instance: Instance) -> list[Stage]:
        """Greedy, annealing, iterated local search."""
        p = self.params
        return [
            Stage("greedy", lambda s: cost_greedy(s, p.greedy_share)),
            Stage("annealed", lambda s: annealing(s, p.annealing_share, p.annealing)),
            Stage("searched", lambda s: iterated(s, 1.0, p.iterated)),
        ]
