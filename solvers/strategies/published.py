"""Two published planners to compare with: NeuroShard's beam search and TorchRec's dynamic program.

docs/strategies.md describes both, and the differences from their sources:

- `Beam`: algorithms 1 and 2 of Zha et al. 2023, "Pre-train and Search: Efficient Embedding Table
  Sharding with Pre-trained Neural Cost Models" (arXiv:2305.01868), with placer's cost models.
- `DynamicProgramming`: the idea of TorchRec's `DynamicProgrammingProposer` (torchrec 1.8, no
  paper). A multiple-choice knapsack (Sinha and Zoltners 1979, doi:10.1287/opre.27.3.503) over HBM
  gives proposals, which are then placed on GPUs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.sharding_options import COLUMN_MULTIPLE
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Block, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, OF_GPU, Float, Int, phases_at
from solvers.strategies._base import Strategy
from solvers.strategies._search import Search


class Needs(NamedTuple):
    """What a block of shards needs on each GPU."""

    cost: Float  # Load that it adds to the GPU.
    room: Float  # Use of HBM bytes, or of several limited resources: shape (GPUs, resources).
    dram_bytes: Float  # Bytes in the memory of the GPU's host.


def pack(
    instance: Instance, blocks: Mapping[Block, Needs], load: Float, room: Float
) -> dict[Block, int]:
    """Put each block, in order, on the least loaded GPU with room; −1 if no GPU has room.

    Shards of one table go to different GPUs. `load` and `room` start as those of empty GPUs and are
    changed in place.
    """
    hosts, dram = np.array(instance.host_of_gpu), instance.dram_bytes.copy()
    holders: dict[int, list[int]] = defaultdict(list)
    gpu_of = {}
    for block, own in blocks.items():
        after = np.where(instance.open_gpus(block), load + own.cost, np.inf)
        after[(own.room > room).reshape(len(load), -1).any(axis=1)] = np.inf
        after[own.dram_bytes > dram[hosts]] = np.inf
        for shard in block:
            after[holders[shard.table]] = np.inf
        gpu = int(after.argmin())
        gpu_of[block] = gpu if np.isfinite(after[gpu]) else -1
        if gpu_of[block] == gpu:
            load[gpu] = after[gpu]
            room[gpu] -= own.room[gpu]
            dram[hosts[gpu]] -= own.dram_bytes[gpu]
            for shard in block:
                holders[shard.table].append(gpu)
    return gpu_of


Options = tuple[tuple[int, ShardingOption], ...]
"""The divided tables with their sharding options, in the order of tables."""

_WIDTH, _CANDIDATES, _STEPS = 3, 10, 10
_COLUMN_LIMITS = np.append(np.linspace(1.0, 1.5, 11), np.inf)
"""K, N, L and the grid of the paper's experiments. The last limit is for shards without a GPU."""

_FILLED = 8
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
        for state in sorted(states.values(), key=_State.key)[:_FILLED]:
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


_BINS_PER_GPU, _MOST_BINS = 100, 1000
"""Number of bins of HBM for each GPU, and at most; TorchRec has 100 for each GPU."""

_LEAST_BYTES = 1e-6
"""Least bytes of a bin, as GPUs may have no HBM besides reserved memory."""

_LONGEST_SHARES = (1.0, 0.5, 0.25, 2.0, np.inf)
"""Limits of the longest shard, as shares of the bound. The program runs once for each limit."""

_CHOICES, _PROPOSALS, _FINALISTS = 32, 24, 4
"""Number of choices of a table, of placed proposals of one program, and of final assignments. The
fastest assignment that fits becomes the plan."""


class DynamicProgramming(Strategy):
    """Solver ``dp``: chooses options by dynamic programming over HBM, and places them."""

    name = "dp"
    no_plan = (
        "no proposal could be placed: every GPU needs room for the buffers of its shards, and "
        "every host for their cold rows; raise --hbm or lower --batch-size, or try `greedy-cost`"
    )

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Return the best few assignments of the program's proposals."""
        finalists: list[Assignment] = []
        placed = 0
        for proposal in _proposals(search):
            # Filling HBM again does not halve the total time, so skip proposals this slow.
            if finalists and proposal.total_s / search.instance.gpus > 2 * finalists[0].step_time_s:
                continue
            assignment = _placed(search.instance, proposal)
            placed += 1
            if assignment is not None:
                search.keep(assignment)
                finalists = sorted([*finalists, assignment], key=lambda own: own.step_time_s)
            search.clock.step()
            if search.is_over:
                break
        search.stats["proposals"] = placed
        return finalists[:_FINALISTS]


class Choices(NamedTuple):
    """Ways to place one table. Each is an option, with the rows worth HBM at one price."""

    options: npt.NDArray[np.object_]
    price_indices: Int
    # HBM bytes and GPU seconds of all shards and replicas.
    bytes_: Float
    time_s: Float
    longest_s: Float  # GPU seconds of the longest shard.

    def within(self, longest_s: float) -> "Choices":
        """Return a few choices with shards within a limit, by rising bytes and falling time."""
        # The limit is NaN for an infinite share of a bound of 0.
        fits = np.flatnonzero(self.longest_s <= np.fmax(longest_s, self.longest_s.min()))
        order = fits[np.lexsort((self.time_s[fits], self.bytes_[fits]))]
        kept = order[_spread(_falling(self.time_s[order]), _CHOICES)]
        return Choices._make(values[kept] for values in self)


class Proposal(NamedTuple):
    """A sharding option and a price index for each table, and the total GPU seconds."""

    options: list[ShardingOption]
    price_indices: list[int]
    total_s: float


