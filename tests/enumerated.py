"""Tiny problems with the best plan of each, found by enumeration."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from enumeration import Enumeration
from fast_and_full import fewer
from plan_cases import machine
from problem_cases import counted_table, crossed_machine, problem_of, zipf_table

from cost_models import Roofline, ShardingOption
from placer import Plan, Problem, TableProfile
from placer.constraints.constraints import Constraints
from placer.constraints.file import TableRule
from placer.plan.fields import PIPELINES
from placer.topology.topology import Topology
from solvers.model.instance import Instance, TableShard


def tiny_table(rng: random.Random, name: str, rows: int, dims: list[int]) -> TableProfile:
    dim, lookups = rng.choice(dims), rng.choice([0.1, 1.0, 4.0])
    if rng.random() < 0.5:
        counts = [rng.randint(0, 20) for _ in range(rows)]
        return counted_table(name, counts, dim, lookups=lookups)
    exponent, pooling = rng.uniform(0, 2), rng.choice(["sum", "none"])
    return zipf_table(name, rows, dim, lookups=lookups, exponent=exponent, pooling=pooling)


def short_of_memory(rng: random.Random, problem: Problem) -> Problem:
    """The problem on GPUs that have room for all, for nothing, or for some of the rows."""
    instance = Instance(problem, Roofline())
    curves = [
        [
            instance.curve(TableShard(table, ShardingOption(cold=cold)), 0).hbm_bytes
            for cold in ("staged", "uva")
        ]
        for table in range(instance.tables)
    ]
    low, high = (sum(float(end(np.concatenate(c))) for c in curves) for end in (np.min, np.max))
    topology = problem.topology
    hbm = (low + (high - low) * rng.uniform(-0.2, 1.0)) / instance.gpus * rng.uniform(1, 1.5)
    smaller = rng.choice([1.0, 1.0, 0.7])
    gpus = tuple(
        replace(gpu, memory_bytes=int(hbm * (smaller if number else 1.0)))
        for number, gpu in enumerate(topology.gpus)
    )
    hosts = topology.hosts
    if rng.random() < 0.2:
        rows = sum(profile.table.total_bytes for profile in problem.profile)
        room = int(rows * rng.uniform(0.1, 0.8) / len(hosts))
        hosts = tuple(replace(host, memory_bytes=room) for host in hosts)
    return replace(problem, topology=replace(topology, gpus=gpus, hosts=hosts))


def varied(rng: random.Random, topology: Topology) -> Topology:
    """The machine with a slower GPU, or hosts' memory that is slower or faster."""
    slower, dram = rng.choice([1.0, 0.3]), rng.choice([0.1, 1.0, 1.0, 10.0])
    *others, last = topology.gpus
    last = replace(last, hbm_bytes_per_s=last.hbm_bytes_per_s * slower)
    hosts = tuple(replace(h, dram_bytes_per_s=h.dram_bytes_per_s * dram) for h in topology.hosts)
    return replace(topology, gpus=(*others, last), hosts=hosts)


def pair(seed: int) -> Problem:
    """Two or three tables of up to 5 rows on two GPUs."""
    rng = random.Random(seed)
    number = rng.choice([2, 2, 3])
    tables = [
        tiny_table(rng, f"t{n}", rng.randint(1, 5 if n < 2 else 4), [16, 32, 48])
        for n in range(number)
    ]
    launch_s = rng.choice([0.0, 1e-9, 1e-6])
    topology = rng.choice([machine(2, launch_s=launch_s), machine(1, 2, launch_s=launch_s)])
    topology = varied(rng, topology)
    return short_of_memory(
        rng, problem_of(*tables, topology=topology, batch_size=rng.choice([1, 4, 16]))
    )


def four(seed: int) -> Problem:
    """One or two tables on four GPUs: grids, finer slices, rows replicated beside them."""
    rng = random.Random(seed)
    tables = [tiny_table(rng, "t0", rng.randint(2, 3), [16, 32])]
    if rng.random() < 0.6:
        tables.append(tiny_table(rng, "t1", rng.randint(1, 2), [16, 32]))
    launch_s = rng.choice([0.0, 1e-9])
    topology = rng.choice([machine(4, launch_s=launch_s), machine(2, 2, launch_s=launch_s)])
    return short_of_memory(
        rng, problem_of(*tables, topology=varied(rng, topology), batch_size=rng.choice([1, 16]))
    )


def crossed(seed: int) -> Problem:
    """Two GPUs of which each is better at something."""
    rng = random.Random(seed)
    tables = [tiny_table(rng, f"t{n}", rng.randint(2, 6), [16, 32]) for n in range(2)]
    topology = crossed_machine(launch_s=rng.choice([0.0, 1e-9]))
    return short_of_memory(
        rng, problem_of(*tables, topology=topology, batch_size=rng.choice([4, 64]))
    )


def one_large(seed: int) -> Problem:
    """A heavy table beside a light one, without pooling: replicas of hot rows pay."""
    rng = random.Random(seed)
    heavy = zipf_table(
        "t0", rng.randint(5, 9), 32, lookups=8.0, exponent=rng.uniform(1, 3), pooling="none"
    )
    topology = machine(2, launch_s=rng.choice([0.0, 1e-9]))
    problem = problem_of(
        heavy,
        tiny_table(rng, "t1", 2, [16]),
        topology=varied(rng, topology),
        batch_size=rng.choice([4, 64]),
    )
    return short_of_memory(rng, problem)


