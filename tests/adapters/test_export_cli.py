"""`placer export`."""

import json
from pathlib import Path

import pytest
from cli_cases import fail, succeed
from plan_cases import in_dram, in_hbm, machine

from placer import Plan, Table


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    shards = (in_hbm("a", (0, 10, 1), (0, 8)), in_hbm("b", (0, 6, 1), (0, 8), "gpu:1"))
    Plan((Table("a", 10, 8), Table("b", 6, 8)), machine(2), shards).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_each_trainers_file(plan_file: Path) -> None:
    found = {}
    for target, module in (("torchrec", ["--module", "m"]), ("hugectr", [])):
        file = plan_file.with_name(f"{target}.json")
        said = succeed("export", str(plan_file), "--to", target, *module, "-o", str(file))
        assert said.stdout == f"2 tables written to {file} for {target}\n"
        found[target] = json.loads(file.read_text())
    assert found["torchrec"]["plan"]["m"]["b"]["ranks"] == [1]
    assert found["hugectr"] == {
        "shard_matrix": [["a"], ["b"]],
        "shard_strategy": [["mp", ["a", "b"]]],
    }


def test_what_a_trainer_cannot_run_is_not_written(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    Plan((Table("a", 10, 8),), machine(1), (in_dram("a", (0, 10, 1), (0, 8)),)).save(plan)
    file = tmp_path / "out.json"
    said = fail("export", str(plan), "--to", "torchrec", "-o", str(file))
    assert "table 'a' so: its rows are read by lookup 'staged'" in said
    assert "(--staged-as)" in said
    assert not file.exists()
    succeed("export", str(plan), "--to", "torchrec", "--staged-as", "uva", "-o", str(file))
    assert json.loads(file.read_text())["plan"][""]["a"]["compute_kernel"] == "fused_uvm"


def test_a_name_that_torchrec_has_no_table_for_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    table = Table("user.id", 10, 8)
    Plan((table,), machine(1), (in_hbm("user.id", (0, 10, 1), (0, 8)),)).save(plan)
    said = fail("export", str(plan), "--to", "torchrec", "-o", str(tmp_path / "out.json"))
    assert "a table of the name 'user.id'" in said
    assert "--feature-table FEATURE=TABLE" in said
