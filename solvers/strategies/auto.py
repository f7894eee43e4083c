"""The default solver: construct a plan, then anneal it and prove a bound by turns.

One assignment goes from stage to stage, until it is within the gap of the bound or time is up.
Whenever it is stopped, it returns the best plan so far. Where all shards of a table must have one
share of their rows in HBM, candidates are searched instead (`solvers.search.candidates`).
"""

from dataclasses import dataclass

from solvers.model.instance import Instance
from solvers.result import Limits
from solvers.search.annealing import prepare
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import anneal, choose, construct, is_branched, prove


@dataclass(frozen=True, slots=True)
class AutoParams:
    """Knobs of `Auto`: shares of the time that is left when a stage begins.

    Attributes
    ----------
    greedy_share : float
        Time for constructing the first plan if the problem is too large for branch and bound. On
        all others it is constructed as `GreedyCost` does.
    annealing_share : float
        Time for annealing if the problem is too large for branch and bound.
    branched_annealing_share, proof_share : float
        Time for annealing otherwise, and for branch and bound. If drives hold rows, annealing gets
        the mean of both annealing shares; if servers hold rows too, branch and bound gets
        `annealing_share`.
    """

    greedy_share: float = 0.25
    annealing_share: float = 0.8
    branched_annealing_share: float = 0.3
    proof_share: float = 0.5


class Auto(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "auto"

    def __init__(self, params: AutoParams = AutoParams()) -> None:
        self.params = params

    def prepare(self, limits: Limits) -> None:
        """Compile annealing's moves."""
        prepare(limits)

    def stages(self, instance: Instance) -> list[Stage]:
        """List the stages: construct once, then anneal and prove in turns."""
        if instance.cost_model.uniform_splits:  # Otherwise each GPU chooses its hot rows by itself.
            return [Stage("candidates", choose)]
        p = self.params
        share = p.branched_annealing_share if is_branched(instance) else p.annealing_share
        if instance.lacks_dram and not instance.servers:  # The proof and annealing both take long.
            share = (share + p.annealing_share) / 2
        # With servers, too, the proof decides the most, and begins again each time.
        proof_share = (
            p.annealing_share if instance.servers and instance.lacks_dram else p.proof_share
        )
        return [
            Stage("greedy", lambda search: construct(search, p.greedy_share)),
            Stage("annealed", lambda search: anneal(search, share)),
            Stage("branched", lambda search: prove(search, proof_share)),
        ]
