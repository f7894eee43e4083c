"""Checkpoints in torch.distributed.checkpoint's format: any plan, any ranks, plain models."""

import copy
import os
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ranks_cases import (
    BLOCK_BYTES,
    applied,
    bounded,
    every_optimizer,
    failing_rows,
    full_disk,
    half_precision,
    same,
    small_blocks,
    through_files,
    turned,
)
from executor_cases import contents, placements, plan_of, random_batch, shard, two_features
from hypothesis import given
from hypothesis import strategies as st
from ranks_cases import every_placement
from ranks_launcher import Outcomes, run
from torch import nn

from placer import apply_plan
from placer.adapters.pytorch import applied_plan
from placer.errors import CheckpointError
from placer.executor import PlacedEmbeddings
from placer.executor.id_order import tensors_of
from placer.storage import tensor_rows
from placer.storage.checkpoint import load_model, save_model, table_blocks
from placer.storage.checkpoint.dcp_reader import read_metadata, read_tensors
from placer.storage.checkpoint.table_blocks import rounds_of
from placer.tables import Feature, Table


def stock_load(folder: Path, model: nn.Module) -> None:
    """What someone without placer does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": model}, checkpoint_id=folder, no_dist=True)


def plain_model(plan) -> nn.ModuleDict:
    return nn.ModuleDict({t.name: nn.EmbeddingBag(t.rows, t.dim) for t in plan.tables})


def trained(plan, **options) -> PlacedEmbeddings:
    model = PlacedEmbeddings(plan, lr=0.1, **options)
    outputs = model(random_batch(plan.tables, seed=3))
    torch.autograd.backward([output.sum() for output in outputs.values()])
    return model


# Over ranks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    jobs = [
        ("files", through_files, (0, folder / "files")),
        ("half precision", half_precision, (folder / "half",)),
        ("applied", applied, (folder / "applied",)),
        ("bounded", bounded, (folder / "bounded",)),
        ("full disk", full_disk, (folder / "full",)),
        ("failing rows", failing_rows, (folder / "failing",)),
    ]
    return run(4, jobs)


@pytest.mark.slow
def test_ranks_of_any_number_and_plan_load_what_others_saved(
    folder: Path, outcomes: Outcomes
) -> None:
    expected = outcomes.of("files")[0]
    kinds = {key.split(".")[-1] for key in expected}
    assert kinds == {"weight", "sum", "exp_avg", "exp_avg_sq", "updates"}
    for saved in ("4", "2", "1"):
        plain = plain_model(every_optimizer(0))
        stock_load(folder / "files" / saved, plain)
        for key, weight in plain.state_dict().items():
            assert torch.equal(weight, expected[key])


@pytest.mark.slow
def test_half_precision_keeps_its_bits(outcomes: Outcomes) -> None:
    outcomes.of("half precision")


@pytest.mark.slow
def test_a_model_spread_by_apply_plan_loads_into_the_plain_one(
    folder: Path, outcomes: Outcomes
) -> None:
    expected = outcomes.of("applied")[0]
    plain = nn.Sequential(nn.EmbeddingBag(61, 8, mode="sum"), nn.Linear(8, 2))
    stock_load(folder / "applied", plain)
    same(plain.state_dict(), {key: expected[key] for key in plain.state_dict()})


@pytest.mark.slow
def test_no_rank_has_more_than_a_block_of_others_rows(folder: Path, outcomes: Outcomes) -> None:
    found = outcomes.of("bounded")
    held = outcomes.of("files")[0].values()
    all_bytes = sum(tensor.nbytes for tensor in held)
    for rank in found:
        assert rank["largest block"] <= BLOCK_BYTES
        assert rank["largest read"] <= BLOCK_BYTES
        assert rank["blocks"] >= 4
    # Each byte travels once at most, and none of a table that a rank has whole.
    assert 0 < sum(rank["sent"] for rank in found) < all_bytes
    # How many updates there were is all that a rank tells the three others then.
    assert [rank["sent of whole tables"] for rank in found] == [3 * 8] * 4
    files = list((folder / "bounded" / "cut").glob("*.distcp"))
    assert len(files) == 4
    assert all(path.stat().st_size for path in files)


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_told_by_all(folder: Path, outcomes: Outcomes) -> None:
    said = outcomes.of("full disk")
    assert len(set(said)) == 1
    assert said[0] == f"cannot write checkpoint {folder / 'full'}: File too large"
    assert not [path for path in folder.iterdir() if path.name.startswith(".full")]


@pytest.mark.slow
def test_a_rank_that_fails_hangs_nobody(outcomes: Outcomes) -> None:
    assert outcomes.of("failing rows") == ["no memory"] * 4


# In one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_stock_loader_fills_a_plain_model(tmp_path: Path, dtype: str) -> None:
    table = replace(two_features(), dtype=dtype)
    model = trained(placements(table)["grid"])
    with small_blocks():
        save_model(tmp_path / "saved", model)
    plain = nn.ModuleDict(
        {table.name: nn.EmbeddingBag(table.rows, table.dim, dtype=getattr(torch, dtype))}
    )
    stock_load(tmp_path / "saved", plain)
    same(plain.state_dict(), dict(model.state_dict()))


def test_a_model_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    plan = every_placement("adam")
    model = trained(plan)
    save_model(tmp_path / "saved", model)
    other = PlacedEmbeddings(turned(plan, 4), lr=0.1, seed=99)
    load_model(tmp_path / "saved", other)
    same(contents(other), contents(model))
    for each in (model, other):
        outputs = each(random_batch(plan.tables, seed=5))
        torch.autograd.backward([output.sum() for output in outputs.values()])
    for key, tensor in contents(model).items():
        torch.testing.assert_close(contents(other)[key], tensor)


class Net(nn.Module):
    """Two tables, one of them used twice, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleDict({"a": nn.EmbeddingBag(61, 8, mode="sum")})
        self.items = nn.Embedding(40, 4)
        self.again = nn.Embedding(40, 4)
        self.again.weight = self.items.weight
        self.dense = nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [self.bags["a"](ids), self.items(ids[:, 0] % 40), self.again(ids[:, 1] % 40)]
        return self.dense(torch.cat(parts, 1))


