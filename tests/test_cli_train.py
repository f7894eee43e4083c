"""`placer train`: its result, samples without a label, Ctrl-C and resuming."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Workbench, command_line, files_of, invoke, succeed

from placer import Plan, Problem, Profile, Topology
from placer.plan.origin import open_log_of
from solvers import solve


def trained(*arguments: str | Path) -> dict[str, Any]:
    """The JSON result of a run."""
    done = succeed(*arguments, "--format", "json")
    assert "None" not in done.stderr  # No note is on an option that was not given.
    return json.loads(done.stdout)


_IMPORTS = """
import sys
from cli import main
try:
    main(sys.argv[1:])
finally:
    print("imported", "torch._dynamo" in sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_run_does_not_wait_for_the_compiler(workbench: Workbench) -> None:
    """It takes two seconds to import, and nothing is compiled."""
    command = [sys.executable, "-c", _IMPORTS, *map(str, workbench.training()), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "imported False" in done.stderr


def test_the_result_says_what_was_trained(workbench: Workbench, tmp_path: Path) -> None:
    result = trained(*workbench.training(), "--checkpoints", tmp_path)
    # 24 batches of 64, of which two are held out; the last one is smaller.
    assert result["steps"] == len(result["losses"]) == 22
    assert result["held_out_samples"] == 2 * 64
    assert result["samples"] == 1500 - 2 * 64
    assert result["unlabelled_samples"] == 0
    assert 0 < result["auc"] <= 1
    assert result["log_loss"] > 0
    assert result["samples_per_s"] > 0
    assert result["step_s"] == pytest.approx(result["train_s"] / 22)
    assert result["planned_step_s"] is None  # The plan is of two GPUs and smaller batches.
    assert result["first_loss"] == result["losses"][0][1]
    assert result["last_loss"] == result["losses"][-1][1]
    assert result["interrupted"] is False
    assert result["checkpoint"] == str(tmp_path / "step-000000000022")


def test_a_plan_that_python_saved_names_its_profile(workbench: Workbench) -> None:
    profile = Profile.load(workbench.profile)
    machine = Topology.parse(str(workbench.folder / "machine.yaml"), hbm="100KiB")
    plan = solve(Problem(profile, machine, 8), solver="greedy-size").plan
    plan.save(workbench.folder / "saved.json")
    assert Plan.load(workbench.folder / "saved.json").provenance.profile == "profile"
    path = workbench.folder / "saved.json"
    assert open_log_of(plan=Plan.load(path), file=path, logs=[workbench.log]).tables


def test_the_result_is_readable(workbench: Workbench) -> None:
    result = succeed(*workbench.training(), "--steps", "3")
    lines = dict(line.strip().split("  ", 1) for line in result.stdout.splitlines())
    assert lines["steps"] == "3"
    assert lines["samples"] == "192"
    assert 0 <= float(lines["auc"]) <= 1
    assert "checkpoint" not in lines
    assert result.stderr == ""


def test_options_reach_the_training(workbench: Workbench) -> None:
    quick = (*workbench.training(), "--steps", "4")
    usual = trained(*quick)
    assert trained(*quick)["losses"] == usual["losses"]
    for option in (("--seed", "1"), ("--lr", "0.1"), ("--embedding-lr", "0.1"),
                   ("--dense-optimizer", "sgd"), ("--batch-size", "50")):  # fmt: skip
        assert trained(*quick, *option)["losses"] != usual["losses"]
    half = trained(*quick, "--amp", "bfloat16")
    assert half["losses"] != usual["losses"]
    assert half["last_loss"] == pytest.approx(usual["last_loss"], abs=0.05)
    whole = trained(*workbench.training(), "--epochs", "2", "--eval-data", workbench.log)
    assert whole["steps"] == 2 * 24
    assert whole["held_out_samples"] == 1500


def test_a_trace_is_written_and_summed_up(workbench: Workbench, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run = (*workbench.training(), "--steps", "9", "--trace", path)
    result = trained(*run, "--trace-steps", "3", "--backend", "tiered")
    names = {phase["phase"] for phase in result["trace"]["phases"]}
    assert names >= {"read", "map", "sort", "forward", "backward", "update", "other"}
    assert result["trace"]["steps"] == 3
    assert result["trace"]["path"] == str(path)
    assert sum(phase["share"] for phase in result["trace"]["phases"]) == pytest.approx(1)
    assert len(result["losses"]) == 9
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "placer: update" for event in events) == 3
    lines = succeed(*run, "--steps", "7").stdout.splitlines()
    [title] = [line for line in lines if line.startswith("A step under the profiler: ")]
    assert title.endswith(f"the mean of 2 in {path}")
    assert any(line.startswith("forward ") for line in lines)
    short = succeed(*run, "--steps", "4")
    assert short.stderr == "no trace: it begins after 5 steps, and the run ended before\n"


def test_hit_rates_are_told_where_memory_has_tiers(workbench: Workbench) -> None:
    run = (*workbench.training(), "--steps", "5")
    assert "hit_rates" not in trained(*run, "--backend", "numba")
    rates = trained(*run, "--backend", "tiered", "--cache-policy", "rank")["hit_rates"]
    assert rates["lookups"] == 5 * 64 * 26
    assert sum(row["lookups"] for row in rates["served"]) == rates["lookups"]
    hit = sum(row["share"] for row in rates["served"] if row["from"].startswith("HBM"))
    assert hit == pytest.approx(rates["hbm_hit_rate"])
    assert 0 < hit < 1
    tables = rates["tables"]
    assert len(tables) == 26
    # Of so few steps all are counted, and each table has one lookup a sample.
    assert sum(one["hbm_share"] for one in tables) / 26 == pytest.approx(hit)
    assert all(0 <= one["planned_hbm_share"] <= 1 for one in tables)
    # The plan was made from this log, whose hottest rows a few steps read as often as all do.
    assert rates["planned_hbm_share"] == pytest.approx(hit, abs=0.05)
    shown = succeed(*run, "--backend", "tiered").stdout
    assert f"found their row in HBM, the plan counts on {rates['planned_hbm_share']:.1%}" in shown
    assert "HBM, rows that the plan keeps there" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "magic"), "no backend is called 'magic'; there are auto, numba"),
        (("--trace-steps", "3"), "--trace-steps needs --trace"),
        (("--amp", "float16"), "'float16' is not one of bfloat16"),
    ],
)
def test_options_that_cannot_be(
    workbench: Workbench, options: tuple[str, ...], message: str
) -> None:
    result = invoke(*workbench.training(), *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_several_logs_are_one(workbench: Workbench, tmp_path: Path) -> None:
    lines = workbench.log.read_text().splitlines(keepends=True)
    (tmp_path / "0.tsv").write_text("".join(lines[:701]))
    (tmp_path / "1.tsv").write_text("".join(lines[701:]))
    train = ("train", "--plan", workbench.plan, "--batch-size", "64")
    parts = ("--data", tmp_path / "0.tsv", "--data", tmp_path / "1.tsv")
    whole = trained(*workbench.training())
    assert trained(*train, *parts)["losses"] == whole["losses"]
    assert trained(*train, "--data", workbench.parquet)["losses"] == whole["losses"]


def test_a_run_resumed_is_equal_to_one_in_a_piece(workbench: Workbench, tmp_path: Path) -> None:
    run = (*workbench.training(), "--epochs", "2")
    whole = trained(*run)
    resumed = (*run, "--checkpoints", tmp_path, "--resume")
    first = succeed(*resumed, "--steps", "25", "--format", "json")
    assert first.stderr == f"no checkpoint in {tmp_path} yet: the run starts at its beginning\n"
    second = succeed(*resumed, "--steps", "50", "--format", "json")
    went_on, ended = second.stderr.splitlines()
    assert went_on == "went on after step 25, where the checkpoint was made"
    again = "the log ended after step 44; --epochs 3 reads it again"
    assert ended == f"--steps 50 was not reached: {again}"
    rest = json.loads(second.stdout)
    assert json.loads(first.stdout)["losses"] + rest["losses"] == whole["losses"]
    assert (rest["auc"], rest["log_loss"]) == (whole["auc"], whole["log_loss"])
    third = succeed(*resumed, "--format", "json")
    assert third.stderr == f"nothing was left to train: {again}\n"
    nothing = json.loads(third.stdout)
    assert (nothing["steps"], nothing["losses"], nothing["auc"]) == (44, [], whole["auc"])
    for steps in (44, 7):
        late = succeed(*resumed, "--steps", steps).stderr
        assert late == (
            f"nothing was left to train: the checkpoint has 44 steps, and --steps is {steps}\n"
        )


def test_metrics_are_a_line_a_step_however_often_a_run_goes_on(
    workbench: Workbench, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    run = (*workbench.training(), "--metrics", file, "--checkpoints", tmp_path / "a", "--resume")
    trained(*run, "--steps", "10")
    saved = file.read_text()
    # A kill after step 13, before there was another checkpoint, and within a line.
    later = [json.dumps({"step": step, "loss": 9.0}) for step in (11, 12, 13)]
    file.write_text(saved + "\n".join([*later, '{"step": 14, "lo']))
    result = trained(*run)
    *steps, last = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 23))
    whole = trained(*workbench.training())
    assert [[line["step"], line["loss"]] for line in steps] == whole["losses"]
    assert all(line["samples_per_s"] > 0 for line in steps)
    assert last == {"steps": 22, "auc": result["auc"], "log_loss": result["log_loss"]}
    # A run that does not go on begins anew.
    trained(*workbench.training(), "--metrics", file, "--steps", "3")
    assert [json.loads(line).get("step") for line in file.read_text().splitlines()[:3]] == [1, 2, 3]


