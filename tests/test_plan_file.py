"""Plan files: what is written is read back, and damage is told in one line."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
from fast_and_full import examples, fewer
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine, plan_of, plans
from safetensors.numpy import save_file

import placer
from placer import Feature, Plan, Table
from placer.errors import PlanError
from placer.files.atomic import sha256_file
from placer.plan.fields import SCHEMA_VERSION, RowOrder
from placer.plan.file import PlanModel, seal
from placer.plan.verify import violations

SCHEMA = json.loads((Path(placer.__file__).parent / "plan" / "plan.schema.json").read_text())

TABLE = Table("t", 10, 4, features=(Feature("a", 2.0),))


def hot_cold() -> Plan:
    """A table with its 3 hottest rows in HBM, and a row order."""
    plan = plan_of(TABLE, in_hbm("t", (0, 3, 1), (0, 4)), in_dram("t", (3, 10, 1), (0, 4)))
    hot_ids = {"t": np.array([7, 1, 4], dtype=np.int64)}
    return replace(plan, row_order={"t": RowOrder("profile")}, hot_ids=hot_ids)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of that plan."""
    hot_cold().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def assert_same(one: Plan, two: Plan) -> None:
    def kinds(plan: Plan) -> dict[str, str]:
        return {name: order.kind for name, order in plan.row_order.items()}

    assert kinds(one) == kinds(two)
    assert replace(one, row_order={}) == replace(two, row_order={})
    assert one.hot_ids.keys() == two.hot_ids.keys()
    for name, ids in one.hot_ids.items():
        np.testing.assert_array_equal(ids, two.hot_ids[name])
        assert two.hot_ids[name].dtype == np.int64


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_an_altered_plan_is_refused_until_it_is_sealed(path: Path) -> None:
    edited(path, lambda document: document.update(batch_size=77))
    assert "was altered since it was written: restore it; if you edited" in error_of(path)
    seal(path)
    assert Plan.load(path).batch_size == 77
    edited(path, lambda document: document.pop("sha256"))  # As earlier versions wrote it.
    assert Plan.load(path).batch_size == 77
    edited(path, lambda document: document.update(batch_size=-1))
    with pytest.raises(PlanError, match=r"batch_size"):
        seal(path)