def net_plan(cut: bool):
    tables = [
        Table("bags.a", 61, 8, optimizer="adam", features=(Feature("a"),)),
        Table("items", 40, 4, optimizer="adam", features=(Feature("i", pooling="none"),)),
    ]
    if not cut:
        return plan_of(tables)
    a, items = tables
    strips = [shard(a, cols=(0, 4)), shard(a, cols=(4, 8), memory="dram")]
    return plan_of(tables, strips + [shard(items, (i, 40, 2)) for i in range(2)])


def step_of(model: nn.Module, seed: int) -> torch.Tensor:
    ids = torch.randint(0, 61, (7, 3), generator=torch.Generator().manual_seed(seed))
    loss = model(ids).square().mean()
    loss.backward()
    return loss.detach()


def test_a_model_after_apply_plan_is_saved_and_loads_into_the_plain_one(tmp_path: Path) -> None:
    model = Net()
    apply_plan(model, net_plan(True), lr=0.1)
    for seed in range(2):
        step_of(model, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    with small_blocks():
        save_model(tmp_path / "saved", model, {"rng": torch.get_rng_state()})
    plain = Net()
    stock_load(tmp_path / "saved", plain)
    same(plain.state_dict(), dict(model.state_dict()))
    assert "table_optimizer.bags.a.exp_avg" in read_tensors(tmp_path / "saved")

    other = Net()
    apply_plan(other, net_plan(False), lr=0.1)
    rest = load_model(tmp_path / "saved", other)
    assert torch.equal(rest["rng"], torch.get_rng_state())
    same(dict(other.state_dict()), dict(model.state_dict()))
    state = applied_plan(other).optimizer_state_dict()
    same(state, applied_plan(model).optimizer_state_dict())
    assert state["items.updates"] == 2
    assert torch.equal(step_of(model, 9), step_of(other, 9))


def plainly_saved(content: dict[str, Any], folder: Path) -> None:
    """Save by torch alone."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save(content, checkpoint_id=folder, no_dist=True)


def test_a_plain_models_checkpoint_loads_under_a_plan(tmp_path: Path) -> None:
    plain = Net()
    plainly_saved({"model": plain}, tmp_path / "saved")
    expected = copy.deepcopy(plain.state_dict())
    torch.manual_seed(1)
    model = Net()
    nn.init.zeros_(model.dense[0].weight)
    apply_plan(model, net_plan(True))
    model.load_state_dict({key: torch.zeros_like(value) for key, value in expected.items()})
    load_model(tmp_path / "saved", model, optimizer_state=False)
    same(dict(model.state_dict()), dict(expected))
    with pytest.raises(CheckpointError, match=r"table_optimizer.bags.a.exp_avg is missing"):
        load_model(tmp_path / "saved", model)


def test_tools_of_torch_find_the_nested_state_dict(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model = trained(every_placement("sgd"))
    save_model(tmp_path / "saved", model)
    with warnings.catch_warnings(action="ignore"):
        dcp_to_torch_save(tmp_path / "saved", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    same(found["model"], dict(model.state_dict()))


def test_empty_tables_and_large_dense_tensors_are_kept(tmp_path: Path) -> None:
    tables = [Table("none", 0, 4, features=(Feature("n"),)), two_features()]
    model = trained(plan_of(tables, [shard(tables[1])]))
    given_tensors = {"large": torch.randn(90, 5), "scalar": torch.tensor(2.5)}
    given_tensors["empty"] = torch.empty(0, 2)
    with small_blocks():
        save_model(tmp_path / "saved", model, given_tensors)
    large = next(one for one in read_metadata(tmp_path / "saved") if one.name == "large")
    assert len(large.blocks) > 1
    rest = load_model(tmp_path / "saved", model)
    same(rest, given_tensors)
    plain = plain_model(model.plan)
    stock_load(tmp_path / "saved", plain)
    same(plain.state_dict(), dict(model.state_dict()))


@given(start=st.integers(0, 61), rows=st.integers(0, 61))
def test_any_rows_are_read_across_blocks(
    tmp_path_factory: pytest.TempPathFactory, start: int, rows: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "blocks"
    values = torch.arange(61 * 8, dtype=torch.float64).view(61, 8)
    if not folder.exists():
        table = Table("t", 61, 8, features=(Feature("f"),))
        model = PlacedEmbeddings(plan_of([table]))
        with small_blocks():
            save_model(folder, model, {"values": values})
    stop = min(61, start + rows)
    found = read_tensors(folder)["values"].read(start, stop)
    assert torch.equal(found, values[start:stop])


@given(
    rows=st.integers(1, 5000),
    dim=st.integers(1, 300),
    world=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_row_is_dealt_once_to_a_rank_that_holds_some(
    rows: int, dim: int, world: int, seed: int
) -> None:
    table = Table("t", rows, dim, optimizer="adam")

    class Held:
        def __init__(self) -> None:
            shares = np.random.default_rng(seed).random(world).round()
            shares[seed % world] = 1
            self.plan, self.optimizers, self.world = plan_of([table]), {"t": "adam"}, world
            self.held = (shares / shares.sum()).tolist()

        def shares(self, _: Table) -> list[float]:
            return self.held

    held = Held()
    named = [table_blocks.NamedTables(held, {(t.name,): t for t in tensors_of(table, "adam")})]
    spans = [
        (rank, span)
        for each in rounds_of(named)
        for rank, span in enumerate(each.requests)
        if span is not None
    ]
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        cuts = sorted((s.start, s.stop) for _, s in spans if s.tensor.name == name)
        assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
        assert cuts[-1][1] == rows
    assert all(held.held[rank] > 0 for rank, _ in spans)
    written = np.bincount([r for r, _ in spans], [s.nbytes for _, s in spans], minlength=world)
    largest = max(span.nbytes for _, span in spans)
    more = written - np.array(held.held) * written.sum()
    assert np.all(more <= largest * (1 + 1e-9))  # No rank goes on once it has written its share.
    assert np.all(more >= -largest * world)


@given(st.integers(1, 1 << 30))
def test_blocks_are_small_and_divide_the_chunks_of_readers(row_bytes: int) -> None:
    rows = tensor_rows.block_rows(row_bytes)
    assert tensor_rows.READ_ROWS % rows == 0
    assert rows == 1 or rows * row_bytes <= tensor_rows.BLOCK_BYTES


# Files that are not what they should be ---------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with small_blocks():
        save_model(tmp_path / "saved", trained(plan_of([two_features()])))
    return tmp_path / "saved"


def unpickled(folder: Path) -> Any:
    """Metadata as torch reads it, to be altered."""
    return pickle.loads((folder / ".metadata").read_bytes())


def write(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_model(folder, PlacedEmbeddings(plan_of([two_features()])))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("hidden", [False, True])
def test_code_in_the_metadata_is_not_run(saved: Path, hidden: bool) -> None:
    marker = saved.parent / "ran"
    metadata = unpickled(saved)
    metadata.planner_data = Evil(marker)  # Within metadata that is otherwise as it should be.
    write(saved, metadata if hidden else Evil(marker))
    refused(saved, r"it wants (posix|nt)\.system; nothing of it was run")
    assert not marker.exists()
    unpickled(saved)  # It would have.
    assert marker.exists()


@pytest.mark.parametrize(
    "name", ["torch.load", "builtins.eval", "torch.serialization.load", "pathlib.os.system"]
)
def test_functions_of_modules_that_metadata_needs_are_refused(saved: Path, name: str) -> None:
    module, _, attribute = name.partition(".") if "pathlib" in name else name.rpartition(".")
    text = f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(attribute))}{attribute}\x93."
    (saved / ".metadata").write_bytes(text.encode("latin-1"))
    refused(saved, f"it wants {re.escape(name)}; nothing of it was run")


def test_metadata_cannot_name_files_elsewhere(saved: Path) -> None:
    metadata = unpickled(saved)
    for place in metadata.storage_data.values():
        place.relative_path = "../saved/__0_0.distcp"
    write(saved, metadata)
    refused(saved, r"\.metadata is damaged.*in .\.\./saved")


def test_a_block_that_was_not_saved_is_missed(saved: Path) -> None:
    metadata = unpickled(saved)
    del metadata.state_dict_metadata["model.t.weight"].chunks[3]
    write(saved, metadata)
    refused(saved, r"lacks a part of rows \d+\.\.\d+ of model\.t\.wei")


def test_blocks_of_columns_are_joined(tmp_path: Path) -> None:
    parts = {"left": torch.randn(5, 3), "right": torch.randn(5, 2)}
    plainly_saved(parts, tmp_path)
    metadata = unpickled(tmp_path)
    whole, places = metadata.state_dict_metadata["left"], metadata.storage_data
    right = metadata.state_dict_metadata.pop("right").chunks[0]
    whole.size, right.offsets = torch.Size((5, 5)), torch.Size((0, 3))
    whole.chunks.append(right)
    at = next(iter(places))
    places[replace(at, fqn="left", offset=right.offsets)] = places.pop(replace(at, fqn="right"))
    write(tmp_path, metadata)
    expected = torch.cat(list(parts.values()), 1)
    assert torch.equal(read_tensors(tmp_path)["left"].whole(), expected)
    del whole.chunks[1]
    write(tmp_path, metadata)
    with pytest.raises(CheckpointError, match=r"lacks a part of rows 0\.\.5 of left"):
        read_tensors(tmp_path)["left"].whole()


def test_a_file_cut_short_is_named(saved: Path) -> None:
    path = saved / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    refused(saved, r"__0_0.distcp is cut short: it lacks a part of ")
    path.unlink()
    refused(saved, r"cannot read .*__0_0.distcp: No such file")


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps({"no": "metadata"})])
def test_metadata_that_is_none_is_refused(saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    refused(saved, r"no metadata of torch.distributed.checkpoint")


def test_what_does_not_fit_is_named_before_anything_is_changed(tmp_path: Path) -> None:
    a, b = two_features(), replace(two_features(), name="b", features=(Feature("x"),))
    save_model(tmp_path / "saved", PlacedEmbeddings(plan_of([a, b])))
    wide = replace(b, dim=4)
    model = PlacedEmbeddings(plan_of([a, wide]), seed=5)
    before = contents(model)
    with pytest.raises(CheckpointError, match=r"model.b.weight has shape \(61, 8\), not \(61, 4\)"):
        load_model(tmp_path / "saved", model)
    same(contents(model), before)
    half = PlacedEmbeddings(plan_of([a, replace(b, dtype="float16")]))
    with pytest.raises(CheckpointError, match=r"model.b.weight is torch.float32, not torch.float1"):
        load_model(tmp_path / "saved", half)
    with pytest.raises(CheckpointError, match=r"model.b.weight is of no table"):
        load_model(tmp_path / "saved", PlacedEmbeddings(plan_of([a])))


def test_names_and_models_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    model = PlacedEmbeddings(plan_of([two_features()]))
    with pytest.raises(CheckpointError, match=r"'model.x' is one of the model's own"):
        save_model(tmp_path / "saved", model, {"model.x": torch.ones(1)})
    with pytest.raises(CheckpointError, match="'optimizer' is a dict, and a folder has tensors"):
        save_model(tmp_path / "saved", model, {"optimizer": {}})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="no placed tables"):
        save_model(tmp_path / "saved", nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
