"""Logs, counts, tables and gradients that used to be taken for something else."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from data_cases import refused
from torch import nn
from training_cases import plan_for, small_log

from cost_models import Roofline
from placer import (
    Feature,
    Plan,
    Problem,
    Profile,
    Shard,
    Table,
    Topology,
    apply_plan,
    profile_model,
    remove_plan,
)
from placer.adapters.pytorch import AppliedPlan, applied_plan
from placer.data import open_log
from placer.data.files.opening import Unpacked
from placer.data.formats.columnar import ParquetSource
from placer.data.keys import MOST_TEXT_BYTES, bags_from_arrow
from placer.data.layout import NamedColumns
from placer.data.source import Cursor
from placer.errors import (
    DataError,
    PlacerError,
    PlanError,
    PlanMismatchError,
    ProblemError,
    ProfileError,
)
from placer.executor import BagBatch, PlacedEmbeddings, ShardedEmbeddings, make_embeddings
from placer.executor.optimizers import check_constants
from placer.files.atomic import HashedFile
from placer.plan.origin import profile_of
from placer.plan.serving import serving_plan
from placer.plan.verify import violations
from placer.profile.count import profile_log
from placer.profile.from_counts import profile_counts
from placer.profile.table_profile import RowCounts
from placer.storage.checkpoint import load_model, load_tables, save_model, save_tables
from placer.topology.devices import Drive
from placer.training import train
from placer.training.distributed import ALONE
from placer.workloads import named_workload
from solvers import solve
from solvers.analysis.replan import replan

# Logs ------------------------------------------------------------------------------------------


def written(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("first", ["a", "a.b"])
def test_statistics_are_those_of_the_column_itself(tmp_path: Path, first: str) -> None:
    columns = {"a.b": pa.array([1, 50_000]), "a": pa.array([[1, 10], [3]])}
    columns = {name: columns[name] for name in (first, *(set(columns) - {first}))}
    nested = {"s": pa.array([{"x": 1, "y": [2]}, None]), "z": pa.array([7, 8])}
    path = written(tmp_path / "log.parquet", **nested, **columns)
    log = open_log(path, ignore=["s"])
    assert log.tables == {"a": 11, "a.b": 50_001, "z": 9}
    source = ParquetSource([str(path)], named=NamedColumns(ignore=["s"]))
    assert source.id_ranges() == {"a": (0, 10), "a.b": (0, 50_000), "z": (0, 8)}


LINE = "\t".join(["1", *["2"] * 13, *["0000000a"] * 26])


def test_a_carriage_return_ends_a_line_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_bytes(f"{LINE}\r\n{LINE}\r\n".encode())
    assert sum(chunk.samples for chunk in open_log(path, id_mapping="vocabulary").chunks()) == 2
    path.write_bytes(f"{LINE}\n{LINE}\r{LINE}\n{LINE}\n".encode())
    refused(r"line 2 has a carriage return that does not end it", path, id_mapping="vocabulary")
    for lines in (LINE, "label,user", '{"user": 1}'):
        path.write_bytes(f"{lines}\r".encode() * 3)
        refused("log.tsv: its lines end with carriage returns alone; write newlines", path)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"user":\r1}\n{"user": 2}\r{"user": 3}\n')
    refused("line 2 is no JSON: Extra data", path)
    path.write_bytes(b'{"user":\r1}\n{"user": 2}\r\n')
    assert open_log(path).tables == {"user": 3}


def test_a_line_that_is_ragged_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_bytes(f"{LINE}\n".encode() + b"\xff\xfe\t1\n" + f"{LINE}\n".encode())
    refused(r"line 2: 2 fields, expected 40 separated by tabs", path, id_mapping="vocabulary")


def test_a_long_line_and_a_long_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placer.data.formats.text.MOST_LINE_BYTES", 1000)
    monkeypatch.setattr("placer.data.formats.text.BLOCK_BYTES", 100)
    path = tmp_path / "log.tsv"
    path.write_text(f"{LINE}\n{LINE}{'a' * 2000}\n")
    refused(r"line 2 has more than 1000 bytes", path, id_mapping="vocabulary")
    with pytest.raises(DataError, match=rf"text of 8193 bytes, and at most {MOST_TEXT_BYTES}"):
        bags_from_arrow(pa.array(["a" * 8193]), "zero")


def test_missing_booleans_are_read_as_missing_numbers() -> None:
    keys, offsets = bags_from_arrow(pa.array([True, None, False]), "zero")
    assert keys.tolist() == [1, 0, 0]
    assert offsets is None
    keys, offsets = bags_from_arrow(pa.array([True, None, False]), "empty")
    assert keys.tolist() == [1, 0]


# Counts ----------------------------------------------------------------------------------------


def test_counts_do_not_wrap(tmp_path: Path) -> None:
    large = 1 << 61
    path = written(tmp_path / "c.parquet", table=["t"] * 2, id=[1, 1], count=[large, large])
    with pytest.raises(DataError, match=r"'t': its counts sum to 2\^62 lookups or more"):
        profile_counts(path, samples=10)
    one = RowCounts(3, np.array([1]), np.array([large]))
    with pytest.raises(ProfileError, match=r"all counts together must be less than"):
        _ = one + one
    with pytest.raises(ProfileError, match=r"all counts together"):
        RowCounts(3, np.array([0, 1]), np.array([large, large]))


@pytest.mark.parametrize(
    ("tables", "kind"), [([["t"]], "list"), ([b"t"], "binary"), ([1], "int64"), ([None], "null")]
)
def test_names_of_tables_are_texts(tmp_path: Path, tables: list[object], kind: str) -> None:
    path = written(tmp_path / "c.parquet", table=tables, id=[1], count=[1])
    message = (
        rf"column 'table' is {kind}.*; it must hold texts" if kind != "null" else "missing values"
    )
    with pytest.raises(DataError, match=message):
        profile_counts(path, samples=10)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    arrays = [pa.array(["t"]), pa.array([1]), pa.array([1]), pa.array([2])]
    table = pa.Table.from_arrays(arrays, names=["table", "id", "count", "count"])
    pq.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"has more than one column 'count'"):
        profile_counts(tmp_path / "c.parquet", samples=10)


def test_two_features_of_one_name(tmp_path: Path) -> None:
    arrays = [pa.array([0, 1]), pa.array([3, 4]), pa.array([1, 2]), pa.array([5, 6])]
    table = pa.Table.from_arrays(arrays, names=["label", "a", "b", "b"])
    pq.write_table(table, tmp_path / "log.parquet")
    feather.write_feather(table, tmp_path / "log.arrow")
    for log in (tmp_path / "log.parquet", tmp_path / "log.arrow", table):
        refused(r"has more than one column 'b'", log, id_mapping="vocabulary")


# Tables and plans ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "dim"), [(1 << 63, 4), (10, 1 << 62), (-1, 4), (10, 0)])
def test_tables_larger_than_any(rows: int, dim: int) -> None:
    with pytest.raises(ProblemError, match=r"rows must be 0 to 281474976710656 and dim 1 to 10485"):
        Table("t", rows, dim)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "float64"}, "dtype 'float64' is none of"),
        ({"optimizer": "lamb"}, "optimizer 'lamb' is none of"),
        ({"pooling": "most"}, "pooling 'most' is none of"),
        ({"pooling_factor": -1.0}, "pooling_factor -1.0 must be at least 0"),
        ({"coverage": 1.5}, "coverage 1.5 within 0..1"),
    ],
)
def test_fields_of_tables_and_features_are_checked(fields: dict[str, Any], words: str) -> None:
    made = partial(Table, rows=1, dim=1) if fields.keys() & {"dtype", "optimizer"} else Feature
    with pytest.raises(ProblemError, match=re.escape(words)):
        made("t", **fields)


def plan_with(*shards: Shard, tables: tuple[Table, ...]) -> Plan:
    return Plan(tables, Topology.parse("1xh100"), shards)


def whole(table: Table, **fields: object) -> Shard:
    shard = Shard(table.name, (0, table.rows, 1), (0, table.dim), ("gpu:0",), "hbm", "device")
    return replace(shard, **fields)  # type: ignore[arg-type]


def test_a_feature_reads_one_table() -> None:
    one, two = (Table(name, 8, 2, features=(Feature("f"),)) for name in "ab")
    plan = plan_with(whole(one), whole(two), tables=(one, two))
    (violation,) = violations(plan)
    assert (violation.rule, violation.where) == ("feature", "f")
    with pytest.raises(PlanMismatchError, match=r"feature 'f' is listed 2 times"):
        PlacedEmbeddings(plan, backend="torch")


def test_a_profile_of_a_name_that_no_file_has_is_not_there(tmp_path: Path) -> None:
    plan = plan_with(tables=())
    for name in ("a" * 5000, "a\0b"):
        named = replace(plan, provenance=replace(plan.provenance, profile=name))
        assert profile_of(named, tmp_path / "plan.json") is None


TWO = Topology.parse("2x1xh100")


@pytest.mark.parametrize(("change", "message"), [
    ({"profile": Profile(())}, "the profile has no table"),
    ({"batch_size": 0}, "samples per GPU, at least 1, not 0"),
    ({"batch_size": 64.0}, "a whole number of samples per GPU, at least 1, not 64.0"),
    ({"topology": replace(TWO, hosts=(replace(TWO.hosts[0], drive=Drive(1)), *TWO.hosts[1:]))},
     "host:1 has no drive, but other hosts with GPUs have one"),
    ({"pipeline": "eager"}, "no pipeline is called 'eager'; there are look-ahead and serial"),
    ({"exchange_dtype": "int4"}, "exchange type 'int4' is none of float32"),
])  # fmt: skip
def test_problems_out_of_range(change: dict[str, Any], message: str) -> None:
    problem = Problem(named_workload("random-2"), Topology.parse("1xh100"), batch_size=1)
    with pytest.raises(ProblemError, match=message):
        replace(problem, **change)


def test_numpy_integers_are_numbers(tmp_path: Path) -> None:
    topology, two = Topology.parse("1xh100"), np.int64(2)
    plan = solve(Problem(named_workload("random-2"), topology, two), "greedy-size", seed=two).plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").batch_size == 2


@pytest.mark.parametrize(
    "use", [PlacedEmbeddings, make_embeddings, partial(apply_plan, nn.Linear(1, 1))]
)
def test_what_is_no_plan_is_not_trained_with(use: Callable[[Any], object]) -> None:
    with pytest.raises(PlanMismatchError, match=r"not NoneType \(a search that finds no plan says"):
        use(None)
    with pytest.raises(
        PlanMismatchError, match=r"must be of type Plan, not str \(Plan.load reads a file"
    ):
        use("plan.json")


PROFILE, MACHINE = named_workload("random-2"), Topology.parse("1xh100")
PROBLEM = Problem(PROFILE, MACHINE)
SMALL = solve(PROBLEM, "greedy-size").plan
MODEL, TABLES = nn.Linear(1, 1), AppliedPlan({})
TRAINER = torch.optim.SGD(MODEL.parameters())
SCHEDULE = torch.optim.lr_scheduler.StepLR(TRAINER, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply_plan(SMALL, MODEL), "model must be of type Module, not Plan"),
        (lambda: apply_plan(MODEL, SMALL, TRAINER), r"optimizer must be of type str \| None, not"),
        (lambda: apply_plan(MODEL, SMALL, optimizers=TRAINER), "optimizers must be of type Iter"),
        (lambda: apply_plan(MODEL, SMALL, optimizers=[SCHEDULE]), "type Optimizer, not StepLR"),
        (lambda: apply_plan(MODEL, SMALL, growing={"t": 9}), "type Growing, not int"),
        (lambda: applied_plan(TABLES), "model must be of type Module, not AppliedPlan"),
        (lambda: remove_plan(TABLES), "model must be of type Module, not AppliedPlan"),
        (lambda: profile_model([1], MODEL), "model must be of type Module, not list"),
        (lambda: TABLES.update_with(SCHEDULE), "optimizer must be of type Optimizer, not StepLR"),
        (lambda: TABLES.load_state_dict("run.pt"), "state_dict must be of type Mapping, not str"),
        (lambda: TABLES.load_optimizer_state_dict([]), "state must be of type Mapping, not list"),
        (lambda: TABLES.clip_grad_norm_([TRAINER], 1.0), "parameters must be of type Tensor, not"),
        (lambda: check_constants(lr="0.1"), "lr 0.1 must be a number"),
        (lambda: save_tables("folder", MODEL), "applied must be of type AppliedPlan, not Linear"),
        (lambda: load_tables(TABLES, "folder"), r"folder must be of type str \| os.PathLike, not"),
        (lambda: save_model("folder", TABLES), "model must be of type Module, not AppliedPlan"),
        (lambda: load_model("folder", TABLES), "model must be of type Module, not AppliedPlan"),
        (lambda: BagBatch.from_features(["f"], {}), "features must be of type Mapping, not list"),
        (lambda: serving_plan(MACHINE, PROFILE, 0.9), "profile must be of type Profile, not Topo"),
        (lambda: Problem(MACHINE, PROFILE), "profile must be of type Profile, not Topology"),
        (lambda: Problem(PROFILE, "1xh100"), "topology must be of type Topology, not str"),
        (lambda: solve(PROFILE), "problem must be of type Problem, not Profile"),
        (lambda: solve(PROBLEM, cost_model=3), r"cost_model must be of type str .*, not int"),
        (lambda: Plan((), "1xh100", ()), "topology must be of type Topology, not str"),
        (lambda: make_embeddings(SMALL, weights=torch.ones(2)), "weights must be of type .*Map"),
        (lambda: make_embeddings(SMALL, padding_idx=[0]), "padding_idx must be of type .*Mapping"),
        (lambda: make_embeddings(SMALL).live_keys("t1"), "table 't1' does not grow; of these tab"),
        (lambda: TABLES.live_keys("t1"), "no placed table is called 't1'; there are: none"),
        (lambda: train(MODEL, "log.tsv"), "plan must be of type Plan, not Linear"),
        (lambda: profile_log("log.tsv"), "log must be of type Log, not str"),
    ],
)
def test_an_argument_of_another_kind_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PlacerError, match=message):
        call()


@pytest.mark.parametrize("change", [{"devices": ("gpu:9",)}, {"rows": (0, 12, 0)}])
def test_a_plan_of_malformed_shards_is_not_followed(change: dict[str, Any]) -> None:
    profile = named_workload("random-3@1")
    problem = Problem(profile, Topology.parse("1xh100"), 64)
    tables = tuple(one.table for one in profile)
    old = plan_with(*(replace(whole(one), **change) for one in tables), tables=tables)
    with pytest.raises(PlanError, match=r"`placer verify` lists all that is wrong"):
        replan(problem, Roofline(), old, solver="greedy-cost")


@pytest.mark.parametrize("lookup", ["staged", "cached"])
@pytest.mark.parametrize("place", [0, 8])
def test_a_shard_without_rows_is_trained_with(lookup: str, place: int) -> None:
    """It stands before or behind a shard that is staged or cached as well."""
    table = Table("t", 8, 2, features=(Feature("f"),))
    cold = whole(table, memory="dram", lookup=lookup, staging_rows=4)
    cold = replace(cold, cache_rows=2 if lookup == "cached" else 0)
    empty = replace(cold, rows=(place, place, 1), lookup="staged", staging_rows=0, cache_rows=0)
    model = PlacedEmbeddings(plan_with(cold, empty, tables=(table,)), backend="tiered")
    before = model.state_dict()["t.weight"].clone()
    ids = torch.tensor([3, 3, 5])
    model(BagBatch.from_features({"f": (ids, None, None)}, ["f"]))["f"].sum().backward()
    changed = (model.state_dict()["t.weight"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [3, 5]


def test_weights_beside_a_table_that_no_feature_reads() -> None:
    read, unread = Table("r", 8, 2, features=(Feature("f"),)), Table("u", 8, 4)
    model = PlacedEmbeddings(
        plan_with(whole(read), whole(unread), tables=(read, unread)), backend="torch"
    )
    feature = torch.tensor([1, 2]), None, torch.tensor([0.5, 2.0])
    output = model(BagBatch.from_features({"f": feature}, ["f"]))["f"]
    weight = model.state_dict()["r.weight"]
    assert torch.equal(output, weight[1:3] * torch.tensor([[0.5], [2.0]]))
    output.sum().backward()


# Training --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": float("nan")}, r"lr nan must be a number of at least 0"),
        ({"lr": -0.1}, r"lr -0.1"),
        ({"lr": float("inf")}, r"lr inf"),
        ({"eps": -1.0}, r"eps -1.0"),
        ({"eps": float("nan")}, r"eps nan"),
        ({"betas": (0.9,)}, r"betas \(0.9,\) must be two"),
        ({"betas": (0.9, float("nan"))}, r"betas \(0.9, nan\)"),
        ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\)"),
    ],
)
def test_constants_of_an_optimizer(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanMismatchError, match=message):
        PlacedEmbeddings(plan_for(small_log(32)), backend="torch", **options)  # type: ignore[arg-type]


def test_a_rate_is_checked_when_it_changes() -> None:
    model = PlacedEmbeddings(plan_for(small_log(32)), backend="torch")
    model.set_lr(0.0)
    with pytest.raises(PlanMismatchError, match=r"lr nan"):
        model.set_lr(float("nan"))


class OwnScaler(torch.amp.GradScaler):
    """A scaler as a library may have one."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().scale(outputs)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, OwnScaler])
