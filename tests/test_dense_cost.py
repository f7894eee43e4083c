"""Time of the dense part of a step: by hand, as published, in reports and in what follows them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import Workbench, json_of, succeed
from dense_cases import DLRM, machine, problem, table

from cost_models import Roofline
from cost_models.dense import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    dense_cost,
    dense_costs,
    dense_step_s,
)
from cost_models.roofline import RooflineConstants
from placer import AccessCdf, Feature, Plan, Problem, Profile, Table, TableProfile, Topology
from placer.dense import Dense, DenseLayers, DenseMath, DenseNetwork, MeasuredDense
from placer.errors import ProblemError
from placer.workloads import named_workload
from solvers import Limits, solve
from solvers.analysis.whatif import whatif
from solvers.report import plan_report
from solvers.report.page.figures import time_chart


def test_seconds_of_a_step_by_hand() -> None:
    network = DenseNetwork.of(replace(DLRM, optimizer="adagrad"), [table("a", 2)])
    topology = machine(2, link=1e15)
    cost = dense_cost(network, topology, topology.gpus[0], 100, 1e3)  # Arithmetic is all.
    macs = 100 * (6 + 6 + 9 + 3 + 8)
    assert cost.forward_s == pytest.approx(2 * macs / 1e3, rel=1e-4)
    assert cost.backward_s == pytest.approx(2 * (2 * macs - 600) / 1e3, rel=1e-4)
    assert cost.update_s == pytest.approx(33 * 4 * 5 / 1e9)
    assert cost.input_s == pytest.approx(100 * 12 / 1e15)
    assert cost.step_s == pytest.approx(cost.forward_s + cost.backward_s + cost.update_s)
    fast = dense_cost(network, topology, topology.gpus[0], 100, 1e30)  # Memory is all.
    products = 100 * (5 + 5 + 6 + 4) + (6 + 6 + 9 + 3)
    elementwise = 2 * 100 * (3 + 2 + 3 + 1)
    interaction = 100 * (4 + 4 + 4 + 3)
    assert fast.forward_s == pytest.approx(4 * (products + elementwise + interaction) / 1e9)


def test_every_kernel_is_launched() -> None:
    network = DenseNetwork.of(DLRM, [table("a", 2)])
    slow = machine(1)
    slow = replace(slow, gpus=tuple(replace(gpu, launch_s=1.0) for gpu in slow.gpus))
    cost = dense_cost(network, slow, slow.gpus[0], 1, 1e30)
    assert cost.step_s == pytest.approx(4 * 6 + 20, rel=1e-6)


def test_gradients_are_summed_beside_the_backward_pass() -> None:
    # A million parameters in one top layer: known when little of the backward pass is left.
    wide = DenseLayers((1024, 1), dense_features=1023, interaction="concat")
    network, topology = DenseNetwork.of(wide, [table("a", 1)]), machine(2, link=1e6)
    cost = dense_cost(network, topology, topology.gpus[0], 100, 1e9)
    assert cost.allreduce_s == pytest.approx(4 * network.parameters / 1e6)
    # The only layer below the top fills the first bucket when the backward pass is over.
    assert 4 * network.parameters > FIRST_BUCKET_BYTES
    assert cost.exposed_s == pytest.approx(cost.allreduce_s, rel=0.01)
    deep = DenseLayers((1024, 1024, 1024, 1), dense_features=1023, interaction="concat")
    network = DenseNetwork.of(deep, [table("a", 1)])
    assert BUCKET_BYTES > 3 * 4 * 1024**2
    hidden = dense_cost(network, topology, topology.gpus[0], 100_000, 1e9)
    layer_bytes = 4 * 1025 * 1024
    # The top's last layer shares the first bucket; those of the two others are one, at the end.
    assert hidden.exposed_s == pytest.approx(2 * layer_bytes / 1e6, rel=0.01)
    alone = machine(1)
    assert dense_cost(network, alone, alone.gpus[0], 100, 1e9).allreduce_s == 0.0


def test_more_work_never_takes_less_time() -> None:
    tables, previous = named_workload("criteo-kaggle"), 0.0
    for batch in (1, 16, 256, 4096):
        for width in (64, 256, 1024):
            layers = DenseLayers((width, 1), (width, 16), 13)
            cost = dense_costs(Problem(tables, Topology.parse("2xa100-40"), batch, dense=layers))[0]
            assert cost.step_s > previous or width == 64
            previous = cost.step_s


def test_tensor_cores_are_faster_and_unknown_chips_are_named() -> None:
    tables = named_workload("criteo-kaggle")
    layers = DenseLayers((512, 256, 1), (512, 16), 13)
    times = [
        dense_step_s(Problem(tables, Topology.parse("2xh100"), dense=replace(layers, math=math)))
        for math in ("float32", "tf32", "bfloat16")
    ]
    assert times == sorted(times, reverse=True)
    v100 = Topology.parse("1xv100-16")
    older = [
        dense_step_s(Problem(tables, v100, dense=replace(layers, math=math)))
        for math in ("float32", "tf32")
    ]
    assert older[0] == older[1]
    with pytest.raises(ProblemError, match="v100-16, which does not multiply in bfloat16; it has"):
        dense_step_s(Problem(tables, v100, dense=replace(layers, math="bfloat16")))
    with pytest.raises(ProblemError, match="nothing is known of the chip of gpu:0: give flops"):
        dense_step_s(problem(DLRM, machine()))
    assert dense_step_s(problem(replace(DLRM, flops_per_s=1e9), machine())) > 0


def test_the_phase_is_what_is_known_of_it() -> None:
    assert dense_step_s(problem(None, machine())) is None
    assert dense_step_s(problem(MeasuredDense(0.012), machine())) == 0.012
    known = problem(replace(DLRM, flops_per_s=1e9), machine())
    assert dense_step_s(known) == max(cost.step_s for cost in dense_costs(known))


@pytest.mark.parametrize(
    ("machine_name", "math", "samples_per_s"),
    [("1xv100-32", "float32", 672e3), ("1xa100-80", "tf32", 2.88e6)],
)
def test_published_steps_are_dense_for_the_most(
    machine_name: str, math: DenseMath, samples_per_s: float
) -> None:
    # NVIDIA DeepLearningExamples, DLRM in PyTorch on one GPU, batch 65,536, dim 128: embeddings of
    # one lookup each take 2 to 5 ms of these 98 and 23.
    layers = DenseLayers((1024, 1024, 512, 256, 1), (512, 256, 128), 13, math=math)
    tables = named_workload("criteo-terabyte").with_tables(dim=128)
    problem = Problem(tables, Topology.parse(machine_name), 65536, dense=layers)
    assert dense_step_s(problem) == pytest.approx(65536 / samples_per_s, rel=0.12)


def test_inputs_and_sums_are_lanes_of_a_pipeline() -> None:
    model = Roofline(replace(RooflineConstants(), step_s=0.0, exchange_step_s=0.0))
    known = problem(replace(DLRM, flops_per_s=1e9), machine())
    cost = dense_costs(known)[0]
    schedule = model.schedule(known)
    lanes = [schedule.phases[chain[0]] for chain in schedule.chains[1:]]
    assert lanes == ["ids", "link", "network"]
    assert schedule.fixed_s == (cost.step_s, 0.0, cost.input_s, cost.allreduce_s)
    serial = model.schedule(replace(known, pipeline="serial"))
    assert serial.fixed_s == (cost.input_s + cost.step_s,)
    assert model.schedule(problem(None, machine())).fixed_s == (0.0,) * 4


def test_every_bucket_is_two_collectives() -> None:
    topology = machine(2)
    slow = replace(topology, links=tuple(replace(one, latency_s=0.25) for one in topology.links))
    network = DenseNetwork.of(DLRM, [table("a", 2)])
    costs = [dense_cost(network, one, one.gpus[0], 100, 1e30) for one in (topology, slow)]
    assert costs[1].exposed_s - costs[0].exposed_s == pytest.approx(0.5)


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
    drawn = time_chart(report, None).table.rows
    assert min(row["waits_s"] for row in drawn) < 0.01 * report.step_time_s
    added_s = dense_step_s(with_dense[0])
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
    shown = plan_report(plan, Roofline().evaluate(problem, plan))
    phases = next(one for one in shown.sections if one.name == "phases")
    names = [row["name"] for row in phases.rows]
    assert names.index("outputs") + 1 == names.index("dense") == names.index("gradients") - 1
    of_dense = phases.rows[names.index("dense")]
    assert of_dense["slowest_s"] == of_dense["mean_s"] == report.dense_s == 1.0
    assert any("1 s of it dense layers" in line for line in shown.headline)
    result = solve(problem, "greedy-cost", "roofline", time_limit_s=5.0)
    assert "waits for dense layers; the dense layers bind" in result.termination.detail


def test_words_say_when_steps_are_embeddings_alone() -> None:
    problem, plan = solved(None)
    shown = plan_report(plan, Roofline().evaluate(problem, plan))
    assert any("(roofline" in line and "embeddings alone" in line for line in shown.headline)
    assert shown.facts["dense_s"] is shown.facts["dense_bytes"] is None


@pytest.mark.slow
def test_a_larger_batch_takes_a_longer_dense_part() -> None:
    problem, _ = solved(MeasuredDense(0.5))
    effects = whatif(problem, Roofline(), Limits(max_steps=1)).effects
    doubled = next(one for one in effects if one.change == "batch size x2")
    assert doubled.step_time_s > 1.0
    # Layers whose activations then do not fit are no change that one can make.
    problem, _ = solved(LAYERS, batch=8192, hbm="48MiB")
    changes = {one.change for one in whatif(problem, Roofline(), Limits(max_steps=1)).effects}
    assert "HBM bandwidth +10%" in changes
    assert "batch size x2" not in changes


def test_commands_keep_what_was_asked(few_tables: Workbench, tmp_path: Path) -> None:
    layers, plan = tmp_path / "layers.yaml", tmp_path / "plan.json"
    layers.write_text("top: [8, 1]\nbottom: [8]\ndense_features: 2\nflops_per_s: 1e9\n")
    made = succeed(
        "plan", *few_tables.problem(), "--hbm", "1MiB", "--dense", layers, "--pipeline", "serial",
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
    replayed = json_of("simulate", plan, "--batches", 2)
    assert replayed["look_ahead"] is False
    assert replayed["step_mean_s"] > facts["dense_s"] == replayed["dense_s"]
    words = succeed(
        "compare", *few_tables.problem(), "--hbm", "1MiB", "--solvers", "greedy-cost",
        "--dense", "measured:3ms",
    ).stdout  # fmt: skip
    assert "steps have dense layers" in words
