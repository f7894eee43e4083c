"""Types of cold rows, tried out: plans, what is trained, and what is said of it."""

import csv
import io
from dataclasses import replace

import pytest
from cli_cases import Workbench, invoke, json_of, succeed
from ranks_launcher import run
from training_cases import QUICK, small_log

from placer import Profile
from placer.data.log import Log
from placer.errors import PlacerError, ProblemError
from placer.plan.verify import violations
from placer.profile.count import profile_log
from placer.report.training import pilot_report
from placer.training import pilot as module
from placer.training import train
from placer.training.pilot import Candidate, pilot


def profiled(log: Log) -> Profile:
    return profile_log(log, dim=8)


def test_candidates_differ_in_their_type_and_seeds_in_their_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, plans = small_log(), []

    def recorded(plan, *arguments, **options):
        plans.append(plan)
        return train(plan, *arguments, **options)

    monkeypatch.setattr(module, "train", recorded)
    seen: list[tuple[int, int]] = []
    float32, int8 = pilot(
        profiled(log),
        log,
        ["int8"],
        config=replace(QUICK, embedding_lr=0.2),
        seeds=2,
        hot_share=0.19,  # Of 50 and 40 rows: rounded up.
        on_run=lambda done, runs: seen.append((done, runs)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (float32.name, int8.name) == ("float32", "cold rows int8")
    # 10 and 8 rows in HBM, and 40 and 32 cold ones; each with 4 bytes of state.
    assert float32.table_bytes == 90 * 36
    assert int8.table_bytes == 18 * 36 + 72 * 20
    assert float32.exchanged_bytes == 2 * 3 * 8 * 4
    for plan in plans:
        assert not violations(plan)
        assert {s.memory for s in plan.shards_by_table["a"]} == {"hbm", "dram"}
        assert list(plan.hot_ids["a"]) == list(profiled(log)["a"].counts.hottest(10))
    for values in (float32.aucs, int8.aucs, float32.log_losses, int8.log_losses):
        assert len(set(values)) == 2
    assert not set(float32.log_losses) & set(int8.log_losses)
    alone = train(plans[0], log, replace(QUICK, embedding_lr=0.2, seed=1))
    assert (alone.auc, alone.log_loss) == (float32.aucs[1], float32.log_losses[1])


def test_a_mean_is_held_against_the_worst_seed() -> None:
    usual = Candidate("float32", "float32", 4, 4, (0.70, 0.72, 0.74), (0.50, 0.51, 0.52))
    assert usual.is_within_spread(usual)
    for aucs, log_losses, within in (
        ((0.69, 0.70, 0.71), (0.40, 0.41, 0.42), True),
        ((0.69, 0.69, 0.71), (0.40, 0.41, 0.42), False),
        ((0.80, 0.80, 0.80), (0.52, 0.53, 0.52), False),
    ):
        other = Candidate("int8", "float32", 4, 4, aucs, log_losses)
        assert other.is_within_spread(usual) is within
    assert Candidate("int8", "bfloat16", 4, 4).name == "cold rows int8, exchange bfloat16"


def test_a_report_names_the_types_that_are_no_worse() -> None:
    usual = Candidate("float32", "float32", 4, 4, (0.70, 0.74), (0.50, 0.52))
    near = Candidate("bfloat16", "float32", 4, 4, (0.69, 0.73), (0.48, 0.53))
    far = Candidate("int8", "float32", 4, 4, (0.69, 0.70), (0.50, 0.52))
    found = pilot_report([usual, near, far])
    assert found.headline == ("no worse than float32's worst seed: cold rows bfloat16",)
    rows = found.to_json()["candidates"]
    assert [row["within_spread"] for row in rows] == [True, True, False]
    ends = ("least_auc", "most_auc", "least_log_loss", "most_log_loss")
    assert [rows[1][end] for end in ends] == [0.69, 0.73, 0.48, 0.53]


def test_what_cannot_be_tried_is_refused() -> None:
    log = small_log(128)
    for expected, how in (
        ("2 seeds or more, not 1", {"seeds": 1}),
        ("torchrun", {"exchange_dtype": "bfloat16"}),
        ("no held-out sample .*lower --batch-size", {"config": replace(QUICK, holdout_every=0)}),
    ):
        with pytest.raises(PlacerError, match=expected):
            pilot(profiled(log), log, **how)
    with pytest.raises(ProblemError, match="width 'int4' is none of"):
        pilot(profiled(log), log, ["int4"])


def on_ranks(rank: int, world: int) -> list[Candidate]:
    log = small_log()
    return pilot(profiled(log), log, (), "bfloat16", replace(QUICK, batch_size=16), seeds=2)


@pytest.mark.slow
def test_two_processes_try_the_type_of_their_exchange() -> None:
    one, other = run(2, [("pilot", on_ranks, ())]).of("pilot")
    assert one == other
    float32, bfloat16 = one
    assert bfloat16.name == "exchange bfloat16"
    assert bfloat16.exchanged_bytes == float32.exchanged_bytes / 2
    assert not set(float32.log_losses) & set(bfloat16.log_losses)
    log = small_log()
    (alone,) = pilot(profiled(log), log, (), config=QUICK, seeds=2)
    assert float32.log_losses == pytest.approx(alone.log_losses, rel=1e-3)


def test_the_command_shows_a_table_json_and_csv(workbench: Workbench) -> None:
    how = ("pilot", "--profile", workbench.profile, "--data", workbench.log, "--seeds", "2")
    how += ("--batch-size", "64", "--steps", "3", "--widths", "int8")
    how += ("--eval-data", workbench.parquet)
    shown = succeed(*how).stdout
    assert "no worse than float32's worst seed" in shown
    assert any(one.startswith("float32 ") and one.endswith(" yes") for one in shown.splitlines())
    found = json_of(*how)
    usual, narrow = found["candidates"]
    assert (usual["name"], narrow["name"]) == ("float32", "cold rows int8")
    assert narrow["table_bytes"] < usual["table_bytes"]
    assert usual["within_spread"]
    losses = [one["log_loss"] for one in found["runs"] if one["name"] == "float32"]
    assert usual["least_log_loss"] == min(losses) < sum(losses) / 2 == usual["log_loss"]
    rows = list(csv.DictReader(io.StringIO(succeed(*how, "--format", "csv").stdout)))
    assert [row["name"] for row in rows] == ["float32", "cold rows int8"]
    assert invoke(*how, "--seeds", "1").exit_code == 2