def error_of(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@given(plans())
@examples(60)
def test_round_trip(plan: Plan) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        loaded = Plan.load(path)
        assert_same(plan, loaded)
        jsonschema.validate(json.loads(path.read_text()), SCHEMA)
        before = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
        loaded.save(path)
        assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == before


def test_the_type_of_the_exchange_is_kept_and_left_out_where_it_is_as_usual(path: Path) -> None:
    assert "exchange_dtype" not in json.loads(path.read_text())
    assert Plan.load(path).exchange_dtype == "float32"
    replace(hot_cold(), exchange_dtype="bfloat16").save(path)
    assert Plan.load(path).exchange_dtype == "bfloat16"
    edited(path, lambda document: document.update(exchange_dtype="int8"))
    message = error_of(path)
    assert "exchange_dtype" in message
    assert "'float32', 'float16' or 'bfloat16'" in message


def test_the_schema_that_ships_is_that_of_the_code() -> None:
    schema = PlanModel.model_json_schema()
    for model in schema["$defs"].values():  # Descriptions without examples.
        model["description"] = re.split(r"\n\n(?:Examples|Raises|>>>)", model["description"])[0]
    assert {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "placer plan",
        **{key: value for key, value in schema.items() if key != "title"},
        "$comment": f"schema_version {SCHEMA_VERSION}; docs/plan-format.md says what it means",
    } == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_only_the_current_row_order_is_kept(tmp_path: Path) -> None:
    plan, path = hot_cold(), tmp_path / "plan.json"
    plan.save(path)
    plan.save(tmp_path / "plan.old")
    replace(plan, hot_ids={"t": np.array([2, 5], dtype=np.int64)}).save(path)
    assert Plan.load(path).hot_ids["t"].tolist() == [2, 5]
    assert Plan.load(tmp_path / "plan.old").hot_ids["t"].tolist() == [7, 1, 4]
    assert len(list(tmp_path.iterdir())) == 4
    replace(plan, row_order={}, hot_ids={}).save(path)
    assert len(list(tmp_path.iterdir())) == 3


def test_cut_short_anywhere(path: Path) -> None:
    whole = path.read_bytes()
    # The last byte is a line end, the one before a brace.
    for size in range(0, len(whole) - 2, fewer(1, 9)):
        path.write_bytes(whole[:size])
        assert str(path) in error_of(path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00plan")
    assert "is a log or another file, and no plan" in error_of(path)
    assert "there is no plan at" in error_of(tmp_path / "absent.json")
    path.write_bytes(b'{"tables": "\xff"}')
    assert "is not JSON of a plan (it is not UTF-8 from byte 12 on)" in error_of(path)
    path.write_text('{"tables":' * 100_000)
    assert "is not JSON of a plan (its values are nested too deeply)" in error_of(path)


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("colour", to="red"), "colour: Extra inputs are not permitted"),
        (_set("shards", 0, "colour", to="red"), "shards.0.colour: Extra inputs"),
        (_set("tables", 0, "rows", to="10"), "tables.0.rows: Input should be a valid integer"),
        (_set("tables", 0, "rows", to=-1), "greater than or equal to 0 (got -1)"),
        (_set("tables", 0, "dim", to=0), "tables.0.dim"),
        (_set("tables", 0, "dtype", to="int7"), "tables.0.dtype"),
        (_set("tables", 0, "features", 0, "coverage", to=1.5), "coverage"),
        (_set("shards", 0, "rows", to=[0, 3]), "shards.0.rows"),
        (_set("shards", 0, "devices", to=[]), "shards.0.devices"),
        (_set("shards", 0, "memory", to="tape"), "shards.0.memory"),
        (_set("shards", 0, "buffer_bytes", to=-4), "shards.0.buffer_bytes"),
        (_set("shards", 0, "staging_rows", to=-4), "shards.0.staging_rows"),
        (_set("batch_size", to=0), "batch_size"),
        (_set("schema_version", to=2), "schema_version 2, this placer reads up to 1: upgrade"),
        (_set("schema_version", to=0), "schema_version"),
        (_set("schema_version", to=True), "no schema_version that is a number"),
        (_set("schema_version", to="1"), "no schema_version that is a number"),
        (_set("topology", "links", 0, "b", to="mars"), "no device is called 'mars'"),
        (_set("topology", "devices", 0, "host", to=None), "gpu:0 is a gpu but names no host"),
        (_set("topology", "devices", 0, "bandwidth_bytes_per_s", to=0), "bandwidth_bytes_per_s"),
        (_set("solver", "step_time_s", to=float("nan")), "NaN"),
        (_set("row_order", "t", "file", to=None), "must name a file beside the plan"),
        (_set("row_order", "t", "file", to="../plan.rows"), "must name a file beside the plan"),
        (_set("row_order", "u", to={"kind": "profile", "file": "no.rows"}), "no.rows is missing"),
    ],
)
def test_edited(path: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    edited(path, change)
    assert words in error_of(path)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every value of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, part in inner:
        found.append((*path, key))
        if isinstance(part, dict | list):
            found += _places(part, (*path, key))
    return found


@given(st.data())
@examples(150)
def test_values_of_another_type_are_refused(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        hot_cold().save(path)
        document = json.loads(path.read_text())
        place = data.draw(st.sampled_from(_places(document)))
        target = document
        for key in place[:-1]:
            target = target[key]
        # Of no key of the format is an object with this key a legal value.
        target[place[-1]] = {"not": ["a", "value"]}
        path.write_text(json.dumps(document))
        with pytest.raises(PlanError):
            Plan.load(path)


def test_row_order_missing_or_altered(path: Path, tmp_path: Path) -> None:
    order = next(tmp_path.glob("*.safetensors"))
    whole = order.read_bytes()
    link = tmp_path / "link" / path.name
    link.parent.mkdir()
    link.symlink_to(path)
    assert Plan.load(link) == Plan.load(path)
    (link.parent / order.name).write_bytes(whole[:-1])  # What is beside the link counts first.
    assert "SHA-256 differs" in error_of(link)
    order.write_bytes(whole[:-1])
    assert "SHA-256 differs" in error_of(path)
    order.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "SHA-256 differs" in error_of(path)
    order.unlink()
    assert "is missing; it belongs beside the plan" in error_of(path)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"u": np.arange(3)}, "holds no row order of table 't'"),
        ({"t": np.arange(3.0)}, "ids are a list of int64"),
        ({"t": np.zeros((2, 2), np.int64)}, "ids are a list of int64"),
        (None, "cannot read the row order"),
    ],
)
def test_a_row_order_of_something_else(
    path: Path, tensors: dict[str, np.ndarray] | None, words: str
) -> None:
    order = path.with_name("other.safetensors")
    if tensors is None:
        order.write_bytes(b"no tensors")
    else:
        save_file(tensors, order)
    reference = {"kind": "profile", "file": order.name, "sha256": sha256_file(order)}
    edited(path, _set("row_order", "t", to=reference))
    assert words in error_of(path)


def test_what_breaks_the_format_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = hot_cold()
    with pytest.raises(PlanError, match=r"solver\.bound_s"):
        replace(plan, solver=replace(plan.solver, bound_s=float("inf"))).save(path)
    with pytest.raises(PlanError, match=r"no hot_ids for the row orders of \['t'\]"):
        replace(plan, hot_ids={}).save(path)
    assert list(tmp_path.iterdir()) == []


def test_presets_round_trip_but_for_the_words_on_their_sources(tmp_path: Path) -> None:
    topology = placer.Topology.parse("2x8xh100", hbm="8GiB")
    plan = plan_of(TABLE, in_hbm("t", (0, 10, 1), (0, 4), "gpu:9"), topology=topology)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.topology == replace(topology, sources={})
    assert violations(loaded) == []


def test_parts_of_a_plan_by_name() -> None:
    plan = plan_of(TABLE, in_hbm("u", (0, 1, 1), (0, 1)), topology=machine(1))
    assert plan.order_of("t").kind == "id"
    with pytest.raises(PlanError, match="table 'u', which the plan does not list"):
        _ = plan.shards_by_table
