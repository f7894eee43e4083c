"""A lower bound of the step time that pools all HBM at one price.

For any price λ ≥ 0 of a byte of HBM, any placement of step time T satisfies on each GPU

    Σ over its shards of (time + λ · bytes)  ≤  T + λ · HBM

Sum both sides over GPUs. The left side is at least the sum of each table's cheapest sharding
option, among options whose shards all finish within T, with each shard's cheapest number of hot
rows that one GPU can hold. So the smallest T for which this sum is at most GPUs × T + λ × all HBM
is a lower bound (Lagrangian duality; Geoffrion 1974, doi:10.1007/BFb0120690). Choose the price that
makes it large. The hosts' memory, pooled in the same way, gives a second bound.

docs/bounds.md has the whole argument: also for options that need not be costed
(`solvers.bounds.option_costs`), replicas, drives and servers.

Both bounds hold for the whole search space of `solvers.model.instance`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from solvers.bounds.hbm_prices import (
    constrained_bound,
    prices_around,
    prices_near_full_hbm,
    rough_prices,
)
from solvers.bounds.option_costs import OptionCosts, OptionPricer
from solvers.model.instance import Instance, ShardingOption
from solvers.model.knapsack import Float

_MOST_CROWDED = 200
_REPLICA_RANGES = 16
_REPLICA_PRICES = (0.0, 0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Ranges of β, for problems of at most so many tables, and prices of a second of replicas on
every GPU, in GPU seconds for each GPU. With one range, 7 of 44 bounds were up to 6% lower."""

_ALL_OPTIONS = 500
"""Up to this many tables × GPUs, cost all options that a stand-in may be cheaper than."""

_Round = tuple[float, npt.NDArray[np.floating], tuple[float, ...]]

_DRAM_PRICES: tuple[_Round, ...] = (
    (math.inf, 8.0 ** np.arange(-1, 8), (0.2, 0.5, 1.0, 2.0, 6.0)),
    (math.inf, 2.0 ** np.arange(-2, 3), (0.6, 0.8, 1.0, 1.25, 1.6)),
    (1.1, 1.2 ** np.arange(-2, 3), (0.85, 1.0, 1.2)),
    (1.02, 1.06 ** np.arange(-2, 3), (0.95, 1.0, 1.05)),
)
"""Rounds of factors for the price of DRAM and the price of HBM beside it, times the best so far.
The first price may be off by 8⁷, as rows on a drive take so much longer. The first number of a
round limits the step time, as a multiple of the best bound: the round bounds plans within it."""

_MOST_ROUNDS = 5
"""Repeat a round at most this often while its bound reaches its limit of the step time."""

_SERVER_SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 16.0, 64.0)
"""Worth of a server's second, as multiples of its speed relative to a GPU."""

_SERVED_PRICES: tuple[_Round, ...] = ((1.03, 1.06 ** np.arange(-1, 2), (0.96, 1.0, 1.04)),)
"""Rounds with servers, whose seconds have the price of `rough_prices`, as memories nearly do."""

_EXACT = 1e-6
"""Relative precision of a bound."""

_SHORTEST_S = float(np.finfo(np.float64).tiny)
"""Step times that differ by less are equal: floats cannot halve the interval."""


@dataclass(frozen=True, slots=True)
class OptionCost:
    """Least costs of one sharding option of a table.

    `longest_s` is the least time of the slowest shard. `priced_s` is the least time plus price
    times bytes, summed over shards.
    """

    option: ShardingOption
    longest_s: float
    priced_s: float


