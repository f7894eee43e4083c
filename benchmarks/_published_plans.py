"""Placements of published measurements, built as their sources say.

table-wise         whole tables, as many on each GPU and balanced by bytes; tables of more than a
                   GPU's part of all bytes by slices of columns
column-wise        every table by slices of columns, one a GPU
row-wise           every table's ranks dealt out to all GPUs
data-parallel      all rows on every GPU
uva                all rows on the host, read in place
cached             all rows on the host behind a cache, of `share` of the distinct rows of `steps`
                   steps, or of `share_of_rows`: the hottest of all tables
largest-on-host    the host pools the largest tables, so that the others fit in HBM
split              `share` of each table's ranks in HBM, the rest read in place
hot-replicated     the hottest rows of all tables on every GPU, the rest read in place
hot-cached         the same with a cache instead of a split
hot-partitioned    as many on each GPU, but each row on one; the rest read in place
hot-both           rows on every GPU, rows on one, and rows read in place, so that `remote` and
                   `host` are the shares of lookups that the sources say
greedy-cost        what this solver finds, where the system's planner chose
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from placer import Plan, Problem, Profile, Shard, Table
from placer.profile.table_profile import TableProfile
from solvers import solve

Rows = tuple[int, int, int]
Facts = Mapping[str, Any]


def plan_of(problem: Problem, facts: Facts) -> Plan:
    """The plan of a placement; `facts` are those of `Measurement.placement`."""
    name = facts["placement"]
    if name == "greedy-cost":
        return _greedy_cost(problem.sha256, problem)
    tables = tuple(profile.table for profile in problem.profile)
    shards = tuple(PLACEMENTS[name](problem, facts))
    return Plan(tables, problem.topology, shards, batch_size=problem.batch_size)


_FOUND: dict[str, Plan] = {}


def _greedy_cost(sha256: str, problem: Problem) -> Plan:
    """What the solver finds, once for rows of the same problem."""
    if sha256 not in _FOUND:
        plan = solve(problem, solver="greedy-cost", cost_model="roofline").plan
        if plan is None:
            raise ValueError("greedy-cost finds no placement")
        _FOUND[sha256] = plan
    return _FOUND[sha256]


def _devices(problem: Problem) -> tuple[str, ...]:
    return tuple(gpu.id for gpu in problem.topology.gpus)


def _hbm(table: Table, rows: Rows, *devices: str) -> Shard:
    return Shard(table.name, rows, (0, table.dim), devices, "hbm", "device")


def _in_place(table: Table, rows: Rows, *devices: str) -> Shard:
    return Shard(table.name, rows, (0, table.dim), devices, "dram", "uva")


def _table_wise(problem: Problem, facts: Facts) -> list[Shard]:
    """Slices of columns as wide as a GPU's part of all bytes allows, the largest first."""
    del facts
    devices = _devices(problem)
    part = problem.profile.total_bytes / len(devices)
    slices = []
    for profile in problem.profile:
        table, cuts = profile.table, 1
        while table.total_bytes / cuts > part and table.dim // cuts > 4 and len(devices) > 1:
            cuts *= 2
        edges = [table.dim * number // cuts for number in range(cuts + 1)]
        slices += [(table, cols) for cols in itertools.pairwise(edges)]
    load, room = dict.fromkeys(devices, 0), dict.fromkeys(devices, -(-len(slices) // len(devices)))
    shards = []
    for table, cols in sorted(slices, key=lambda one: -_bytes(*one)):
        device = min((one for one in devices if room[one]), key=lambda one: load[one])
        load[device] += _bytes(table, cols)
        room[device] -= 1
        shards.append(Shard(table.name, (0, table.rows, 1), cols, (device,), "hbm", "device"))
    return shards


def _bytes(table: Table, cols: tuple[int, int]) -> int:
    return table.rows * table.bytes_per_row(cols[1] - cols[0])


def _column_wise(problem: Problem, facts: Facts) -> list[Shard]:
    del facts
    devices, shards = _devices(problem), []
    for profile in problem.profile:
        table = profile.table
        count = min(len(devices), table.dim)
        edges = [table.dim * number // count for number in range(count + 1)]
        shards += [
            Shard(table.name, (0, table.rows, 1), cols, (device,), "hbm", "device")
            for device, cols in zip(devices, itertools.pairwise(edges), strict=False)
        ]
    return shards


def _strided(problem: Problem, table: Table, start: int, stop: int) -> list[Shard]:
    """Ranks from `start` to `stop`, dealt out to all GPUs; each table begins with another one."""
    devices = _devices(problem)
    first = problem.profile.table_names.index(table.name)
    return [
        _hbm(table, (start + number, stop, len(devices)), devices[(first + number) % len(devices)])
        for number in range(min(len(devices), stop - start))
    ]


def _row_wise(problem: Problem, facts: Facts) -> list[Shard]:
    del facts
    return [
        shard
        for profile in problem.profile
        for shard in _strided(problem, profile.table, 0, profile.table.rows)
    ]


def _data_parallel(problem: Problem, facts: Facts) -> list[Shard]:
    del facts
    devices = _devices(problem)
    return [_hbm(p.table, (0, p.table.rows, 1), *devices) for p in problem.profile]


def _uva(problem: Problem, facts: Facts) -> list[Shard]:
    del facts
    devices = _devices(problem)
    return [_in_place(p.table, (0, p.table.rows, 1), *devices) for p in problem.profile]


def _caches(problem: Problem, cache_rows: Mapping[str, int]) -> list[Shard]:
    shards = []
    for profile in problem.profile:
        table, size = profile.table, cache_rows[profile.name]
        rows, columns = (0, table.rows, 1), (0, table.dim)
        shards.append(
            Shard(table.name, rows, columns, _devices(problem), "dram", "cached", cache_rows=size)
        )
    return shards


def _cached(problem: Problem, facts: Facts) -> list[Shard]:
    if "share_of_rows" in facts:
        return _caches(problem, _hottest(problem.profile, facts["share_of_rows"]))
    samples = problem.global_batch_size * facts["steps"]
    sizes = {
        profile.name: int(
            facts["share"] * profile.cdf.unique(samples * profile.table.lookups_per_sample)
        )
        for profile in problem.profile
    }
    return _caches(problem, sizes)


def _largest_on_host(problem: Problem, facts: Facts) -> list[Shard]:
    del facts
    tables = sorted((p.table for p in problem.profile), key=lambda table: -table.total_bytes)
    (gpu,) = problem.topology.gpus
    shards, left = [], sum(table.total_bytes for table in tables)
    for table in tables:
        rows, cols = (0, table.rows, 1), (0, table.dim)
        fits = left <= gpu.memory_bytes
        memory, lookup = ("hbm", "device") if fits else ("dram", "host")
        shards.append(Shard(table.name, rows, cols, (gpu.id,), memory, lookup))  # type: ignore[arg-type]
        left -= 0 if fits else table.total_bytes
    return shards


def _ranks_split(problem: Problem, facts: Facts) -> list[Shard]:
    devices = _devices(problem)
    return [
        shard
        for profile in problem.profile
        for size in [int(facts["share"] * profile.table.rows)]
        for shard in _split(profile, size, size, problem, devices)
    ]


def _hot_replicated(problem: Problem, facts: Facts) -> list[Shard]:
    sizes, devices = _hottest(problem.profile, facts["share"]), _devices(problem)
    return [
        shard
        for profile in problem.profile
        for shard in _split(profile, sizes[profile.name], sizes[profile.name], problem, devices)
    ]


def _hot_cached(problem: Problem, facts: Facts) -> list[Shard]:
    return _caches(problem, _hottest(problem.profile, facts["share"]))


def _hot_partitioned(problem: Problem, facts: Facts) -> list[Shard]:
    devices = _devices(problem)
    sizes = _hottest(problem.profile, min(1.0, facts["share"] * len(devices)))
    return [
        shard
        for profile in problem.profile
        for shard in _split(profile, 0, sizes[profile.name], problem, devices)
    ]


def _hot_both(problem: Problem, facts: Facts) -> list[Shard]:
    devices = _devices(problem)
    # A GPU holds 1/N of the rows that are on one GPU each: of their lookups, (N - 1)/N are remote.
    on_one = facts["remote"] * len(devices) / (len(devices) - 1)
    replicated = _serving(problem.profile, 1 - facts["host"] - on_one)
    in_hbm = _serving(problem.profile, 1 - facts["host"])
    return [
        shard
        for profile in problem.profile
        for shard in _split(
            profile, replicated[profile.name], in_hbm[profile.name], problem, devices
        )
    ]


def _split(
    profile: TableProfile, replicated: int, in_hbm: int, problem: Problem, devices: tuple[str, ...]
) -> list[Shard]:
    """Ranks on every GPU, then ranks on one GPU each, then ranks that are read in place."""
    table = profile.table
    shards = [_hbm(table, (0, replicated, 1), *devices)] if replicated else []
    shards += _strided(problem, table, replicated, in_hbm)
    if in_hbm < table.rows:
        shards.append(_in_place(table, (in_hbm, table.rows, 1), *devices))
    return shards


def _hottest(profile: Profile, share: float) -> dict[str, int]:
    """How many rows of each table are among this share of all rows, the hottest first."""
    total = share * sum(p.table.rows for p in profile)
    return _hotter(profile, lambda sizes: sum(sizes.values()) <= total)


def _serving(profile: Profile, share: float) -> dict[str, int]:
    """The hottest rows of all tables that serve no more than this share of all lookups."""
    tables = [(p.name, p.cdf, p.table.lookups_per_sample) for p in profile]
    total = share * sum(lookups for _, _, lookups in tables)
    return _hotter(
        profile,
        lambda sizes: sum(float(c.share(sizes[n])) * k for n, c, k in tables) <= total,
    )


def _hotter(profile: Profile, fits: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Rows that a sample reads at least so often, with the lowest limit with which they fit."""
    reads = [(p.name, p.cdf.row_share * p.table.lookups_per_sample, p.cdf.ranks) for p in profile]

    def sizes(limit: float) -> dict[str, int]:
        return {name: int(ranks[np.count_nonzero(each >= limit)]) for name, each, ranks in reads}

    low, high = 1e-18, 1e6
    if fits(sizes(low)):
        return sizes(low)
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(sizes(middle)) else (middle, high)
    return sizes(high)


PLACEMENTS: dict[str, Callable[[Problem, Facts], list[Shard]]] = {
    "table-wise": _table_wise,
    "column-wise": _column_wise,
    "row-wise": _row_wise,
    "data-parallel": _data_parallel,
    "uva": _uva,
    "cached": _cached,
    "largest-on-host": _largest_on_host,
    "split": _ranks_split,
    "hot-replicated": _hot_replicated,
    "hot-cached": _hot_cached,
    "hot-partitioned": _hot_partitioned,
    "hot-both": _hot_both,
}
