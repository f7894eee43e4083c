"""Small problems for tests of cost models and solvers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from plan_cases import machine

from placer import AccessCdf, Feature, Plan, Problem, Profile, Shard, Table, TableProfile
from placer.plan.fields import Lookup
from placer.plan.memory import with_buffers
from placer.profile.table_profile import RowCounts
from placer.topology.topology import Topology


def zipf_table(
    name: str,
    rows: int,
    dim: int = 16,
    *,
    lookups: float = 1.0,
    exponent: float = 1.0,
    optimizer: str = "rowwise_adagrad",
    pooling: str = "sum",
) -> TableProfile:
    """A table of published shape: a Zipf law, no counts, one feature."""
    feature = Feature(name, lookups, 1.0, pooling)  # type: ignore[arg-type]
    table = Table(name, rows, dim, optimizer=optimizer, features=(feature,))  # type: ignore[arg-type]
    return TableProfile(table, AccessCdf.zipf(rows, exponent))


def counted_table(
    name: str, counts: Sequence[int], dim: int = 16, *, lookups: float = 1.0
) -> TableProfile:
    """A table of a log: counts by id, and so a row order."""
    dense = np.asarray(counts, dtype=np.int64)
    table = Table(name, dense.size, dim, features=(Feature(name, lookups),))
    cdf = AccessCdf.from_counts(dense, dense.size)
    return TableProfile(table, cdf, RowCounts.from_dense(dense))


def problem_of(
    *tables: TableProfile, topology: Topology | None = None, batch_size: int = 64
) -> Problem:
    return Problem(Profile(tables, source="test"), topology or machine(), batch_size)


def unequal_machine(hbm_bytes: int = 1 << 40, *, launch_s: float = 1e-6) -> Topology:
    """Two hosts of two GPUs; the second host's GPUs are smaller and slower."""
    topology = machine(2, 2, hbm_bytes=hbm_bytes, launch_s=launch_s)
    slow = [
        replace(gpu, memory_bytes=gpu.memory_bytes // 3, hbm_bytes_per_s=gpu.hbm_bytes_per_s / 2)
        for gpu in topology.gpus[2:]
    ]
    return replace(topology, gpus=(*topology.gpus[:2], *slow))


def crossed_machine(hbm_bytes: int = 1 << 40, *, launch_s: float = 1e-6) -> Topology:
    """Two GPUs of which one has the faster memory, the other the faster link to its host."""
    topology = machine(2, hbm_bytes=hbm_bytes, launch_s=launch_s)
    fast, slow = topology.gpus
    links = [
        replace(link, bytes_per_s=link.bytes_per_s * 8)
        if (link.a, link.kind) == (slow.id, "pcie")
        else link
        for link in topology.links
    ]
    slow = replace(slow, hbm_bytes_per_s=slow.hbm_bytes_per_s / 3)
    return replace(topology, gpus=(fast, slow), links=tuple(links))


def resident_buffers(problem: Problem) -> int:
    """HBM that a problem's tables take on one GPU besides their rows, all of these in HBM."""
    taken, samples = 0, problem.global_batch_size
    for number, profile in enumerate(problem.profile):
        shard = whole(problem, "device", table=number)
        taken += with_buffers(profile, shard, samples=samples, returns_bags=True).buffer_bytes
    return taken


def plan_for(problem: Problem, *shards: Shard) -> Plan:
    tables = tuple(profile.table for profile in problem.profile)
    return Plan(tables, problem.topology, shards, batch_size=problem.batch_size)


def whole(problem: Problem, lookup: Lookup, *devices: str, table: int = 0) -> Shard:
    """All of a table, read in one way; a cache holds half of the rows."""
    spec = problem.profile.tables[table].table
    memory = "hbm" if lookup == "device" else "dram"
    cache_rows = spec.rows // 2 if lookup == "cached" else 0
    cells, on = ((0, spec.rows, 1), (0, spec.dim)), devices or ("gpu:0",)
    return Shard(spec.name, *cells, on, memory, lookup, cache_rows)


@st.composite
def table_profiles(draw: st.DrawFn, name: str, *, least_rows: int = 0) -> TableProfile:
    """A table of up to 40 rows: counted or published, read or not."""
    rows = draw(st.integers(least_rows, 40))
    features = tuple(
        Feature(
            f"{name}{number}",
            draw(st.floats(0, 8)),
            draw(st.floats(0, 1)),
            draw(st.sampled_from(["sum", "max", "none"])),
        )
        for number in range(draw(st.integers(0, 2)))
    )
    dim = draw(st.sampled_from([3, 16, 32, 80]))
    dtype = draw(st.sampled_from(["float32", "float16"]))
    optimizer = draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam"]))
    table = Table(name, rows, dim, dtype, optimizer, features)
    if draw(st.booleans()):
        counts = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
        dense = np.array(counts, dtype=np.int64)
        return TableProfile(table, AccessCdf.from_counts(dense, rows), RowCounts.from_dense(dense))
    return TableProfile(table, AccessCdf.zipf(rows, draw(st.floats(0, 2))))


@st.composite
def problems(draw: st.DrawFn, *, hbm_bytes: int = 1 << 40) -> Problem:
    """Up to 4 tables on up to 4 GPUs."""
    number = draw(st.integers(1, 4))
    tables = [draw(table_profiles(f"t{n}", least_rows=0 if n else 1)) for n in range(number)]
    sizes = (1, 1), (3, 1), (2, 2)
    machines = [machine(gpus, hosts, hbm_bytes=hbm_bytes) for gpus, hosts in sizes]
    machines += [unequal_machine(hbm_bytes), crossed_machine(hbm_bytes)]
    topology = draw(st.sampled_from(machines))
    return problem_of(*tables, topology=topology, batch_size=draw(st.integers(1, 200)))
