"""Plans that solvers make train over ranks, and move the bytes that the cost model says."""

from dataclasses import replace

import numpy as np
import pytest
from executor_cases import machine, plan_of, shard
from ranks_cases import bytes_sent, trains_alike
from ranks_launcher import Job, Outcomes, run

from cost_models import cost_model
from placer import AccessCdf, Problem, Profile, TableProfile
from placer.plan.plan import Plan
from placer.profile.table_profile import RowCounts
from placer.tables import OPTIMIZERS, Feature, Table
from solvers import SOLVERS, solve

PROBLEMS = 3
GPUS = 4


def random_problem(number: int) -> Problem:
    """Up to five small tables, some with a row order, on GPUs with room for half of them."""
    generator = np.random.default_rng(number)
    optimizer = OPTIMIZERS[number % len(OPTIMIZERS)]
    profiles = []
    for index in range(int(generator.integers(3, 6))):
        rows = int(generator.integers(3, 200))
        name = f"t{index}"
        features = tuple(
            Feature(f"{name}.{pooling}", float(generator.integers(1, 6)), 1.0, pooling)
            for pooling in generator.choice(["sum", "mean", "none"], 2, replace=False).tolist()
        )
        dim = int(generator.choice([4, 8, 16]))
        table = Table(name, rows, dim, "float32", optimizer, features)
        counts = generator.zipf(1.3, rows).clip(max=10_000)
        if index % 2:
            cdf = AccessCdf.from_counts(counts, rows)
            profiles.append(TableProfile(table, cdf, RowCounts.from_dense(counts)))
        else:
            profiles.append(TableProfile(table, AccessCdf.zipf(rows, 1.0)))
    total = sum(profile.table.total_bytes for profile in profiles)
    # Buffers of a step take HBM too; less than this and there is no plan.
    topology = machine(GPUS, hbm_bytes=total // 8 + 12_000)
    return Problem(Profile(tuple(profiles), source="test"), topology, 2)


def solved(number: int) -> list[tuple[str, Plan]]:
    """The different plans that the solvers have for a problem."""
    found: dict[object, tuple[str, Plan]] = {}
    problem = random_problem(number)
    for name in SOLVERS:
        result = solve(problem, name, time_limit_s=0.5, seed=number, max_steps=200, threads=1)
        if result.plan is not None:
            found.setdefault(frozenset(result.plan.shards), (name, result.plan))
    return list(found.values())


SAMPLES = 12
BAG = 4
ROWS = 4
"""So few that every rank's samples read all rows: the distinct rows that the cost model expects."""

EXCHANGED = Problem(
    Profile(
        tuple(
            TableProfile(
                Table(name, ROWS, 8, dtype, "rowwise_adagrad", (Feature(name, BAG, 1.0, pooling),)),
                AccessCdf.zipf(ROWS, 0.0),
            )
            for name, dtype, pooling in (
                ("whole", "float32", "sum"),
                ("half precision", "float16", "mean"),
                ("rows", "float32", "sum"),
                ("rows under max", "float32", "max"),
                ("rows one by one", "float32", "none"),
                ("columns", "float32", "sum"),
                ("everywhere", "float32", "sum"),
                ("on two", "float32", "sum"),
                ("two everywhere", "float32", "sum"),
            )
        ),
        source="test",
    ),
    machine(GPUS),
    SAMPLES,
)


def exchanged_plan() -> Plan:
    """A table for each way to exchange; of the last, two rows are everywhere and two on GPU 1."""
    tables = [profile.table for profile in EXCHANGED.profile]
    whole, half, rows, largest, singly, columns, everywhere, on_two, head = tables
    gpus = tuple(f"gpu:{i}" for i in range(GPUS))
    shards = [shard(whole, on="gpu:2"), shard(half, on="gpu:3")]
    for table in (rows, largest, singly):
        shards += [shard(table, (i, ROWS, GPUS), on=gpus[i]) for i in range(GPUS)]
    shards += [shard(columns, None, (0, 3)), shard(columns, None, (3, 8), on="gpu:3")]
    shards += [shard(everywhere, on=gpus), shard(on_two, on=gpus[:2])]
    shards += [shard(head, (0, 2, 1), on=gpus), shard(head, (2, ROWS, 1), on="gpu:1")]
    return plan_of(tables, shards, topology=EXCHANGED.topology)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Different plans of all solvers, by problem and solver."""
    return {
        f"problem {number}, {name}": plan
        for number in range(PROBLEMS)
        for name, plan in solved(number)
    }


pytestmark = pytest.mark.slow
"""`test_ranks_training.py` has what the fast tests try."""


@pytest.fixture(scope="module", params=[2, 4], ids=lambda world: f"{world} ranks")
def outcomes(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> Outcomes:
    jobs: list[Job] = [(name, trains_alike, (plan, 3)) for name, plan in plans.items()]
    return run(request.param, [*jobs, ("exchange", bytes_sent, (exchanged_plan(), SAMPLES, BAG))])


def test_every_plan_of_every_solver_trains(outcomes: Outcomes, plans: dict[str, Plan]) -> None:
    assert {name.split(",")[0] for name in plans} == {f"problem {i}" for i in range(PROBLEMS)}
    for name in plans:
        outcomes.of(name)


def test_the_bytes_sent_are_those_of_the_cost_model(outcomes: Outcomes) -> None:
    """Of every kind: ids, lengths, outputs, gradients, replicas' gradients, sums of squares."""
    sent = outcomes.of("exchange")
    if len(sent) != GPUS:
        return  # The cost model knows of no ranks that stand for several GPUs.
    link_bytes_per_s = EXCHANGED.topology.peer_bytes_per_s("gpu:0")
    plan = exchanged_plan()
    for table in plan.tables:
        own = tuple(found for found in plan.shards if found.table == table.name)
        predicted = cost_model("roofline").evaluate(EXCHANGED, replace(plan, shards=own))
        expected = sum(gpu.communication_s for gpu in predicted.gpus) * link_bytes_per_s
        measured = sum(theirs[table.name] for theirs in sent)
        assert measured == pytest.approx(expected, abs=0.1), table.name
