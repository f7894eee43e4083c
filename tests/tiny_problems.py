"""Random tiny problems of all kinds, of which `enumeration` finds the best plan."""

import math
import random
from dataclasses import replace

import numpy as np
from plan_cases import machine, sized
from problem_cases import problem_of

from cost_models import Roofline
from placer import AccessCdf, Constraints, Feature, Problem, Table, TableProfile, TableRule
from placer.constraints.file import Kind
from placer.errors import ProblemError
from placer.plan.fields import PIPELINES
from placer.profile.table_profile import RowCounts
from placer.tables import DTYPE_BYTES, OPTIMIZERS
from placer.topology.devices import Drive, Host, Link
from placer.topology.topology import Topology
from solvers.model.instance import Instance

_ROWS = {1: 7, 2: 4, 3: 3}
"""Rows of the largest table, by the number of tables: more take too long to enumerate."""

_TOO_MANY = 2_500
"""Placements of a table, hot rows included, that take too long to enumerate."""


_TOO_MANY_TOGETHER = 30_000_000


_FORBIDDEN: list[Kind] = [
    "row-wise", "column-wise", "replicated", "split", "staged", "uva", "host", "cached",
]  # fmt: skip
"""A list of its own: a seed means the same problem when there are more kinds."""


def tiny_problem(seed: int) -> Problem:
    """One to three tables on one to three GPUs: a problem of any kind, short of memory or not."""
    rng = random.Random(seed)
    while True:
        topology = _machine(rng)
        gpus, number = len(topology.gpus), rng.choice([1, 2, 2, 3, 3])
        if gpus * number > 6:
            continue
        names = [f"t{n}" for n in range(number)]
        whole_only = [rng.random() < 0.25 for _ in names]
        tables = [
            _table(
                rng, name, rows=10 ** rng.randint(1, 6) if whole else rng.randint(1, _ROWS[number])
            )
            for name, whole in zip(names, whole_only, strict=True)
        ]
        batch_size = int(10 ** rng.uniform(0, 6))
        try:
            constraints = _constraints(rng, names, whole_only, topology)
            problem = replace(
                problem_of(*tables, topology=topology, batch_size=batch_size),
                pipeline=rng.choice(PIPELINES),
                constraints=constraints,
            )
            problem = _short_of_memory(rng, problem)
            sizes = _choices(problem)
        except ProblemError:  # Constraints that contradict one another.
            continue
        if max(sizes) <= _TOO_MANY and math.prod(sizes) <= _TOO_MANY_TOGETHER:
            return problem


def with_server(seed: int) -> Problem:
    """A tiny problem of up to two GPUs, with a host without GPUs of any speed and size beside."""
    rng = random.Random(seed)
    while True:
        problem = tiny_problem(rng.randrange(100_000))
        topology = problem.topology
        if len(topology.gpus) > 2:
            continue
        sizes = [profile.table.total_bytes for profile in problem.profile]
        memory_bytes = int(rng.choice([2 * sum(sizes) + 1e9, max(sizes) * 1.2, sum(sizes) * 0.7]))
        server = Host(f"host:{len(topology.hosts)}", memory_bytes, 10 ** rng.uniform(9, 12))
        ports = [link for link in topology.links if link.kind != "network"]
        ports += [
            Link(host.id, "network", "network", 10 ** rng.uniform(9, 11))
            for host in (*topology.hosts, server)
        ]
        larger = replace(topology, hosts=(*topology.hosts, server), links=tuple(ports))
        try:
            problem = replace(problem, topology=larger)
            sizes = _choices(problem)
        except ProblemError:
            continue
        if max(sizes) <= _TOO_MANY and math.prod(sizes) <= _TOO_MANY_TOGETHER // 10:
            return problem


def driven(seed: int, *, served: bool = False) -> Problem:
    """A tiny problem whose hosts with GPUs have little memory and a drive each; with a server."""
    rng, problem = random.Random(seed), (with_server if served else tiny_problem)(seed)
    machine = problem.topology
    hosts = tuple(
        replace(
            host,
            memory_bytes=int(host.memory_bytes * rng.choice((0, 0.2, 0.5, 1))),
            drive=Drive(1 << 30, rng.choice((1e6, 1e4)), rng.choice((2e5, 1e4))),
        )
        if machine.gpus_of(host.id)
        else host
        for host in machine.hosts
    )
    widths = rng.choice(((), ("int8",), ("bfloat16",)))
    return replace(problem, topology=replace(machine, hosts=hosts), widths=widths)


