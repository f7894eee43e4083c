"""Turn a problem and its assignments into the arrays that annealing works on, and back."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from cost_models.arenas import Arena
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.drive_rows import opened
from solvers.model.instance import Block, Instance, ShardingOption
from solvers.model.knapsack import BYTES, GPU_S, PHASES, Bool, Int, phases_at
from solvers.search.annealing.rating import rate, replace_items, step_time_s, weigh_phases
from solvers.search.annealing.state import HIGH_POWER, NOBODY, Model, Rules, State

_MOST_SHARDS = 8
"""Do not try options with more shards than this, except those that tables have already."""

_MOST_ITEMS = 20_000
"""Compute costs of at most this many new shards; further tables keep their options."""

_WORTH_CUTTING = 0.1
"""Divide a table to balance GPUs only if it has this share of the mean table's work."""

_LIGHT_AT_A_TURN = 3
"""Consider this many tables that are cheap to divide for each table with much work."""

_REPLICATED_GPUS = 16
"""On more GPUs, keep replicas as they are: a change would rate all GPUs."""


class _Option(NamedTuple):
    """A sharding option: blocks of shards, each served by a GPU, and replicas on every GPU."""

    items: list[Block]
    replicas: Block


class AnnealingProblem:
    """The units, options and items of an instance, each known by its number.

    `starts`: assignments whose sharding options are included. `clock`: limits the time for
    computing costs.
    """

    def __init__(self, starts: Sequence[Assignment], clock: Clock) -> None:
        self.instance = starts[0].instance
        fixed, free = _units(starts)
        options = _options(starts, free, clock)
        self.tables = [_tables_of(unit[0]) for unit in fixed] + [[table] for table in free]
        self.options = [*fixed, *options]
        self.items: list[Block] = []
        first_option, first_item, replica = [0], [], []
        for unit in self.options:
            for option in unit:
                first_item.append(len(self.items))
                self.items += option.items
                replica.append(len(self.items) if option.replicas else NOBODY)
                self.items += [option.replicas] if option.replicas else []
            first_option.append(len(first_item))
        self._first_option, self._first_item = np.array(first_option), np.array(first_item)
        self._replica = np.array(replica)
        self._count = np.array([len(option.items) for unit in self.options for option in unit])
        # The replica of the unit's own option.
        self._place = {
            item: (unit, number, shard)
            for unit, options_of_unit in enumerate(self.options)
            for number, option in enumerate(options_of_unit)
            for shard, item in enumerate(
                [option.replicas, *option.items] if option.replicas else option.items
            )
        }
        self._fill()

    def _fill(self) -> None:
        """Fill in the items' costs and arenas, and which GPUs may serve them."""
        instance = self.instance
        rows = [BYTES, *range(instance.rows_of_costs)[PHASES]]
        kinds, prices = len(instance.kinds), instance.prices.size
        shared = bool(instance.dram_price)
        self._costs = np.zeros((len(self.items), kinds, prices, len(rows) + 2 * shared))
        numbers: dict[Arena, int] = {}
        first_arena, arena = [0], []
        for number, item in enumerate(self.items):
            for shard in item:
                arena.append(numbers.setdefault(instance.arena_of(shard), len(numbers)))
                for kind, gpu in enumerate(instance.kinds):
                    costs = instance.priced_costs(shard, gpu)
                    if shared:
                        costs, apart_s = instance.drives.apart(shard, gpu, costs)
                        self._costs[number, kind, :, -2:] += apart_s.T
                    self._costs[number, kind, :, : len(rows)] += costs[rows].T
            first_arena.append(len(arena))
        self._first_arena, self._arena = np.array(first_arena), np.array(arena)
        self._arenas = len(numbers)
        self._home = np.array([_home(item) for item in self.items])
        self._may_serve: Bool = np.ones((len(self.options), instance.gpus), dtype=bool)
        for unit, tables in enumerate(self.tables):
            for table in tables:
                allowed = instance.allowed(table)
                if allowed is not None:
                    self._may_serve[unit] &= allowed

    def start(self, assignment: Assignment, power: int = HIGH_POWER) -> tuple[Model, State, float]:
        """Return the arrays of an assignment, and its step time in seconds, launches included.

        Energies are of this power of phases.
        """
        instance = self.instance
        objective, schedule = instance.objective, instance.objective.schedule
        launches = np.array(instance.launches_s)
        state = self._state(assignment)
        arena_s = assignment.arena_s(range(instance.gpus))
        phases = arena_s.shape[1]
        sums = np.insert(state.sums.swapaxes(1, 2), GPU_S, 0.0, axis=1)
        state.sums[:, :, 1 : 1 + phases] += arena_s[:, None]
        every_s = phases_at(sums, instance.hbm_bytes)
        phase_s = every_s[:, :phases] + arena_s
        phase_s = phase_s + state.arenas[:, None] * launches
        # Waits of other phases decide what shared lanes add. They hardly change.
        waits_s = objective.scale_s(phase_s)
        prolonged_s = objective.prolonged(phase_s)
        step_s = float(objective.longest_s(prolonged_s.max(axis=0)))
        drive_chain, dram_s = instance.drives.chain()
        more = every_s.shape[1] - phases
        done_s = assignment.step_time_s if instance.lacks_dram else 0.0
        sharers = instance.gpus - instance.servers
        if more:
            chain_s = (phase_s @ drive_chain + every_s[:, -2])[:sharers]
            worth_s = every_s[:sharers, -1]
            chain_s += worth_s + (chain_s - done_s) ** 2 / done_s if done_s else worth_s
            step_s = max(step_s, float(chain_s.mean()) - dram_s)
        # A chain that is shorter than the step may become as long.
        longer = step_s / np.maximum(schedule.chain_times_s(phase_s.T), 1e-3 * step_s)
        scale_s = waits_s * (longer @ objective.members).clip(1.0)
        lanes = [(lane.phase, lane.part, lane.beside) for lane in schedule.shared]
        # A phase in no chain delays nothing by itself.
        counted_s = np.where(objective.members.any(axis=0), scale_s, 0.0)
        model = Model(
            costs=self._costs,
            kind=np.array(instance.kind_of_gpu),
            room=instance.hbm_bytes,
            launches=np.pad(launches, ((0, 0), (0, more))),
            first_arena=self._first_arena,
            arena=self._arena,
            home=self._home,
            first_option=self._first_option,
            first_item=self._first_item,
            item_count=self._count,
            replica=self._replica,
            may_serve=self._may_serve,
            members=np.pad(objective.members, ((0, 0), (0, more))),
            fixed_s=objective.fixed,
            lanes=np.array(lanes, dtype=np.int64).reshape(-1, 3),
            lane_begins=np.array([lane.begin_s for lane in schedule.shared], dtype=np.float64),
            lane_waits=np.array([waits_s[list(lane.before)].sum() for lane in schedule.shared]),
            scale_s=np.pad(scale_s, (0, more), constant_values=1.0),
            counted_s=np.pad(counted_s, (0, more)),
            drive_chain=drive_chain,
            dram_s=dram_s,
            done_s=done_s,
            sharers=sharers,
            served_s=instance.servers * instance.server_share / sharers,
        )
        rules = Rules(0.0, 0.0, 0, 0.0, power, step_s, 0.0, 0.0)
        for gpu in range(instance.gpus):
            rate(model, state, rules, gpu)
            replace_items(model, state, gpu)
        weigh_phases(model, state, rules)
        step_time_s(model, state)
        return model, state, step_s

    def _state(self, assignment: Assignment) -> State:
        instance, gpus = self.instance, self.instance.gpus
        rows = [BYTES, *range(GPU_S + 1, assignment.sums.shape[1])]
        units, phases = len(self.options), self._costs.shape[3] - 1
        gpu_of: Int = np.full((units, int(self._count.max(initial=1))), NOBODY)
        option, at = np.zeros(units, dtype=np.int64), np.zeros_like(gpu_of)
        on, held = np.full((gpus, units), NOBODY, dtype=np.int32), np.zeros(gpus, dtype=np.int64)
        counts = np.zeros((gpus, self._arenas), dtype=np.int64)
        for shard in assignment.replicas:
            unit, number, _ = self._place[(shard,)]
            option[unit] = self._first_option[unit] + number
            item = self._replica[option[unit]]
            counts[:, self._arena[self._first_arena[item]]] += 1
        for gpu, shards in enumerate(assignment.shards):
            for block in instance.blocks(shards):
                block = tuple(map(opened, block))
                unit, number, _ = self._place[block]
                option[unit] = self._first_option[unit] + number
                shard_number = self.options[unit][number].items.index(block)
                gpu_of[unit, shard_number], at[unit, shard_number] = gpu, held[gpu]
                on[gpu, held[gpu]] = unit
                held[gpu] += 1
                item = self._first_item[option[unit]] + shard_number
                for place in range(self._first_arena[item], self._first_arena[item + 1]):
                    counts[gpu, self._arena[place]] += 1
        replicated = np.flatnonzero(self._replica[option] >= 0)
        sums = np.ascontiguousarray(assignment.sums[:, rows].swapaxes(1, 2))
        if instance.dram_price:  # Shards have a fixed share of rows on drives; items do not.
            kinds = instance.kind_of_gpu
            sums = self._costs[self._replica[option[replicated]]].sum(axis=0)[kinds]
            for unit, of_unit in enumerate(gpu_of):
                for number, gpu in enumerate(of_unit[of_unit >= 0].tolist()):
                    sums[gpu] += self._costs[self._first_item[option[unit]] + number, kinds[gpu]]
        return State(
            option=option,
            gpu=gpu_of,
            sums=sums,
            phase_s=np.zeros((gpus, phases)),
            energy=np.zeros(gpus),
            on=on,
            at=at,
            held=held,
            counts=counts,
            arenas=np.count_nonzero(counts, axis=1),
            change=np.full((gpus, 4), NOBODY),
            new_phase_s=np.zeros((gpus, phases)),
            new_energy=np.zeros(gpus),
            changed=np.zeros(gpus, dtype=np.int64),
            chosen=np.full(gpu_of.shape[1], NOBODY),
            done_s=np.zeros(gpus),
            # Room for all GPUs, or some and those of the old and the new option's shards.
            candidates=np.zeros(gpus + 2 * gpu_of.shape[1], dtype=np.int64),
            replicated=np.pad(replicated, (0, units - replicated.size)),
            replicated_count=np.array([replicated.size]),
            weight_s=np.zeros(phases),
            pooled_s=np.zeros(1),
        )

    def assignment(self, option: Int, gpu_of: Int) -> Assignment | None:
        """Return a state's assignment with HBM filled exactly; None if it does not fit."""
        pairs, replicas = [], []
        for unit, number in enumerate(option.tolist()):
            first = self._first_item[number]
            for shard_number in range(self._count[number]):
                gpu = int(gpu_of[unit, shard_number])
                pairs += [(shard, gpu) for shard in self.items[first + shard_number]]
            if self._replica[number] >= 0:
                replicas += self.items[self._replica[number]]
        return Assignment.of(self.instance, pairs, replicas)


