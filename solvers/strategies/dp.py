"""Dynamic programming over HBM: one option per table, least total time for each total of HBM.

The idea of TorchRec's `DynamicProgrammingProposer` (torchrec 1.8, no paper): a multiple-choice
knapsack (Sinha and Zoltners 1979, doi:10.1287/opre.27.3.503). An option of a table is a
sharding option and a number of rows in HBM, with a time t and HBM bytes h summed over its shards;
with total HBM in bins of one size, for tables 1 to n

    best[n][bin] = min over options o of table n of  best[n-1][bin'] + t[o]

where bin' is any bin from which h[o] more bytes lead to `bin`. Each bin keeps the bytes of its
best choice exactly, so that rounding does not add up over tables. Each bin's choice of options
is a proposal. From the one with the most HBM down, shards of a proposal are placed, longest
first, on the GPU with the least time so far that has room for their rows; each GPU's HBM is
filled anew, and the proposal of the least step time is kept.

Total time alone would leave large tables whole however long the GPU that serves them takes, for
cutting costs extra. So options are limited to those whose shards each take at most a share of
the bound, for a few such shares, the dynamic program run for each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, Float
from solvers.strategies._base import Strategy
from solvers.strategies._search import Search

Int = npt.NDArray[np.int64]

_NEVER_S = 1e30
_ROUNDING = 1e-6


_LEAST_BYTES = 1e-6
"""Size of a bin: tables that take no HBM have their place in the first."""


@dataclass(frozen=True, slots=True)
class DpParams:
    """Knobs of `DynamicProgramming`.

    Attributes
    ----------
    bins_per_gpu, most_bins : int
        Bins of HBM; TorchRec has 100 for each GPU.
    options : int
        Options kept of a table: more differ too little.
    longest_shares : tuple of float
        Longest shard as a share of the bound, a dynamic program each.
    proposals : int
        Proposals of one dynamic program that are placed, evenly over its bins.
    finalists : int
        Assignments of which the fastest that fits becomes the plan.
    """

    bins_per_gpu: int = 100
    most_bins: int = 1000
    options: int = 32
    longest_shares: tuple[float, ...] = (1.0, 0.5, 0.25, 2.0, np.inf)
    proposals: int = 24
    finalists: int = 4


class DynamicProgramming(Strategy):
    """The strategy of this module's docstring."""

    name = "dp"
    no_plan = (
        "no proposal could be placed: every GPU needs room for the buffers of its shards, and "
        "every host for their cold rows; raise --hbm or lower --batch-size, or try `greedy-cost`"
    )

    def __init__(self, params: DpParams = DpParams()) -> None:
        self.params = params

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Choose options and place them: the best few proposals."""
        instance, clock, params = search.instance, search.clock, self.params
        finalists: list[Assignment] = []
        placed = 0
        for proposal in _proposals(instance, search.lagrangian, clock, params):
            # Its HBM is filled anew, but not so much better that the total would halve.
            if finalists and proposal.total_s / instance.gpus > 2 * finalists[0].step_time_s:
                continue
            assignment = _partitioned(instance, proposal)
            placed += 1
            if assignment is not None:
                search.keep(assignment)
                finalists = sorted([*finalists, assignment], key=lambda p: p.step_time_s)[
                    : params.finalists
                ]
            clock.step()
            if search.is_over:
                break
        search.stats["proposals"] = placed
        return finalists


@dataclass(frozen=True, slots=True)
class _Choices:
    """Ways to place one table, by rising bytes and falling time, unless `longest_s` says no.

    Attributes
    ----------
    options : list of ShardingOption
    price_indices : int64
        How many rows are in HBM: those worth it at the instance's price of this number.
    bytes_, time_s : float64
        HBM bytes and GPU seconds of all shards and replicas.
    longest_s : float64
        GPU seconds of the longest shard, or of one replica.
    """

    options: list[ShardingOption]
    price_indices: Int
    bytes_: Float
    time_s: Float
    longest_s: Float

    def only(self, at: Int) -> "_Choices":
        """The options with these numbers."""
        return _Choices(
            [self.options[n] for n in at.tolist()],
            self.price_indices[at],
            self.bytes_[at],
            self.time_s[at],
            self.longest_s[at],
        )

    def within(self, longest_s: float, most: int) -> "_Choices":
        """The best few options with no shard longer than a limit, else those with the shortest."""
        least = float(self.longest_s.min())
        # No limit is not a number where the bound is 0.
        fits = np.flatnonzero(self.longest_s <= np.fmax(longest_s, least))
        order = fits[np.lexsort((self.time_s[fits], self.bytes_[fits]))]
        times = self.time_s[order]
        before = np.concatenate(([np.inf], np.minimum.accumulate(times)[:-1]))
        front = order[times < before]
        if front.size > most:
            front = front[np.linspace(0, front.size - 1, most).round().astype(np.int64)]
        return self.only(front)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A sharding option and a price index for each table, and their GPU seconds together."""

    options: list[ShardingOption]
    price_indices: list[int]
    total_s: float


def _proposals(
    instance: Instance, bound: LagrangianBound, clock: Clock, params: DpParams
) -> Iterator[_Proposal]:
    """Proposals for each share of the bound, those with the most HBM first."""
    every = []
    for table in range(instance.tables):
        options = list(instance.options_of(table))
        if clock.spent:  # Nothing to choose from: what the bound would do with it.
            work = bound.option_for(table, bound.step_time_s * (1 + _ROUNDING))
            options = options[:1] if work is None else [work.option]
        every.append(_options(instance, table, options))
    first = True
    for share in params.longest_shares:
        if clock.spent and not first:
            return
        choices = [one.within(share * bound.step_time_s, params.options) for one in every]
        yield from _of_bins(instance, choices, params)
        first = False


