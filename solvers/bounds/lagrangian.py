"""A lower bound of the step time by pooling all HBM at one price.

For any price λ ≥ 0 of a byte of HBM, any placement of step time T satisfies on each GPU

    Σ over its shards of (time + λ · bytes)  ≤  T + λ · HBM

Summed over GPUs, the left side is at least what the tables cost when each takes its
cheapest sharding option, among those whose every shard can finish within T, and each shard its
cheapest number of hot rows that one GPU can hold. The smallest T for which that sum is at most GPUs
× T + λ × all HBM is therefore a lower bound (Lagrangian duality; Geoffrion 1974,
doi:10.1007/BFb0120690). The price is chosen to make it large. The hosts' memory gives a second one:
what must be staged whatever is in HBM, taken as one memory.

Where cutting a table always costs extra (`CostModel.sharding_overhead_s`), the sharding options of
tables that one GPU can serve whole need not be looked at: the whole table stands for all of them,
its rows split freely and one GPU's memory no limit, plus that extra cost.

What is replicated takes the same time β of every GPU, so that a shard has T − β left and not
T: a GPU that serves a long shard leaves little room for replicas of other tables. The sum is
therefore taken for each of a list of ranges of β: with sharding options that leave room for the
least β of the range, and replicas that take the most of it together, a budget that is priced like
HBM is. The smallest of those sums counts.

Both hold for the whole search space of `solvers.model.instance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cost_models.step_equation.contention import most_work_s
from solvers.bounds.hbm_prices import prices_near_full_hbm
from solvers.bounds.least_cost import least
from solvers.model.instance import Instance, ShardingOption, TableShard

Float = npt.NDArray[np.float64]

_MOST_CROWDED = 200
_REPLICA_RANGES = 16
_REPLICA_PRICES = (0.0, 0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Ranges of β, for problems of at most so many tables, and prices of a second of replicas on
every GPU, in GPU seconds for each GPU."""

_ALL_OPTIONS = 500
"""Tables × GPUs up to which all sharding options of all tables are looked at."""

_EXACT = 1e-6
"""Share of itself to which a bound is known."""

_SHORTEST_S = float(np.finfo(np.float64).tiny)
"""Step times that differ by less are equal: below it, floats have no middle."""


@dataclass(frozen=True, slots=True)
class OptionCost:
    """One sharding option of a table, at the best for each of its shards.

    `longest_s` is the least time of the slowest shard; `priced_s` the least time plus price
    times bytes, summed over shards.
    """

    option: ShardingOption
    longest_s: float
    priced_s: float


@dataclass(frozen=True, slots=True)
class LagrangianBound:
    """The Lagrangian bound of a problem, and the costs of sharding options behind it.

    Attributes
    ----------
    step_time_s : float
    price_s_per_byte : float
        The price λ: GPU seconds that one more byte of HBM saves, about.
    hbm_worth_s : float
        λ × all HBM.
    options : tuple of tuples of OptionCost
        Per table, every sharding option of the search space that can be the cheapest for a step
        time of at least the bound.
    dram_s : float
        The part that the hosts' memory alone enforces.
    """

    step_time_s: float
    price_s_per_byte: float
    hbm_worth_s: float
    options: tuple[tuple[OptionCost, ...], ...]
    dram_s: float

    def option_for(self, table: int, step_time_s: float) -> OptionCost | None:
        """The cheapest sharding option whose shards can each take at most `step_time_s`."""
        allowed = [option for option in self.options[table] if option.longest_s <= step_time_s]
        return min(allowed, key=lambda option: (option.priced_s, option.option), default=None)

    def work_s(self, step_time_s: float) -> float:
        """GPU seconds that any placement of that step time needs; infinite if there is none."""
        total = -self.hbm_worth_s
        for table in range(len(self.options)):
            option = self.option_for(table, step_time_s)
            if option is None:
                return float("inf")
            total += option.priced_s
        return total


