"""Decide whether drives hold rows, and which, if sharding options leave that open.

At a price of a byte of DRAM, the coldest rows of a shard belong on the drive: those whose time
costs less than their bytes in DRAM. GPUs of a host share its DRAM. So find the least time for which
all of them fit, where each GPU has the highest price at which it finishes within that time.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cost_models import ANY_SHARE, TableShard
from solvers.model.knapsack import DRAM_BYTES, HOT, PHASES, Float, Knapsack

if TYPE_CHECKING:
    from solvers.model.instance import Instance

Filled = Callable[[int, Sequence[TableShard]], "Knapsack | None"]
"""Returns the knapsack of a GPU with some shards."""

_LEAST_SHARE = 1e-12
"""A share of rows below one row of any table. Open shares lie between it and 1, as no rows and all
rows on a drive are options of their own."""

_FACTORS = np.exp(np.sinh(np.linspace(3.3, -3.3, 133)))
"""Prices of DRAM for single GPUs, as multiples of the common price: 5% apart near it."""

_MOST_FILLED = 3
"""Fill a host's DRAM this often, each time with more bytes left free, until all rows fit."""

_EXACT = 1e-4
"""Relative precision of the time of a host's GPUs."""


_FILLED = 0.5
"""Share of HBM that is assumed to hold rows instead of buffers."""


def takes_drives(instance: "Instance") -> bool:
    """Return whether tables may exceed HBM and DRAM and drives take the rest."""
    topology = instance.problem.topology
    with_gpus = [host for host in topology.hosts if topology.gpus_of(host.id)]
    has_drives = all(host.drive is not None for host in with_gpus)
    return has_drives and _is_too_large(instance)


def takes_servers(instance: "Instance") -> bool:
    """Return whether tables may exceed the memory of hosts with GPUs and servers take the rest.

    Hosts with GPUs are then mostly full.
    """
    return instance.servers > 0 and _is_too_large(instance)


def _is_too_large(instance: "Instance") -> bool:
    tables = sum(one.table.total_bytes for one in instance.problem.profile)
    return tables > instance.all_hbm_bytes * _FILLED + float(instance.all_dram_bytes.sum())