def test_a_file_that_has_no_metrics_is_left_alone(workbench: Workbench, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("by hand\n")
    refused = invoke(*workbench.training(), "--metrics", file)
    assert refused.exit_code == 1
    assert f"{file} has no metrics of a run; name another file" in refused.stderr
    assert file.read_text() == "by hand\n"
    refused = invoke(*workbench.training(), "--metrics", tmp_path / "new" / "metrics.jsonl")
    assert refused.exit_code == 1
    assert "make it: mkdir -p" in refused.stderr


def test_tensorboard_shows_each_step_once(workbench: Workbench, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = ("--log-to", f"tensorboard:{tmp_path / 'board'}")
    run = (*workbench.training(), *board, "--checkpoints", tmp_path / "a", "--resume")
    # The first run trains on behind its checkpoint, as one that is killed.
    trained(*run, "--steps", "10")
    trained(*workbench.training(), *board, "--steps", "13")
    result = trained(*run)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert [step for step, _ in losses] == list(range(1, 23))
    (auc,) = events.Scalars("auc")
    assert (auc.step, auc.value) == (22, pytest.approx(result["auc"]))
    assert {"samples_per_s", "log_loss"} <= set(events.Tags()["scalars"])
    refused = invoke(*workbench.training(), "--log-to", f"tensorboard:{workbench.log}")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1] == f"placer: cannot write {workbench.log}: File exists"


def test_a_log_that_is_not_installed_says_what_installs_it(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused = invoke(*workbench.training(), "--log-to", "wandb:clicks")
    assert refused.exit_code == 1
    assert "pip install wandb" in refused.stderr
    refused = invoke(*workbench.training(), "--log-to", "mlflow")
    assert refused.exit_code == 1
    assert "give tensorboard:FOLDER or wandb:PROJECT" in refused.stderr


def test_samples_without_a_label_are_left_out(workbench: Workbench, tmp_path: Path) -> None:
    lines = workbench.log.read_text().splitlines()
    bare = [line if number % 3 else line[1:] for number, line in enumerate(lines)]
    (tmp_path / "log.tsv").write_text("".join(f"{line}\n" for line in bare))
    run = ("train", "--plan", workbench.plan, "--data", tmp_path / "log.tsv")
    result = trained(*run)
    assert result["unlabelled_samples"] == 500
    assert result["samples"] + result["held_out_samples"] == 1000
    assert "unlabelled samples  500" in succeed(*run).stdout


def interrupted(folder: Path, *words: object) -> tuple[dict[str, Any], str]:
    """What a run printed that was interrupted after its first checkpoint, and its notes."""
    process = subprocess.Popen(
        command_line(*words, "--checkpoints", folder, "--epochs", "100000", "--format", "json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, notes = process.communicate(timeout=60)
    assert process.returncode == 130, notes
    return json.loads(output), notes


@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_goes_on_exactly(
    workbench: Workbench, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    run = (*workbench.training(), "--checkpoints", folder)
    result, notes = interrupted(folder, *workbench.training(), "--every", "10")
    steps = result["steps"]
    assert notes == f"interrupted after step {steps}; --resume goes on from {folder}\n"
    assert result["interrupted"] is True
    assert result["checkpoint"] == str(folder / f"step-{steps:012d}")
    assert not [name for name in files_of(folder) if name.startswith(".")]

    goal = ("--epochs", "100000", "--steps", str(steps + 30))
    rest = trained(*run, *goal, "--resume")
    whole = trained(*workbench.training(), *goal)
    assert result["losses"] + rest["losses"] == whole["losses"]