@dataclass(frozen=True, slots=True)
class _Works:
    """Sharding options of a table with times, and costs at several prices.

    `longest_s` and `replica_s`, the part of it that all GPUs spend on replicas, have shape
    (options,), `priced_s` shape (options, prices).
    """

    options: tuple[ShardingOption, ...]
    longest_s: Float
    replica_s: Float
    priced_s: Float

    def set(self, at: int, longest_s: float, replica_s: float, priced_s: Float) -> None:
        """Fill in one sharding option."""
        self.longest_s[at], self.replica_s[at], self.priced_s[at] = longest_s, replica_s, priced_s


def lagrangian_bound(instance: Instance) -> LagrangianBound:
    """The bound of this module's docstring."""
    prices, dram_s = prices_near_full_hbm(instance)
    dram_s = max(0.0, dram_s - instance.fixed_s)  # What every step takes is beside it.
    few = instance.tables * instance.gpus <= _ALL_OPTIONS
    extra_s = None if few else instance.sharding_overhead_s
    whole = _Whole(instance, prices)
    if extra_s is None:
        works = [_all_works(instance, whole, table, prices) for table in range(instance.tables)]
    else:
        usual_works = [
            _whole_works(instance, whole, table, prices, extra_s)
            for table in range(instance.tables)
        ]
        works = [work for work, _ in usual_works]
        # No step is shorter than this, so that tables that one GPU can serve within it need
        # no finer option; the others do.
        least_s = _best_bound(instance, works, prices, dram_s)[0]
        for table, (_, usual_s) in enumerate(usual_works):
            if usual_s > least_s or not np.isfinite(usual_s):
                works[table] = _all_works(instance, whole, table, prices)
    bound_s, best = _best_bound(instance, works, prices, dram_s)
    options = tuple(
        tuple(
            OptionCost(option, float(longest), float(priced))
            for option, longest, priced in zip(
                work.options, work.longest_s, work.priced_s[:, best], strict=True
            )
        )
        for work in works
    )
    hbm_worth_s = float(prices[best] * instance.hbm_bytes.sum())
    return LagrangianBound(bound_s, float(prices[best]), hbm_worth_s, options, dram_s)


def contended_bound_s(instance: Instance, bound: LagrangianBound) -> float:
    """The bound of whole steps, where GPUs of one host slow each other (`CostModel.contention`).

    The GPUs of a host that have work are slowed by one another, in the mean. A single shard may be
    served while all other GPUs are idle, so that the limits of shards stay as they are.
    """
    topology, share = instance.problem.topology, instance.cost_model.contention
    lowest_s = bound.step_time_s + instance.fixed_s
    if not share:
        return lowest_s
    launches_s = instance.fixed_s - instance.objective.fixed_s
    low, high = lowest_s, lowest_s * (1 + share * len(topology.gpus))
    while high - low > _EXACT * high:  # Work falls in steps as T grows.
        middle = (low + high) / 2
        room_s = most_work_s(topology, share, middle - instance.objective.fixed_s, launches_s)
        enough = bound.work_s(middle - instance.fixed_s) <= room_s
        low, high = (low, middle) if enough else (middle, high)
    return low


