"""Beam search over column slices, greedy grid search over GPUs: NeuroShard's strategy.

Zha et al. 2023, "Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained
Neural Cost Models" (arXiv:2305.01868), algorithms 1 and 2, with our cost model in the place of
their neural ones:

* Outer loop: a beam of the K best ways to divide tables by columns. Each step halves one shard
  of each of them, tried for the N most costly and the N largest shards; L steps.
* Inner loop: shards sorted by the cost that each has by itself, the most costly first, go to
  the GPU whose cost is then least, among those with memory left and with columns left below a
  limit: M limits, evenly from 1 to 1.5 times the mean columns of a GPU, are all tried. The
  limit keeps communication balanced. (Where it leaves a shard no GPU, there is none.)

GPUs of the paper have nothing but HBM. Here, a shard needs no more than its buffers there;
what it costs on a GPU is its time plus the bound's price of the HBM that it would then fill,
and the cost of a finished assignment is its step time with every GPU's HBM filled anew. Shards
of one table go to different GPUs, as everywhere in our search space, which is also why only
those halvings are made that it has.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.sharding_options import COLUMN_MULTIPLE
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import Float, phases_at
from solvers.search.grid_greedy import Int, Items, assign_many
from solvers.strategies._base import Strategy
from solvers.strategies._search import Search

Options = tuple[tuple[int, ShardingOption], ...]
"""The tables that are sharded, with their sharding options, in order."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Knobs of `Beam`; the defaults of the first four are those of the paper's experiments.

    Attributes
    ----------
    width : int
        K, the states (sharding options of all tables) that a step keeps.
    candidates : int
        N, the most costly and the largest shards that are halved.
    steps : int
        L, unless something finds no place.
    column_limits : tuple of float
        M limits of a GPU's columns, as shares of the mean.
    finalists : int
        Assignments whose HBM is filled exactly at the end, for the best of them.
    batch : int
        Beam states × limits × GPUs that are assigned at once.
    """

    width: int = 3
    candidates: int = 10
    steps: int = 10
    column_limits: tuple[float, ...] = tuple(np.linspace(1.0, 1.5, 11).tolist())
    finalists: int = 8
    batch: int = 20_000


class Beam(Strategy):
    """The strategy of this module's docstring."""

    name = "beam"
    no_plan = (
        "no assignment of whole tables and column slices fits: every GPU needs room for the "
        "buffers of its shards, and every host for their cold rows; `greedy-cost` divides "
        "tables by rows too"
    )

    def __init__(self, params: BeamParams = BeamParams()) -> None:
        self.params = params

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Halve shards, assign, keep the best few."""
        beam = _BeamSearch(search.instance, search.lagrangian, self.params)
        beam.run(search.clock)
        search.stats |= {"beam_steps": beam.steps, "assignments": beam.rated}
        return beam.assignments()


@dataclass(frozen=True, slots=True)
class _Rated:
    """An assignment with its approximate step time and the shards that found no GPU.

    Ordered by bytes without a place, then time.
    """

    unplaced_bytes: float
    step_time_s: float
    options: Options
    items: Int
    gpus: Int

    @property
    def key(self) -> tuple[float, float]:
        return self.unplaced_bytes, self.step_time_s


class _BeamSearch:
    """The beam, with the costs of all shards seen so far."""

    def __init__(self, instance: Instance, bound: LagrangianBound, params: BeamParams) -> None:
        self.instance, self.params = instance, params
        self.items = Items(instance, bound.price_s_per_byte)
        self.whole = [_whole_option(instance, bound, table) for table in range(instance.tables)]
        self.finalists: list[_Rated] = []
        self.steps = 0
        self.rated = 0
        shards = [TableShard(table, option) for table, option in enumerate(self.whole)]
        self.base = self.items.of(instance.blocks(shards))
        dims = float(self.items.columns[self.base].sum())
        self.limits = np.append(params.column_limits, np.inf) * dims / instance.gpus

    def run(self, clock: Clock) -> None:
        """Search until the beam's steps are done, no shard can be halved, or the clock is spent."""
        beam = self._assign([()])
        done: set[Options] = {()}
        # As long as something finds no place, cutting goes on: it is not for speed.
        while self.steps < self.params.steps or beam[0].unplaced_bytes:
            if clock.spent:
                return
            clock.step()
            self.steps += 1
            wanted = dict.fromkeys(options for rated in beam for options in self._halvings(rated))
            fresh = [options for options in wanted if options not in done]
            done.update(fresh)
            next_states: list[_Rated] = []
            size = max(1, self.params.batch // (self.limits.size * self.instance.gpus))
            for first in range(0, len(fresh), size):
                if next_states and clock.left_s < 0:
                    break
                next_states += self._assign(fresh[first : first + size])
            if not next_states:
                return
            beam = sorted(next_states, key=lambda rated: rated.key)[: self.params.width]

    def assignments(self) -> Iterable[Assignment]:
        """The best assignments with their HBM filled exactly, fastest first."""
        assignments = []
        for rated in self.finalists:
            pairs = [
                (shard, gpu)
                for item, gpu in zip(rated.items.tolist(), rated.gpus.tolist(), strict=True)
                for shard in self.items.blocks[item]
            ]
            assignment = Assignment.of(self.instance, pairs)
            if assignment is not None:
                assignments.append(assignment)
        return sorted(assignments, key=lambda assignment: assignment.step_time_s)

    def _halvings(self, rated: _Rated) -> Iterable[Options]:
        """The options with one shard more halved: of the most costly and the largest shards."""
        items, now = rated.items, dict(rated.options)
        tried = [
            item
            for by in (self.items.cost[items, 0], self.items.size_bytes[items])
            for item in items[np.argsort(-by, kind="stable")[: self.params.candidates]].tolist()
        ]
        if rated.unplaced_bytes:
            tried += items[rated.gpus < 0][: self.params.candidates].tolist()
        for item in dict.fromkeys(tried):
            block = self.items.blocks[item]
            if len(block) > 1:
                continue  # Tables that stay together stay whole.
            (shard,) = block
            halved = _halved(self.instance, shard)
            if halved is not None:
                yield tuple(sorted({**now, shard.table: halved}.items()))

    def _assign(self, states: Sequence[Options]) -> list[_Rated]:
        """The best assignment of each state over the grid of limits."""
        instance, items = self.instance, self.items
        orders, tables = [], []
        for options in states:
            changed = dict(options)
            kept = [i for i in self.base.tolist() if items.blocks[i][0].table not in changed]
            sliced = [
                (shard,) for table, option in options for shard in instance.shards(table, option)
            ]
            mine = np.concatenate((np.array(kept, dtype=np.int64), items.of(sliced)))
            mine = mine[np.argsort(-items.cost[mine, 0], kind="stable")]
            orders.append(mine)
            place = {table: at for at, table in enumerate(changed)}
            tables.append([place.get(items.blocks[i][0].table, -1) for i in mine.tolist()])
        gpus = assign_many(instance, items, orders, tables, self.limits)
        best = []
        for options, mine, assigned in zip(states, orders, gpus, strict=True):
            self.rated += len(assigned)
            unplaced = np.where(assigned < 0, items.size_bytes[mine] + 1.0, 0.0).sum(axis=1)
            times = self._times(mine, assigned)
            rated = [
                _Rated(float(unplaced[at]), float(times[at]), options, mine, assigned[at])
                for at in range(len(assigned))
            ]
            within = min(rated[:-1], key=lambda one: one.key)
            best.append(min(rated, key=lambda one: one.key) if within.unplaced_bytes else within)
        fitting = [one for one in best if not one.unplaced_bytes and np.isfinite(one.step_time_s)]
        self.finalists = sorted([*self.finalists, *fitting], key=lambda one: one.key)[
            : self.params.finalists
        ]
        return best

    def _times(self, mine: Int, assigned: Int) -> Float:
        """About the step times of assignments of the same items, shape (assignments,)."""
        instance = self.instance
        on = (assigned[:, :, None] == np.arange(instance.gpus)).astype(np.float64)
        of_kind = np.array(instance.kind_of_gpu)
        sums = np.empty(
            (len(assigned), instance.gpus, instance.rows_of_costs - 3, instance.prices.size)
        )
        for kind in range(len(instance.kinds)):
            here = np.flatnonzero(of_kind == kind)
            priced = self.items.priced[mine, kind]
            sums[:, here] = np.einsum("apg,pvr->agvr", on[:, :, here], priced, optimize=True)
        return instance.objective.step_time_s(phases_at(sums, instance.hbm_bytes))


def _whole_option(instance: Instance, bound: LagrangianBound, table: int) -> ShardingOption:
    """The whole table, its cold rows read in the way that is cheapest at the bound's price."""
    whole = [
        work
        for work in bound.cheapest[table]
        if work.option.shard_count == 1
        and not work.option.replicated_rows
        and np.isfinite(work.longest_s)
    ]
    if not whole:  # It is larger than any GPU: a later step divides it.
        return next(
            c for c in instance.options_of(table) if c.shard_count == 1 and not c.replicated_rows
        )
    return min(whole, key=lambda work: (work.priced_s, work.option)).option


def _halved(instance: Instance, shard: TableShard) -> ShardingOption | None:
    """The table's sharding option with that shard halved; None if the search space has none.

    Where the space has so many column slices only if they are even, all column slices as wide as
    that one are halved; where it has no halves at all, the next finer column slices stand for them.
    """
    first, last = instance.columns(shard)
    width = last - first
    column_widths = shard.option.column_widths or (width,)
    sliced = [
        c
        for c in instance.options_of(shard.table)
        if c.column_widths and c.row_slices == 1 and not c.replicated_rows
    ]
    sliced.sort(key=lambda option: (option.cold != shard.option.cold, option))
    option_of_widths = {option.column_widths: option for option in reversed(sliced)}
    for half in (width // 2, -(-width // (2 * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE):
        halves = (half, width - half)
        rest = list(column_widths)
        rest.remove(width)
        every = [part for w in column_widths for part in (halves if w == width else (w,))]
        for wanted in ([*rest, *halves], every):
            key = tuple(sorted(wanted, reverse=True))
            if min(halves) > 0 and key in option_of_widths:
                return option_of_widths[key]
    finer = [option for option in sliced if len(option.column_widths) > len(column_widths)]
    return min(finer, key=lambda option: len(option.column_widths), default=None)
