"""The module around the backends: checks before anything is touched, memory, checkpoints."""

import copy
import io
import pickle
import sys
from dataclasses import replace

import pytest
import torch
from executor_cases import (
    assert_same_bits,
    backward,
    machine,
    placements,
    plan_of,
    random_batch,
    random_gradients,
    shard,
    train_step,
    two_features,
)
from fast_and_full import combinations
from torch import nn

from placer.errors import (
    BackendError,
    CapacityError,
    CheckpointError,
    DataError,
    PlacerError,
    PlanMismatchError,
)
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.growing import Growing
from placer.plan.memory import device_memory
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, Feature, Table


def test_plans_that_are_not_sound_are_refused() -> None:
    table = two_features()
    with pytest.raises(PlanMismatchError, match=r"'t'.*rank 60 is covered 0 times"):
        PlacedEmbeddings(plan_of([table], [shard(table, (0, 60, 1))]))
    plan = plan_of([table], topology=machine(hbm_bytes=2000))
    asked = device_memory(plan)["gpu:0"].total_bytes
    with pytest.raises(CapacityError, match=rf"gpu:0 .*{asked} bytes.*{asked - 2000} bytes too"):
        PlacedEmbeddings(plan)


def test_weights_that_do_not_fit_are_all_named() -> None:
    table = two_features()
    wrong = {"t": torch.zeros(61, 9), "u": torch.zeros(1, 1)}
    with pytest.raises(PlanMismatchError) as error:
        PlacedEmbeddings(plan_of([table]), weights=wrong)
    assert "'u' is no table" in str(error.value)
    assert "(61, 9), the plan says (61, 8)" in str(error.value)


def test_initial_weights_depend_on_the_seed_and_not_on_the_plan() -> None:
    table = two_features(rows=70_000, dim=8)  # more rows than are drawn at a time
    plans = placements(table)
    first = PlacedEmbeddings(plans["hbm"], seed=5).state_dict()["t.weight"]
    second = PlacedEmbeddings(plans["hot, then row-wise"], seed=5).state_dict()["t.weight"]
    other = PlacedEmbeddings(plans["hbm"], seed=6).state_dict()["t.weight"]
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.abs().max() <= 70_000**-0.5
    assert first.std() == pytest.approx(70_000**-0.5 / 3**0.5, rel=0.01)


@combinations(
    "placement, optimizer, backend",
    ["hbm", "host", "split 50%", "grid", "crossing cuts"],
    OPTIMIZERS,
    ["torch", "tiered"],
)
def test_memory_held_is_what_the_plan_says(placement: str, optimizer: str, backend: str) -> None:
    plan = placements(two_features(optimizer))[placement]
    held = PlacedEmbeddings(plan, backend=backend).memory_use()
    for use in device_memory(plan).values():
        tier = "hbm" if use.device.startswith("gpu") else "dram"
        planned = use.weight_bytes + use.state_bytes
        if (placement, optimizer) == ("crossing cuts", "rowwise_adagrad") and tier == "hbm":
            # Column slices cut the uncut half too, and each keeps its copy of the row's state.
            planned += 4 * 30 if use.device == "gpu:0" else 0
        assert held.get((use.device, tier), 0) == planned


def test_memory_of_maps_and_replicas() -> None:
    plans = placements(two_features("sgd"))
    assert PlacedEmbeddings(plans["hbm"]).memory_use() == {("gpu:0", "hbm"): 61 * 8 * 4}
    assert PlacedEmbeddings(plans["replicas"]).memory_use() == {("gpu:0", "hbm"): 61 * 8 * 4}
    split = PlacedEmbeddings(plans["split 50%"]).memory_use()
    assert split["gpu:0", "row_maps"] == 61 * 4
    by_id = replace(plans["split 50%"], row_order={}, hot_ids={})
    assert ("gpu:0", "row_maps") not in PlacedEmbeddings(by_id).memory_use()


