"""Beam search over column slices, with a greedy assignment: NeuroShard's strategy.

These are algorithms 1 and 2 of Zha et al. 2023, "Pre-train and Search: Efficient Embedding Table
Sharding with Pre-trained Neural Cost Models" (arXiv:2305.01868), with placer's cost models instead
of neural ones. docs/strategies.md describes both loops and the differences from the paper.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from cost_models.sharding_options import COLUMN_MULTIPLE
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Block, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, OF_GPU, Float, phases_at
from solvers.strategies._base import Strategy
from solvers.strategies._packing import Needs, pack
from solvers.strategies._search import Search

Options = tuple[tuple[int, ShardingOption], ...]
"""The divided tables with their sharding options, in the order of tables."""

_WIDTH, _CANDIDATES, _STEPS = 3, 10, 10
_COLUMN_LIMITS = np.append(np.linspace(1.0, 1.5, 11), np.inf)
"""K, N, L and the grid of the paper's experiments. The last limit is for shards without a GPU."""

_FINALISTS = 8
"""Number of states whose HBM is filled exactly at the end; the fastest becomes the plan."""


class Beam(Strategy):
    """Solver ``beam``: halves column slices in a beam search, and assigns shards greedily."""

    name = "beam"
    no_plan = (
        "no assignment of whole tables and column slices fits: every GPU needs room for the "
        "buffers of its shards, and every host for their cold rows; `greedy-cost` divides "
        "tables by rows too"
    )

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Return assignments of the best states: halve shards, assign them, keep the best few."""
        greedy = _Greedy(search.instance, search.lagrangian)
        beam, steps = [greedy.assign(())], 0
        states: dict[Options, _State] = {(): beam[0]}
        # A shard without a GPU needs further halving, whatever the number of steps.
        while (steps < _STEPS or beam[0].unplaced_bytes) and not search.clock.spent:
            search.clock.step()
            steps += 1
            fresh: dict[Options, _State] = {}
            for options in [options for state in beam for options in greedy.halvings(state)]:
                if options not in states and not (fresh and search.clock.left_s < 0):
                    fresh[options] = states[options] = greedy.assign(options)
            if not fresh:
                break
            beam = sorted(fresh.values(), key=_State.key)[:_WIDTH]
        search.stats |= {"beam_steps": steps, "assignments": len(_COLUMN_LIMITS) * len(states)}
        filled = []
        for state in sorted(states.values(), key=_State.key)[:_FINALISTS]:
            if not state.unplaced_bytes:
                pairs = [(shard, gpu) for block, gpu in state.gpu_of.items() for shard in block]
                filled.append(Assignment.of(search.instance, pairs))
        return sorted(filter(None, filled), key=attrgetter("step_time_s"))


class _State(NamedTuple):
    """Sharding options, the GPU of each block (−1 if none has room), and the step time."""

    options: Options
    gpu_of: dict[Block, int]
    unplaced_bytes: float
    step_time_s: float

    def key(self) -> tuple[float, float]:
        return self.unplaced_bytes, self.step_time_s


class _Costs(NamedTuple):
    """A block's costs by kind of GPU, its needs of each GPU, and the bytes of its rows."""

    values: Float
    needs: Needs
    size_bytes: float

    @property
    def least(self) -> float:
        return float(self.needs.cost.min())


