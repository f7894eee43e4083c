"""Plans that solvers make train over ranks, and move the bytes that the cost model says."""

import numpy as np
import pytest
from executor_cases import machine, plan_of, shard
from ranks_cases import bytes_sent, trains_alike
from ranks_launcher import Job, Outcomes, run

from cost_models import cost_model
from placer import AccessCdf, Problem, Profile, TableProfile
from placer.plan.plan import Plan
from placer.profile.counts import RowCounts
from placer.tables import OPTIMIZERS, Feature, Table
from solvers import SOLVERS, solve

PROBLEMS = 5
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


BAG = 4
SAMPLES = 6
EXCHANGED = Problem(
    Profile(
        tuple(
            TableProfile(
                Table(name, 64, 8, features=(Feature(name, BAG),)), AccessCdf.zipf(64, 0.0)
            )
            for name in ("whole", "rows", "columns")
        ),
        source="test",
    ),
    machine(GPUS),
    SAMPLES,
)
"""One table is whole, one cut by rows over all GPUs, one by columns over two."""


def exchanged_plan() -> Plan:
    whole, rows, columns = (profile.table for profile in EXCHANGED.profile)
    shards = [shard(whole, on="gpu:2")]
    shards += [shard(rows, (i, 64, GPUS), on=f"gpu:{i}") for i in range(GPUS)]
    shards += [shard(columns, None, (0, 3)), shard(columns, None, (3, 8), on="gpu:3")]
    return plan_of([whole, rows, columns], shards, topology=EXCHANGED.topology)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Different plans of all solvers, by problem and solver."""
    return {
        f"problem {number}, {name}": plan
        for number in range(PROBLEMS)
        for name, plan in solved(number)
    }


@pytest.fixture(scope="module", params=[2, 4], ids=lambda world: f"{world} ranks")
def outcomes(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> Outcomes:
    jobs: list[Job] = [(name, trains_alike, (plan, 3)) for name, plan in plans.items()]
    return run(request.param, [*jobs, ("exchange", bytes_sent, (exchanged_plan(), SAMPLES, BAG))])


def test_every_plan_of_every_solver_trains(outcomes: Outcomes, plans: dict[str, Plan]) -> None:
    assert {name.split(",")[0] for name in plans} == {f"problem {i}" for i in range(PROBLEMS)}
    for name in plans:
        outcomes.of(name)


def test_the_bytes_sent_are_those_of_the_cost_model(outcomes: Outcomes) -> None:
    sent = outcomes.of("exchange")
    if len(sent) != GPUS:
        return  # The cost model knows of no ranks that stand for several GPUs.
    predicted = cost_model("roofline").evaluate(EXCHANGED, exchanged_plan())
    link_bytes_per_s = EXCHANGED.topology.peer_bytes_per_s("gpu:0")
    bytes_predicted = sum(gpu.communication_s for gpu in predicted.gpus) * link_bytes_per_s
    kinds = ("ids", "outputs", "gradients")
    assert sum(theirs[kind][0] for theirs in sent for kind in kinds) == round(bytes_predicted)
    lookups = GPUS * SAMPLES * BAG
    # Ids go once to each strip of columns.
    assert sum(sum(theirs["ids"]) for theirs in sent) == 4 * lookups * 8
    vectors = GPUS * SAMPLES * (1 + GPUS + 1) * 8 * 4
    assert sum(sum(theirs["outputs"]) for theirs in sent) == vectors
    assert sum(sum(theirs["gradients"]) for theirs in sent) == vectors
    assert not any("replicas" in theirs for theirs in sent)
