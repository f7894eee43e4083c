"""The cost-optimal placement by integer programming, with a proven bound.

RecShard's decision (doi:10.1145/3503222.3507777, section 4), the GPU that owns a table and
where it is split into hot and cold rows, extended by its sharding option. The cost greedy's plan
starts an iterated local search; what that leaves open goes to CP-SAT
(`solvers.search.integer_program`); the search then polishes CP-SAT's answer. The bound is the
larger of the Lagrangian one and CP-SAT's.
"""

from dataclasses import dataclass, field

from solvers.model.assignment import Assignment
from solvers.model.instance import Instance
from solvers.search.iterated import IteratedParams, iterated_search
from solvers.strategies._base import Search, Stage, StagedStrategy
from solvers.strategies._stages import cost_greedy, integer_program, iterated, single_shards


@dataclass(frozen=True, slots=True)
class IlpParams:
    """Knobs of `Ilp`.

    Attributes
    ----------
    greedy_share : float
        Share of the time that the first plan may take, where problems are huge.
    search_share : float
        Share of the time for the local search before CP-SAT, and again after it.
    most_places : int
        Shards × GPUs beyond which a program takes longer to build than a search would gain.
    bound_share : float
        Share of the time for the bound of single shards.
    bound_places : int
        Tables × GPUs beyond which it is left out.
    polished_ratio : float
        CP-SAT's answer is polished if it is at most so many times as slow as the best plan.
    """

    greedy_share: float = 0.5
    search_share: float = 0.25
    most_places: int = 20_000
    bound_share: float = 0.2
    bound_places: int = 500
    polished_ratio: float = 1.01
    iterated: IteratedParams = field(default_factory=IteratedParams)


class Ilp(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "ilp"

    def __init__(self, params: IlpParams = IlpParams()) -> None:
        self.params = params

    def stages(self, instance: Instance) -> list[Stage]:
        """Greedy, a closer bound, iterated local search, CP-SAT."""
        p, places = self.params, instance.tables * instance.gpus
        return [
            Stage("greedy", lambda s: cost_greedy(s, p.greedy_share)),
            Stage("shards", lambda s: single_shards(s, p.bound_share), places <= p.bound_places),
            Stage("searched", lambda s: iterated(s, p.search_share, p.iterated)),
            Stage("exact", self._exact),
        ]

    def _exact(self, search: Search) -> Assignment | None:
        """CP-SAT's answer, polished; without one, for want of time or memory, the best plan."""
        p, best = self.params, search.best
        assignment = integer_program(search, 1 - p.search_share, p.most_places)
        if "variables" not in search.stats:
            assignment = best
        elif assignment and best and assignment.step_time_s >= best.step_time_s * p.polished_ratio:
            return None
        if assignment is None:
            return None
        return iterated_search(
            assignment,
            target_s=search.target_s,
            seed=search.seed + 1,
            clock=search.clock,
            params=p.iterated,
        )