def _units(starts: Sequence[Assignment]) -> tuple[list[list[_Option]], list[int]]:
    """Return groups of tables that stay together, with their options; and all other tables.

    A group has an option for each way in which the starts have its tables.
    """
    instance = starts[0].instance
    groups: dict[frozenset[int], dict[tuple[Block, ...], _Option]] = {}
    for start in starts:
        blocks: dict[frozenset[int], list[Block]] = {}
        for shards in start.shards:
            for block in instance.blocks(shards):
                if len(block) > 1 or instance.in_group(block[0].table):
                    tables = frozenset(shard.table for shard in block)
                    blocks.setdefault(tables, []).append(tuple(map(opened, block)))
        for tables, found in blocks.items():
            found.sort()
            groups.setdefault(tables, {})[tuple(found)] = _Option(found, ())
    together = set().union(*groups)
    free = [table for table in range(instance.tables) if table not in together]
    return [list(options.values()) for options in groups.values()], free


def _options(starts: Sequence[Assignment], tables: list[int], clock: Clock) -> list[list[_Option]]:
    """Return the options of each table, cheap ones first."""
    instance, of_starts = starts[0].instance, [start.option_of for start in starts]
    own = of_starts[0]
    owned = {table: list(dict.fromkeys(of[table] for of in of_starts)) for table in tables}
    many, items = instance.gpus > _REPLICATED_GPUS, 0
    work_s = {t: float(instance.option_costs(t, own[t])[GPU_S, -1]) for t in tables}
    options = dict(owned)
    for table in _promising(instance, work_s):
        others = [
            option
            for option in instance.options_of(table)
            if option not in owned[table]
            and option.shard_count <= min(_MOST_SHARDS, instance.gpus)
            and not (option.replicated_rows and many)
        ]
        items += sum(max(1, option.shard_count) for option in others)
        if items > _MOST_ITEMS or clock.spent:
            break
        for shard in (s for option in others for s in instance.shards(table, option)):
            for gpu in instance.kinds:
                instance.priced_costs(shard, gpu)
        # Only its own option may have a fixed share of rows in HBM.
        options[table] = [*others, *owned[table]]
    return [
        [
            _Option(
                [(shard,) for shard in instance.shards(table, option)],
                instance.replicas(table, option),
            )
            for option in sorted(
                options[table], key=lambda option: _rough_s(instance, table, option)
            )
        ]
        for table in tables
    ]


