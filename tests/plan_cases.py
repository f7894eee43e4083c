"""Machines, tables and random sound plans for tests."""

import cProfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from placer import Feature, Plan, Shard, Table
from placer.plan.fields import Provenance, RowOrder, SolverRecord
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology


def roomy(name: str) -> Topology:
    """A preset whose GPUs and hosts have more memory than any card: for plans of all kinds."""
    preset = Topology.parse(name)
    gpus = tuple(replace(gpu, chip="") for gpu in preset.gpus)
    return replace(preset, gpus=gpus).with_memory(hbm="4TiB", dram="64TiB")


def machine(
    gpus: int = 2,
    hosts: int = 1,
    *,
    hbm_bytes: int = 1 << 40,
    dram_bytes: int = 1 << 40,
    launch_s: float = 1e-6,
    servers: int = 0,
) -> Topology:
    """`hosts` equal hosts of `gpus` equal GPUs each, and `servers` without, of round bandwidths."""
    names = [f"host:{number}" for number in range(hosts)]
    ids = [(f"gpu:{number}", names[number // gpus]) for number in range(gpus * hosts)]
    links = [Link(gpu, host, "pcie", 1e10) for gpu, host in ids]
    links += [Link(gpu, host, "nvlink", 1e11) for gpu, host in ids]
    names += [f"host:{hosts + number}" for number in range(servers)]
    links += [Link(host, "network", "network", 1e10) for host in names] if len(names) > 1 else []
    return Topology(
        f"{hosts}x{gpus}",
        tuple(Gpu(gpu, host, hbm_bytes, 1e12, launch_s) for gpu, host in ids),
        tuple(Host(name, dram_bytes, 1e11) for name in names),
        tuple(links),
    )


def sized(topology: Topology, memory: Mapping[str, float]) -> Topology:
    """The machine with so many bytes of memory on some devices."""
    gpus = (replace(g, memory_bytes=int(memory.get(g.id, g.memory_bytes))) for g in topology.gpus)
    hosts = (replace(h, memory_bytes=int(memory.get(h.id, h.memory_bytes))) for h in topology.hosts)
    return replace(topology, gpus=tuple(gpus), hosts=tuple(hosts))


def calls_of(work: Callable[[], object]) -> int:
    """How many functions some work calls, of Python and built in."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    return sum(one.callcount for one in profiler.getstats())


def enlarged(topology: Topology, short_bytes: Mapping[str, int]) -> Topology:
    """The machine with so much more memory on some devices."""
    devices = {device.id: device for device in (*topology.gpus, *topology.hosts)}
    more = {name: devices[name].memory_bytes + size for name, size in short_bytes.items()}
    return sized(topology, more)


def in_hbm(table: str, rows: tuple[int, int, int], cols: tuple[int, int], *devices: str) -> Shard:
    return Shard(table, rows, cols, devices or ("gpu:0",), "hbm", "device")


def in_dram(table: str, rows: tuple[int, int, int], cols: tuple[int, int], *devices: str) -> Shard:
    return Shard(table, rows, cols, devices or ("gpu:0",), "dram", "staged")


def plan_of(table: Table, *shards: Shard, topology: Topology | None = None) -> Plan:
    return Plan((table,), topology or machine(), shards)


# Lone surrogates are no text: UTF-8 cannot hold them.
_words = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)


@st.composite
def tables(draw: st.DrawFn, name: str = "t") -> Table:
    features = tuple(
        Feature(
            f"{name}{number}",
            draw(st.floats(0, 50)),
            draw(st.floats(0, 1)),
            draw(st.sampled_from(["sum", "mean", "max", "none"])),
        )
        for number in range(draw(st.integers(0, 2)))
    )
    rows, dim = draw(st.integers(0, 30)), draw(st.integers(1, 8))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    optimizer = draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam"]))
    return Table(name, rows, dim, dtype, optimizer, features)


@st.composite
def row_slices(draw: st.DrawFn, rows: int) -> list[tuple[int, int, int]]:
    """Slices that partition 0..rows: blocks, each of them strided or not."""
    inner = draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=3)) if rows > 1 else set()
    edges = [0, *sorted(inner), rows]
    slices = []
    for low, high in pairwise(edges):
        ways = draw(st.integers(1, max(1, min(5, high - low))))
        slices += [(low + index, high, ways) for index in range(ways)]
    return slices


@st.composite
def covers(draw: st.DrawFn, table: Table, topology: Topology) -> list[Shard]:
    """Shards that cover a table once: strips of columns, each cut by rows in its own way."""
    inner = draw(st.sets(st.integers(1, table.dim - 1), max_size=2)) if table.dim > 1 else set()
    edges = [0, *sorted(inner), table.dim]
    gpus = [gpu.id for gpu in topology.gpus]
    shards = []
    for strip in pairwise(edges):
        for rows in draw(row_slices(table.rows)):
            replicas = draw(st.lists(st.sampled_from(gpus), min_size=1, max_size=3, unique=True))
            shard = in_hbm(table.name, rows, strip, *replicas)
            kind = draw(st.sampled_from(["device", "uva", "staged", "cached", "host"]))
            if kind != "device":
                size = draw(st.integers(0, 99))
                shard = replace(shard, memory="dram", lookup=kind, buffer_bytes=size)
            if kind == "cached" and not shard.row_count:
                shard = replace(shard, lookup="staged")
            elif kind == "cached":
                shard = replace(shard, cache_rows=draw(st.integers(1, shard.row_count)))
            if shard.lookup in ("staged", "cached"):
                shard = replace(shard, staging_rows=draw(st.integers(0, shard.row_count)))
            if kind == "host" and topology.servers and draw(st.booleans()):
                shard = replace(shard, devices=(topology.servers[0].id,))
            shards.append(shard)
    return draw(st.permutations(shards))


@st.composite
def placed(draw: st.DrawFn, chosen: tuple[Table, ...], topology: Topology) -> Plan:
    """A sound plan of some tables, with row orders of its own."""
    hot_ids = {
        table.name: np.array(
            draw(st.permutations(range(table.rows)))[: draw(st.integers(0, table.rows))], np.int64
        )
        for table in chosen
        if draw(st.booleans())
    }
    return Plan(
        chosen,
        topology,
        tuple(shard for table in chosen for shard in draw(covers(table, topology))),
        {name: RowOrder("profile") for name in hot_ids},
        hot_ids,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A sound plan of a few tables, row orders and all."""
    gpus, hosts = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    topology = machine(gpus, hosts, servers=draw(st.integers(0, 1)))
    names = draw(st.lists(_words, min_size=1, max_size=3, unique=True))
    chosen = tuple(draw(tables(name)) for name in names)
    plan = draw(placed(chosen, topology))
    batch_size, times = draw(st.integers(1, 1 << 20)), st.none() | st.floats(0, 1e3)
    name, status = draw(_words), draw(st.sampled_from(["optimal", "feasible"]))
    step_time_s, bound_s, seconds = draw(times), draw(times), draw(st.floats(0, 1e6))
    seed, cost_model = draw(st.integers(-(1 << 70), 1 << 70)), draw(_words)
    solver = SolverRecord(name, status, step_time_s, bound_s, seconds, seed, cost_model)
    # An absolute path of a profile is saved as seen from the plan, which is tested by itself.
    made = Provenance(draw(_words), draw(_words), draw(_words), draw(_words).lstrip("/"))
    return replace(plan, batch_size=batch_size, solver=solver, provenance=made)


def with_drives(plan: Plan) -> Plan:
    """The plan on the same machine, each of whose hosts has a drive."""
    return replace(plan, topology=plan.topology.with_memory(ssd="1TiB"))
