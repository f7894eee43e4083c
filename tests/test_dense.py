"""The dense part of a model: products, memory, texts that name it, problems and plans with it."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cases import DLRM, machine, problem, table
from torch.profiler import ProfilerActivity, profile

from placer import Plan, Problem, Topology
from placer.dense import Dense, DenseLayers, DenseNetwork, MeasuredDense, Product, dense_memory
from placer.dense.network import pass_bytes
from placer.errors import PlacerError, ProblemError
from placer.simulator.replay import ReplayOptions
from placer.training.trainer import Dlrm
from placer.workloads import named_workload, published
from placer.workloads.dense import dense_part, published_dense

# Products


def test_a_dlrm_counted_by_hand() -> None:
    network = DenseNetwork.of(DLRM, [table("a", 2)])
    sizes = [(one.part, one.inputs, one.outputs) for one in network.products]
    # Top: 2 of the bottom MLP, and the one pair.
    assert sizes == [("bottom", 2, 3), ("bottom", 3, 2), ("top", 3, 3), ("top", 3, 1)]
    assert network.macs_per_sample == (6 + 6 + 9 + 3) + 2 * 2 * 2
    assert network.parameters == 9 + 8 + 12 + 4
    assert network.input_bytes_per_sample == 12
    assert [one.is_first for one in network.products] == [True, False, False, False]


def test_every_feature_gives_a_vector_and_other_widths_are_projected() -> None:
    network = DenseNetwork.of(DLRM, [table("a", 2, features=2), table("b", 5)])
    assert network.vectors == 4
    assert Product(5, 2, "projection", bias=False) in network.products
    assert network.products[3].inputs == 2 + 6  # Six pairs of four vectors.


def test_without_dense_features_the_widest_table_says_how_wide_vectors_are() -> None:
    network = DenseNetwork.of(DenseLayers((1,)), [table("a", 2), table("b", 4)])
    assert network.products == (Product(2, 4, "projection", False), Product(1, 1, "top"))


@pytest.mark.parametrize(("rank", "cross"), [(0, [(10, 10)] * 2), (3, [(10, 3), (3, 10)] * 2)])
def test_cross_layers_are_square_or_of_low_rank(rank: int, cross: list[tuple[int, int]]) -> None:
    layers = replace(DLRM, interaction="cross", cross_layers=2, cross_rank=rank)
    network = DenseNetwork.of(layers, [table("a", 8)])
    crosses = [one for one in network.products if one.part == "cross"]
    assert [(one.inputs, one.outputs) for one in crosses] == cross
    assert sum(one.bias for one in crosses) == 2
    assert network.interaction_macs == 2 * 10
    assert next(one.inputs for one in network.products if one.part == "top") == 10


def test_concatenation_takes_means_of_neighbouring_columns_of_embeddings_alone() -> None:
    layers = DenseLayers((4, 1), dense_features=3, interaction="concat", concat_stride=7)
    network = DenseNetwork.of(layers, [table("a", 8), table("b", 8)])
    assert [one.inputs for one in network.products] == [3 + 3, 4]  # ceil(16 / 7), and 3 features.


def test_mlperf_dcnv2_has_its_parameters() -> None:
    layers = DenseLayers((1024, 1024, 512, 256, 1), (512, 256, 128), 13, "cross", 3, 512)
    tables = [one.table for one in named_workload("mlperf-dcnv2")]
    # Bottom and top MLP, and three cross layers of 27 × 128 columns.
    expected = 14 * 512 + 513 * 256 + 257 * 128
    expected += 3457 * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
    expected += 3 * (2 * 3456 * 512 + 3456)
    assert DenseNetwork.of(layers, tables).parameters == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top": ()}, "top lists no layer"),
        ({"top": (4, 0)}, "top must be at least 1, not 0"),
        ({"bottom": (-1,)}, "bottom must be at least 1, not -1"),
        ({"dense_features": 0}, "a bottom MLP needs dense_features"),
        ({"dense_features": -2}, "dense_features must be at least 0, not -2"),
        ({"interaction": "sum"}, "interaction 'sum' is none of dot, cross, concat"),
        ({"math": "int8"}, "math 'int8' is none of float32"),
        ({"optimizer": "lamb"}, "optimizer 'lamb' is none of sgd"),
        ({"interaction": "cross"}, "cross needs one layer at least"),
        ({"cross_layers": 2}, "'dot' with cross_layers 2"),
        ({"cross_rank": 8}, "cross_rank 8 goes with cross alone"),
        ({"concat_stride": 2}, "concat_stride goes with interaction concat alone"),
        ({"flops_per_s": 0.0}, "flops_per_s must be more than 0, not 0"),
    ],
)
def test_layers_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        replace(DLRM, **changes)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_measured_time_is_a_time(seconds: float) -> None:
    with pytest.raises(ProblemError, match="must be 0 s or more"):
        MeasuredDense(seconds)


# Memory


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("adagrad", 1), ("adam", 2)])
def test_memory_by_hand(optimizer: str, states: int) -> None:
    network = DenseNetwork.of(replace(DLRM, optimizer=optimizer), [table("a", 2)])
    memory = dense_memory(network, 100, gpus=2)
    assert memory.parameter_bytes == memory.gradient_bytes == memory.bucket_bytes == 33 * 4
    assert memory.state_bytes == states * 33 * 4
    # In the interaction's backward pass: outputs of the bottom MLP, two vectors, gradients of the
    # top's input and of all four products, and those of the vectors as left and right factor.
    assert memory.activation_bytes == 100 * (12 + 4 * ((3 + 2) + 4 + 3 + 4 + 2 * 4))
    assert memory.total_bytes == (3 + states) * 33 * 4 + memory.activation_bytes
    assert dense_memory(network, 100).bucket_bytes == 0  # One GPU sums nothing.


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        # 3 dense features and 40 columns of embeddings; hidden layers have 2 outputs.
        # In the top's last product of all 43 columns: they, their gradients, two outputs.
        ({"interaction": "concat"}, 43 + 43 + 2),
        # In the means of 40 columns, which keep them: they, their gradients, 9 inputs of the top.
        ({"interaction": "concat", "concat_stride": 7}, 40 + 40 + 9 + 9),
        # In two cross layers: two times 43 columns and a rank of 5 each, the result, its gradient
        # and that of the first input.
        ({"interaction": "cross", "cross_layers": 2, "cross_rank": 5}, 2 * 91 + 43 + 2 * 43),
    ],
)
def test_memory_of_other_interactions_by_hand(changes: dict[str, Any], values: int) -> None:
    network = DenseNetwork.of(DenseLayers((2, 1), (), 3, **changes), [table("a", 20, features=2)])
    memory = dense_memory(network, 100)
    assert memory.activation_bytes == 100 * (16 + 4 * values)


def test_half_precision_halves_activations_and_copies_parameters() -> None:
    network = DenseNetwork.of(DLRM, [table("a", 2)])
    of_half = DenseNetwork.of(replace(DLRM, math="bfloat16"), [table("a", 2)])
    full, half = dense_memory(network, 100), dense_memory(of_half, 100)
    assert half.activation_bytes - 1200 == (full.activation_bytes - 1200) / 2
    assert half.parameter_bytes == 33 * 6
    assert half.gradient_bytes == 33 * 4


@pytest.mark.parametrize(
    ("features", "dim", "bottom", "top"),
    [
        (26, 16, (512, 256, 64), (512, 256)),  # Most in the forward pass of the top MLP,
        (26, 64, (64,), (64, 32)),  # in the backward pass of the interaction,
        (2, 16, (16,), (64, 512)),  # or in that of the top MLP.
    ],
)
def test_memory_is_what_torch_allocates(
    features: int, dim: int, bottom: tuple[int, ...], top: tuple[int, ...]
) -> None:
    names, samples = [f"f{number}" for number in range(features)], 512
    model = Dlrm(dict.fromkeys(names, dim), 13, dim=dim, bottom=bottom, top=top)
    pooled = {name: torch.randn(samples, dim, requires_grad=True) for name in names}
    numeric, labels = torch.randn(samples, 13), torch.ones(samples)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        logits = model(numeric, pooled)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
    events = profiled.profiler.kineto_results.events()
    allocated = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    most = max(itertools.accumulate(size for _, size in allocated))
    layers = DenseLayers((*top, 1), (*bottom, dim), 13)
    network = DenseNetwork.of(layers, [table("t", dim, features)])
    memory = dense_memory(network, samples)
    given = numeric.nbytes + labels.nbytes
    # Gradients of parameters are there in part: those of the top MLP, or none.
    assert memory.activation_bytes - given <= most * 1.03
    assert most * 0.97 <= memory.activation_bytes + memory.gradient_bytes - given
    assert max(pass_bytes(network, samples)) - given == pytest.approx(most, rel=0.03)


def test_a_problem_takes_the_dense_part_off_each_gpu_once() -> None:
    without, given = problem(None, machine()), problem(DLRM, machine())
    taken = given.dense_memory.total_bytes
    assert [gpu.memory_bytes for gpu in given.topology.gpus] == [2**30 - taken] * 2
    assert given.topology.hosts == without.topology.hosts
    assert replace(given, pipeline="serial").topology == given.topology
    larger = replace(given, batch_size=8)
    left = 2**30 - larger.dense_memory.total_bytes
    assert larger.topology == given.topology.with_memory(hbm=left)
    assert replace(larger, batch_size=4) == given
    assert problem(MeasuredDense(0.01), machine()).topology == without.topology


def test_a_gpu_without_room_for_the_dense_part_is_named() -> None:
    with pytest.raises(ProblemError, match=r"gpu:0 has 64 B .*dense layers alone take .* bytes\)"):
        problem(DLRM, machine(memory=64))


# Problems and plans


def test_only_what_is_not_as_usual_changes_the_hash() -> None:
    usual = problem(None, machine())
    parts = DLRM, replace(DLRM, math="bfloat16"), MeasuredDense(0.01)
    others = replace(usual, pipeline="serial"), *(problem(dense, machine()) for dense in parts)
    assert len({one.sha256 for one in (usual, *others)}) == 5
    named = replace(machine(), gpus=tuple(replace(gpu, chip="h100") for gpu in machine().gpus))
    assert problem(None, named).sha256 == usual.sha256
    assert problem(DLRM, named).sha256 != problem(DLRM, machine()).sha256


@pytest.mark.parametrize("dense", [None, MeasuredDense(0.012), replace(DLRM, math="float16")])
def test_a_plan_file_keeps_both(dense: Dense | None, tmp_path: Path) -> None:
    named = replace(Topology.parse("2xh100"), sources={})  # A plan does not keep sources.
    asked = replace(problem(dense, named), pipeline="serial")
    plan = Plan(
        tuple(one.table for one in asked.profile), asked.topology, (),
        batch_size=4, pipeline=asked.pipeline, dense=asked.dense,
    )  # fmt: skip
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = Problem.of_plan(loaded, asked.profile)
    assert again.topology.gpus == asked.topology.gpus
    assert (again.pipeline, again.dense) == (asked.pipeline, asked.dense)


def test_a_dense_part_that_cannot_be_is_refused_in_a_plan_file(tmp_path: Path) -> None:
    plan = Plan((table("a", 2),), machine(), (), dense=DLRM)
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(path.read_text().replace('"bottom": [', '"cross_rank": 4, "bottom": ['))
    with pytest.raises(PlacerError, match="cross_rank 4 goes with cross alone"):
        Plan.load(path)


def test_what_follows_a_plan_keeps_its_pipeline() -> None:
    plan = Plan((table("a", 2),), machine(), (), pipeline="serial")
    assert ReplayOptions().of_plan(plan).look_ahead is False
    assert ReplayOptions(look_ahead=True).of_plan(plan).look_ahead is True
    assert ReplayOptions().of_plan(replace(plan, pipeline="look-ahead")).look_ahead is True


def test_texts_name_a_dense_part() -> None:
    assert dense_part("none") is None
    assert dense_part("measured:1.5ms") == MeasuredDense(0.0015)
    assert dense_part("workload", "mlperf-dcnv2") == published_dense("mlperf-dcnv2")
    half = dense_part("workload:bfloat16", "mlperf-dcnv2")
    assert half == replace(published_dense("mlperf-dcnv2"), math="bfloat16")


@pytest.mark.parametrize(
    ("text", "workload", "message"),
    [
        ("workload", None, "give --workload, or a file"),
        ("workload", "avazu", "no dense layers were published for 'avazu'; .*mlperf-dcnv2"),
        ("workload:int4", "criteo-kaggle", "math 'int4' is none of float32"),
        ("measured:soon", None, "--dense measured:soon: not a duration: 'soon'"),
        ("512-256-1", None, "is none of none, workload"),
        ("missing.yaml", None, "cannot read the dense missing.yaml: No such file"),
    ],
)
def test_texts_that_name_none_are_refused(text: str, workload: str | None, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        dense_part(text, workload)


FILES = {
    "dense.yaml": "top: [3, 1]\nbottom: [3, 2]\ndense_features: 2\nmath: tf32\n",
    "dense.toml": 'top = [3, 1]\nbottom = [3, 2]\ndense_features = 2\nmath = "tf32"\n',
    "dense.json": '{"top": [3, 1], "bottom": [3, 2], "dense_features": 2, "math": "tf32"}',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_layers_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    assert dense_part(str(tmp_path / name)) == replace(DLRM, math="tf32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bottom: [4]", "dense.yaml: top: Field required"),
        ("top: [4, 0]", r"top\[1\]: 0: .*greater than or equal to 1"),
        ("top: [1]\nwidth: 4", "width: no such field; docs/dense.md lists them"),
        ("top: [1]\nmaths: tf32", r"maths: no such field; .*; did you mean math\?"),
        ("top: [1]\nmath: int8", "math: 'int8'"),
        ("top: [1]\ncross_rank: 4", "dense.yaml: dense layers: cross_rank 4 goes with cross"),
        ("top: [1", "dense.yaml is not a dense file"),
    ],
)
def test_a_file_without_layers_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "dense.yaml").write_text(text)
    with pytest.raises(ProblemError, match=message):
        dense_part(str(tmp_path / "dense.yaml"))


def test_published_layers_fit_their_tables() -> None:
    for name, entry in published().items():
        if "dense" not in entry:
            continue
        tables = [one.table for one in named_workload(name)]
        network = DenseNetwork.of(published_dense(name), tables)
        assert network.parameters > 0
        assert not [one for one in network.products if one.part == "projection"]
    # As published: Medium takes means of 7 columns, and 25 numeric features.
    medium = [one.table for one in named_workload("nvidia-medium")]
    columns = sum(one.dim * len(one.features) for one in medium)
    network = DenseNetwork.of(published_dense("nvidia-medium"), medium)
    assert network.products[0].inputs == -(-columns // 7) + 25


def test_vectors_have_the_width_of_tables_that_another_one_was_asked_for() -> None:
    assert published_dense("criteo-terabyte", 128).bottom == (512, 256, 128)
    assert published_dense("nvidia-tiny", 128) == published_dense("nvidia-tiny")
