"""The dense part of a model: its products and memory by hand, its time, and what problems do."""

from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.dense import dense_cost, dense_costs, dense_phase_s
from cost_models.dense.step import BUCKET_BYTES, FIRST_BUCKET_BYTES
from placer import Plan, Problem, Profile, Topology
from placer.dense import Dense, DenseLayers, DenseNetwork, MeasuredDense, Product
from placer.errors import PlacerError, ProblemError
from placer.profile.cdf import AccessCdf
from placer.profile.table_profile import TableProfile
from placer.simulator.replay import ReplayOptions
from placer.tables import Feature, Table
from placer.topology.devices import Gpu, Host, Link
from placer.workloads import named_workload
from placer.workloads.dense import dense_part, published_dense
from placer.workloads.published import published

DLRM = DenseLayers(top=(3, 1), bottom=(3, 2), dense_features=2)


def table(name: str, dim: int, features: int = 1) -> Table:
    return Table(name, 10, dim, features=tuple(Feature(f"{name}{n}") for n in range(features)))


def machine(gpus: int = 2, *, memory: int = 2**30, link: float = 1e8) -> Topology:
    """GPUs of round numbers: a byte takes a nanosecond in their memory, a launch none."""
    devices = tuple(Gpu(f"gpu:{n}", "host:0", memory, 1e9, 0.0) for n in range(gpus))
    links = [Link(gpu.id, "host:0", "pcie", link) for gpu in devices]
    return Topology("round", devices, (Host("host:0", 2**30, 1e9),), tuple(links))


def problem(layers: Dense | None, topology: Topology) -> Problem:
    tables = [TableProfile(table(n, 2), AccessCdf.zipf(10, 0.0)) for n in "ab"]
    return Problem(Profile(tuple(tables)), topology, 4, dense=layers)


# Products


def test_a_dlrm_counted_by_hand() -> None:
    network = DenseNetwork.of(DLRM, [table("a", 2)])
    sizes = [(one.part, one.inputs, one.outputs) for one in network.products]
    # Top: 2 of the bottom MLP, and the one pair.
    assert sizes == [("bottom", 2, 3), ("bottom", 3, 2), ("top", 3, 3), ("top", 3, 1)]
    assert network.macs_per_sample == (6 + 6 + 9 + 3) + 2 * 2 * 2
    assert network.flops_per_sample == 6 * 32
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
    memory = network.memory(100, gpus=2)
    assert memory.parameter_bytes == memory.gradient_bytes == memory.bucket_bytes == 33 * 4
    assert memory.state_bytes == states * 33 * 4
    kept = (3 + 2 + 3 + 1) + (4 + 4 + 3)  # Layers' outputs; vectors, products, the top's input.
    assert memory.activation_bytes == 100 * (12 + 4 * (kept + 2 * 4))
    assert memory.total_bytes == (4 + states - 1) * 33 * 4 + memory.activation_bytes
    assert network.memory(100).bucket_bytes == 0  # One GPU sums nothing.


def test_half_precision_halves_activations_and_copies_parameters() -> None:
    half = DenseNetwork.of(replace(DLRM, math="bfloat16"), [table("a", 2)])
    assert half.memory(100).activation_bytes == 100 * (12 + 2 * 28)
    assert half.memory(100).parameter_bytes == 33 * 6
    assert half.memory(100).gradient_bytes == 33 * 4


def test_a_problem_takes_the_dense_part_off_each_gpu_once() -> None:
    without, given = problem(None, machine()), problem(DLRM, machine())
    assert given.dense_memory is not None
    taken = given.dense_memory.total_bytes
    assert [gpu.memory_bytes for gpu in given.topology.gpus] == [2**30 - taken] * 2
    assert given.topology.hosts == without.topology.hosts
    assert replace(given, pipeline="serial").topology == given.topology
    larger = replace(given, batch_size=8)
    assert larger.topology == problem(DLRM, machine()).topology.with_memory(
        hbm=2**30 - larger.dense_memory.total_bytes
    )
    assert replace(larger, batch_size=4) == given
    assert problem(MeasuredDense(0.01), machine()).topology == without.topology


def test_a_gpu_without_room_for_the_dense_part_is_named() -> None:
    with pytest.raises(ProblemError, match=r"gpu:0 has 64 B .*dense layers alone take .* bytes\)"):
        problem(DLRM, machine(memory=64))


# Time


def test_seconds_of_a_step_by_hand() -> None:
    network = DenseNetwork.of(replace(DLRM, optimizer="adagrad"), [table("a", 2)])
    topology = machine(2, link=1e15)
    cost = dense_cost(network, topology, topology.gpus[0], 100, 1e3)  # Arithmetic is all.
    macs = 100 * (6 + 6 + 9 + 3 + 8)
    assert cost.forward_s == pytest.approx(2 * macs / 1e3, rel=1e-4)
    assert cost.backward_s == pytest.approx(2 * (2 * macs - 600) / 1e3, rel=1e-4)
    assert cost.bottom_s == pytest.approx(2 * 1200 / 1e3, rel=1e-4)
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


def test_a_published_step_of_dlrm_is_dense_for_the_most() -> None:
    # NVIDIA DeepLearningExamples, PyTorch DLRM: 494,000 samples/s in float32 on one V100-32, batch
    # 32,768, dim 128; embeddings of one lookup each take the rest of these 66.3 ms.
    layers = DenseLayers((1024, 1024, 512, 256, 1), (512, 256, 128), 13)
    tables = named_workload("criteo-terabyte").with_tables(dim=128)
    seconds = dense_phase_s(Problem(tables, Topology.parse("1xv100-32"), 32768, dense=layers))[0]
    assert 0.75 < seconds / (32768 / 494e3) < 1.0


# Problems and plans


def test_only_what_is_not_as_usual_changes_the_hash() -> None:
    usual = problem(None, machine())
    hashes = {
        usual.sha256,
        replace(usual, pipeline="serial").sha256,
        problem(DLRM, machine()).sha256,
        problem(replace(DLRM, math="bfloat16"), machine()).sha256,
        problem(MeasuredDense(0.01), machine()).sha256,
    }
    assert len(hashes) == 5
    named = replace(machine(), gpus=tuple(replace(gpu, chip="h100") for gpu in machine().gpus))
    assert problem(None, named).sha256 == usual.sha256
    assert problem(DLRM, named).sha256 != problem(DLRM, machine()).sha256


def test_a_pipeline_is_one_of_two() -> None:
    with pytest.raises(ProblemError, match="'eager'; there are look-ahead and serial"):
        replace(problem(None, machine()), pipeline="eager")


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


# What a command says


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
