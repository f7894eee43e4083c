"""`placer demo`: what `make demo` runs, made small."""

import re
from pathlib import Path

import pytest
from cli_cases import invoke, json_of, succeed

import placer
from placer.plan.verify import violations
from solvers.report.demo import closing_words

QUICK = ("--steps", "30", "--time-limit", "0.2")
SOLVERS = ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim", "greedy-cost", "ilp")


def check(folder: Path, output: str) -> placer.Profile:
    """The demo's files are sound, its tables exceed the budget, and the losses are equal."""
    profile, plan = placer.Profile.load(folder / "profile"), placer.Plan.load(folder / "plan.json")
    assert not violations(plan)
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    hbm_bytes = sum(gpu.memory_bytes for gpu in plan.topology.gpus)
    shown = json_of("show", folder / "plan.json")
    assert shown["hbm_used_bytes"] + shown["dram_used_bytes"] > hbm_bytes
    assert {shard.memory for shard in plan.shards} == {"hbm", "dram"}
    assert all(f" {solver} " in output for solver in SOLVERS)
    assert "30 steps of " in output
    losses = re.findall(r"^ +\d+ +(0\.\d{6}) +(0\.\d{6}) +(\d\.\de[-+]\d+)$", output, re.MULTILINE)
    assert len(losses) >= 10
    assert all(abs(float(placed) - float(unplaced)) < 1e-5 for placed, unplaced, _ in losses)
    auc = re.search(r"AUC +(0\.\d+) +(0\.\d+) +of ([\d,]+) held-out samples", output)
    assert abs(float(auc[1]) - float(auc[2])) < 1e-3
    assert "equal to float tolerance, step for step" in output
    return profile


@pytest.mark.slow
def test_a_generated_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = succeed("demo", "--samples", "6000", "--scale", "0.01", *QUICK)
    assert "This log is GENERATED, not real: 6,000 samples" in result.stdout
    profile = check(tmp_path / "demo", result.stdout)
    assert profile.samples == 6000
    assert profile.total_bytes > sum(
        gpu.memory_bytes for gpu in placer.Plan.load(tmp_path / "demo" / "plan.json").topology.gpus
    )
    # What the demo tells its reader to do next works as it stands.
    [next_step] = re.findall(r"`placer (train [^`]*)`", result.stdout)
    assert "auc" in succeed(*next_step.split(), "--steps", "2").stdout


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    result = invoke("demo", "--data", tmp_path / "none.tsv", "-o", tmp_path / "d")
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert "none.tsv" in line
    assert not (tmp_path / "d").exists()


def test_a_log_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("a file where a folder should be")
    result = invoke("demo", "--samples", "1000", "--scale", "0.001", "-o", tmp_path / "d")
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert f"cannot write {tmp_path / 'd'}: it is a file; name a folder" in line


def test_the_demo_names_the_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    assert f"In {tmp_path}: plan.json. Go on" in closing_words(tmp_path, Path("log.tsv"))
    (tmp_path / "compare.png").touch()
    assert "plan.json, compare.png. Go on" in closing_words(tmp_path, Path("log.tsv"))


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "options", "unlabelled"),
    [
        ("criteo_sample.train.xz", (), 0),
        ("criteo_20k.parquet", (), 10_000),
        ("avazu_10k.parquet", ("--ignore", "id"), 0),
    ],
)
def test_a_real_log(
    real_data: Path, tmp_path: Path, name: str, options: tuple[str, ...], unlabelled: int
) -> None:
    result = succeed("demo", "--data", real_data / name, *options, *QUICK, "-o", tmp_path)
    check(tmp_path, result.stdout)
    assert ("samples without a label were passed over" in result.stdout) == bool(unlabelled)