class _Greedy:
    """Assigns the shards of a state to GPUs, and divides them further."""

    def __init__(self, instance: Instance, bound: LagrangianBound) -> None:
        self.instance, self.price = instance, bound.price_s_per_byte
        self._costs: dict[Block, _Costs] = {}
        whole = [_whole_option(instance, bound, table) for table in range(instance.tables)]
        self.base = instance.blocks(TableShard(t, option) for t, option in enumerate(whole))
        columns = sum(self.of(block).needs.room[0, 1] for block in self.base)
        self.limits = (_COLUMN_LIMITS * columns / instance.gpus + 1e-6).tolist()

    def of(self, block: Block) -> _Costs:
        """Return a block's costs. A GPU's load is its blocks' time and the price of their HBM."""
        if block not in self._costs:
            instance = self.instance
            own = [sum(instance.priced_costs(s, gpu) for s in block) for gpu in instance.kinds]
            values = np.array(own)
            here = values[instance.kind_of_gpu, :, instance.price_index(self.price)]
            cost = here[:, GPU_S] + self.price * here[:, BYTES]
            columns = sum(last - first for first, last in map(instance.columns, block))
            room = np.full((instance.gpus, 2), (values[0, BYTES, 0], columns))
            dram_bytes = np.full(instance.gpus, here[0, DRAM_BYTES])
            size_bytes = float(values[0, [BYTES, DRAM_BYTES], -1].sum())
            self._costs[block] = _Costs(values, Needs(cost, room, dram_bytes), size_bytes)
        return self._costs[block]

    def assign(self, options: Options) -> _State:
        """Return the best assignment of these options over all column limits."""
        divided = dict(options)
        blocks = [block for block in self.base if block[0].table not in divided]
        for table, option in options:
            blocks += [(shard,) for shard in self.instance.shards(table, option)]
        blocks.sort(key=lambda block: -self.of(block).least)
        states = [self._within(options, blocks, limit) for limit in self.limits]
        best = min(states[:-1], key=_State.key)
        return min(states, key=_State.key) if best.unplaced_bytes else best

    def _within(self, options: Options, blocks: list[Block], most_columns: float) -> _State:
        """Put blocks on the GPUs where they cost least, with at most `most_columns` on each."""
        instance, hbm = self.instance, self.instance.hbm_bytes
        # More HBM makes a GPU faster. So others start with a load: the price of HBM that they lack.
        load = self.price * (hbm.max() - hbm)
        room = np.stack((hbm, np.full_like(hbm, most_columns)), axis=1)
        gpu_of = pack(instance, {block: self.of(block).needs for block in blocks}, load, room)
        unplaced = sum(self.of(block).size_bytes + 1.0 for block in blocks if gpu_of[block] < 0)
        sums = np.zeros((1, instance.gpus, instance.rows_of_costs - 3, instance.prices.size))
        for block, gpu in gpu_of.items():
            if gpu >= 0:
                sums[0, gpu] += self.of(block).values[instance.kind_of_gpu[gpu], OF_GPU]
        (time_s,) = instance.objective.step_time_s(phases_at(sums, hbm))
        return _State(options, gpu_of, unplaced, float(time_s))

    def halvings(self, state: _State) -> Iterable[Options]:
        """Yield options with one more shard halved, from costly, large and unplaced shards."""
        tried = sorted(state.gpu_of, key=lambda block: -self.of(block).least)[:_CANDIDATES]
        tried += sorted(state.gpu_of, key=lambda block: -self.of(block).size_bytes)[:_CANDIDATES]
        tried += [block for block, gpu in state.gpu_of.items() if gpu < 0][:_CANDIDATES]
        for shard, *others in dict.fromkeys(tried):
            halved = None if others else self._halved(shard)  # Tables kept together stay whole.
            if halved is not None:
                yield tuple(sorted({**dict(state.options), shard.table: halved}.items()))

    def _halved(self, shard: TableShard) -> ShardingOption | None:
        """Return the table's option with this shard halved, or the nearest finer option."""
        first, last = self.instance.columns(shard)
        now = [*(shard.option.column_widths or (last - first,))]
        half = -(-(last - first) // (2 * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE
        at = now.index(last - first)
        halved = sorted([*now[:at], half, last - first - half, *now[at + 1 :]], reverse=True)

        def key(option: ShardingOption) -> tuple[object, ...]:
            widths = option.column_widths
            return [*widths] != halved, len(widths), option.cold != shard.option.cold, option

        options = self.instance.options_of(shard.table)
        sliced = [o for o in options if o.row_slices == 1 and not o.replicated_rows]
        return min((o for o in sliced if len(o.column_widths) > len(now)), key=key, default=None)


def _whole_option(instance: Instance, bound: LagrangianBound, table: int) -> ShardingOption:
    """Return the option of the whole table with the cheapest `cold` at the bound's price."""
    costs = {own.option: own.priced_s for own in bound.cheapest[table] if own.longest_s < np.inf}
    options = instance.options_of(table)
    whole = [o for o in options if o.shard_count == 1 and not o.replicated_rows]
    # If no GPU has room for the whole table, a later step divides it.
    return min(whole, key=lambda option: (costs.get(option, np.inf), option))
