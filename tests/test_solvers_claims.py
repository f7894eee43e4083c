"""What strategies claim to be a bound, against the plans of all others."""

from dataclasses import replace

import numpy as np
import pytest
from calibration_cases import calibration
from fast_and_full import fewer

from cost_models import Calibrated, CostModel, Roofline
from placer import Problem, Topology
from placer.workloads import named_workload
from solvers import SolveResult, solve
from solvers.bounds import lagrangian
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits
from solvers.strategies._search import Search

MIB = 1 << 20


def drawn(seed: int, tables: int, machine: str, batch_size: int = 256) -> Problem:
    """A generated model on GPUs with room for some of its rows."""
    workload = named_workload(f"random-{tables}@{seed}")
    topology = Topology.parse(machine)
    rng = np.random.default_rng(seed)
    most = sum(profile.table.total_bytes for profile in workload) / len(topology.gpus)
    hbm = 100 * MIB + int(most * float(rng.choice([0.002, 0.02, 0.2])))
    return Problem(workload, topology.with_memory(hbm=hbm), batch_size=batch_size)


def check(problem: Problem, model: CostModel, names: tuple[str, ...], steps: int) -> None:
    """No strategy's plan is below what another one claims."""
    results: dict[str, SolveResult] = {
        name: solve(problem, name, model, time_limit_s=3600.0, max_steps=steps, threads=1)
        for name in names
    }
    fits = [name for name, one in results.items() if one.plan is not None]
    for name, one in results.items():
        assert not (fits and one.termination.reason == "infeasible"), (name, fits)
        for other in fits:
            step_time_s = results[other].step_time_s
            assert (one.bound_s or 0.0) <= step_time_s * (1 + 1e-6), (name, other)


MODELS = {
    "roofline": Roofline(),
    "replicas": Calibrated(calibration(exchange_byte=1e-6, replicas=1e-4)),
}


@pytest.mark.parametrize("model", MODELS)
def test_options_that_are_not_looked_at_are_known_when_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many tables, few options are costed for a bound."""
    monkeypatch.setattr(lagrangian, "_ALL_OPTIONS", 0)
    for seed in range(3, 3 + fewer(2, 1)):
        instance = Instance(drawn(seed, 10, "4xh100"), MODELS[model])
        few = lagrangian_bound(instance)
        every = [few.options_of(table) for table in range(instance.tables)]
        options = [list(instance.options_of(table)) for table in range(instance.tables)]
        assert [[cost.option for cost in of] for of in every] == options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "tables", "machine", "model"),
    [
        (7, 4, "2xh100", "roofline"),
        (8, 4, "2xh100", "roofline"),
        (21006, 8, "2x4xh100", "roofline"),
        (21007, 16, "4xh100", "replicas"),
        (21008, 8, "8xh100", "roofline"),
        (21009, 12, "4xh100", "replicas"),
    ],
)
def test_no_plan_is_below_a_claim_of_another(
    seed: int, tables: int, machine: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the problem were large, so that few options are known when a search begins."""
    monkeypatch.setattr(lagrangian, "_ALL_OPTIONS", 0)
    names = ("auto", "ilp", "greedy-cost", "greedy-size", "beam", "dp")
    check(drawn(seed, tables, machine), MODELS[model], names, 3)


def test_what_is_proven_without_replicas_is_no_proof_of_all_plans() -> None:
    """Where searches leave replicas out, room is looked for with them."""
    problem = drawn(1, 8, "2xh100")
    whole = Instance(problem, Roofline())
    tables = range(whole.tables)
    assert any(option.replicated_rows for table in tables for option in whole.options_of(table))
    part = Instance(problem, Roofline(), like=whole, with_replicas=False)
    search = replace(Search.start(part, Clock.start(Limits())), others_s=1.0)
    found = search.first_fit()
    assert found.instance.with_replicas