def _proposals(search: Search) -> Iterator[Proposal]:
    """Yield proposals for each share of the bound, those with the most HBM first."""
    instance, bound, every = search.instance, search.lagrangian, []
    for table in range(instance.tables):
        options = instance.options_of(table)
        if search.clock.spent:  # Only keep the option that the bound chooses.
            cost = bound.option_for(table, bound.step_time_s * (1 + 1e-6))
            options = options[:1] if cost is None else (cost.option,)
        every.append(choices_of(instance, table, options))
    for number, share in enumerate(_LONGEST_SHARES):
        if number and search.clock.spent:
            return
        yield from cheapest(instance, [own.within(share * bound.step_time_s) for own in every])


def choices_of(instance: Instance, table: int, options: Sequence[ShardingOption]) -> Choices:
    """Return some sharding options of a table, each with the rows worth HBM at each price."""
    gpu, prices = instance.kinds[0], instance.prices.size
    longest_s = np.zeros((len(options), prices))
    for at, option in enumerate(options):
        shards = instance.shards(table, option)
        if shards:
            ends = np.array([instance.priced_costs(s, gpu) for s in (shards[0], shards[-1])])
            # Shards that fit on no GPU count as very long.
            fits = ends[0, BYTES] <= instance.hbm_bytes.max()
            longest_s[at] = np.where(fits, ends[:, GPU_S].max(axis=0), 1e30)
        for replica in instance.replicas(table, option):
            longest_s[at] += instance.priced_costs(replica, gpu)[GPU_S]
    costs = np.stack([instance.option_costs(table, option) for option in options], axis=1)
    return Choices(
        np.repeat(np.fromiter(options, dtype=object), prices),
        np.tile(np.arange(prices), len(options)),
        costs[BYTES].ravel(),
        costs[GPU_S].ravel(),
        longest_s.ravel(),
    )


def cheapest(instance: Instance, choices: Sequence[Choices]) -> Iterator[Proposal]:
    """Run the dynamic program, and yield proposals of its bins, the most HBM first."""
    bins = min(_MOST_BINS, _BINS_PER_GPU * instance.gpus)
    size = max(float(instance.hbm_bytes.sum()) / bins, _LEAST_BYTES)
    best, used, at_bin = np.full(bins, np.inf), np.zeros(bins), np.arange(bins)
    best[0] = 0.0
    chosen, came_from = np.zeros((2, len(choices), bins), dtype=np.int16)
    for table, mine in enumerate(choices):
        steps = np.minimum(mine.bytes_ / size, bins + 1.0)
        down = steps.astype(np.int64)
        # `used` has the exact bytes of a bin, so a sum may reach the next bin.
        sources = at_bin - np.concatenate((down, down + 1))[:, None]
        possible, sources = sources >= 0, np.maximum(sources, 0)
        then = used[sources] + np.tile(steps, 2)[:, None]
        possible &= then.astype(np.int64) == at_bin
        total = np.where(possible, best[sources] + np.tile(mine.time_s, 2)[:, None], np.inf)
        at = total.argmin(axis=0)
        chosen[table], came_from[table] = at % steps.size, sources[at, at_bin]
        best, used = total[at, at_bin], then[at, at_bin]
    # Skip bins that need more HBM without less time.
    for end in _spread(_falling(best)[::-1], _PROPOSALS).tolist():
        picked, at_end = [], end
        for table in reversed(range(len(choices))):
            picked.append(int(chosen[table, at_end]))
            at_end = came_from[table, at_end]
        pairs = list(zip(choices, reversed(picked), strict=True))
        options = [mine.options[number] for mine, number in pairs]
        indices = [int(mine.price_indices[number]) for mine, number in pairs]
        yield Proposal(options, indices, float(best[end]))


def _falling(values: Float) -> Int:
    """Return the indices of values that are less than all values before them."""
    before = np.minimum.accumulate(np.concatenate(([np.inf], values)))[:-1]
    return np.flatnonzero(values < before)


def _spread(numbers: Int, most: int) -> Int:
    """Return at most `most` of the numbers, evenly spread."""
    at = np.linspace(0, numbers.size - 1, min(most, numbers.size))
    return numbers[at.round().astype(np.int64)]


def _placed(instance: Instance, proposal: Proposal) -> Assignment | None:
    """Place a proposal's shards, longest first, on the least loaded GPUs with room."""
    load, hbm = np.zeros(instance.gpus), instance.hbm_bytes.copy()
    shards, replicas = instance.sharded(proposal.options)
    for replica in replicas:
        each = [instance.priced_costs(replica, gpu)[:, 0] for gpu in instance.kinds]
        own = np.array(each)[instance.kind_of_gpu]
        load, hbm = load + own[:, GPU_S], hbm - own[:, BYTES]
    needs = {}
    for block in instance.blocks(shards):
        at = [proposal.price_indices[shard.table] for shard in block]
        of_kinds = [
            sum(instance.priced_costs(s, gpu)[:, n] for s, n in zip(block, at, strict=True))
            for gpu in instance.kinds
        ]
        own = np.array(of_kinds)[instance.kind_of_gpu]
        needs[block] = Needs(own[:, GPU_S], own[:, BYTES], own[:, DRAM_BYTES])
    longest_first = sorted(needs, key=lambda b: (-needs[b].cost[instance.kinds[0]], b))
    gpu_of = pack(instance, {block: needs[block] for block in longest_first}, load, hbm)
    if -1 in gpu_of.values():
        return None
    pairs = [(shard, gpu) for block, gpu in gpu_of.items() for shard in block]
    return Assignment.of(instance, pairs, replicas)
