"""The integer program, with a proven bound.

Splits, replicas, sharding options and the GPU that serves each shard are its decisions. It extends
RecShard's program (doi:10.1145/3503222.3507777, section 4), which has the GPU that owns a table and
where the table is split into hot and cold rows. The cost greedy's plan comes first, and two ways
to solve the program follow:

* CP-SAT with all points of the curves, where the problem is small
  (`solvers.search.exact_program`);
* branch and bound over linear relaxations (`solvers.search.branching`).

Local search polishes what they find. docs/solvers.md has the equations.
"""

from dataclasses import dataclass, field

from solvers.model.instance import Instance
from solvers.search.branching import BranchingParams
from solvers.search.iterated import IteratedParams
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import (
    branching,
    cost_greedy,
    delays,
    exact_program,
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
    """

    greedy_share: float = 0.5
    exact_share: float = 0.5
    exact_places: int = 4000
    branching_share: float = 0.9
    branching_places: int = 2000
    branching: BranchingParams = field(default_factory=BranchingParams)
    iterated: IteratedParams = field(default_factory=IteratedParams)


class Ilp(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "ilp"

    def __init__(self, params: IlpParams = IlpParams()) -> None:
        self.params = params

    def stages(self, instance: Instance) -> list[Stage]:
        """Greedy, the program in two ways, iterated local search."""
        p, plain = self.params, not instance.cost_model.uniform_splits
        branched = instance.tables * instance.gpus <= p.branching_places
        return [
            Stage("greedy", lambda s: cost_greedy(s, p.greedy_share)),
            Stage("exact", lambda s: exact_program(s, p.exact_share, p.exact_places), plain),
            Stage("delays", delays),
            Stage("branched", lambda s: branching(s, p.branching_share, p.branching), branched),
            Stage("searched", lambda s: iterated(s, 1.0, p.iterated)),
        ]