def constrained(seed: int) -> Problem:
    """Two or three tables of which users want something."""
    rng = random.Random(seed)
    names = ["t0", "t1", "t2"][: rng.choice([2, 3])]
    tables = [tiny_table(rng, name, rng.randint(1, 3), [16, 32]) for name in names]
    topology = varied(rng, machine(rng.choice([2, 2, 3]), launch_s=rng.choice([0.0, 1e-9])))
    problem = short_of_memory(
        rng, problem_of(*tables, topology=topology, batch_size=rng.choice([4, 16]))
    )
    kinds = ["row-wise", "column-wise", "replicated", "split", "staged", "uva", "host", "cached"]
    rules = {}
    for name in names:
        gpus = rng.sample([gpu.id for gpu in topology.gpus], rng.choice([1, 2]))
        rules[name] = TableRule(
            tuple(gpus) if rng.random() < 0.3 else None,
            rng.choice([None, None, None, "hbm", "dram"]),
            frozenset(rng.sample(kinds, rng.choice([0, 1, 1, 2, 3]))),
        )
    together = [names[:2]] if rng.random() < 0.3 else []
    if together:
        rules["t0"] = replace(rules["t0"], devices=rules["t1"].devices)
    return replace(problem, constraints=Constraints.of(rules, together))


def sharing(seed: int) -> Problem:
    """Two tables on two GPUs, one read in place while the other one's rows may be copied.

    GPUs mostly have no links but PCIe, and tables two arenas.
    """
    rng = random.Random(seed)
    tables = []
    for name in ("t0", "t1"):
        profile = tiny_table(rng, name, rng.randint(1, 3), [16, 32])
        optimizer = rng.choice(["sgd", "adagrad"])
        spec = replace(profile.table, dtype=rng.choice(["float32", "float16"]), optimizer=optimizer)
        tables.append(replace(profile, table=spec))
    topology = machine(2, launch_s=rng.choice([0.0, 1e-10, 1e-9]))
    kinds, latency_s = rng.choice([{"pcie"}, {"pcie"}, {"pcie", "nvlink"}]), rng.choice([0.0, 1e-9])
    links = [replace(each, latency_s=latency_s) for each in topology.links if each.kind in kinds]
    problem = problem_of(
        *tables, topology=replace(topology, links=tuple(links)), batch_size=rng.choice([4, 64])
    )
    if rng.random() < 0.5:
        problem = short_of_memory(rng, problem)
    rules = {
        "t0": TableRule(tier="dram", forbid=frozenset({"staged", "cached", "host"})),
        "t1": TableRule(tier=rng.choice(["dram", "dram", None]), forbid=frozenset({"uva", "host"})),
    }
    return replace(problem, constraints=Constraints.of(rules, []))


def pooling(seed: int) -> Problem:
    """Two or three tables whose cold rows a host of slow memory pools, in no other way."""
    rng = random.Random(seed)
    tables = [
        zipf_table(f"t{n}", rng.randint(2, 5), rng.choice([16, 32]), lookups=rng.choice([2.0, 8.0]))
        for n in range(rng.choice([2, 2, 3]))
    ]
    topology = machine(2, launch_s=rng.choice([0.0, 1e-9]))
    slower = rng.choice([0.3, 0.05, 0.01])
    hosts = [replace(h, dram_bytes_per_s=h.dram_bytes_per_s * slower) for h in topology.hosts]
    topology = replace(topology, hosts=tuple(hosts))
    problem = problem_of(*tables, topology=topology, batch_size=rng.choice([4, 64]))
    rules = {"*": TableRule(forbid=frozenset({"staged", "uva", "cached"}))}
    return replace(short_of_memory(rng, problem), constraints=Constraints.of(rules))


KINDS: dict[str, tuple[Callable[[int], Problem], int]] = {
    "pair": (pair, 14),
    "four": (four, 10),
    "crossed": (crossed, 10),
    "one large": (one_large, 10),
    "constrained": (constrained, 40),
    "sharing": (sharing, 80),
    "pooling": (pooling, 8),
}
"""Kinds of tiny problems that are solved by enumeration, and how many of each."""


@dataclass(frozen=True)
class Solved:
    """A tiny problem, the step time of its best plan (infinite without one), and that plan."""

    problem: Problem
    best_s: float
    plan: Plan | None


class Enumerated:
    """The tiny problems of a kind, solved when first asked for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @cached_property
    def solved(self) -> list[Solved]:
        make, number = KINDS[self.kind]
        number = fewer(number, 6)
        # Copies cost little where they run ahead: half of the problems have them in the step.
        problems = [
            replace(make(seed), pipeline=PIPELINES[seed % len(PIPELINES)]) for seed in range(number)
        ]
        return [Solved(problem, *Enumeration(problem, Roofline()).best()) for problem in problems]


ENUMERATED = {kind: Enumerated(kind) for kind in KINDS}
