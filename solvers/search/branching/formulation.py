"""The integer program's data as arrays: sharding options, shards, and points of curves."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from cost_models import ANY_SHARE, CostCurve
from solvers.bounds.option_costs import distinct_shards, points_within
from solvers.model.instance import Block, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, PHASES, Bool, Float, Int
from solvers.search.branching.drives import DrivePoints, drive_points, without_settled

Widths = tuple[tuple[int, int], ...]
"""Widths of a table's shards, each with its number of shards."""

UNITS = 1000.0
"""Step time of the best known plan, in units of the formulation."""

_LONG_SHARE = 0.1
"""A phase may wait for a single shard that takes at least this share of a step."""

_NEARLY_SAME = 2e-3
"""Merge points that differ by less than this share of a GPU's HBM and step."""

_HARDLY_DIFFERENT = 2e-4
"""The same if there are fewer points, from a tenth of the limit on."""

_CHEAP = 0.03
"""Give the first program the options that cost this share of a step more than the cheapest."""

_MOST_PINS = 120
"""Leave out which GPUs may serve which tables above this number of sets × tables, as each set is a
group. With more groups, relaxations take so long that less is proven in the same time."""

_PRICE_FACTORS = (0.0, 0.25, 0.7, 1.0, 1.5, 4.0, 1e6)
"""The first linear program has the cheapest points at these multiples of a price of HBM."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a table is cut, apart from replicas: its row slices and the widths of its shards."""

    row_slices: int
    widths: Widths

    @property
    def shards(self) -> int:
        """The number of shards."""
        return sum(count for _, count in self.widths)


REPLICATED = Layout(0, ())
"""Layout of a table that is replicated as a whole."""