def _promising(instance: Instance, work_s: Mapping[int, float]) -> Iterator[int]:
    """Yield tables in the order in which their other options are worth computing.

    Tables with the most work, and tables that are cheap to divide, come in turns ("Annealing" in
    docs/solvers.md). If servers are there for their memory, the largest tables come first.

    `work_s`: seconds of each table.
    """
    profiles = instance.problem.profile.tables
    if instance.servers and instance.dram_price:
        yield from sorted(work_s, key=lambda table: -profiles[table].table.total_bytes)
        return
    heavy = sorted(work_s, key=lambda table: (-work_s[table], table))
    least_s = _WORTH_CUTTING * math.fsum(work_s.values()) / max(1, len(work_s))
    light = sorted(
        (table for table in work_s if work_s[table] > least_s),
        key=lambda table: (profiles[table].table.lookups_per_sample / work_s[table], table),
    )
    turns = iter(light)
    by_turns = (one for table in heavy for one in (table, *islice(turns, _LIGHT_AT_A_TURN)))
    yield from dict.fromkeys(by_turns)


def _rough_s(instance: Instance, table: int, option: ShardingOption) -> float:
    """Return GPU seconds of an option with all rows in HBM, which is enough for sorting."""
    gpu, shards = instance.kinds[0], instance.shards(table, option)
    work_s = sum(float(instance.priced_costs(shard, gpu)[GPU_S, -1]) for shard in shards)
    for replica in instance.replicas(table, option):
        work_s += instance.gpus * float(instance.priced_costs(replica, gpu)[GPU_S, -1])
    return work_s


def _tables_of(option: _Option) -> list[int]:
    return sorted({shard.table for item in option.items for shard in item})


def _home(item: Block) -> int:
    """Return the only GPU that may serve an item, or -1 if several may."""
    homes = [shard.home_gpu for shard in item if shard.home_gpu is not None]
    return homes[0] if homes else NOBODY
