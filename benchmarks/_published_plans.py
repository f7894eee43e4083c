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
from placer.plan.fields import whole_table_shard
from solvers import solve

Facts = Mapping[str, Any]
Rows = Mapping[str, int]
"""Rows of each table, by its name."""

_FOUND: dict[str, Plan] = {}


def plan_of(problem: Problem, facts: Facts) -> Plan:
    """The plan of a placement; `facts` are those of `Measurement.placement`."""
    if facts["placement"] == "greedy-cost":
        return _greedy_cost(problem.sha256, problem)
    tables = tuple(profile.table for profile in problem.profile)
    shards = tuple(_shards(problem, facts))
    return Plan(tables, problem.topology, shards, batch_size=problem.batch_size)


def _greedy_cost(sha256: str, problem: Problem) -> Plan:
    """What the solver finds, once for rows of the same problem."""
    if sha256 not in _FOUND:
        plan = solve(problem, solver="greedy-cost", cost_model="roofline").plan
        if plan is None:
            raise ValueError("greedy-cost finds no placement")
        _FOUND[sha256] = plan
    return _FOUND[sha256]


def _shards(problem: Problem, facts: Facts) -> list[Shard]:
    profile, gpus = problem.profile, len(problem.topology.gpus)
    sizes = {one.name: one.table.rows for one in profile}
    nothing = dict.fromkeys(sizes, 0)
    match facts["placement"]:
        case "table-wise":
            return _table_wise(problem)
        case "column-wise":
            return _column_wise(problem)
        case "row-wise":
            return _divided(problem, nothing, sizes)
        case "data-parallel":
            return _divided(problem, sizes, sizes)
        case "uva":
            return _divided(problem, nothing, nothing)
        case "cached" | "hot-cached":
            return _caches(problem, facts)
        case "largest-on-host":
            return _largest_on_host(problem)
        case "split":
            part = {name: int(facts["share"] * rows) for name, rows in sizes.items()}
            return _divided(problem, part, part)
        case "hot-replicated":
            hot = _hottest(profile, facts["share"])
            return _divided(problem, hot, hot)
        case "hot-partitioned":
            return _divided(problem, nothing, _hottest(profile, min(1.0, facts["share"] * gpus)))
        case "hot-both":
            # A GPU holds 1/N of the rows that are on one GPU each: (N - 1)/N of their lookups are
            # remote.
            on_one = facts["remote"] * gpus / (gpus - 1)
            replicated = _serving(profile, 1 - facts["host"] - on_one)
            return _divided(problem, replicated, _serving(profile, 1 - facts["host"]))
        case other:
            raise ValueError(f"no placement is called {other!r}")


def _devices(problem: Problem) -> tuple[str, ...]:
    return tuple(gpu.id for gpu in problem.topology.gpus)


def _table_wise(problem: Problem) -> list[Shard]:
    """Slices of columns as wide as a GPU's part of all bytes allows, the largest first."""
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


def _column_wise(problem: Problem) -> list[Shard]:
    devices, shards = _devices(problem), []
    for table in (one.table for one in problem.profile):
        count = min(len(devices), table.dim)
        edges = [table.dim * number // count for number in range(count + 1)]
        shards += [
            Shard(table.name, (0, table.rows, 1), cols, (device,), "hbm", "device")
            for device, cols in zip(devices, itertools.pairwise(edges), strict=False)
        ]
    return shards


def _divided(problem: Problem, on_every: Rows, in_hbm: Rows) -> list[Shard]:
    """Ranks on every GPU, then ranks on one GPU each, then ranks that are read in place.

    Those on one GPU are dealt out to all GPUs; each table begins with another one.
    """
    devices, shards = _devices(problem), []
    for first, table in enumerate(one.table for one in problem.profile):
        start, stop, cols = on_every[table.name], in_hbm[table.name], (0, table.dim)
        if start:
            shards.append(Shard(table.name, (0, start, 1), cols, devices, "hbm", "device"))
        for number in range(min(len(devices), stop - start)):
            rows = start + number, stop, len(devices)
            device = devices[(first + number) % len(devices)]
            shards.append(Shard(table.name, rows, cols, (device,), "hbm", "device"))
        if stop < table.rows:
            cold = (stop, table.rows, 1)
            shards.append(Shard(table.name, cold, cols, devices, "dram", "uva"))
    return shards


def _caches(problem: Problem, facts: Facts) -> list[Shard]:
    """Caches of the hottest rows of all tables, or of some of the rows that some steps read."""
    if facts["placement"] == "hot-cached" or "share_of_rows" in facts:
        share = facts["share" if facts["placement"] == "hot-cached" else "share_of_rows"]
        sizes = _hottest(problem.profile, share)
    else:
        samples = problem.global_batch_size * facts["steps"]
        sizes = {
            one.name: int(facts["share"] * one.cdf.unique(samples * one.table.lookups_per_sample))
            for one in problem.profile
        }
    return [
        Shard(
            *(one.name, (0, one.table.rows, 1), (0, one.table.dim), _devices(problem)),
            *("dram", "cached"),
            cache_rows=sizes[one.name],
        )
        for one in problem.profile
    ]


def _largest_on_host(problem: Problem) -> list[Shard]:
    tables = sorted((p.table for p in problem.profile), key=lambda table: -table.total_bytes)
    (gpu,) = problem.topology.gpus
    shards, left = [], sum(table.total_bytes for table in tables)
    for table in tables:
        fits = left <= gpu.memory_bytes
        where = ("hbm", "device") if fits else ("dram", "host")
        shards.append(whole_table_shard(table, gpu.id, *where))  # type: ignore[arg-type]
        left -= 0 if fits else table.total_bytes
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
