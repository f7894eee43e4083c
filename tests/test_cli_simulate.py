"""`placer simulate` on the command line."""

import json

import pytest
from cli_cases import Workbench, fail, invoke, succeed


def found(*arguments) -> dict:
    return json.loads(succeed("simulate", *arguments, "--format", "json").stdout)


@pytest.mark.slow
def test_a_log_is_counted_to_the_lookup(workbench: Workbench) -> None:
    result = found(workbench.plan, "--data", workbench.log)
    assert (result["steps"], result["samples"]) == (-(-1500 // 16), 1500)
    # 26 columns; those that a sample lacks are read as id 0.
    assert result["lookups"] == 26 * 1500
    assert len(result["steps_in_order"]) == result["steps"]
    assert 0 < result["hbm_share"] <= 1
    assert 0 < result["step_mean_s"] <= result["sum_mean_s"]
    assert sum(row["lookups"] for row in result["devices"]) * result["steps"] == pytest.approx(
        result["lookups"]
    )
    again = found(workbench.plan, "--data", workbench.parquet)
    assert again["lookups"] == result["lookups"]


def test_a_table_is_for_people(workbench: Workbench) -> None:
    shown = succeed("simulate", workbench.plan, "--batches", "4", "--seed", "2").stdout
    for word in ("Simulated", "4 steps, 64 samples", "gpu:1", "outputs", "p99"):
        assert word in shown


def test_draws_are_seeded_and_look_ahead_saves_time(workbench: Workbench) -> None:
    drawn = workbench.plan, "--batches", "6"
    first, again = found(*drawn), found(*drawn)
    assert first == again
    assert found(*drawn, "--seed", "1")["steps_in_order"] != first["steps_in_order"]
    alone = found(*drawn, "--no-look-ahead")
    assert alone["step_mean_s"] == alone["sum_mean_s"]
    assert alone["lookups"] == first["lookups"]


def test_what_follows_is_told_beside_another_plan(workbench: Workbench) -> None:
    """A plan is compared with one for more memory, over the windows of two logs."""
    other = workbench.folder / "roomy.json"
    machine = ("--topology", workbench.folder / "machine.yaml", "--hbm", "400KiB")
    succeed("plan", "--profile", workbench.profile, *machine, "--batch-size", "8",
            "--solver", "greedy-cost", "-o", other)  # fmt: skip
    logs = ("--data", workbench.log, "--then", workbench.parquet)
    result = found(workbench.plan, *logs, "--against", other, "--windows", "2", "--batches", "20")
    windows = result["windows"]
    assert [window["steps"] for window in windows] == [10] * 4
    assert windows[0]["lost_share"] == 0
    for window in windows:
        assert window["other_hbm_share"] > window["hbm_share"]
        saved = window["step_mean_s"] - window["other_step_mean_s"]
        assert window["break_even_steps"] == pytest.approx(window["migration_s"] / saved)
        assert window["break_even"].endswith(" steps")


def test_wrong_use_is_told(workbench: Workbench) -> None:
    usage = invoke("simulate", workbench.plan)
    assert usage.exit_code == 2
    assert "--batches" in usage.stderr
    drawn = ("simulate", workbench.plan, "--batches", "2")
    assert "no constants" in fail(*drawn, "--cost-model", "torchrec")
    assert "2 steps, which do not make 3 windows" in fail(*drawn, "--windows", "3")
    assert "nowhere.tsv" in fail("simulate", workbench.plan, "--data", "nowhere.tsv")