@pytest.mark.parametrize("before", [False, True])
def test_scaled_gradients_are_refused(kind: type[torch.amp.GradScaler], before: bool) -> None:
    made = kind("cpu") if before else None
    table = Table("t", 8, 2, features=(Feature("f"),))
    plan = plan_with(whole(table), tables=(table,))
    model, watched = PlacedEmbeddings(plan, backend="torch"), kind.scale
    PlacedEmbeddings(plan, backend="torch")
    assert kind.scale is watched  # Once, however many models there are.
    scaler = made or kind("cpu")
    weights = model.state_dict()["t.weight"].clone()

    def loss() -> torch.Tensor:
        batch = BagBatch.from_features({"f": (torch.tensor([1, 2]), None, None)}, ["f"])
        return model(batch)["f"].sum()

    with pytest.raises(PlacerError, match=r"the loss was scaled by a GradScaler"):
        scaler.scale(loss()).backward()
    assert torch.equal(model.state_dict()["t.weight"], weights)
    kind("cpu", enabled=False).scale(loss()).backward()
    loss().backward()
    assert not torch.equal(model.state_dict()["t.weight"], weights)


# Closing twice ---------------------------------------------------------------------------------


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    log = written(tmp_path / "log.parquet", a=[1, 2], b=[3, 4])
    feather.write_feather(pa.table({"a": [1, 2]}), tmp_path / "log.arrow")
    texts = {
        "log.csv": "a,b\n1,2\n3,4\n",
        "log.jsonl": '{"a": 1}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    logs = [open_log(log, ignore=["b"]), open_log(pa.table({"a": [1, 2]}))]
    logs += [open_log(tmp_path / name) for name in (*texts, "log.arrow")]
    for cursor in [Cursor(one.source.spans()) for one in logs]:
        cursor.read(1)
        cursor.close()
        cursor.close()
    for closed in (
        HashedFile(tmp_path / "file"),
        Unpacked(io.BytesIO(b""), ".bz2"),
        ALONE,
    ):
        closed.close()
        closed.close()


def test_closing_embeddings_twice_is_harmless() -> None:
    plan = plan_for(small_log(64))
    alone = make_embeddings(plan)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shared = ShardedEmbeddings(plan)
        part = shared.part([plan.tables[0].name])
        for embeddings in (alone, part, shared):
            embeddings.close()
            embeddings.close()
    finally:
        dist.destroy_process_group()