def test_unknown_names_list_the_known() -> None:
    plan = plan_of([two_features()])
    with pytest.raises(BackendError, match="no backend 'tpu'; there are auto, numba"):
        PlacedEmbeddings(plan, backend="tpu")
    with pytest.raises(BackendError, match="'torch' runs on cpu, not on cuda"):
        PlacedEmbeddings(plan, backend="torch", device="cuda")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="torch finds no GPU here"):
            PlacedEmbeddings(plan, device="cuda")
    with pytest.raises(PlanMismatchError, match="optimizer 'lamb' is none of"):
        PlacedEmbeddings(plan, optimizer="lamb")
    with pytest.raises(PlanMismatchError, match="cache_policy 'lru' is none of"):
        PlacedEmbeddings(plan, cache_policy="lru")  # type: ignore[arg-type]
    with pytest.raises(PlanMismatchError, match=r"padding_idx names features \['x'\]"):
        PlacedEmbeddings(plan, padding_idx={"x": 0})


def test_a_batch_of_other_features_is_refused() -> None:
    model = PlacedEmbeddings(plan_of([two_features()]))
    assert model.feature_names == ("t.sum", "t.mean")
    with pytest.raises(DataError, match="holds 1 features, the plan 2"):
        model(BagBatch(torch.tensor([1]), torch.tensor([0, 1]), 1))
    with pytest.raises(PlacerError, match=r"look_ahead takes batches and .*, not a Linear"):
        next(look_ahead([], nn.Linear(2, 2)))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"a BagBatch, not a dict: make one with .*from_features"):
        model({"t.sum": (torch.tensor([1]), None, None)})


def test_one_optimizer_for_all_tables() -> None:
    model = PlacedEmbeddings(plan_of([two_features("sgd")]), optimizer="adagrad")
    assert model.optimizer_state_dict()["t.sum"].shape == (61, 8)


def test_it_is_saved_and_loaded_as_a_part_of_a_model() -> None:
    table = two_features()

    def model(seed: int) -> nn.Module:
        placed = PlacedEmbeddings(placements(table)["grid"], seed=seed)
        return nn.ModuleDict({"embeddings": placed, "top": nn.Linear(2, 2)})

    first, second = model(1), model(2)
    assert list(first.state_dict()) == ["embeddings.t.weight", "top.weight", "top.bias"]
    second.load_state_dict(first.state_dict())
    assert torch.equal(
        first.state_dict()["embeddings.t.weight"], second.state_dict()["embeddings.t.weight"]
    )


