"""The default solver: construct a plan, then anneal it and prove a bound by turns.

One assignment goes from stage to stage, until it is within the gap of the bound or time is up.
Whenever it is stopped, it returns the best plan so far.
"""

from dataclasses import dataclass

from solvers.model.assignment import Assignment
from solvers.model.instance import Instance
from solvers.model.uniform_splits import common_shares, fixed_shares
from solvers.result import Limits
from solvers.search.annealing import prepare
from solvers.search.moves import improve
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._search import Search
from solvers.strategies._stages import anneal, construct, is_branched, prove

_IMPROVED_SHARE = 0.05
"""Of the time that is left, for moves after all shards of a table have got one share of rows in
HBM."""


@dataclass(frozen=True, slots=True)
class AutoParams:
    """Knobs of `Auto`. Shares are of the time that is left when a stage begins.

    Attributes
    ----------
    greedy_share : float
        Of the first plan.
    annealing_share : float
        Of annealing on problems with too many tables and GPUs for branch and bound.
    branched_annealing_share, proof_share : float
        Of annealing on all others, and of branch and bound.
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
        """Construct once; anneal and prove by turns, so that neither takes the other's time."""
        p = self.params
        is_proven = is_branched(instance) and not instance.lacks_dram
        share = p.branched_annealing_share if is_proven else p.annealing_share
        return [
            Stage("greedy", lambda search: construct(search, p.greedy_share)),
            Stage("annealed", lambda search: anneal(search, share)),
            Stage("branched", lambda search: prove(search, p.proof_share)),
        ]

    def admitted(self, assignment: Assignment, search: Search) -> Assignment | None:
        """Return the assignment with one HBM share for each table, if the model asks that."""
        if not search.instance.cost_model.uniform_splits:
            return assignment
        common = common_shares(assignment)
        fixed = None if common is None else fixed_shares(common)
        if fixed is None:
            return common
        improve(fixed, search.clock.part(_IMPROVED_SHARE), reshard_tables=False)
        return fixed
