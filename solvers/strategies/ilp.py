"""The integer program, with a proven bound.

Splits, replicas, sharding options and the GPU that serves each shard are its decisions. It extends
RecShard's program (doi:10.1145/3503222.3507777, section 4), which has the GPU that owns a table and
where the table is split into hot and cold rows. The cost greedy's plan comes first, and three ways
to solve the program follow:

* CP-SAT with all points of the curves, where the problem is small
  (`solvers.search.exact_program`);
* branch and bound over linear relaxations (`solvers.search.branching`);
* CP-SAT over prices of HBM (`solvers.search.integer_program`).

Local search polishes what they find. docs/solvers.md has the equations.
"""

from dataclasses import dataclass, field

from solvers.model.assignment import Assignment
from solvers.model.instance import Instance
from solvers.search.branching import BranchingParams
from solvers.search.iterated import IteratedParams, iterated_search
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._search import Search
from solvers.strategies._stages import (
    branching,
    cost_greedy,
    delays,
    exact_program,
    integer_program,
    iterated,
)


@dataclass(frozen=True, slots=True)
class IlpParams:
    """Knobs of `Ilp`. Shares are of the time that is left when a stage begins.

    Attributes
    ----------
    greedy_share : float
        Of the first plan, where problems are huge.
    exact_share, exact_places : float, int
        Of CP-SAT with all points of curves, and the shards × GPUs × points up to which it is tried.
    branching_share, branching_places : float, int
        Of branch and bound, and the tables × GPUs up to which it is worth its time.
    search_share : float
        Of local search before CP-SAT, and again after it.
    most_places : int
        Shards × GPUs beyond which a program takes longer to build than a search would gain.
    polished_ratio : float
        CP-SAT's answer is polished if it is at most so many times as slow as the best plan.
    """

    greedy_share: float = 0.5
    exact_share: float = 0.5
    exact_places: int = 4000
    branching_share: float = 0.9
    branching_places: int = 2000
    search_share: float = 0.25
    most_places: int = 20_000
    polished_ratio: float = 1.01
    branching: BranchingParams = field(default_factory=BranchingParams)
    iterated: IteratedParams = field(default_factory=IteratedParams)


class Ilp(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "ilp"

    def __init__(self, params: IlpParams = IlpParams()) -> None:
        self.params = params

    def stages(self, instance: Instance) -> list[Stage]:
        """Greedy, the program in three ways, iterated local search."""
        p, plain = self.params, not instance.cost_model.uniform_splits
        branched = instance.tables * instance.gpus <= p.branching_places
        return [
            Stage("greedy", lambda s: cost_greedy(s, p.greedy_share)),
            Stage("exact", lambda s: exact_program(s, p.exact_share, p.exact_places), plain),
            Stage("delays", delays),
            Stage("branched", lambda s: branching(s, p.branching_share, p.branching), branched),
            Stage("searched", lambda s: iterated(s, p.search_share, p.iterated)),
            Stage("program", self._program),
        ]

    def _program(self, search: Search) -> Assignment | None:
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
