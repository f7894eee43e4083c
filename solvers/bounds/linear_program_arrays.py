"""All placements that a linear relaxation mixes, as arrays over which priced leasts are taken."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from solvers.bounds.linear_program_devices import DeviceGroups, Prices
from solvers.bounds.linear_program_tables import (
    BYTES,
    DRAM_BYTES,
    DRAM_S,
    GPU_S,
    TableChoice,
    TableChoices,
)
from solvers.model.instance import Instance

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

_MOST_POINTS = 20_000_000
"""Points of shards, 32 bytes each, beyond which there is no relaxation."""


class Space:
    """All points of all shards of all sharding options that a plan faster than some other can use.

    Sharding options are in the order of their tables, parts (shards that cost the same) in the
    order of their sharding options, and the points of each group in the order of the parts.

    Attributes
    ----------
    groups : DeviceGroups
    first_cut : int64, shape (tables,)
        Of each table; all have one.
    longest_s : float64, shape (options,)
        A lower limit of the time in which the slowest shard of a sharding option is done.
    """

    def __init__(self, groups: DeviceGroups, choices: Sequence[Sequence[TableChoice]]) -> None:
        self.groups = groups
        every = [choice for mine in choices for choice in mine]
        sizes = [len(mine) for mine in choices]
        self.first_option: Int = np.cumsum([0, *sizes[:-1]])
        self.longest_s: Float = np.array([choice.longest_s for choice in every])
        counts = groups.gpu_counts
        self._replica_s = np.stack([choice.replica_s for choice in every]) * counts
        self._replica_bytes = np.stack([choice.replica_bytes for choice in every]) * counts
        parts = [part for choice in every for part in choice.parts]
        self._first_part = np.cumsum([0, *(len(choice.parts) for choice in every)])
        self._option_of_part = np.repeat(np.arange(len(every)), np.diff(self._first_part))
        self._times = np.array([float(part.times) for part in parts])
        self._points: list[Float] = []
        self._starts: list[Int] = []
        self._served: list[Int] = []
        self._segment: list[Int] = []
        for group in range(len(groups.gpus)):
            served = [at for at, part in enumerate(parts) if group in part.points]
            blocks = [parts[at].points[group] for at in served]
            self._points.append(np.concatenate([np.zeros((4, 0)), *blocks], axis=1))
            self._starts.append(np.cumsum([0, *(block.shape[1] for block in blocks)]))
            self._served.append(np.array(served, dtype=np.int64))
            segment = np.full(len(parts), -1)
            segment[served] = np.arange(len(served))
            self._segment.append(segment)

    @classmethod
    def of(
        cls,
        instance: Instance,
        groups: DeviceGroups,
        least_s: float,
        upper_s: float,
        deadline: float,
        *,
        large: bool = False,
    ) -> "Space | int | None":
        """What a plan faster than `upper_s` can use.

        A table that no such plan can place is returned instead, and None if the time is up or
        there is too much. `least_s` is a step time that no plan beats; of a `large` instance
        whole tables stand for sharding options, if one price holds for all GPUs.
        """
        extra_s = instance.sharding_overhead_s
        whole = large and len(groups.gpus) == 1
        choices_of_tables: list[list[TableChoice]] = []
        points = 0
        for table in range(instance.tables):
            if time.monotonic() > deadline or points > _MOST_POINTS:
                return None
            choices = TableChoices(instance, groups, table, upper_s)
            if whole and extra_s is not None and choices.whole_suffices(least_s):
                choices_of_tables.append(choices.of_wholes(extra_s))
            else:
                choices_of_tables.append(choices.of_options(instance.options_of(table)))
            if not choices_of_tables[-1]:
                return table
            points += sum(choice.points for choice in choices_of_tables[-1])
        return cls(groups, choices_of_tables)

    def weights(self, group: int, prices: Prices) -> Float:
        """Prices of the rows of a group's points."""
        weights, host = np.zeros(4), self.groups.host_of[group]
        weights[BYTES], weights[GPU_S] = prices.hbm[group], prices.gpu_s[group]
        weights[DRAM_S], weights[DRAM_BYTES] = prices.dram_s[host], prices.dram[host]
        return weights

    def priced(self, prices: Prices) -> Float:
        """The least cost of each sharding option's shards and replicas, in seconds."""
        parts = np.full(self._times.size, np.inf)
        for group, served in enumerate(self._served):
            if served.size:
                cost = self.weights(group, prices) @ self._points[group]
                least = np.minimum.reduceat(cost, self._starts[group][:-1])
                parts[served] = np.minimum(parts[served], least)
        options = np.bincount(self._option_of_part, self._times * parts, self.longest_s.size)
        total: Float = options + self._replica_s @ prices.gpu_s + self._replica_bytes @ prices.hbm
        return total

    def usage(self, option: int, prices: Prices) -> Float:
        """What the cheapest placement of a table in a sharding option takes.

        Time, then HBM, by group of GPUs; DRAM time, then DRAM, by group of hosts.
        """
        gpus, hosts = len(self.groups.gpus), len(self.groups.hosts)
        used = np.zeros(2 * gpus + 2 * hosts)
        used[:gpus], used[gpus : 2 * gpus] = self._replica_s[option], self._replica_bytes[option]
        for part in range(self._first_part[option], self._first_part[option + 1]):
            group, point = self._cheapest(part, prices)
            taken, host = self._times[part] * point, 2 * gpus + self.groups.host_of[group]
            used[group] += taken[GPU_S]
            used[gpus + group] += taken[BYTES]
            used[host] += taken[DRAM_S]
            used[hosts + host] += taken[DRAM_BYTES]
        return used

    def _cheapest(self, part: int, prices: Prices) -> tuple[int, Float]:
        """The group and the point at which a part is cheapest."""
        best, chosen = np.inf, None
        for group, segment in enumerate(self._segment):
            at = segment[part]
            if at < 0:
                continue
            points = self._points[group][:, self._starts[group][at] : self._starts[group][at + 1]]
            cost = self.weights(group, prices) @ points
            here = int(np.argmin(cost))
            if cost[here] < best:
                best, chosen = float(cost[here]), (group, points[:, here])
        assert chosen is not None, "a sharding option is only there if all its shards can be served"
        return chosen
