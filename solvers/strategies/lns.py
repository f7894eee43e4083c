"""Large-neighbourhood search: a few GPUs at a time are packed anew, exactly, by CP-SAT.

The cost greedy's plan, improved by iterated local search, is the start of
`solvers.search.neighbourhoods`.
"""

from dataclasses import dataclass, field

from solvers.model.instance import Instance
from solvers.search.iterated import IteratedParams
from solvers.search.neighbourhoods import NeighbourhoodParams
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import cost_greedy, iterated, neighbourhoods


@dataclass(frozen=True, slots=True)
class LnsParams:
    """Knobs of `Lns`.

    Attributes
    ----------
    search_share : float
        Share of the time for local search before the first round.
    """

    search_share: float = 0.25
    iterated: IteratedParams = field(default_factory=IteratedParams)
    neighbourhoods: NeighbourhoodParams = field(default_factory=NeighbourhoodParams)


class Lns(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "lns"

    def __init__(self, params: LnsParams = LnsParams()) -> None:
        self.params = params

    def stages(self, instance: Instance) -> list[Stage]:
        """Greedy; and on more than one GPU, iterated local search and neighbourhoods."""
        p = self.params
        stages = [
            Stage("greedy", cost_greedy),
            Stage("searched", lambda s: iterated(s, p.search_share, p.iterated)),
            Stage("neighbourhoods", lambda s: neighbourhoods(s, 1.0, p.neighbourhoods)),
        ]
        return stages if instance.gpus > 1 else stages[:1]
