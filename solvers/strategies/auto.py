"""The default solver: several searches, one after another, within the time limit.

One assignment goes from stage to stage, until it is within the gap of the bound or time is up.
Whenever it is stopped, it returns the best plan so far.
"""

from dataclasses import dataclass, field, replace

from solvers.model.assignment import Assignment
from solvers.model.instance import Instance
from solvers.model.uniform_splits import common_shares, fixed_shares
from solvers.result import Limits
from solvers.search.annealing import AnnealingParams, prepare
from solvers.search.branching import BranchingParams, points_of
from solvers.search.iterated import IteratedParams
from solvers.search.moves import improve
from solvers.strategies._base import Run, Stage, StagedStrategy
from solvers.strategies._search import Search
from solvers.strategies._stages import (
    annealing,
    branching,
    cost_greedy,
    delays,
    exact_program,
    iterated,
    relaxation,
    with_time,
)


@dataclass(frozen=True, slots=True)
class AutoParams:
    """Knobs of `Auto`. Shares are of the time that is left when a stage begins.

    Attributes
    ----------
    greedy_share, annealing_share, search_share : float
        Of the first plan, annealing and iterated local search.
    construction_share : float
        Of the first plan's time, for looking at ways to shard; the rest improves the best of them.
    common_shares_share : float
        Of moves that suit what the cost model asks of all shards of a table.
    branching_share, relaxed_share : float
        Of branch and bound, and of its first relaxation alone, or where it begins at once.
    branching_places : int
        Tables × GPUs up to which it is worth its time.
    promising_share : float
        Of the time within which its first search has to end to come before all of annealing.
    promising_places : int
        Tables × GPUs up to which it may come before all of annealing.
    branched_tables, branched_places : int
        Tables, or tables × GPUs, up to which it does so with any gap, and whatever the time is.
    early_s, late_s : float
        Seconds that have to be left for branching and closer bounds before most of annealing, and
        after it.
    relaxed_s, relaxed_s_per_point : float
        Seconds that the first relaxation of branching takes at least, and for each point of all
        curves, where GPUs are too many for more of it.
    few_tables : int
        Tables up to which that relaxation is solved.
    early : float
        Times what a closer bound takes that has to be left for it before most of annealing.
    first_bounds : float
        Times the first bound that one with delays takes.
    first_share, first_search_share : float
        Of annealing before it, and of iterated local search before that: annealing hardly finds
        its way where GPUs are full of buffers.
    few_places : int
        Tables × GPUs up to which there is iterated local search before annealing.
    exact_share : float
        Of CP-SAT over numbers of hot rows too.
    exact_places : int
        Shards × GPUs × points of curves up to which that is tried.
    """

    greedy_share: float = 0.25
    construction_share: float = 0.5
    annealing_share: float = 0.8
    exact_share: float = 0.5
    exact_places: int = 4000
    search_share: float = 1.0
    common_shares_share: float = 0.05
    few_places: int = 2000
    branching_share: float = 0.5
    relaxed_share: float = 0.9
    branching_places: int = 2000
    promising_share: float = 0.1
    promising_places: int = 500
    branched_tables: int = 16
    branched_places: int = 128
    early_s: float = 4.0
    late_s: float = 0.5
    relaxed_s: float = 3.0
    relaxed_s_per_point: float = 1e-6
    few_tables: int = 200
    early: float = 2.0
    first_bounds: float = 1.2
    first_share: float = 0.2
    first_search_share: float = 0.1
    annealing: AnnealingParams = field(default_factory=AnnealingParams)
    iterated: IteratedParams = field(default_factory=IteratedParams)
    branching: BranchingParams = field(default_factory=BranchingParams)


class Auto(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "auto"

    def __init__(self, params: AutoParams = AutoParams()) -> None:
        self.params = params

    def prepare(self, limits: Limits) -> None:
        """Compile annealing's moves."""
        prepare(limits)

    def stages(self, instance: Instance) -> list[Stage]:
        """First plans, small problems exactly, branching, annealing, searches."""
        p, places = self.params, instance.tables * instance.gpus
        rest = 1 - p.common_shares_share
        few = places <= p.few_places
        branched = places <= p.branching_places
        several, plain = instance.gpus > 1, not instance.cost_model.uniform_splits
        tiny = instance.tables <= p.branched_tables or places <= p.branched_places
        promising = replace(p.branching, first_share=p.promising_share)

        # What is left then has to do for branching.
        first = with_time(
            p.early_s / (1 - p.first_share), lambda s: annealing(s, p.first_share, p.annealing)
        )
        early_s = p.late_s if tiny else p.early_s
        at_once = with_time(early_s, lambda s: branching(s, p.relaxed_share, promising))
        early = with_time(early_s, lambda s: branching(s, p.branching_share, p.branching))
        late = with_time(p.late_s, lambda s: branching(s, p.branching_share, p.branching))
        # Its first relaxation alone: a bound whose size does not depend on the number of GPUs.
        is_relaxed = several and not branched and instance.tables <= p.few_tables
        points = points_of(instance) if is_relaxed else 0
        relaxed_s = max(p.relaxed_s, p.relaxed_s_per_point * points)

        def relaxed(share: float) -> Run:
            return lambda s: relaxation(s, share, p.branching)

        return [
            Stage("greedy", lambda s: cost_greedy(s, p.greedy_share, p.construction_share)),
            Stage("delays", with_time(p.early_s, delays, bounds=p.early * p.first_bounds), several),
            Stage("branched", at_once, places <= p.promising_places and not tiny),
            Stage(
                "searched",
                lambda s: iterated(s, p.first_search_share, p.iterated),
                few and several and not tiny,
            ),
            Stage("annealed", first, branched),
            Stage("branched", early, branched),
            Stage("exact", lambda s: exact_program(s, p.exact_share, p.exact_places), plain),
            Stage("relaxed", with_time(p.early * relaxed_s, relaxed(1 / p.early)), is_relaxed),
            Stage("annealed", lambda s: annealing(s, p.annealing_share, p.annealing)),
            Stage("delays", with_time(p.late_s, delays, bounds=p.first_bounds), several),
            Stage("branched", late, branched),
            Stage("relaxed", with_time(relaxed_s, relaxed(p.relaxed_share)), is_relaxed),
            Stage("searched", lambda s: iterated(s, p.search_share * rest, p.iterated), several),
        ]

    def admitted(self, assignment: Assignment, search: Search) -> Assignment | None:
        """The assignment with one share of rows in HBM for each table, if the model asks that."""
        if not search.instance.cost_model.uniform_splits:
            return assignment
        common = common_shares(assignment)
        fixed = None if common is None else fixed_shares(common)
        if fixed is None:
            return common
        improve(fixed, search.clock.part(self.params.common_shares_share), reshard_tables=False)
        return fixed