@dataclass(frozen=True, slots=True)
class LagrangianBound:
    """The Lagrangian bound of a problem, and the costs of sharding options behind it."""

    step_time_s: float
    price_s_per_byte: float  # The price λ: about the GPU seconds that one more byte of HBM saves.
    dram_price: float  # The price of a byte of DRAM.
    server_share: float  # Worth of a server's second, in seconds of a GPU.
    # For each table, options that include the cheapest for any step of at least its
    # `enough_from_s`, which is at most the bound.
    cheapest: tuple[tuple[OptionCost, ...], ...]
    enough_from_s: tuple[float, ...]
    part_s: float  # The bound by hosts' memory alone, or by pinned and grouped tables alone.
    # Returns all sharding options of a table, by its number. For many tables that is slow.
    options_of: Callable[[int], tuple[OptionCost, ...]]

    def option_for(self, table: int, step_time_s: float) -> OptionCost | None:
        """Return the cheapest known option whose shards take at most `step_time_s`.

        With many tables, unknown options may cost less.
        """
        enough = step_time_s >= self.enough_from_s[table]
        options = self.cheapest[table] if enough else self.options_of(table)
        allowed = [option for option in options if option.longest_s <= step_time_s]
        return min(allowed, key=lambda option: (option.priced_s, option.option), default=None)