class Formulation:
    """Options, parts and points of a problem.

    A part stands for the shards of an option that cost the same, on GPUs that cost the same. So
    that numbers are near 1, seconds are in units of `unit_s`, bytes of HBM in units of the largest
    GPU's HBM, and bytes of DRAM in units of all DRAM.

    - `upper_s`: the step time of a plan.
    - `price_s_per_byte`: a price of HBM, in GPU seconds.
    - `most_points`: merge similar points if all curves have about this many; from a tenth of it on,
      merge points that hardly differ.

    Attributes:
    - `nearly`: largest total error by merging points, as a share of a GPU's HBM and step.
    - `options`: options of all tables that some GPU has room for.
    - `table_of`, int64, shape (options,).
    - `layouts`: of the options.
    - `launches`, shape (kinds of GPUs, phases).
    - `gpus_of_kind`: number of GPUs by kind, HBM and number of their `pins`.
    - `pins`, bool, shape (sets of tables, tables): which tables some GPUs may serve.
    - `pins_of_gpu`: the set of each GPU.
    - `together`: pairs of tables that one GPU has to serve, each table with the next of its group.
    - `replicas`, shape (kinds of GPUs, options, 1 + phases): bytes and seconds of an option's
      replicas on every GPU.
    - `replica_arena`, int64, shape (options,): arena of an option's replicas; -1 without replicas.
    - `option_of`, `times`, `width_of`, `arena_of`, `number_of`, `shard_of`, `kind_of`, arrays,
      shape (parts,): of each part: its option, the number of its shards, their columns, their
      arena, their number within the option, their number among all, and the kind of GPU. Parts that
      differ only in the kind stand for the same shards.
    - `points`, shape (1 + phases, points): bytes and seconds of a part's shard, part by part. If
      DRAM has a price, a last row has the bytes there.
    - `is_long`, bool, shape (parts,): whether a part's shard is long enough for a phase to wait for
      it.
    - `starts`, `sizes`, int64, shape (parts,): first point and number of points of each part.
    - `first_points`: columns of the first linear program: the cheapest at some prices of HBM.
    - `drives`: drive points, which are combined with points.
    - `server_kinds`: kinds of GPUs that are servers, if these are there for lack of DRAM.
    - `devices`: number of GPUs, with servers by what their seconds count.
    - `option_costs`, `table_costs`, shapes (options,) and (tables,): costs of options at the first
      price of HBM, and of each table's cheapest option.
    """

    def __init__(
        self,
        instance: Instance,
        upper_s: float,
        price_s_per_byte: float,
        most_points: int,
    ) -> None:
        self.instance, self.unit_s = instance, upper_s / UNITS
        self.devices = instance.gpus + instance.servers * (instance.server_share - 1)
        points_of_all = points_of(instance)
        self.nearly = 0.0 if 10 * points_of_all <= most_points else _HARDLY_DIFFERENT
        if points_of_all > most_points:
            self.nearly = _NEARLY_SAME
        # A GPU serves many tables, whose differences add up.
        self._nearly = self.nearly * min(1.0, instance.gpus / instance.tables)
        unit_s = self.unit_s
        self.phases = len(instance.objective.schedule.phases)
        gpus = instance.gpus - instance.servers
        self.unit_bytes = max(1.0, float(instance.hbm_bytes[:gpus].max()))
        dram_bytes = float(instance.all_dram_bytes.sum())
        self.unit_dram = max(1.0, dram_bytes) if instance.dram_price else 0.0
        self.launches = np.array([instance.launches_s[gpu] for gpu in instance.kinds]) / unit_s
        self.fixed = instance.objective.fixed / unit_s
        self.members = instance.objective.members
        hbm = (instance.hbm_bytes / self.unit_bytes).tolist()
        self.pins, self.pins_of_gpu = _pins(instance)
        whole = [instance.whole(table) for table in range(instance.tables)]
        groups = [sorted(shard.table for shard in block) for block in instance.blocks(whole)]
        self.together = [pair for group in groups for pair in pairwise(group)]
        self.gpus_of_kind = Counter(zip(instance.kind_of_gpu, hbm, self.pins_of_gpu, strict=True))
        self.options: list[ShardingOption] = []
        self.layouts: list[Layout] = []
        tables: list[int] = []
        replicas: list[list[Float]] = []
        replica_arenas: list[int] = []
        parts: list[tuple[int, ...]] = []
        shards = 0
        points: list[Float] = []
        drives: list[Float] = []
        self._arenas: dict[object, int] = {}
        # Options share curves of servers, and of column slices of one width.
        self._of_curve = lru_cache(256)(self._points)
        for table in range(instance.tables):
            for option in without_settled(instance.options_of(table)):
                mine = self._parts(table, option)
                if not all(of_kinds for _, _, of_kinds in mine):
                    continue
                for number, (shard, times, of_kinds) in enumerate(mine):
                    arena = instance.arena_of(shard)
                    row = len(tables), times, arena[2], self._arena(arena), number, shards
                    shards += 1
                    for kind, (each, on_drive) in of_kinds.items():
                        parts.append((*row, kind))
                        points.append(each)
                        drives.append(on_drive)
                everywhere = instance.replicas(table, option)
                replicas.append(self._replicas(everywhere))
                arenas = [self._arena(instance.arena_of(one)) for one in everywhere]
                replica_arenas.append(max(arenas, default=-1))
                tables.append(table)
                self.options.append(option)
                self.layouts.append(_layout(instance, table, option))
        self.table_of: Int = np.array(tables, dtype=np.int64)
        by_option = np.array(replicas).reshape(len(tables), len(instance.kinds), 1 + self.phases)
        self.replicas = by_option.swapaxes(0, 1)
        self.replica_arena: Int = np.array(replica_arenas, dtype=np.int64)
        columns = np.array(parts, dtype=np.int64).reshape(len(parts), 7).T
        self.option_of, _, self.width_of, self.arena_of, self.number_of = columns[:5]
        self.shard_of, self.kind_of = columns[5:]
        self.times = columns[1].astype(np.float64)
        self.part_table: Int = self.table_of[self.option_of]
        self.arenas = len(self._arenas)
        self.sizes = np.array([each.shape[1] for each in points], dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.part_of_point = np.repeat(np.arange(self.sizes.size), self.sizes)
        rows = 1 + self.phases + bool(self.unit_dram)
        units = np.array([self.unit_bytes, *[unit_s] * self.phases, self.unit_dram])[:rows, None]
        self.points = np.hstack(points)[:rows] / units if points else np.zeros((rows, 0))
        first = [
            np.searchsorted(-drive[-1], each[-1]) if drive.size else np.zeros_like(each[0], int)
            for each, drive in zip(points, drives, strict=True)
        ]
        on_drives = [drive[:rows] / units for drive in drives]
        self.drives = DrivePoints(rows, on_drives, self.part_of_point, first)
        self._time = instance.objective.weights @ self.points[1 : 1 + self.phases]
        self._on_server = np.zeros(self.points.shape[1], dtype=bool)
        # Servers count another chain of phases.
        servers = instance.kind_of_gpu[gpus:] if self.unit_dram else []
        self.server_kinds = np.unique(servers)
        if self.server_kinds.size:
            on_server = np.isin(self.kind_of, self.server_kinds)
            self._on_server = on_server[self.part_of_point]
            phase_s = self.points[1 : 1 + self.phases, self._on_server]
            self._time[self._on_server] = instance.objective_of_servers.weights @ phase_s
        least = np.minimum.reduceat(self._time, self.starts) if points else np.zeros(0)
        self.is_long = least * unit_s >= _LONG_SHARE * upper_s
        price = price_s_per_byte * self.unit_bytes / unit_s
        costs = [self._priced(factor * price, factor) for factor in _PRICE_FACTORS]
        cheapest = [least_of_each(each, self.starts, self.sizes)[1] for each, _ in costs if points]
        self.first_points: Int = np.unique(
            [numbers[at] for at, (_, numbers) in zip(cheapest, costs, strict=False)]
        ).astype(np.int64)
        self.option_costs = self._option_costs(price) if points else np.zeros(len(tables))
        self.table_costs = np.full(instance.tables, np.inf)
        np.minimum.at(self.table_costs, self.table_of, self.option_costs)

    def _priced(self, price: float, factor: float) -> tuple[Float, Int]:
        """Return costs of all points at a price of HBM, and the numbers of their columns.

        DRAM costs `factor` times its price. Each point has its best drive point.
        """
        instance, more = self.instance, np.zeros((len(self.points), self.sizes.size))
        costs = self._time + price * self.points[0]
        if self.unit_dram:
            more[1 : 1 + self.phases] = instance.objective.weights[:, None]
            more[-1] = factor * instance.dram_price * self.unit_dram / self.unit_s
            costs += more[-1, 0] * self.points[-1]
            costs[self._on_server] = instance.server_share * self._time[self._on_server]
        of_drives, columns = self.drives.least(more, np.arange(costs.size))
        return costs + of_drives, columns

    def _option_costs(self, price: float) -> Float:
        """Return what options cost at prices of memory, shape (options,)."""
        weights = np.append(price, self.instance.objective.weights)
        of_parts = np.minimum.reduceat(self._priced(price, 1.0)[0], self.starts) * self.times
        of_shards = np.full(int(self.shard_of.max()) + 1, np.inf)
        np.minimum.at(of_shards, self.shard_of, of_parts)
        gpus = np.zeros(len(self.launches))
        for (kind, *_), count in self.gpus_of_kind.items():
            gpus[kind] += count
        costs = np.einsum("kof,f,k->o", self.replicas, weights, gpus)
        shards, first = np.unique(self.shard_of, return_index=True)
        np.add.at(costs, self.option_of[first], of_shards[shards])
        return np.asarray(costs)

    @property
    def cheap_options(self) -> Bool:
        """Whether each option costs little more than its table's cheapest, shape (options,)."""
        extra: Float = self.option_costs - self.table_costs[self.table_of]
        return extra <= _CHEAP * UNITS * self.devices

    def points_of_parts(self, parts: Int) -> tuple[Int, Int, Float]:
        """Return all points of parts: the start of each part, numbers, and points."""
        sizes = self.sizes[parts]
        starts = np.cumsum(sizes) - sizes
        numbers = np.repeat(self.starts[parts] - starts, sizes) + np.arange(int(sizes.sum()))
        return starts, numbers, self.points[:, numbers]

    @property
    def is_complete(self) -> bool:
        """Whether every table has an option that one GPU has room for."""
        return bool(np.unique(self.table_of).size == self.instance.tables)

    def heaviest_first(self) -> list[int]:
        """Return tables by the time of all their shards, whole, in HBM or out of it."""
        if not self.is_complete:
            return []
        if self.unit_dram:  # Memory counts too.
            return np.argsort(-self.table_costs, kind="stable").tolist()  # type: ignore[no-any-return]
        time = np.minimum.reduceat(self._time, self.starts)
        # Of parts that stand for the same shards, the last.
        parts = np.flatnonzero(np.diff(self.shard_of, append=-1))
        of_option = np.zeros(len(self.options))
        np.add.at(of_option, self.option_of[parts], (time * self.times)[parts])
        heavy = np.zeros(self.instance.tables)
        np.maximum.at(heavy, self.table_of, of_option)
        return np.argsort(-heavy, kind="stable").tolist()  # type: ignore[no-any-return]

    def _merged(self, points: Float, nearly: float) -> Float:
        """Merge points that are nearly equal, at the least of their costs.

        `points`, shape (1 + phases, m), or two rows more: bytes and seconds, bytes of DRAM, and
        numbers of points. `nearly`: share of a GPU's HBM and of the step.

        The result has as many rows.
        """
        if points.shape[1] <= 1 or not nearly:
            return points
        most = [self.unit_bytes, *[self.unit_s * UNITS] * self.phases, self.unit_dram, np.inf]
        sizes = np.array(most[: len(points)]) * nearly
        order = np.argsort(points[0], kind="stable")
        ordered = points[:, order]
        cells = np.floor(ordered / sizes[:, None])
        changes = (np.diff(cells, axis=1) != 0).any(axis=0)
        starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
        merged: Float = np.minimum.reduceat(ordered, starts, axis=1)
        return merged

    def _arena(self, arena: object) -> int:
        return self._arenas.setdefault(arena, len(self._arenas))

    def _replicas(self, replicas: Block) -> list[Float]:
        """Return bytes and seconds on each kind of GPU."""
        every = [np.zeros(1 + self.phases) for _ in self.instance.kinds]
        for replica in replicas:
            for of_kind, gpu in zip(every, self.instance.kinds, strict=True):
                costs = self.instance.priced_costs(replica, gpu)[:, 0]
                of_kind[0] += costs[BYTES] / self.unit_bytes
                of_kind[1:] += costs[PHASES] / self.unit_s
        return every

    def _parts(
        self, table: int, option: ShardingOption
    ) -> list[tuple[TableShard, int, dict[int, tuple[Float, Float]]]]:
        """Return one shard of each set of equal shards, their number, and points by kind of GPU.

        Points have shape (1 + phases, m). If DRAM has a price, two more rows have bytes of DRAM and
        the point's number, which says where its drive points begin. Kinds without room are left
        out.
        """
        parts, instance = [], self.instance
        is_open = option.home.drive_share == ANY_SHARE
        for shard, times in distinct_shards(instance.shards(table, option)):
            of_kinds: dict[int, tuple[Float, Float]] = {}
            for kind, gpu in enumerate(instance.kinds):
                curve = (instance.free_curve if is_open else instance.curve)(shard, gpu)
                points, drive = self._of_curve(curve, kind)
                if points.size:
                    of_kinds[kind] = points, drive
            parts.append((shard, times, of_kinds))
        return parts

    def _points(self, curve: CostCurve, kind: int) -> tuple[Float, Float]:
        """Return the points of a shard's curve on a kind of GPU, and its drive points."""
        room = max(hbm for each, hbm, _ in self.gpus_of_kind if each == kind)
        rows, split_s = curve.phase_s, curve.split_phase_s
        if self.unit_dram:
            rows = np.vstack((rows, curve.dram_bytes, np.arange(rows.shape[1])))
            split_s = np.append(split_s, (0.0, 0.0))
        points = np.vstack(points_within(curve, rows, split_s, room * self.unit_bytes))
        points = points[:, np.isfinite(points).all(axis=0)]
        drive = np.zeros((len(points), 0))
        if points.size and self.unit_dram:
            drive = drive_points(curve, self.members, self.unit_s * UNITS)
            drive = self._merged(drive, max(self.nearly, _HARDLY_DIFFERENT))
        return self._merged(points, self._nearly), drive


def points_of(instance: Instance) -> int:
    """Return about how many points all curves have: slices have at most the table's points."""
    total = 0
    for table, tables in Counter(instance.alike).items():
        parts = sum(
            len(distinct_shards(instance.shards(table, option)))
            for option in instance.options_of(table)
        )
        total += tables * parts * instance.curve(instance.whole(table), 0).hot_rows.size
    return total * len(instance.kinds)


def least_of_each(costs: Float, starts: Int, sizes: Int) -> tuple[Float, Int]:
    """Return the least of the costs of each part, and the first point that has it, shapes (parts,).

    `costs`, shape (points,): part by part. `starts`, `sizes`, int64, shape (parts,).

    Examples
    --------
    >>> least_of_each(np.array([3.0, 2.0, 2.0, 5.0]), np.array([0, 3]), np.array([3, 1]))
    (array([2., 5.]), array([1, 3]))
    """
    least: Float = np.minimum.reduceat(costs, starts)
    at = np.flatnonzero(costs == np.repeat(least, sizes))
    return least, at[np.searchsorted(at, starts)]


def _pins(instance: Instance) -> tuple[Bool, list[int]]:
    """Return the sets of tables that GPUs may serve, and the number of each GPU's set.

    The sets have shape (sets, tables).
    """
    every = np.ones(instance.gpus, dtype=bool)
    allowed = [instance.allowed(table) for table in range(instance.tables)]
    masks = np.array([every if mask is None else mask for mask in allowed])
    sets, of_gpu = np.unique(masks.T, axis=0, return_inverse=True)
    if sets.size > _MOST_PINS and len(sets) > 1:
        return np.ones((1, instance.tables), dtype=bool), [0] * instance.gpus
    return sets, of_gpu.ravel().tolist()


def _layout(instance: Instance, table: int, option: ShardingOption) -> Layout:
    shards = instance.shards(table, option)
    if not shards:
        return REPLICATED
    widths = Counter(instance.arena_of(shard)[2] for shard in shards)
    return Layout(option.row_slices, tuple(sorted(widths.items())))