def tight_problem(seed: int) -> Problem:
    """Two to eight tables on one to four GPUs, with 0.1 to 5% more or less memory than needed."""
    rng = random.Random(seed)
    gpus = rng.randint(1, 4)
    hosts = rng.choice([1, 1, 2]) if gpus > 1 else 1
    topology, number, tables = machine(max(1, gpus // hosts), hosts), rng.randint(2, 8), []
    for n in range(number):
        rows, dim = int(10 ** rng.uniform(0.5, 5.5)), rng.choice([8, 16, 32, 64, 128])
        dtype = rng.choice(["float32", "float16"])
        optimizer = rng.choice(["sgd", "rowwise_adagrad", "adam"])
        lookups, share = rng.choice([1.0, 1.0, 3.0, 20.0]), rng.choice([0.5, 1.0])
        feature = Feature(f"f{n}", lookups, share, rng.choice(["sum", "mean", "none"]))  # type: ignore[arg-type]
        table = Table(f"t{n}", rows, dim, dtype, optimizer, (feature,))  # type: ignore[arg-type]
        tables.append(TableProfile(table, AccessCdf.zipf(rows, rng.uniform(0.2, 1.5))))
    problem = problem_of(*tables, topology=topology, batch_size=int(10 ** rng.uniform(0, 4)))
    instance = Instance(problem, Roofline())
    curves = [instance.curve(instance.whole(n), 0) for n in range(number)]
    low, high = (sum(float(curve.hbm_bytes[end]) for curve in curves) for end in (0, -1))
    rows_bytes = sum(float(curve.dram_bytes.max()) for curve in curves)
    more = 1 + rng.choice([0.001, 0.002, 0.005, 0.01, 0.02, 0.05]) * rng.choice([1, 1, -1])
    style = rng.choice(["hbm only", "both", "buffers", "even"])
    hbm, dram = low + (high - low) * 0.5, rows_bytes * 0.5 * more
    if style == "hbm only":
        hbm, dram = high * more, 0.0
    elif style == "both":
        hbm = low + (high - low) * rng.uniform(0.1, 0.9)
        dram = max(0.0, high * more - hbm)
    elif style == "buffers":
        hbm, dram = low * more, rows_bytes * 1.01
    even = rng.random() < 0.6
    shares = np.array([1.0 if even else rng.uniform(0.2, 1) for _ in topology.gpus])
    each = (hbm * shares / shares.sum()).tolist()
    memory = dict(zip((gpu.id for gpu in topology.gpus), each, strict=True))
    memory |= {host.id: dram / len(topology.hosts) for host in topology.hosts}
    return replace(problem, topology=sized(topology, memory))


def _machine(rng: random.Random) -> Topology:
    gpus, hosts = rng.choice([(1, 1), (2, 1), (2, 1), (3, 1), (1, 2), (1, 2), (1, 3)])
    topology = machine(gpus, hosts, launch_s=rng.choice([0.0, 1e-9, 1e-7, 1e-5]))
    slower, dram = rng.choice([1.0, 1.0, 0.3]), rng.choice([0.1, 1.0, 1.0, 10.0])
    *others, last = topology.gpus
    last = replace(last, hbm_bytes_per_s=last.hbm_bytes_per_s * slower)
    of_hosts = tuple(replace(h, dram_bytes_per_s=h.dram_bytes_per_s * dram) for h in topology.hosts)
    return replace(topology, gpus=(*others, last), hosts=of_hosts)


def _table(rng: random.Random, name: str, rows: int) -> TableProfile:
    features = tuple(
        Feature(
            f"{name}.{n}",
            rng.choice([0.0, 1.0, 1.0, 3.0, 20.0]) if n == 0 else rng.choice([1.0, 5.0]),
            rng.choice([0.0, 0.1, 1.0, 1.0, 1.0]),
            rng.choice(["sum", "sum", "mean", "max", "none"]),  # type: ignore[arg-type]
        )
        for n in range(rng.choice([0, 1, 1, 1, 1, 2]))
    )
    dim, dtype = rng.choice([8, 16, 16, 32, 48, 64, 128]), rng.choice(list(DTYPE_BYTES))
    table = Table(name, rows, dim, dtype, rng.choice(OPTIMIZERS), features)  # type: ignore[arg-type]
    if rows < 100 and rng.random() < 0.5:
        counts = np.array([rng.choice([0, 1, 5, 50]) for _ in range(rows)], dtype=np.int64)
        return TableProfile(
            table, AccessCdf.from_counts(counts, rows), RowCounts.from_dense(counts)
        )
    return TableProfile(table, AccessCdf.zipf(rows, rng.uniform(0, 2)))


def _constraints(
    rng: random.Random, names: list[str], whole_only: list[bool], topology: Topology
) -> Constraints:
    """Large tables are never split, so that there is little to enumerate; others at random."""
    rules, often = {}, rng.choice([0.0, 0.0, 0.5])
    devices = [gpu.id for gpu in topology.gpus] + [host.id for host in topology.hosts]
    for name, whole in zip(names, whole_only, strict=True):
        forbid = {"split", "cached"} if whole else set()
        if rng.random() < often:
            forbid |= set(rng.sample(_FORBIDDEN, rng.choice([0, 1, 2, 3, 4])))
        pinned = None
        if rng.random() < often / 2:
            pinned = tuple(rng.sample(devices, rng.randint(1, 2)))
        tier = rng.choice([None, "hbm", "dram"]) if rng.random() < often else None
        if forbid or pinned or tier:
            rules[name] = TableRule(pinned, tier, frozenset(forbid))  # type: ignore[arg-type]
    together = [names[-2:]] if len(names) > 1 and rng.random() < often / 2 else []
    return Constraints.of(rules, together)


def _short_of_memory(rng: random.Random, problem: Problem) -> Problem:
    """The problem with room for all of its rows, for some, for hardly any, or for too few."""
    low, high, rows = _needs(problem)
    topology, hosts = problem.topology, len(problem.topology.hosts)
    gpus = len(topology.gpus)
    style = rng.choice(["room", "some", "some", "little", "little"])
    needed = {
        "room": high * 3 * gpus,
        "some": low + (high - low) * rng.uniform(0.0, 1.0),
        "little": low * rng.uniform(0.9, 1.5),
    }[style]
    unequal = rng.choice([1.0, 1.0, 0.7, 1 / 15])
    shares = np.array([1.0] + [unequal] * (gpus - 1))
    rng.shuffle(shares)  # type: ignore[arg-type]
    each = needed * shares / (shares.sum() if rng.random() < 0.5 else 1.0)
    room = {
        "room": 1e15,
        "some": rows * rng.uniform(0.3, 1.2),
        "little": rows * rng.uniform(0.0, 0.4),
    }[rng.choice(["room", "room", "room", "some", "little"])]
    host_shares = np.array([1.0] + [rng.choice([1.0, 0.1])] * (hosts - 1))
    of_host = room * host_shares / host_shares.sum()
    memory = dict(zip((gpu.id for gpu in topology.gpus), each.tolist(), strict=True))
    memory |= zip((host.id for host in topology.hosts), of_host.tolist(), strict=True)
    return replace(problem, topology=sized(topology, memory))


def _needs(problem: Problem) -> tuple[float, float, float]:
    """HBM of whole tables: the least, and with all rows; and the bytes of all rows."""
    instance = Instance(problem, Roofline())
    low = high = rows = 0.0
    for table in range(instance.tables):
        options = instance.options_of(table)
        whole = [option for option in options if option.shard_count == 1] or list(options)
        curves = []
        for option in whole:
            shards = instance.shards(table, option) or instance.replicas(table, option)
            curves.append([instance.curve(s, 0).hbm_bytes for s in shards if s is not None])
        low += min(sum(float(c.min()) for c in of) for of in curves)
        high += max(sum(float(c.max()) for c in of) for of in curves)
        rows += problem.profile.tables[table].table.total_bytes
    return low, high, rows


def _choices(problem: Problem) -> list[int]:
    """About how many placements each table has."""
    instance = Instance(problem, Roofline())
    return [
        sum(
            math.prod(
                instance.curve(shard, 0).hot_rows.size * (instance.gpus - at)
                for at, shard in enumerate(instance.shards(table, option))
            )
            for option in instance.options_of(table)
        )
        for table in range(instance.tables)
    ]
