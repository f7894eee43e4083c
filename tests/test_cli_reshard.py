"""`placer export --to shards|safetensors` and `placer reshard`."""

import json
import re
import shutil
from pathlib import Path

import pytest
from cli_cases import Workbench, fail, files_of, invoke, succeed
from safetensors.torch import load_file

import placer
from placer.plan.diff import diff
from placer.plan.migration import migration
from placer.storage.shards import open_shards


@pytest.fixture(scope="module")
def folder(workbench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, shards of it, and a newer plan."""
    made = tmp_path_factory.mktemp("reshard")
    succeed(*workbench.training(), "--steps", "3", "--checkpoints", made / "runs")
    succeed("export", workbench.plan, "--to", "shards", "--checkpoint", made / "runs",
            "-o", made / "shards")  # fmt: skip
    command = ("plan", *workbench.problem(), "--hbm", "70KiB", "--solver", "greedy-cost")
    succeed(*command, "-o", made / "new.json")
    return made


def test_resharding_is_as_exporting_anew(
    workbench: Workbench, folder: Path, tmp_path: Path
) -> None:
    plans = (workbench.plan, folder / "new.json")
    result = succeed("reshard", *plans, "--shards", folder / "shards", "-o", tmp_path / "new",
                     "--format", "json")  # fmt: skip
    assert result.stderr == f"shards written to {tmp_path / 'new'}\n"
    anew = succeed("export", folder / "new.json", "--to", "shards", "--checkpoint",
                   folder / "runs", "-o", tmp_path / "anew")  # fmt: skip
    assert anew.stdout == f"26 tables of step 3 written to {tmp_path / 'anew'}\n"
    assert files_of(tmp_path / "new") == files_of(tmp_path / "anew")
    assert open_shards(tmp_path / "new").step == 3

    told = json.loads(result.stdout)
    found = diff(*(placer.Plan.load(path) for path in plans))
    assert told["moved_bytes"] == found.moved_bytes > 0
    assert told["migration_s"] == migration(found).seconds
    assert told["kept_bytes"] + told["moved_bytes"] >= sum(t.total_bytes for t in found.new.tables)
    assert sum(row["moved_bytes"] for row in told["transfers"]) == found.moved_bytes
    count = len(list((tmp_path / "new").glob("*/*")))
    assert told["kept_files"] + told["written_files"] == count
    assert told["kept_files"] > 0

    # Beforehand the plans alone tell the same.
    planned = json.loads(succeed("reshard", *plans, "--format", "json").stdout)
    assert planned == {name: value for name, value in told.items() if "file" not in name}
    text = succeed("reshard", *plans).stdout
    assert "What resharding would move" in text
    assert "over the machine's links" in text


def test_a_file_of_tables(workbench: Workbench, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tables.safetensors"
    command = ("export", workbench.plan, "--to", "safetensors", "--checkpoint", folder / "runs")
    result = succeed(*command, "-o", path)
    assert result.stdout == f"26 tables of step 3 written to {path}\n"
    tables = placer.Plan.load(workbench.plan).tables
    found = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        f"{table.name}.weight": (table.rows, table.dim) for table in tables
    }
    succeed(*command, "--with-optimizer", "-o", path)
    assert len(load_file(path)) == 2 * len(tables)


def test_wrong_use_is_told(workbench: Workbench, folder: Path, tmp_path: Path) -> None:
    plan, out = workbench.plan, tmp_path / "out"
    checkpoint = ("--checkpoint", folder / "runs")
    for command in (
        ("export", plan, "--to", "shards", "-o", out),
        ("export", plan, "--to", "hugectr", *checkpoint, "-o", out),
        ("export", plan, "--to", "shards", *checkpoint, "--with-optimizer", "-o", out),
        ("reshard", plan, plan, "--shards", folder / "shards"),
        ("reshard", plan, plan, "-o", out),
        ("reshard", plan, plan, "--no-verify"),
    ):
        assert invoke(*command).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_line(workbench: Workbench, folder: Path, tmp_path: Path) -> None:
    shards = ("--shards", folder / "shards")
    new = folder / "new.json"
    line = fail("reshard", new, workbench.plan, *shards, "-o", tmp_path / "out")
    assert "were not written with the older plan" in line
    assert str(folder / "shards" / "plan.json") in line
    line = fail("reshard", workbench.plan, new, *shards, "-o", folder / "shards")
    assert line == f"placer: {folder / 'shards'} exists already; give another name, or remove it"
    line = fail("reshard", workbench.plan, new, "--shards", folder / "runs", "-o", tmp_path / "x")
    assert "a folder of shards is made by `placer export --to shards`" in line
    line = fail("export", new, "--to", "shards", "--checkpoint", tmp_path, "-o", tmp_path / "x")
    assert "there is no checkpoint in" in line
    runs, since = folder / "runs", folder / "runs" / "step-000000000001"
    line = fail("export", workbench.plan, "--to", "safetensors", "--checkpoint", runs,
                "--since", since, "-o", tmp_path / "x")  # fmt: skip
    assert line.startswith(f"placer: there is no checkpoint {since}; {runs} has step-00000000")
    assert list(tmp_path.iterdir()) == []


def test_the_python_of_the_page_runs(
    workbench: Workbench, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "reshard.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    placer.Plan.load(workbench.plan).save("old.json")
    placer.Plan.load(folder / "new.json").save("new.json")
    shutil.copytree(folder / "runs", "runs/a")
    exec(compile(code, "docs/reshard.md", "exec"), {})
    assert open_shards("new-shards").step == 3
