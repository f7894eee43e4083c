"""Time of the dense part of a step: by hand, against published steps, and as work grows."""

from dataclasses import replace

import pytest
from dense_cases import DLRM, machine, problem, table

from cost_models import Roofline
from cost_models.dense import dense_cost, dense_costs, dense_phase_s
from cost_models.dense.step import BUCKET_BYTES, FIRST_BUCKET_BYTES
from cost_models.roofline import RooflineConstants
from placer import Problem, Topology
from placer.dense import (
    DenseLayers,
    DenseMath,
    DenseNetwork,
    MeasuredDense,
)
from placer.errors import ProblemError
from placer.workloads import named_workload


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
        dense_phase_s(Problem(tables, Topology.parse("2xh100"), dense=replace(layers, math=math)))[
            0
        ]
        for math in ("float32", "tf32", "bfloat16")
    ]
    assert times == sorted(times, reverse=True)
    v100 = Topology.parse("1xv100-16")
    older = [
        dense_phase_s(Problem(tables, v100, dense=replace(layers, math=math)))
        for math in ("float32", "tf32")
    ]
    assert older[0] == older[1]
    with pytest.raises(ProblemError, match="v100-16, which does not multiply in bfloat16; it has"):
        dense_phase_s(Problem(tables, v100, dense=replace(layers, math="bfloat16")))
    with pytest.raises(ProblemError, match="nothing is known of the chip of gpu:0: give flops"):
        dense_phase_s(problem(DLRM, machine()))
    assert dense_phase_s(problem(replace(DLRM, flops_per_s=1e9), machine()))[0] > 0


def test_the_phase_is_what_is_known_of_it() -> None:
    assert dense_phase_s(problem(None, machine())) == (0.0, 0.0)
    assert dense_phase_s(problem(MeasuredDense(0.012), machine())) == (0.012, 0.012)
    known = problem(replace(DLRM, flops_per_s=1e9), machine())
    assert dense_phase_s(known) == tuple(cost.step_s for cost in dense_costs(known))


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
    assert dense_phase_s(problem)[0] == pytest.approx(65536 / samples_per_s, rel=0.12)


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
