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

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cost_models.sharding_options import COLUMN_MULTIPLE
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Block, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, OF_GPU, Float, phases_at
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
    """

    width: int = 3
    candidates: int = 10
    steps: int = 10
    column_limits: tuple[float, ...] = tuple(np.linspace(1.0, 1.5, 11).tolist())
    finalists: int = 8


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
class _Item:
    """What is placed as one: a shard, or tables that stay together.

    Attributes
    ----------
    cost : float64, shape (GPUs,)
        Time plus price times HBM bytes; infinite where it may not be.
    priced : float64, shape (kinds of GPUs, 2 + phases, prices)
        HBM bytes and GPU seconds, all and by phase.
    least_bytes, dram_bytes, size_bytes, columns : float
        HBM of the buffers alone; DRAM of the rows that are not worth HBM; all rows; columns.
    """

    block: Block
    cost: Float
    priced: Float
    least_bytes: float
    dram_bytes: float
    size_bytes: float
    columns: int

    @classmethod
    def of(cls, instance: Instance, block: Block, price: float) -> "_Item":
        """Look at a block."""
        values = np.array(
            [sum(instance.priced_costs(p, gpu) for p in block) for gpu in instance.kinds]
        )
        here = values[..., instance.price_index(price)]
        cost = (here[:, GPU_S] + price * here[:, BYTES])[np.array(instance.kind_of_gpu)]
        return cls(
            block,
            np.where(instance.open_gpus(block), cost, np.inf),
            values[:, OF_GPU],
            float(values[0, BYTES, 0]),
            float(here[0, DRAM_BYTES]),
            float(values[0, BYTES, -1] + values[0, DRAM_BYTES, -1]),
            sum(last - first for first, last in map(instance.columns, block)),
        )


@dataclass(frozen=True, slots=True)
class _Rated:
    """An assignment with its approximate step time and the shards that found no GPU.

    Ordered by bytes without a place, then time.
    """

    unplaced_bytes: float
    step_time_s: float
    options: Options
    items: list[_Item]
    gpus: list[int]

    @property
    def key(self) -> tuple[float, float]:
        return self.unplaced_bytes, self.step_time_s


class _BeamSearch:
    """The beam, with the costs of all shards seen so far."""

    def __init__(self, instance: Instance, bound: LagrangianBound, params: BeamParams) -> None:
        self.instance, self.params, self.price = instance, params, bound.price_s_per_byte
        self.items: dict[Block, _Item] = {}
        self.finalists: list[_Rated] = []
        self.steps = 0
        self.rated = 0
        whole = [_whole_option(instance, bound, table) for table in range(instance.tables)]
        shards = [TableShard(table, option) for table, option in enumerate(whole)]
        self.base = [self._item(block) for block in instance.blocks(shards)]
        dims = sum(item.columns for item in self.base)
        self.limits = np.append(params.column_limits, np.inf) * dims / instance.gpus

    def run(self, clock: Clock) -> None:
        """Search until the beam's steps are done, no shard can be halved, or the clock is spent."""
        beam = [self._assign(())]
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
            for options in fresh:
                if next_states and clock.left_s < 0:
                    break
                next_states.append(self._assign(options))
            if not next_states:
                return
            beam = sorted(next_states, key=lambda rated: rated.key)[: self.params.width]

    def _item(self, block: Block) -> _Item:
        if block not in self.items:
            self.items[block] = _Item.of(self.instance, block, self.price)
        return self.items[block]

    def assignments(self) -> Iterable[Assignment]:
        """The best assignments with their HBM filled exactly, fastest first."""
        assignments = []
        for rated in self.finalists:
            pairs = [
                (shard, gpu)
                for item, gpu in zip(rated.items, rated.gpus, strict=True)
                for shard in item.block
            ]
            assignment = Assignment.of(self.instance, pairs)
            if assignment is not None:
                assignments.append(assignment)
        return sorted(assignments, key=lambda assignment: assignment.step_time_s)

    def _halvings(self, rated: _Rated) -> Iterable[Options]:
        """The options with one shard more halved: of the most costly and the largest shards."""
        now, most = dict(rated.options), self.params.candidates
        tried = sorted(rated.items, key=lambda item: -item.cost.min())[:most]
        tried += sorted(rated.items, key=lambda item: -item.size_bytes)[:most]
        tried += [i for i, gpu in zip(rated.items, rated.gpus, strict=True) if gpu < 0][:most]
        for block in dict.fromkeys(item.block for item in tried):
            if len(block) > 1:
                continue  # Tables that stay together stay whole.
            (shard,) = block
            halved = _halved(self.instance, shard)
            if halved is not None:
                yield tuple(sorted({**now, shard.table: halved}.items()))

    def _assign(self, options: Options) -> _Rated:
        """The best assignment of a state over the limits."""
        changed = dict(options)
        items = [item for item in self.base if item.block[0].table not in changed]
        for table, option in options:
            items += [self._item((shard,)) for shard in self.instance.shards(table, option)]
        items.sort(key=lambda item: -item.cost.min())
        rated = [self._within(options, items, limit) for limit in self.limits.tolist()]
        self.rated += len(rated)
        within = min(rated[:-1], key=lambda one: one.key)
        best = min(rated, key=lambda one: one.key) if within.unplaced_bytes else within
        if not best.unplaced_bytes and np.isfinite(best.step_time_s):
            several = sorted([*self.finalists, best], key=lambda one: one.key)
            self.finalists = several[: self.params.finalists]
        return best

    def _within(self, options: Options, items: list[_Item], most_columns: float) -> _Rated:
        """Put items on the GPUs where they cost least, each of at most so many columns."""
        instance, hbm = self.instance, self.instance.hbm_bytes
        hosts = np.array(instance.host_of_gpu)
        # A GPU with more HBM is done sooner: what its HBM is worth counts as time it has already.
        load = self.price * (hbm.max() - hbm)
        taken, columns, unworthy, size = np.zeros((4, instance.gpus))
        cold = np.zeros(len(instance.dram_bytes))
        sums = np.zeros((1, instance.gpus, instance.rows_of_costs - 3, instance.prices.size))
        held: dict[int, list[int]] = {}
        gpus, unplaced = [], 0.0
        for item in items:
            # Cold rows of a GPU: those that are not worth HBM, or those for which it has none.
            colder = np.maximum(unworthy + item.dram_bytes, size + item.size_bytes - hbm)
            colder -= np.maximum(unworthy, size - hbm)
            after = load + item.cost
            after[taken + item.least_bytes > hbm] = np.inf
            after[columns + item.columns > most_columns + 1e-6] = np.inf
            after[cold[hosts] + colder > instance.dram_bytes[hosts]] = np.inf
            after[held.get(item.block[0].table, [])] = np.inf
            gpu = int(after.argmin())
            if not np.isfinite(after[gpu]):
                gpus.append(-1)
                unplaced += item.size_bytes + 1.0
                continue
            gpus.append(gpu)
            load[gpu] = after[gpu]
            taken[gpu] += item.least_bytes
            columns[gpu] += item.columns
            cold[hosts[gpu]] += colder[gpu]
            unworthy[gpu] += item.dram_bytes
            size[gpu] += item.size_bytes
            held.setdefault(item.block[0].table, []).append(gpu)
            sums[0, gpu] += item.priced[instance.kind_of_gpu[gpu]]
        time_s = instance.objective.step_time_s(phases_at(sums, hbm))
        return _Rated(unplaced, float(time_s[0]), options, items, gpus)


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
