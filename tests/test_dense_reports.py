"""The dense part in what commands print, in plans that solvers make, and in what follows them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cli_cases import Workbench, succeed

from cost_models import Roofline
from cost_models.dense import dense_phase_s
from placer import AccessCdf, Feature, Plan, Problem, Profile, Table, TableProfile, Topology
from placer.dense import Dense, DenseLayers, MeasuredDense
from solvers import Limits, solve
from solvers.analysis.whatif import whatif
from solvers.report import plan_report

LAYERS = DenseLayers(top=(256, 1), bottom=(64, 16), dense_features=13)
TABLES = Profile(
    tuple(
        TableProfile(Table(name, rows, 16, features=(Feature(name),)), AccessCdf.zipf(rows, 1.05))
        for name, rows in (("a", 4000), ("b", 1000))
    )
)


def solved(dense: Dense | None, *, batch: int = 64, hbm: str = "64MiB") -> tuple[Problem, Plan]:
    problem = Problem(TABLES, Topology.parse("2xh100", hbm=hbm), batch, dense=dense)
    plan = solve(problem, "greedy-cost", "roofline").plan
    assert plan is not None
    return problem, plan


@pytest.mark.parametrize("dense", [LAYERS, MeasuredDense(0.012)])
def test_a_step_is_longer_by_its_dense_part(dense: Dense) -> None:
    without, with_dense = solved(None), solved(dense)
    report = Roofline().evaluate(*with_dense)
    added_s = max(dense_phase_s(with_dense[0]))
    assert report.dense_s == added_s > 0
    alone = Roofline().evaluate(with_dense[0], with_dense[1])
    chain = replace(alone.schedule, fixed_s=(0.0,) * 4)
    embeddings_s = float(chain.chain_times_s(alone.phase_times_s)[0])
    assert report.step_time_s >= embeddings_s + added_s
    assert Roofline().evaluate(*without).dense_s is None
    assert with_dense[1].dense == with_dense[0].dense
    assert with_dense[1].provenance.problem_sha256 == with_dense[0].sha256


def test_a_long_dense_part_is_what_a_step_waits_for() -> None:
    problem, plan = solved(MeasuredDense(1.0))
    report = Roofline().evaluate(problem, plan)
    assert report.has_dense_phase
    assert report.bottleneck == "dense layers"
    shown = plan_report(plan, partial(Roofline().evaluate, problem))
    phases = next(one for one in shown.sections if one.name == "phases")
    names = [row["name"] for row in phases.rows]
    assert names.index("outputs") + 1 == names.index("dense") == names.index("gradients") - 1
    assert any("1 s of it dense layers" in line for line in shown.headline)
    result = solve(problem, "greedy-cost", "roofline", time_limit_s=5.0)
    assert "waits for dense layers; the dense layers bind" in result.termination.detail


def test_words_say_when_steps_are_embeddings_alone() -> None:
    problem, plan = solved(None)
    shown = plan_report(plan, partial(Roofline().evaluate, problem))
    assert any("(roofline" in line and "embeddings alone" in line for line in shown.headline)
    assert shown.facts["dense_s"] is shown.facts["dense_bytes"] is None


@pytest.mark.slow
def test_a_larger_batch_takes_a_longer_dense_part() -> None:
    problem, _ = solved(MeasuredDense(0.5))
    effects = whatif(problem, Roofline(), Limits(max_steps=1)).effects
    doubled = next(one for one in effects if one.change == "batch size x2")
    assert doubled.step_time_s is not None
    assert doubled.step_time_s > 1.0
    # Layers whose activations then do not fit are no change that one can make.
    problem, _ = solved(LAYERS, batch=8192, hbm="48MiB")
    changes = {one.change for one in whatif(problem, Roofline(), Limits(max_steps=1)).effects}
    assert "HBM bandwidth +10%" in changes
    assert "batch size x2" not in changes


def test_commands_keep_what_was_asked(workbench: Workbench, tmp_path: Path) -> None:
    layers, plan = tmp_path / "layers.yaml", tmp_path / "plan.json"
    layers.write_text("top: [8, 1]\nbottom: [8]\ndense_features: 2\nflops_per_s: 1e9\n")
    made = succeed(
        "plan", *workbench.problem(), "--hbm", "1MiB", "--dense", layers, "--pipeline", "serial",
        "--solver", "greedy-cost", "-o", plan, "--format", "json",
    )  # fmt: skip
    facts = json.loads(made.stdout)
    assert facts["pipeline"] == "serial"
    assert facts["dense_bytes"] > 0
    assert Plan.load(plan).pipeline == "serial"
    shown = succeed("show", plan, "--format", "json")
    assert "not those that the plan was made for" not in shown.stderr
    for key in ("dense_s", "dense_bytes", "pipeline", "step_time_s", "problem_sha256"):
        assert json.loads(shown.stdout)[key] == facts[key], key
    replayed = json.loads(succeed("simulate", plan, "--batches", 2, "--format", "json").stdout)
    assert replayed["look_ahead"] is False
    assert replayed["step_mean_s"] > facts["dense_s"] == replayed["dense_s"]
    words = succeed(
        "compare", *workbench.problem(), "--hbm", "1MiB", "--solvers", "greedy-cost",
        "--dense", "measured:3ms",
    ).stdout  # fmt: skip
    assert "steps have dense layers" in words
