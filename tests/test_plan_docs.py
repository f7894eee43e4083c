"""The worked example of docs/plan-format.md is a plan, and the numbers beside it are right."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
from docs_cases import REPOSITORY
from problem_cases import zipf_table
from safetensors.numpy import save_file

from placer import Plan
from placer.files.atomic import sha256_file
from placer.plan.memory import (
    ENTRY_BYTES_PASSING,
    ROW_CACHE_ENTRY_BYTES,
    SORT_BYTES_PER_LOOKUP,
    STEPS_IN_FLIGHT,
    device_memory,
    index_buffer_bytes,
)
from placer.plan.verify import verify

SCHEMA = json.loads((REPOSITORY / "placer" / "plan" / "plan.schema.json").read_text())
TEXT = (REPOSITORY / "docs" / "plan-format.md").read_text(encoding="utf-8")


def test_the_example_is_a_sound_plan(tmp_path: Path) -> None:
    example = re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)
    document = json.loads(example[1])
    jsonschema.validate(document, SCHEMA)
    order = document["row_order"]["C1"]
    ids = re.search(r"lists the ids (\d+), (\d+) and (\d+) for `C1`", TEXT)
    hot_ids = np.array(ids.groups(), dtype=np.int64)
    save_file({"C1": hot_ids}, tmp_path / order["file"])
    assert sha256_file(tmp_path / order["file"]) == order["sha256"]
    (tmp_path / "plan.json").write_text(example[1])
    plan = Plan.load(tmp_path / "plan.json")
    verify(plan)
    assert plan.hot_ids["C1"].tolist() == [7, 1, 4]
    for use in device_memory(plan).values():
        row = (use.weight_bytes, use.state_bytes, use.row_map_bytes, use.buffer_bytes)
        cells = " | ".join(str(size) for size in (*row, use.total_bytes))
        assert f"| `{use.device}` | {cells} |" in TEXT


def test_its_figures_are_those_that_plans_are_made_with() -> None:
    assert STEPS_IN_FLIGHT == 2
    table = zipf_table("t", 1).table
    assert f"{index_buffer_bytes(table, 1, 64):.0f} bytes for each lookup of a step" in TEXT
    assert f"{index_buffer_bytes(table, 1, 128):.0f} for rows of 128 columns" in TEXT
    assert f"; {index_buffer_bytes(table, 1, 64, ahead=False):.0f} with `pipeline: serial`" in TEXT
    assert f"{SORT_BYTES_PER_LOOKUP} bytes a lookup more than updates" in TEXT
    assert f"{ENTRY_BYTES_PASSING} bytes an entry" in TEXT
    assert f"(weights + state of a row + {ROW_CACHE_ENTRY_BYTES})" in TEXT
    assert f"with their state and {ROW_CACHE_ENTRY_BYTES} bytes of bookkeeping each" in TEXT
    costs = (REPOSITORY / "docs" / "cost-model.md").read_text(encoding="utf-8")
    assert f"each cached row takes {ROW_CACHE_ENTRY_BYTES} bytes" in costs


def test_every_key_of_the_format_is_explained() -> None:
    keys = set(SCHEMA["properties"])
    for model in SCHEMA["$defs"].values():
        keys |= set(model["properties"])
    # Of links, words say what their ends and latency are.
    unexplained = {key for key in keys if f"`{key}`" not in TEXT and f".{key}`" not in TEXT}
    assert unexplained <= {"a", "b", "bytes_per_s", "latency_s"}
