"""The plans that `placer sweep` compares: one for each way to place tables that are all alike.

Tables alike need no search: dealt out in turn, they are balanced as well as can be.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cost_models import CostModel
from placer.plan.memory import Shortage, cache_bytes, device_memory
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Memory, Shard, whole_table_shard
from placer.problem import Problem

PlanOf = Callable[[Problem, CostModel], Plan]
Parts = Callable[[int, int], list[Shard]]
"""The shards of a table, by its number and how many of its rows are in HBM."""


def _plan(problem: Problem, model: CostModel, shards: list[Shard]) -> Plan:
    sized: dict[tuple[object, ...], Shard] = {}
    charged: set[tuple[str, tuple[str, ...]]] = set()

    def with_buffers(shard: Shard) -> Shard:
        first = (shard.table, shard.devices) not in charged
        charged.add((shard.table, shard.devices))
        # Of tables that are alike, the same part takes the same buffers wherever it is.
        key = (first, shard.rows, shard.memory, shard.lookup, shard.cache_rows)
        if key not in sized:
            sized[key] = model.with_buffers(problem, 0, shard, returns_bags=first)
        return replace(sized[key], table=shard.table, devices=shard.devices)

    return Plan(
        tables=tuple(profile.table for profile in problem.profile),
        topology=problem.topology,
        shards=tuple(with_buffers(shard) for shard in shards),
        batch_size=problem.batch_size,
        pipeline=problem.pipeline,
        dense=problem.dense,
    )


def _gpu_of(problem: Problem, table: int) -> str:
    gpus = problem.topology.gpus
    return gpus[table % len(gpus)].id


def _whole_tables(memory: Memory, lookup: Lookup) -> PlanOf:
    """Return plans in which each table is whole, on the GPUs in turn."""

    def plan(problem: Problem, model: CostModel) -> Plan:
        shards = [
            whole_table_shard(one.table, _gpu_of(problem, n), memory, lookup)
            for n, one in enumerate(problem.profile)
        ]
        return _plan(problem, model, shards)

    return plan


def by_rows(problem: Problem, model: CostModel) -> Plan:
    """Deal the rows of each table out over the memories of all GPUs."""
    gpus = problem.topology.gpus
    shards = []
    for table in (one.table for one in problem.profile):
        for n, gpu in enumerate(gpus):
            rows = (min(n, table.rows), table.rows, len(gpus))
            shards.append(whole_table_shard(table, gpu.id, "hbm", "device", rows))
    return _plan(problem, model, shards)


def pooled_by_host(problem: Problem, model: CostModel) -> Plan:
    """Place all rows in host memory, where CPUs pool them for all GPUs: a parameter server."""
    hosts = problem.topology.hosts
    shards = [
        whole_table_shard(one.table, hosts[n % len(hosts)].id, "dram", "host")
        for n, one in enumerate(problem.profile)
    ]
    return _plan(problem, model, shards)


def hot_and_cold(problem: Problem, model: CostModel) -> Plan:
    """Place as many of each table's hottest rows in its GPU's memory as there is room for."""

    def parts(number: int, hot: int) -> list[Shard]:
        table, gpu = problem.profile.tables[number].table, _gpu_of(problem, number)
        in_hbm = whole_table_shard(table, gpu, "hbm", "device", (0, hot, 1))
        cold = whole_table_shard(table, gpu, "dram", "staged", (hot, table.rows, 1))
        return [shard for shard in (in_hbm, cold) if shard.row_count]

    return _filled(problem, model, parts)


def behind_caches(problem: Problem, model: CostModel) -> Plan:
    """Place all rows in host memory, behind caches as large as HBM has room for."""

    def parts(number: int, cached: int) -> list[Shard]:
        table, gpu = problem.profile.tables[number].table, _gpu_of(problem, number)
        whole = whole_table_shard(table, gpu, "dram", "cached" if cached else "uva")
        return [replace(whole, cache_rows=cached)]

    return _filled(problem, model, parts)


def _filled(problem: Problem, model: CostModel, parts: Parts) -> Plan:
    """Return the plan whose tables have as many rows in HBM as fit, the same number on one GPU."""
    gpus = problem.topology.gpus
    shards: list[Shard] = []
    rows_in_hbm: dict[tuple[int, int], int] = {}
    for number in range(len(problem.profile)):
        place = number % len(gpus)
        on_gpu = len(range(place, len(problem.profile), len(gpus)))
        room = gpus[place].memory_bytes // on_gpu
        if (on_gpu, room) not in rows_in_hbm:
            rows_in_hbm[on_gpu, room] = _most_rows(problem, model, number, parts, room)
        shards += parts(number, rows_in_hbm[on_gpu, room])
    return _plan(problem, model, shards)


def _most_rows(problem: Problem, model: CostModel, number: int, parts: Parts, room: int) -> int:
    """Find the most rows of table `number` that take at most `room` bytes of HBM.

    Bytes may fall over the first rows, which save more of staging than they take, but once
    they grow they grow for good: so bisection finds the last number that fits.
    """
    table = problem.profile.tables[number].table

    def fits(rows: int) -> bool:
        total = 0
        for turn, shard in enumerate(parts(number, rows)):
            sized = model.with_buffers(problem, number, shard, returns_bags=turn == 0)
            total += sized.buffer_bytes + cache_bytes(table, sized)
            if sized.memory == "hbm":
                total += sized.row_count * table.bytes_per_row()
        return total <= room

    low, high = 0, table.rows
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def shortage(plan: Plan) -> Shortage | None:
    """Return what the device that is overfilled most is short of, or None if the plan fits."""
    worst = min(device_memory(plan).values(), key=lambda use: use.free_bytes)
    if worst.free_bytes >= 0:
        return None
    memory: Memory = "hbm" if worst.device in plan.topology.gpus_by_id else "dram"
    rows = worst.weight_bytes + worst.state_bytes
    what = "rows" if rows > worst.capacity_bytes else "rows and buffers" if rows else "buffers"
    return Shortage(worst.device, memory, -worst.free_bytes, what)


@dataclass(frozen=True, slots=True)
class Placement:
    """A way to place all tables.

    Attributes
    ----------
    plan : callable or None
        The plan on GPUs; None where tables are with servers, or there are no GPUs to use.
    copies_ahead : bool
        Whether bytes on the host link come ahead of the step; else the GPU waits for them.
    """

    name: str
    plan: PlanOf | None = None
    copies_ahead: bool = True


PLACEMENTS: dict[str, Placement] = {
    one.name: one
    for one in (
        Placement("gpu", _whole_tables("hbm", "device")),
        Placement("row-wise", by_rows),
        Placement("hot-cold", hot_and_cold),
        Placement("cached", behind_caches),
        Placement("host-staged", _whole_tables("dram", "staged")),
        Placement("host-read", _whole_tables("dram", "uva"), copies_ahead=False),
        Placement("host-pooled", pooled_by_host),
        Placement("remote"),  # In the memory of CPU servers, which pool and send.
        Placement("cpu"),  # In host memory, with dense layers on CPUs too.
    )
}
"""By name; docs/sweep.md describes each."""