def _options(instance: Instance, table: int, options: Sequence[ShardingOption]) -> _Choices:
    """Some sharding options of a table, each with the rows worth HBM at each price."""
    gpu, prices = instance.kinds[0], instance.prices.size
    values = np.zeros((3, len(options), prices))
    for at, option in enumerate(options):
        values[: GPU_S + 1, at] = instance.option_costs(table, option)
        shards, replica = instance.shards(table, option), instance.replica(table, option)
        if shards:
            ends = [instance.priced_costs(s, gpu)[: GPU_S + 1] for s in (shards[0], shards[-1])]
            # What no GPU has room for is as bad as one that takes forever.
            small = ends[0][BYTES] <= instance.hbm_bytes.max()
            slower = np.maximum(ends[0][GPU_S], ends[1][GPU_S])
            values[2, at] = np.where(small, slower, _NEVER_S)
        if replica is not None:
            values[2, at] += instance.priced_costs(replica, gpu)[GPU_S]
    return _Choices(
        [option for option in options for _ in range(prices)],
        np.tile(np.arange(prices), len(options)),
        values[BYTES].reshape(-1),
        values[GPU_S].reshape(-1),
        values[2].reshape(-1),
    )


def _of_bins(
    instance: Instance, choices: Sequence[_Choices], params: DpParams
) -> Iterator[_Proposal]:
    """The dynamic program, and proposals of its bins from the one with the most HBM down."""
    bins = min(params.most_bins, params.bins_per_gpu * instance.gpus)
    # GPUs may have no HBM at all beside what is reserved.
    size = max(float(instance.hbm_bytes.sum()) / bins, _LEAST_BYTES)
    best, used = np.full(bins, np.inf), np.zeros(bins)
    best[0] = 0.0
    at_bin = np.arange(bins)
    chosen = np.zeros((len(choices), bins), dtype=np.int16)
    came_from = np.zeros((len(choices), bins), dtype=np.int16)
    for table, mine in enumerate(choices):
        steps = np.minimum(mine.bytes_ / size, bins + 1.0)
        down = steps.astype(np.int64)
        # The bytes beyond a bin's start may or may not carry over into the next one.
        sources = at_bin - np.concatenate((down, down + 1))[:, None]
        more = np.concatenate((steps, steps))[:, None]
        added = np.concatenate((mine.time_s, mine.time_s))[:, None]
        possible = sources >= 0
        sources = np.maximum(sources, 0)
        then = used[sources] + more
        possible &= then.astype(np.int64) == at_bin
        total = np.where(possible, best[sources] + added, np.inf)
        at = total.argmin(axis=0)
        chosen[table] = at % steps.size
        came_from[table] = sources[at, at_bin]
        best, used = total[at, at_bin], then[at, at_bin]
    # More HBM for no less time is no proposal.
    least_before = np.concatenate(([np.inf], np.minimum.accumulate(best)[:-1]))
    worth = np.flatnonzero(best < least_before)[::-1]
    if worth.size > params.proposals:
        worth = worth[np.linspace(0, worth.size - 1, params.proposals).round().astype(np.int64)]
    for end in worth.tolist():
        picked = np.empty(len(choices), dtype=np.int64)
        at = end
        for table in range(len(choices) - 1, -1, -1):
            picked[table] = chosen[table, at]
            at = came_from[table, at]
        pairs = list(zip(choices, picked.tolist(), strict=True))
        yield _Proposal(
            [mine.options[n] for mine, n in pairs],
            [int(mine.price_indices[n]) for mine, n in pairs],
            float(best[end]),
        )


def _partitioned(instance: Instance, proposal: _Proposal) -> Assignment | None:
    """Shards of a proposal on the least loaded GPUs with room for them, longest first."""
    kinds, hosts = np.array(instance.kind_of_gpu), np.array(instance.host_of_gpu)
    load, hbm = np.zeros(instance.gpus), instance.hbm_bytes.copy()
    dram = instance.dram_bytes.copy()
    shards, replicas = instance.sharded(proposal.options)
    for replica in replicas:
        each = np.array([instance.priced_costs(replica, g)[:, 0] for g in instance.kinds])
        load += each[kinds, GPU_S]
        hbm -= each[kinds, BYTES]
    costs = {
        block: np.array(
            [
                sum(instance.priced_costs(p, g)[:, proposal.price_indices[p.table]] for p in block)
                for g in instance.kinds
            ]
        )
        for block in instance.blocks(shards)
    }
    apart: dict[int, list[int]] = {}
    pairs: list[tuple[TableShard, int]] = []
    for block in sorted(costs, key=lambda b: (-costs[b][0, GPU_S], b)):
        cost = costs[block][kinds]
        open_ = instance.open_gpus(block)
        open_ &= (cost[:, BYTES] <= hbm) & (cost[:, DRAM_BYTES] <= dram[hosts])
        for shard in block:
            open_[apart.get(shard.table, [])] = False
        after = np.where(open_, load + cost[:, GPU_S], np.inf)
        gpu = int(after.argmin())
        if not np.isfinite(after[gpu]):
            return None
        load[gpu] = after[gpu]
        hbm[gpu] -= cost[gpu, BYTES]
        dram[hosts[gpu]] -= cost[gpu, DRAM_BYTES]
        for shard in block:
            pairs.append((shard, gpu))
            if shard.option.shard_count > 1:
                apart.setdefault(shard.table, []).append(gpu)
    return Assignment.of(instance, pairs, replicas)