def _best_bound(
    instance: Instance, works: Sequence[_Works], prices: Float, dram_s: float
) -> tuple[float, int]:
    """The largest bound of all prices, and the number of its price."""
    shape = len(works), max(len(work.options) for work in works)
    longest, replica_s = np.full(shape, np.inf), np.zeros(shape)
    priced = np.full((*shape, prices.size), np.inf)
    for table, work in enumerate(works):
        longest[table, : len(work.options)] = work.longest_s
        replica_s[table, : len(work.options)] = work.replica_s
        priced[table, : len(work.options)] = work.priced_s
    lowest_s = max(dram_s, float(longest.min(axis=1).max()))
    best_s, best, most_s = lowest_s, 0, -np.inf
    # The middle price is mostly among the best: others need only show that they are no better.
    for at in sorted(range(prices.size), key=lambda at: abs(at - prices.size // 2)):
        work_s = _Work(priced[:, :, at], longest, replica_s, lowest_s, instance.gpus)
        hbm_worth_s = float(prices[at] * instance.hbm_bytes.sum())
        low = best_s
        needed_s = work_s(low) - hbm_worth_s
        if needed_s <= instance.gpus * low:
            if best_s == lowest_s and needed_s > most_s:  # The worth of HBM, if not the bound.
                best, most_s = at, needed_s
            continue
        # Work falls in steps as T grows: find where it crosses GPUs × T.
        high = max(low, float(longest[np.isfinite(longest)].max())) + work_s.most_replicas_s
        high = max(high, (work_s(high) - hbm_worth_s) / instance.gpus)
        while high - low > max(_EXACT * high, _SHORTEST_S):
            middle = (low + high) / 2
            enough = work_s(middle) - hbm_worth_s <= instance.gpus * middle
            low, high = (low, middle) if enough else (middle, high)
        best_s, best = low, at
    return best_s, best


class _Work:
    """GPU seconds plus price times bytes of all tables, as a function of the step time."""

    def __init__(
        self, costs: Float, longest: Float, replica_s: Float, lowest_s: float, gpus: int
    ) -> None:
        usual = np.where(longest <= lowest_s, costs, np.inf).argmin(axis=1)
        at_most = float(replica_s[np.arange(usual.size), usual].sum())
        self.most_replicas_s = at_most
        # Tables whose every sharding option fits, however much is replicated, cost the same at any
        # T.
        fits = (longest + at_most <= lowest_s) | np.isinf(costs)
        constant = fits.all(axis=1) & (replica_s.max(axis=1) == 0)
        self.done_s = float(costs[constant].min(axis=1).sum())
        costs, replica_s = costs[~constant], replica_s[~constant]
        self.shards_s = longest[~constant] - replica_s
        # Ranges of the time of all replicas: the last one has no end.
        crowded = bool((longest.min(axis=1) + at_most > lowest_s).any()) and at_most > 0
        crowded &= len(longest) <= _MOST_CROWDED
        self.starts = np.linspace(0, at_most, _REPLICA_RANGES) if crowded else np.zeros(1)
        self.replica_s = replica_s
        # Each range but the last at several prices of a second of replicas, shape (prices, ...).
        self.prices = np.array(_REPLICA_PRICES if crowded else (0.0,)) * gpus
        self.priced = costs + self.prices[:, None, None] * replica_s

    def __call__(self, step_time_s: float) -> float:
        least = np.inf
        for start, end in pairwise((*self.starts.tolist(), np.inf)):
            closed = self.shards_s + np.maximum(start, self.replica_s) > step_time_s
            priced = self.priced if np.isfinite(end) else self.priced[:1]
            totals = np.where(closed, np.inf, priced).min(axis=2, initial=np.inf).sum(axis=1)
            if np.isfinite(end):
                totals -= self.prices * end
            least = min(least, float(totals.max()))
        return self.done_s + least


class _Whole:
    """Whole tables on each kind of GPU, at several prices."""

    def __init__(self, instance: Instance, prices: Float) -> None:
        self.instance = instance
        self.prices = prices
        # Column slices of one width, in however many of a table's options, have one curve.
        self._least = lru_cache(256)(lambda curve, most: least(curve, most, prices))
        self.most_of_kind = [
            max(
                float(h)
                for h, k in zip(instance.hbm_bytes, instance.kind_of_gpu, strict=True)
                if k == kind
            )
            for kind in range(len(instance.kinds))
        ]

    def best(self, shard: TableShard) -> tuple[float, Float]:
        """Least time, and least time + price × bytes at each price, on the best kind of GPU."""
        least_of_kinds = [
            self._least(self.instance.curve(shard, gpu), most)
            for gpu, most in zip(self.instance.kinds, self.most_of_kind, strict=True)
        ]
        return min(time_s for time_s, _ in least_of_kinds), np.min(
            [p for _, p in least_of_kinds], axis=0
        )

    def free(self, shard: TableShard) -> Float:
        """Least time + price × bytes without the cost of splits and the limit of one GPU."""
        priced_s = []
        for gpu in self.instance.kinds:
            curve = self.instance.free_curve(shard, gpu)
            priced_s.append((curve.gpu_s + self.prices[:, None] * curve.hbm_bytes).min(axis=1))
        lowest: Float = np.min(priced_s, axis=0)
        return lowest

    def replicas(self, shard: TableShard | None) -> tuple[float, Float]:
        """Time of replicas on the best GPU, and their cost on all GPUs together."""
        if shard is None:
            return 0.0, np.zeros_like(self.prices)
        instance = self.instance
        curves = [instance.curve(shard, gpu) for gpu in instance.kinds]
        counts = np.bincount(instance.kind_of_gpu)
        total = np.zeros_like(self.prices)
        for curve, count in zip(curves, counts, strict=True):
            total += count * (curve.gpu_s[0] + self.prices * curve.hbm_bytes[0])
        return min(float(curve.gpu_s[0]) for curve in curves), total


def _all_works(instance: Instance, whole: _Whole, table: int, prices: Float) -> _Works:
    """Every sharding option of a table."""
    options = instance.options_of(table)
    works = _Works(
        options,
        np.zeros(len(options)),
        np.zeros(len(options)),
        np.zeros((len(options), prices.size)),
    )
    for at, option in enumerate(options):
        works.set(at, *_work_of(instance, whole, table, option))
    return works


def _work_of(
    instance: Instance, whole: _Whole, table: int, option: ShardingOption
) -> tuple[float, float, Float]:
    """Longest shard, time of replicas, and costs at each price of one sharding option."""
    replica_s, priced = whole.replicas(instance.replica(table, option))
    shards = instance.shards(table, option)
    if not shards:
        return replica_s, replica_s, priced
    least_of_shards = [whole.best(shard) for shard in _representatives(shards)]
    longest_s = replica_s + max(time_s for time_s, _ in least_of_shards)
    priced = priced + np.sum([p for _, p in least_of_shards], axis=0)
    # Thin slices differ only in which of the hottest ranks they hold; the last one has
    # the least work and stands for those that were not looked at.
    if rest := len(shards) - len(least_of_shards):
        priced = priced + rest * least_of_shards[-1][1]
    return longest_s, replica_s, priced


def _whole_works(
    instance: Instance, whole: _Whole, table: int, prices: Float, extra_s: float
) -> tuple[_Works, float]:
    """The uncut variants of a table, cheap enough to stand for all sharding options.

    Their `priced_s` and `longest_s` are below those of all sharding options with the same replicas
    and cold rows read alike; caches are looked at one by one. Also returned is the longest time of
    the first variant in truth: it stands for all for any step that is not shorter.
    """
    options = instance.options_of(table)
    finer = {(option.replicated_rows, option.cold) for option in options if option.shard_count > 1}
    chosen = tuple(
        option for option in options if option.shard_count == 1 or option.cold == "cached"
    )
    works = _Works(
        chosen, np.zeros(len(chosen)), np.zeros(len(chosen)), np.zeros((len(chosen), prices.size))
    )
    usual_s = 0.0
    for at, option in enumerate(chosen):
        longest_s, replica_s, priced = _work_of(instance, whole, table, option)
        if at == 0:
            usual_s = longest_s
        if option.cold != "cached" and (option.replicated_rows, option.cold) in finer:
            longest_s = replica_s  # Shards of finer options may be shorter.
            free = whole.replicas(instance.replica(table, option))[1] + extra_s
            for shard in instance.shards(table, option):
                free = free + whole.free(shard)
            priced = np.minimum(priced, free)
        works.set(at, longest_s, replica_s, priced)
    return works, usual_s


def _representatives(shards: list[TableShard]) -> list[TableShard]:
    """The first shards, which hold the hottest ranks, and the last."""
    return shards if len(shards) <= 5 else [*shards[:4], shards[-1]]
