"""Assignment by min-cost flow: shards to GPUs, one class of about equal shards at a time.

Which GPU serves which shard is a transportation problem where shards take equal time, and its
min-cost flow is integral (Ahuja, Magnanti and Orlin 1993, "Network Flows", chapter 9): nothing
has to be rounded. Shards are therefore classed by what they cost, and the classes are assigned
from the largest shards to the smallest, each by the flow

    table → GPU    at most 1 where the table is divided: its shards go to different GPUs. No arc to
                   a GPU that may not serve it, or that serves a shard of it already
    GPU → host     one arc for each further shard, at the time when the GPU would then be done:
                   parallel arcs of rising cost, so that the cost of a GPU's load is convex. No
                   more arcs than it has HBM for buffers of such shards
    host → sink    as many as the host's memory has room for cold rows of such shards

Inside a class, larger shards then go where the flow has left most room. When a GPU is done is
not a sum of times, for what a shard costs depends on the HBM that is left for it. By duality, as
in `solvers.bounds.lagrangian`, it is

    max over prices λ of  Σ over its shards of (time + λ · bytes)  −  λ · HBM

which adds up shard by shard at each of a few prices; the shards still to come count as shared
evenly. With everything assigned, each GPU's HBM is filled exactly, and the next round starts
with what was wrong with each GPU's time, and with wider or narrower classes. (Classes of equal
shards alone, the narrowest, leave little to the flow: then it is a greedy.) Rounds are repeated for
the sharding options that the bound would choose for shorter and longer steps.

Networks are small, since shards that may go to the same GPUs are one node, and solved by
networkx's network simplex in milliseconds: fit for thousands of shards on a hundred GPUs, a round
of which takes about a second. Where the time limit strikes before the first plan, what is left is
assigned shard by shard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Block, Instance, ShardingOption
from solvers.search.construction import construct
from solvers.search.flow_classes import FlowState, cheapest_flow, classes_of
from solvers.strategies._base import Strategy
from solvers.strategies._search import Search


@dataclass(frozen=True, slots=True)
class FlowParams:
    """Knobs of `Flow`.

    Attributes
    ----------
    targets : tuple of float
        Step times, as shares of the bound, for which sharding options are chosen.
    ratios : tuple of float
        Largest over smallest cost in a class, a round each.
    damping : float
        The share by which a round corrects what the one before was wrong by.
    least_gain, patience : float and int
        Rounds in a row without so much gain after which tables are sharded anew.
    """

    targets: tuple[float, ...] = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 1.03, 1.2, 2.5)
    ratios: tuple[float, ...] = (1.1, 1.02, 1.05, 1.0, 1.2, 1.0, 1.15, 1.0, 1.3, 1.03)
    damping: float = 0.5
    least_gain: float = 1e-3
    patience: int = 5


class Flow(Strategy):
    """The strategy of this module's docstring."""

    name = "flow"
    no_plan = (
        "no assignment fits: every GPU needs room for the buffers of its shards, and every host "
        "for their cold rows; raise --hbm or lower --batch-size, or try `greedy-cost`"
    )

    def __init__(self, params: FlowParams = FlowParams()) -> None:
        self.params = params

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Choose options, assign by flows, fill HBM, correct times: the best of all rounds."""
        _Rounds(search, self.params).run()
        return [] if search.best is None else [search.best]


class _Rounds:
    """Rounds of assignments, which improve a search's best one."""

    def __init__(self, search: Search, params: FlowParams) -> None:
        self.search = search
        self.params = params
        self.rounds = 0
        self.flows = 0

    def run(self) -> None:
        """All rounds of all sharding options, as far as the clock lets them come; at least one."""
        search, bound = self.search, self.search.lagrangian
        tried = set[tuple[ShardingOption, ...]]()
        for target in self.params.targets:
            options = _options_for(search.instance, bound, target * bound.step_time_s)
            if options is None or tuple(options) in tried:
                continue
            tried.add(tuple(options))
            self._rounds_of(options)
            if search.is_over:
                break
        search.stats |= {"rounds": self.rounds, "flows": self.flows}

    def _rounds_of(self, options: Sequence[ShardingOption]) -> None:
        """Assign tables with these sharding options, again and again with corrected times."""
        search, instance = self.search, self.search.instance
        ahead_s = np.zeros(instance.gpus)
        least_s, idle = np.inf, 0
        for ratio in self.params.ratios:
            state = FlowState.empty(instance, options, search.lagrangian.price_s_per_byte, ahead_s)
            for members in classes_of(state, ratio):
                self._assign(state, members)
            self.rounds += 1
            search.clock.step()
            assignment = (
                Assignment.of(instance, state.pairs, state.replicas) if state.complete else None
            )
            if assignment is None:
                if search.clock.spent:
                    return
                continue
            better = assignment.step_time_s < least_s * (1 - self.params.least_gain)
            least_s, idle = min(least_s, assignment.step_time_s), 0 if better else idle + 1
            search.keep(assignment)
            if search.is_over or idle == self.params.patience:
                return
            wrong_s = assignment.times_s - (state.done_s - ahead_s)
            ahead_s = self.params.damping * (wrong_s - wrong_s.mean())

    def _assign(self, state: FlowState, members: Sequence[Block]) -> None:
        """Put the blocks of a class on GPUs, in two halves where no flow takes them all."""
        if len(members) == 1 or (self.search.clock.spent and self.search.best is None):
            for block in members:
                state.put_first(block)
            return
        self.flows += 1
        flow = cheapest_flow(state, members)
        if flow is not None:
            state.put_all(members, flow)
            return
        middle = len(members) // 2
        self._assign(state, members[:middle])
        self._assign(state, members[middle:])


def _options_for(
    instance: Instance, bound: LagrangianBound, target_s: float
) -> list[ShardingOption] | None:
    """Sharding options of all tables for a step time of `target_s`, or for less than is possible.

    For less, tables get finer options, so that shards are easy to balance.
    """
    start = construct(instance, bound, max(target_s, bound.step_time_s))
    if start is None:
        return None
    options = [start.option_of[table] for table in range(instance.tables)]
    if target_s >= bound.step_time_s:
        return options
    fine = [_fine_option(instance, bound, table, target_s) for table in range(instance.tables)]
    # Where memory asks for more shards than time does, those.
    return [
        max(pair, key=lambda option: option.shard_count) for pair in zip(fine, options, strict=True)
    ]


def _fine_option(
    instance: Instance, bound: LagrangianBound, table: int, target_s: float
) -> ShardingOption:
    """The cheapest sharding option with shards of at most `target_s`, or else of not much more."""
    work = bound.option_for(table, target_s)
    if work is not None:
        return work.option
    known = bound.options_of(table)
    shortest = min(known, key=lambda work: (work.longest_s, work.option))
    if any(work.option.shard_count > 1 for work in known) or not np.isfinite(shortest.longest_s):
        return shortest.option
    # The bound has looked at whole tables alone: as many row slices as the time asks for.
    slices = [
        c for c in instance.options_of(table) if not c.column_widths and not c.replicated_rows
    ]
    enough = [option for option in slices if option.row_slices * target_s >= shortest.longest_s]
    return min(enough, key=lambda option: option.row_slices, default=shortest.option)