def lagrangian_bound(
    instance: Instance,
    known: LagrangianBound | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> LagrangianBound:
    """Return the bound of this module's docstring.

    `known`: the bound of the same problem with other weights. Prices near its prices are tried, and
    its `part_s` is reused. `is_late`: returns true once no time is left for costing
    ways to cut tables, which raise the bound.
    """
    is_priced = known is None and (instance.lacks_dram or instance.needs_servers)
    if is_priced and instance.servers:
        rough_s, around = rough_prices(instance)
        bound = _refined(instance, 0.0, around, _SERVED_PRICES, known_s=rough_s)
        return replace(bound, step_time_s=max(bound.step_time_s, constrained_bound(instance)))
    if known is None:
        prices, part_s = prices_near_full_hbm(instance)
        # No bound here includes the fixed time of a step.
        part_s = max(0.0, part_s - instance.fixed_s, constrained_bound(instance))
    else:
        prices, part_s = prices_around(known.price_s_per_byte), known.part_s
    dram_price = 0.0 if known is None else known.dram_price
    shares = _server_shares(instance) if known is None else np.array([known.server_share])
    dram_prices = np.full(prices.size * shares.size, dram_price)
    prices, server_shares = np.tile(prices, shares.size), np.repeat(shares, prices.size)
    bound = _bound_at(instance, prices, dram_prices, part_s, server_shares, is_late=is_late)
    if not (is_priced and 0 < bound.step_time_s < math.inf):
        return bound
    # A row that leaves HBM takes DRAM: the price of HBM is about that of DRAM, of narrow rows less.
    price = bound.step_time_s * instance.gpus / max(1.0, float(instance.dram_bytes.sum()))
    return _refined(instance, part_s, (price, 1.0, 1.0), _DRAM_PRICES, bound)


def _refined(
    instance: Instance,
    part_s: float,
    around: tuple[float, float, float],
    rounds: Sequence[_Round],
    bound: LagrangianBound | None = None,
    known_s: float = 0.0,
) -> LagrangianBound:
    """Return the best bound of rounds of prices, each around the best prices of the last round.

    `around` has the first prices: of DRAM, of HBM relative to it, and of servers' seconds.
    """
    best, ratio, server_share = around
    for share, steps, ratios in rounds:
        dram_prices = np.repeat(best * np.array(steps), len(ratios))
        prices = dram_prices * ratio * np.tile(ratios, len(steps))
        server_shares = np.full(prices.size, server_share)
        for _ in range(_MOST_ROUNDS):
            limit_s = share * (known_s if bound is None else bound.step_time_s)
            found = _bound_at(instance, prices, dram_prices, part_s, server_shares, limit_s)
            bound = found if bound is None else max(bound, found, key=lambda one: one.step_time_s)
            if found.step_time_s < limit_s:
                break
        if found.dram_price:
            best, ratio = found.dram_price, found.price_s_per_byte / found.dram_price
    assert bound is not None, "there are rounds"
    return bound


def _server_shares(instance: Instance) -> Float:
    """Return prices to try for a server's second, in seconds of a GPU; 1 without servers.

    They are around the time that a GPU takes for all tables over the time that a server takes.
    """
    if not instance.servers:
        return np.ones(1)
    of_gpu, of_server = (
        sum(
            float(instance.curve(instance.whole(t), gpu).gpu_s.min())
            for t in range(instance.tables)
        )
        for gpu in (instance.kinds[0], instance.kinds[-1])
    )
    return np.array(_SERVER_SHARES) * (of_gpu / of_server if of_gpu and of_server else 1.0)


def _bound_at(
    instance: Instance,
    prices: Float,
    dram_prices: Float,
    part_s: float,
    server_shares: Float,
    limit_s: float = math.inf,
    is_late: Callable[[], bool] = lambda: False,
) -> LagrangianBound:
    """Return the best bound of some triples of prices: of HBM, of DRAM, and of servers' seconds.

    It bounds plans within `limit_s`, in which no shard waits longer for its drive. It is at most
    `limit_s`.
    """
    few = instance.tables * instance.gpus <= _ALL_OPTIONS
    pricer = OptionPricer(instance, prices, dram_prices, server_shares, limit_s)
    devices = instance.gpus - instance.servers + instance.servers * server_shares
    worth_s = prices * instance.all_hbm_bytes
    worth_s += dram_prices * float(instance.all_dram_bytes.sum())
    if instance.servers:  # What each device's chains take always, less what is added to the bound.
        of_gpus, of_servers = instance.objective.fixed_s, instance.objective_of_servers.fixed_s
        worth_s += min(of_gpus, of_servers) * devices - of_gpus * instance.gpus
        worth_s -= (of_servers * server_shares - of_gpus) * instance.servers
    extra_s = instance.sharding_overhead_s
    every = cache(pricer.every)
    uncut = every if extra_s is None else cache(lambda table: pricer.uncut(table, extra_s))
    costs = [uncut(table) for table in instance.alike]
    bound_s, known = part_s, set[int]()
    while True:
        bound_s, best, replicas_s = _best_bound(devices, costs, worth_s, part_s, bound_s)
        # No step is shorter, so tables that one GPU can serve within it need no finer option;
        # beside replicas of other tables there is less time for it.
        longer = [
            table
            for table, of in enumerate(costs)
            if of.stood_for
            and table not in known
            and not (
                of.longest_s[0] <= bound_s
                and (not few or of.enough_from_s(best) + replicas_s <= bound_s)
            )
        ]
        if not longer:
            break
        known.update(longer)
        finer: dict[int, OptionCosts] = {}
        for table in longer:
            if is_late() and not few:
                break
            like = instance.alike[table]
            if like not in finer:
                of_all = every(like) if few else pricer.promising(like, costs[table], bound_s)
                finer[like] = of_all
            costs[table] = finer[like]
    cheapest = tuple(_at_price(of, best, may_be_cut=not few) for of in costs)
    return LagrangianBound(
        min(bound_s, limit_s),
        float(prices[best]),
        float(dram_prices[best]),
        float(server_shares[best]),
        cheapest,
        tuple(of.enough_from_s(best) if few else 0.0 for of in costs),
        part_s,
        cache(lambda table: _at_price(every(instance.alike[table]), best)),
    )


def _at_price(
    costs: OptionCosts, price: int, *, may_be_cut: bool = False
) -> tuple[OptionCost, ...]:
    """Return the options themselves; if divisible, their shards may be as short as needed."""
    longest_s = costs.longest_s.copy()
    if may_be_cut:
        longest_s[list(costs.stood_for)] = costs.longest_s[costs.own :]
    every = zip(costs.options, longest_s.tolist(), costs.priced_s[:, price].tolist(), strict=True)
    return tuple(OptionCost(*each) for each in every)[: costs.own]


def _best_bound(
    devices: Float,
    works: Sequence[OptionCosts],
    memory_worth_s: Float,
    part_s: float,
    known_s: float,
) -> tuple[float, int, float]:
    """Return the largest bound of all prices, its price's number, and what replicas take.

    At each price all memory together is worth so many seconds, and a second of all devices, as
    many GPU seconds. No step is shorter than `known_s`.
    """
    shape = len(works), max(len(work.options) for work in works)
    longest, replica_s = np.full(shape, np.inf), np.zeros(shape)
    priced = np.full((*shape, memory_worth_s.size), np.inf)
    for table, work in enumerate(works):
        longest[table, : len(work.options)] = work.longest_s
        replica_s[table, : len(work.options)] = work.replica_s
        priced[table, : len(work.options)] = work.priced_s
    lowest_s = max(part_s, float(longest.min(axis=1).max()))
    least_s = max(lowest_s, known_s)
    best_s, best, most_s, replicas_s = least_s, 0, -np.inf, 0.0
    # The middle price is mostly among the best. Others need only be shown to be no better.
    for at in sorted(range(memory_worth_s.size), key=lambda at: abs(at - memory_worth_s.size // 2)):
        gpus = float(devices[at])
        work_s = _Work(priced[:, :, at], longest, replica_s, lowest_s, gpus)
        worth_s = float(memory_worth_s[at])
        low = best_s
        needed_s = work_s(low) - worth_s
        if needed_s <= gpus * low:
            if best_s == least_s and needed_s > most_s:  # The worth of HBM, if not the bound.
                best, most_s, replicas_s = at, needed_s, work_s.most_replicas_s
            continue
        # Work falls in steps as T grows. Find where it crosses GPUs × T.
        high = max(low, float(longest[np.isfinite(longest)].max())) + work_s.most_replicas_s
        high = max(high, (work_s(high) - worth_s) / gpus)
        while high - low > max(_EXACT * high, _SHORTEST_S):
            middle = (low + high) / 2
            enough = work_s.is_within(middle, gpus * middle + worth_s)
            low, high = (low, middle) if enough else (middle, high)
        best_s, best, replicas_s = low, at, work_s.most_replicas_s
    return best_s, best, replicas_s


class _Work:
    """GPU seconds plus price times bytes of all tables, as a function of the step time."""

    def __init__(
        self, costs: Float, longest: Float, replica_s: Float, lowest_s: float, gpus: float
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
        shards_s = longest[~constant] - replica_s
        # Ranges of the time of all replicas: the last one has no end.
        crowded = bool((longest.min(axis=1) + at_most > lowest_s).any()) and at_most > 0
        crowded &= len(longest) <= _MOST_CROWDED
        starts = np.linspace(0, at_most, _REPLICA_RANGES) if crowded else np.zeros(1)
        self.ends = (*starts[1:].tolist(), math.inf)
        # What options' shards and replicas take at least in each range.
        self.needed_s = shards_s + np.maximum(starts[:, None, None], replica_s)
        # Each range but the last at several prices of a second of replicas, shape (prices, ...).
        self.prices = np.array(_REPLICA_PRICES if crowded else (0.0,)) * gpus
        self.priced = costs + self.prices[:, None, None] * replica_s

    def __call__(self, step_time_s: float) -> float:
        return self.done_s + min(self._of_ranges(step_time_s))

    def is_within(self, step_time_s: float, room_s: float) -> bool:
        """Return whether it is at most that: in a first range of replicas that shows it."""
        return any(self.done_s + work_s <= room_s for work_s in self._of_ranges(step_time_s))

    def _of_ranges(self, step_time_s: float) -> Iterator[float]:
        for end, needed_s in zip(self.ends, self.needed_s, strict=True):
            priced = self.priced if end < math.inf else self.priced[:1]
            open_s = np.where(needed_s > step_time_s, math.inf, priced)
            totals = open_s.min(axis=2, initial=math.inf).sum(axis=1)
            if end < math.inf:
                totals -= self.prices * end
            yield float(totals.max())
