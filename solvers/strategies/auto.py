"""The strategies that are lists of stages of `_stages.py`: auto, ilp and greedy-cost."""

from dataclasses import dataclass

from solvers.model.instance import Instance
from solvers.result import Limits
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import (
    MANY_PLACES,
    anneal,
    choose,
    construct,
    is_branched,
    prove,
)


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
        `annealing_share` instead.
    """

    greedy_share: float = 0.25
    annealing_share: float = 0.8
    branched_annealing_share: float = 0.3
    proof_share: float = 0.5


class Auto(StagedStrategy):
    """The default solver: construct a plan, then anneal it and prove a bound by turns.

    One assignment goes from stage to stage, until it is within the gap of the bound or time is up.
    Whenever it is stopped, it returns the best plan so far. Where all shards of a table must have
    one share of their rows in HBM, candidates are searched instead (`solvers.search.candidates`).
    """

    name = "auto"

    def __init__(self, params: AutoParams = AutoParams()) -> None:
        self.params = params

    def prepare(self, limits: Limits) -> None:
        """Compile annealing's moves."""
        # Import here: other strategies do without the compiler, which loads slowly.
        from solvers.search.annealing import prepare

        prepare(limits)

    def stages(self, instance: Instance) -> dict[str, Stage]:
        """Return the stages: construct once, then anneal and prove in turns."""
        if instance.cost_model.uniform_splits:  # Otherwise each GPU chooses its hot rows by itself.
            return {"candidates": choose}
        p = self.params
        share = p.branched_annealing_share if is_branched(instance) else p.annealing_share
        proof_share = p.proof_share
        if instance.lacks_dram:  # The proof and annealing both take long.
            share = (share + p.annealing_share) / 2
        if instance.lacks_dram and instance.servers:
            proof_share = p.annealing_share
        return {
            "greedy": lambda search: construct(search, p.greedy_share),
            "annealed": lambda search: anneal(search, share),
            "branched": lambda search: prove(search, proof_share),
        }


_GREEDY_SHARE, _PROOF_SHARE = 0.5, 0.9
"""Of the time that is left: for the first plan, where problems are huge, and for each proof."""


class Ilp(StagedStrategy):
    """The integer program, with a proven bound.

    It extends RecShard's program (doi:10.1145/3503222.3507777, section 4). The cost greedy's plan
    comes first; then the program is solved by branch and bound over linear relaxations
    (`solvers.search.branching`). docs/solvers.md has the equations.
    """

    name = "ilp"

    def stages(self, instance: Instance) -> dict[str, Stage]:
        """Construct a plan, then branch and bound."""
        return {
            "greedy": lambda search: construct(search, _GREEDY_SHARE),
            "branched": lambda search: prove(search, _PROOF_SHARE),
        }


class GreedyCost(StagedStrategy):
    """Greedy by cost: divide what is too much for one GPU, pack by time, fill HBM by saving a byte.

    "Construction" in docs/solvers.md has its steps.
    """

    name = "greedy-cost"

    def stages(self, instance: Instance) -> dict[str, Stage]:
        """Construct plans and improve the best."""
        # On 856 × 128 that takes 4 s beside 3 s for the rest, and gains 4%: `auto` does it.
        resharded = instance.tables * instance.gpus <= MANY_PLACES
        return {"greedy": lambda search: construct(search, resharded=resharded)}
