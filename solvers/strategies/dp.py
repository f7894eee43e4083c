"""Dynamic programming over HBM: choose options with the least total time for each total of HBM.

The idea is that of TorchRec's `DynamicProgrammingProposer` (torchrec 1.8, no paper). A
multiple-choice knapsack (Sinha and Zoltners 1979, doi:10.1287/opre.27.3.503) gives proposals, which
are then placed on GPUs. docs/strategies.md has the recurrence and the differences from TorchRec.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, Float
from solvers.strategies._base import Strategy
from solvers.strategies._packing import Needs, pack
from solvers.strategies._search import Search

Int = npt.NDArray[np.int64]

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
        shards, replica = instance.shards(table, option), instance.replica(table, option)
        if shards:
            ends = np.array([instance.priced_costs(s, gpu) for s in (shards[0], shards[-1])])
            # Shards that fit on no GPU count as very long.
            fits = ends[0, BYTES] <= instance.hbm_bytes.max()
            longest_s[at] = np.where(fits, ends[:, GPU_S].max(axis=0), 1e30)
        if replica is not None:
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