class DriveRows:
    """Chooses shares of rows on drives at prices of DRAM."""

    def __init__(self, instance: "Instance") -> None:
        self._instance = instance
        self._settled: dict[tuple[TableShard, int, float], TableShard] = {}

    def settled(self, shard: TableShard, gpu: int, dram_price: float | None = None) -> TableShard:
        """Return a shard with the best share of rows on the drive, if its option leaves it open.

        The price is `dram_price`, by default the instance's. Servers keep all rows in memory.
        """
        if shard.option.home.drive_share != ANY_SHARE or not self._instance.is_gpu(gpu):
            return shard
        price = self._instance.dram_price if dram_price is None else dram_price
        key = shard, self._instance.kind_of_gpu[gpu], price
        settled = self._settled.get(key)
        if settled is None:
            curve, first = self._instance.free_curve(shard, gpu), 0
            if price < np.inf:
                assert curve.drive_s is not None
                first = int((curve.drive_s - price * curve.dram_bytes).argmin())
            last = int(curve.hot_rows[-1])
            settled = at_drive_share(shard, last - int(curve.hot_rows[first]), last)
            self._settled[key] = settled
        return settled

    def apart(self, shard: TableShard, gpu: int, costs: Float) -> tuple[Float, Float]:
        """Split priced costs into those without the drive's time, and that time with DRAM's worth.

        Their shapes are (5 + phases, prices) and (2, prices).
        """
        instance, drive_s = self._instance, np.zeros(costs.shape[1])
        share = shard.option.home.drive_share
        if share and instance.is_gpu(gpu):
            curve = instance.free_curve(_with_share(shard, ANY_SHARE), gpu)
            assert curve.drive_s is not None
            assert curve.drive_s_of_phases is not None
            first = self.settled(shard, gpu).option.home.first_on_drive(int(curve.hot_rows[-1]))
            rows = np.maximum(costs[HOT], first)
            drive_s = np.interp(rows, curve.hot_rows, curve.drive_s)
            costs = costs.copy()
            phases_s = curve.drive_s_of_phases
            costs[PHASES][: len(phases_s)] -= [np.interp(rows, curve.hot_rows, p) for p in phases_s]
        return costs, np.stack((drive_s, instance.dram_price * costs[DRAM_BYTES]))

    def chain(self) -> tuple[Float, float]:
        """Return which phases are in the chain with drives, and the worth of a GPU's mean DRAM.

        The worth is less the fixed time of the chain. Without drives there are no phases; without a
        price of DRAM the array is empty.
        """
        instance, objective = self._instance, self._instance.objective
        if not instance.dram_price:
            return np.zeros(0), 0.0
        gpus = instance.gpus - instance.servers
        worth_s = instance.dram_price * float(instance.dram_bytes.sum()) / gpus
        if not instance.lacks_dram:
            return np.zeros_like(objective.members[0]), worth_s
        chain = int(objective.chain_weights.argmax())
        return objective.members[chain], worth_s - float(objective.fixed[chain])

    def filled(
        self, shards: Sequence[list[TableShard]], knapsack: Filled
    ) -> list[list[TableShard]]:
        """Return each GPU's shards with open shares chosen so that DRAM is full.

        If that does not fit, put all their rows on drives.
        """
        instance, found = self._instance, [list(mine) for mine in shards]
        for host, room in enumerate(instance.dram_bytes.tolist()):
            gpus = [gpu for gpu, of in enumerate(instance.host_of_gpu) if of == host]
            if not instance.is_gpu(gpus[0]):
                continue
            _Host(self, instance, {gpu: found[gpu] for gpu in gpus}, knapsack).fill(room, found)
        return found


def is_open(shard: TableShard) -> bool:
    """Return whether a shard's option leaves its share of rows on the drive open."""
    return shard.option.home.drive_share not in (0.0, 1.0)


def opened(shard: TableShard) -> TableShard:
    """Return a shard without its chosen share of rows on the drive, if that is open."""
    return _with_share(shard, ANY_SHARE) if is_open(shard) else shard


def at_drive_share(shard: TableShard, on_drive: int, rows: int) -> TableShard:
    """Return a shard with this share of rows on the drive, if that is open."""
    if not is_open(shard):
        return shard
    return _with_share(shard, min(max(on_drive / max(1, rows), _LEAST_SHARE), 1 - _LEAST_SHARE))


def _with_share(shard: TableShard, share: float) -> TableShard:
    option = shard.option
    return shard._replace(option=option._replace(home=option.home._replace(drive_share=share)))


