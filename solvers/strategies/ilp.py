"""The integer program, with a proven bound.

Splits, replicas, sharding options and the GPU that serves each shard are its decisions. It extends
RecShard's program (doi:10.1145/3503222.3507777, section 4), which has the GPU that owns a table and
where the table is split into hot and cold rows. The cost greedy's plan comes first; then the
program is solved by branch and bound over linear relaxations (`solvers.search.branching`).
docs/solvers.md has the equations.
"""

from solvers.model.instance import Instance
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import construct, prove

_GREEDY_SHARE, _PROOF_SHARE = 0.5, 0.9
"""Of the time that is left: for the first plan, where problems are huge, and for each proof."""


class Ilp(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "ilp"

    def stages(self, instance: Instance) -> list[Stage]:
        """Construct a plan, then branch and bound."""
        return [
            Stage("greedy", lambda search: construct(search, _GREEDY_SHARE)),
            Stage("branched", lambda search: prove(search, _PROOF_SHARE)),
        ]
