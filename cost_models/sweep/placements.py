"""The plans that `placer sweep` compares: one for each way to place equal tables.

Equal tables need no search: dealing them out in turn gives the best balance.
"""

import itertools
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace

from cost_models import CostModel
from placer.plan.fields import Lookup, Memory, Shard, whole_table_shard
from placer.plan.memory import Shortage, cache_bytes, device_memory
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.tables import Table

PlanOf = Callable[[Problem, CostModel], Plan]
Parts = Callable[[Table, str, int], list[Shard]]
"""Returns a table's shards, given the table, a GPU's id and the number of rows in HBM."""


def _plan(problem: Problem, model: CostModel, shards: list[Shard]) -> Plan:
    sized: dict[tuple[object, ...], Shard] = {}
    charged: set[tuple[str, tuple[str, ...]]] = set()

    def with_buffers(shard: Shard) -> Shard:
        first = (shard.table, shard.devices) not in charged
        charged.add((shard.table, shard.devices))
        # Tables are equal, so the same part needs the same buffers on every device.
        key = (first, shard.rows, shard.memory, shard.lookup, shard.cache_rows)
        if key not in sized:
            sized[key] = model.with_buffers(problem, 0, shard, returns_bags=first)
        return replace(sized[key], table=shard.table, devices=shard.devices)

    return Plan(**problem.fields_of_plans, shards=tuple(map(with_buffers, shards)))


def _whole_tables(memory: Memory, lookup: Lookup, on_hosts: bool = False) -> PlanOf:
    """Return a maker of plans with whole tables, dealt out to GPUs or to hosts."""

    def plan(problem: Problem, model: CostModel) -> Plan:
        devices = problem.topology.hosts if on_hosts else problem.topology.gpus
        ids = itertools.cycle(device.id for device in devices)
        shards = [
            whole_table_shard(one.table, next(ids), memory, lookup) for one in problem.profile
        ]
        return _plan(problem, model, shards)

    return plan


pooled_by_host = _whole_tables("dram", "host", on_hosts=True)
"""Places all rows in host memory; CPUs pool them for all GPUs, like a parameter server."""


def by_rows(problem: Problem, model: CostModel) -> Plan:
    """Deal out the rows of each table to the HBM of all GPUs."""
    gpus = problem.topology.gpus
    shards = []
    for table in (one.table for one in problem.profile):
        for n, gpu in enumerate(gpus):
            rows = (min(n, table.rows), table.rows, len(gpus))
            shards.append(whole_table_shard(table, gpu.id, "hbm", "device", rows))
    return _plan(problem, model, shards)


def _hot_and_cold(table: Table, gpu: str, hot: int) -> list[Shard]:
    """Place the hottest `hot` rows in the GPU's memory, the others in its host's."""
    in_hbm = whole_table_shard(table, gpu, "hbm", "device", (0, hot, 1))
    cold = whole_table_shard(table, gpu, "dram", "staged", (hot, table.rows, 1))
    return [shard for shard in (in_hbm, cold) if shard.row_count]


def _behind_cache(table: Table, gpu: str, cached: int) -> list[Shard]:
    """Place all rows in host memory, behind a cache of `cached` rows."""
    whole = whole_table_shard(table, gpu, "dram", "cached" if cached else "uva")
    return [replace(whole, cache_rows=cached)]


def _filled(parts: Parts) -> PlanOf:
    """Return a maker of plans that fill HBM, with equally many rows of all tables on a GPU."""

    def plan(problem: Problem, model: CostModel) -> Plan:
        gpus, tables = problem.topology.gpus, [one.table for one in problem.profile]
        shards: list[Shard] = []
        rows_in_hbm: dict[tuple[int, int], int] = {}
        for number, table in enumerate(tables):
            gpu = gpus[number % len(gpus)]
            on_gpu = len(range(number % len(gpus), len(tables), len(gpus)))
            key = on_gpu, gpu.memory_bytes // on_gpu
            if key not in rows_in_hbm:
                rows_in_hbm[key] = _most_rows(problem, model, number, parts, key[1])
            shards += parts(table, gpu.id, rows_in_hbm[key])
        return _plan(problem, model, shards)

    return plan


def _most_rows(problem: Problem, model: CostModel, number: int, parts: Parts, room: int) -> int:
    """Find the most rows of table `number` that take at most `room` bytes of HBM.

    Over the first rows, bytes may fall, as these rows save more staging buffer than they take.
    After that they only grow. So bisection finds the last number that fits.
    """
    table, gpus = problem.profile.tables[number].table, problem.topology.gpus

    def fits(rows: int) -> bool:
        total = 0
        for turn, shard in enumerate(parts(table, gpus[number % len(gpus)].id, rows)):
            sized = model.with_buffers(problem, number, shard, returns_bags=turn == 0)
            total += sized.buffer_bytes + cache_bytes(table, sized)
            if sized.memory == "hbm":
                total += sized.row_count * table.bytes_per_row()
        return total <= room

    return bisect(range(1, table.rows + 1), False, key=lambda rows: not fits(rows))


def shortage(plan: Plan) -> Shortage | None:
    """Return what the most overfilled device is short of, or None if the plan fits."""
    worst = min(device_memory(plan).values(), key=lambda use: use.free_bytes)
    if worst.free_bytes >= 0:
        return None
    memory: Memory = "hbm" if worst.device in plan.topology.gpus_by_id else "dram"
    rows = worst.weight_bytes + worst.state_bytes
    what = "rows" if rows > worst.capacity_bytes else "rows and buffers" if rows else "buffers"
    return Shortage(worst.device, memory, -worst.free_bytes, what)


PLACEMENTS: dict[str, PlanOf | None] = {
    "gpu": _whole_tables("hbm", "device"),
    "row-wise": by_rows,
    "hot-cold": _filled(_hot_and_cold),
    "cached": _filled(_behind_cache),
    "host-staged": _whole_tables("dram", "staged"),
    "host-read": _whole_tables("dram", "uva"),
    "host-pooled": pooled_by_host,
    "remote": None,  # On CPU servers, which send pooled rows.
    "cpu": None,  # In host memory; dense layers on CPUs, too.
}
"""All placements by name, with the maker of their plans on GPUs; docs/sweep.md describes them."""