class _Host:
    """The GPUs of a host at falling prices of DRAM."""

    def __init__(
        self,
        drives: DriveRows,
        instance: "Instance",
        shards: dict[int, list[TableShard]],
        knapsack: Filled,
    ) -> None:
        self._drives, self._instance, self._shards = drives, instance, shards
        self._knapsack = knapsack
        price = instance.dram_price or float(instance.prices[-2])
        self._prices = np.array([np.inf, *price * _FACTORS, 0.0])
        self._known: dict[tuple[int, int], tuple[list[TableShard], Knapsack | None]] = {}

    def fill(self, room: float, found: list[list[TableShard]]) -> None:
        """Write the shards of each GPU to `found`."""
        if not any(shard.option.home.drive_share == ANY_SHARE for m in found for shard in m):
            return
        last = self._prices.size - 1
        low = max(self._time_s(gpu, last) for gpu in self._shards)
        high = max(self._time_s(gpu, 0) for gpu in self._shards)
        levels = dict.fromkeys(self._shards, 0)
        if np.isfinite(high) and self._dram(levels) <= room:
            free = dict.fromkeys(self._shards, last)
            if self._dram(free) <= room:
                levels, low = free, high
            while high - low > _EXACT * high:
                middle = (low + high) / 2
                trial = {gpu: self._level(gpu, middle) for gpu in self._shards}
                if self._dram(trial) <= room:
                    levels, high = trial, middle
                else:
                    low = middle
        # Prices have steps: what fits, and the next higher prices, with what is left of DRAM used.
        higher = {gpu: max(0, level - 1) for gpu, level in levels.items()}
        spare = 0.0
        for _ in range(_MOST_FILLED):
            ways = [self._full(room - spare, one) for one in (levels, higher)]
            chosen = min(ways, key=lambda way: way[0])[1]
            # Other shares have other buffers in HBM, which may move rows from there to DRAM.
            filled = [self._knapsack(gpu, shards) for gpu, shards in chosen.items()]
            over = sum(np.inf if one is None else one.dram_bytes for one in filled) - room
            if over <= 0:
                break
            spare += 2 * over
        for gpu, shards in chosen.items():
            found[gpu] = shards

    def _at(self, gpu: int, level: int) -> tuple[list[TableShard], Knapsack | None]:
        """Return a GPU's shards at a price, and its knapsack with them."""
        known = self._known.get((gpu, level))
        if known is None:
            price = float(self._prices[level])
            shards = sorted(self._drives.settled(s, gpu, price) for s in self._shards[gpu])
            known = self._known[gpu, level] = shards, self._knapsack(gpu, shards)
        return known

    def _time_s(self, gpu: int, level: int) -> float:
        filled = self._at(gpu, level)[1]
        return np.inf if filled is None else filled.gpu_s

    def _dram(self, levels: dict[int, int]) -> float:
        filled = (self._at(gpu, level)[1] for gpu, level in levels.items())
        return sum(np.inf if one is None else one.dram_bytes for one in filled)

    def _level(self, gpu: int, time_s: float) -> int:
        """Return the highest price at which a GPU finishes in time."""
        low, high = -1, self._prices.size - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._time_s(gpu, middle) <= time_s else (middle, high)
        return high

    def _full(
        self, room: float, levels: dict[int, int]
    ) -> tuple[float, dict[int, list[TableShard]]]:
        """Return the time and each GPU's shards once rows of slow GPUs fill the DRAM left."""
        left = room - self._dram(levels)
        found = {gpu: list(self._at(gpu, level)[0]) for gpu, level in levels.items()}
        times_s = {gpu: self._time_s(gpu, level) for gpu, level in levels.items()}
        slow = set(times_s)
        while left > 0 and slow:
            gpu = max(slow, key=lambda one: times_s[one])
            best = 0.0, 0, 0, 0.0, 0.0
            filled = self._at(gpu, levels[gpu])[1]
            for number, shard in enumerate(found[gpu]):
                if filled is None or not is_open(shard):
                    continue
                curve = self._instance.free_curve(opened(shard), gpu)
                assert curve.drive_s is not None
                last, hot = int(curve.hot_rows[-1]), filled.hot_rows[number]
                first = max(hot, shard.option.home.first_on_drive(last))
                if first >= last:
                    continue
                row_bytes = float(curve.dram_bytes[0]) / last
                end = int(curve.hot_rows[np.searchsorted(curve.hot_rows, first, side="right")])
                end = min(end, first + int(left / row_bytes))
                if end <= first:
                    continue
                saved = -float(np.diff(np.interp([first, end], curve.hot_rows, curve.drive_s))[0])
                taken = (end - first) * row_bytes
                best = max(best, (saved / taken, number, last - end, saved, taken))
            worth, number, on_drive, saved, taken = best
            if worth <= 0:
                slow.remove(gpu)
                continue
            shard = found[gpu][number]
            rows = int(self._instance.free_curve(opened(shard), gpu).hot_rows[-1])
            found[gpu][number] = at_drive_share(shard, on_drive, rows)
            left, times_s[gpu] = left - taken, times_s[gpu] - saved
        return max(times_s.values()), found