def test_checkpoints_that_do_not_fit_are_refused_and_change_nothing() -> None:
    tables = [two_features(), Table("u", 3, 2, features=(Feature("u"),))]
    model = PlacedEmbeddings(plan_of(tables))
    before, state = model.state_dict(), model.optimizer_state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*u\.weight"):
        model.load_state_dict({"t.weight": before["t.weight"]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*v\.weight"):
        model.load_state_dict({**before, "v.weight": torch.zeros(1)})
    with pytest.raises(PlanMismatchError, match=r"checkpoint: table 'u' has shape \(1, 2\)"):
        model.load_state_dict({"t.weight": torch.zeros(61, 8), "u.weight": torch.zeros(1, 2)})
    with pytest.raises(CheckpointError, match=r"u\.sum is missing; v\.sum is of no table"):
        model.load_optimizer_state_dict({"t.sum": state["t.sum"], "v.sum": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"t\.sum has shape \(3,\), not \(61,\)"):
        model.load_optimizer_state_dict({**state, "t.sum": torch.zeros(3)})
    assert model.load_state_dict({}, strict=False).missing_keys == ["t.weight", "u.weight"]
    whole = nn.ModuleList([model, nn.Linear(1, 1)])
    whole.load_state_dict(whole.state_dict())  # Names of other modules are not unexpected.
    assert_same_bits(before, model.state_dict())
    ones = {"t.weight": torch.ones(61, 8), "v.weight": torch.zeros(1)}
    assert model.load_state_dict(ones, strict=False) == (["u.weight"], ["v.weight"])
    assert torch.equal(model.state_dict()["t.weight"], ones["t.weight"])
    assert torch.equal(model.state_dict()["u.weight"], before["u.weight"])


def test_it_prints_what_it_is() -> None:
    text = repr(PlacedEmbeddings(plan_of([two_features()]), backend="torch"))
    assert "tables=1, features=2, shards=1, backend='torch'" in text


def test_auto_falls_back_to_torch_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    plan = plan_of([two_features()])
    model = PlacedEmbeddings(plan)
    assert model.backend == "torch"
    train_step(model, random_batch([two_features()]))
    with pytest.raises(BackendError, match="needs numba: pip install"):
        PlacedEmbeddings(plan, backend="numba")


def _with_narrow_rows(table: Table) -> Plan:
    cold = replace(shard(table, (20, table.rows, 1)), memory="dram", lookup="staged", dtype="int8")
    return plan_of([table], [shard(table, (0, 20, 1)), replace(cold, staging_rows=40)])


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("backend", ["numba", "torch", "tiered"])
def test_a_deep_copy_trains_by_itself_or_is_refused(backend: str, grows: bool) -> None:
    table = two_features()
    growing = {table.name: Growing(table.rows - 1)} if grows else {}
    model = PlacedEmbeddings(replace(plan_of([table]), growing=growing), backend=backend)
    twin, batch = copy.deepcopy(model), random_batch([table])
    for each in (model, twin):
        before = model.state_dict()["t.weight"]
        train_step(each, batch)
        assert torch.equal(before, model.state_dict()["t.weight"]) == (each is twin)
    assert torch.equal(twin.state_dict()["t.weight"], model.state_dict()["t.weight"])
    if backend == "tiered":
        narrow = PlacedEmbeddings(_with_narrow_rows(table), backend=backend)
        outputs = narrow(batch)  # Its thread and queues exist now.
        backward(outputs, random_gradients(outputs))
        with pytest.raises(PlacerError, match=r"narrow rows cannot be deep-copied.*state_dict"):
            copy.deepcopy(torch.nn.ModuleList([narrow]))


def test_what_to_do_instead_of_saving_or_freezing_a_module_is_said() -> None:
    model = PlacedEmbeddings(plan_of([two_features()]))
    with pytest.raises(PlacerError, match=r"cannot be pickled.*save its state_dict"):
        pickle.dumps(model)
    with pytest.raises(PlacerError, match=r"nor saved by torch\.save"):
        torch.save(torch.nn.ModuleList([model]), io.BytesIO())
    assert model.requires_grad_() is model
    with pytest.raises(PlacerError, match=r"no parameters to freeze.*torch\.no_grad"):
        model.requires_grad_(False)


@pytest.mark.parametrize("backend", ["numba", "tiered"])
def test_a_module_made_and_read_in_inference_mode_trains(backend: str) -> None:
    table = two_features()
    for plan in (placements(table)["cold rows staged"], _with_narrow_rows(table)):
        if backend == "numba" and plan.shards[-1].dtype == "int8":
            continue
        usual = PlacedEmbeddings(plan, backend=backend)
        with torch.inference_mode():
            model = PlacedEmbeddings(plan, backend=backend)
        for seed in range(3):
            with torch.inference_mode():
                model(random_batch([table], seed=seed + 10))
                usual(random_batch([table], seed=seed + 10))
            for each in (usual, model):
                train_step(each, random_batch([table], seed=seed), seed)
        assert torch.equal(usual.state_dict()["t.weight"], model.state_dict()["t.weight"])


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.half, lambda m: m.to("meta")])
def test_what_would_not_reach_the_tables_is_refused(change: object) -> None:
    model = nn.Sequential(PlacedEmbeddings(plan_of([two_features()])), nn.Linear(8, 1))
    with pytest.raises(PlanMismatchError, match=r"cannot become torch\..* with device=\.\.\."):
        change(model)  # type: ignore[operator]
    assert model.float().to("cpu").share_memory() is model


def test_hooks_see_a_state_before_it_is_loaded() -> None:
    model = PlacedEmbeddings(plan_of([two_features()]))
    renamed = {"old.weight": torch.ones(61, 8)}
    model.register_load_state_dict_pre_hook(
        lambda module, state, *_: state.update({"t.weight": state.pop("old.weight")})
    )
    model.load_state_dict(renamed)
    assert bool((model.state_dict()["t.weight"] == 1).all())
