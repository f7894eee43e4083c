"""Day after day: a later log is counted as the first was, the plan follows it, training goes on."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cli_cases import Workbench, fail, invoke, json_of, succeed
from profile_cases import assert_same_profile

from cost_models import Roofline
from placer import Plan, Problem, Profile
from placer.data import open_log
from placer.errors import ProfileError
from placer.profile.count import profile_like
from placer.workloads import named_workload
from solvers.analysis import kept_plan

_IDS = range(14, 40)
"""Columns of Criteo's format that hold ids."""


@pytest.fixture(scope="module")
def tuesday(workbench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Monday's log with a third of the ids replaced: half of them by new ones."""
    rng = np.random.default_rng(3)
    lines = [line.split("\t") for line in workbench.log.read_text().splitlines()]
    others = rng.permutation(len(lines))
    for number, line in enumerate(lines):
        for column in _IDS:
            chance = rng.random()
            if chance < 1 / 6:
                line[column] = f"{int(rng.integers(1 << 28)):08x}"
            elif chance < 1 / 3:
                line[column] = lines[others[number]][column]
    path = tmp_path_factory.mktemp("tuesday") / "tuesday.tsv"
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_the_road_of_two_days(workbench: Workbench, tuesday: Path, tmp_path: Path) -> None:
    """Three commands on Monday, three on Tuesday, in the folder of the user."""
    first, plan, run = (tmp_path / name for name in ("monday", "plan.json", "run"))
    second, new = tmp_path / "tuesday", tmp_path / "new.json"
    machine = ("--topology", workbench.folder / "machine.yaml", "--hbm", "300KiB")
    succeed("profile", workbench.log, "--dim", "8", "-o", first)
    succeed("plan", "--profile", first, *machine, "--batch-size", "64", "--solver", "greedy-cost",
            "-o", plan)  # fmt: skip
    trained = json_of("train", "--plan", plan, "--data", workbench.log, "--checkpoints", run)

    shown = json_of("profile", tuesday, "--like", first, "-o", second)
    replanned = succeed("replan", "--from", plan, "--profile", second, "-o", new)
    goes_on = ("train", "--data", tuesday, "--checkpoints", run, "--resume")
    message = fail(*goes_on, "--plan", new)
    again = json_of(*goes_on, "--plan", new, "--other-data")

    assert all(0.1 < table["unknown_share"] < 0.25 for table in shown["tables"])
    assert "lookups of ids that the vocabularies lack" in replanned.stderr
    followed = Plan.load(new)
    assert followed.batch_size == 64
    assert followed.topology == Plan.load(plan).topology
    assert followed.tables_by_name["C1"].dim == 8
    assert "--other-data" in message
    # Tuesday is trained on from its start, after Monday's steps.
    assert again["samples"] == trained["samples"] == 1500 - again["held_out_samples"]
    assert again["steps"] == 2 * trained["steps"]
    # The same command once more finds nothing left to do.
    assert json_of(*goes_on, "--plan", new, "--other-data")["samples"] == 0


def test_ids_become_the_rows_that_they_were(workbench: Workbench, tuesday: Path) -> None:
    monday = Profile.load(workbench.profile)
    later = profile_like(monday, tuesday)
    assert later.ids_sha256 == monday.ids_sha256
    assert [one.table.dim for one in later] == [8] * 26
    every = set()
    for line in workbench.log.read_text().splitlines():
        every.add(line.split("\t")[16])
    ids = [line.split("\t")[16] for line in tuesday.read_text().splitlines()]
    table, new = later["C3"], [one for one in ids if one and one not in every]
    assert (table.unknown.lookups, table.unknown.ids) == (len(new), len(set(new)))
    known = {one for one in ids if one in every}
    assert table.unknown_id_share == pytest.approx(len(set(new)) / len(known | set(new)), abs=0.01)
    same = profile_like(monday, workbench.log)
    assert all(not one.unknown_share for one in same)
    np.testing.assert_array_equal(same["C3"].counts.ids, monday["C3"].counts.ids)  # type: ignore[union-attr]


def test_what_like_decides_is_not_given_beside_it(workbench: Workbench, tmp_path: Path) -> None:
    log, like = workbench.log, ("--like", workbench.profile, "-o", tmp_path / "p")
    for option in (("--dim", "4"), ("--id-mapping", "hash"), ("--rows", "10")):
        wrong = invoke("profile", log, *like, *option)
        assert wrong.exit_code == 2
        assert f"{option[0]} does not go with --like" in wrong.stderr
    with pytest.raises(ProfileError, match="does not say how ids become rows"):
        profile_like(named_workload("random-2@1"), log)


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_ids_alone_are_enough_to_count(workbench: Workbench, tmp_path: Path, kind: str) -> None:
    """A log of ids that were served has no clicks and no prices."""
    rng = np.random.default_rng(1)
    users = rng.zipf(1.3, 200).clip(max=60)
    whole = pd.DataFrame({"click": rng.integers(0, 2, 200), "price": 0.5, "user": users})
    logs = [tmp_path / f"{name}.{kind}" for name in ("whole", "ids")]
    for log, frame in zip(logs, (whole, whole[["user"]]), strict=True):
        if kind == "csv":
            frame.to_csv(log, index=False)
        elif kind == "jsonl":
            frame.to_json(log, orient="records", lines=True)
        else:
            frame.to_parquet(log, index=False)
    profile, plan = tmp_path / "profile", tmp_path / "plan.json"
    succeed("profile", logs[0], "--label", "click", "-o", profile)
    machine = ("--topology", workbench.folder / "machine.yaml", "--batch-size", "8")
    succeed("plan", "--profile", profile, *machine, "--solver", "greedy-cost", "-o", plan)
    counted = [profile_like(Profile.load(profile), log) for log in logs]
    assert_same_profile(counted[0], counted[1], same_source=False)
    assert counted[1].encoding == Profile.load(profile).encoding
    replayed = [json_of("simulate", plan, "--data", log)["steps"] for log in logs]
    assert replayed[0] == replayed[1]
    assert "has no column 'click'" in fail("train", "--plan", plan, "--data", logs[1])


def test_a_full_plan_is_a_candidate(
    workbench: Workbench, tuesday: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no room for all rows that Tuesday stages: the rest is read in place."""
    profile = profile_like(Profile.load(workbench.profile), tuesday)
    profile.save(tmp_path / "tuesday")
    plan = Plan.load(workbench.plan)
    found = json_of("replan", "--from", workbench.plan, "--profile", tmp_path / "tuesday",
                   "-o", tmp_path / "new.json")  # fmt: skip
    assert found["old_refused"] == ""
    assert found["old_step_time_s"] > 0
    assert Plan.load(tmp_path / "new.json").batch_size == plan.batch_size == 8
    monkeypatch.setattr(kept_plan, "_with_old_buffers", lambda needed, old: None)
    problem = Problem.of_plan(plan, profile)
    assert "bytes too many" in kept_plan.kept_plan(problem, Roofline(), plan)[1]


def test_row_0_is_no_hot_row_without_a_word(workbench: Workbench, tuesday: Path) -> None:
    log = open_log(tuesday, encoding=Profile.load(workbench.profile).encoding)
    assert not any(keys.estimate() for keys in log.unknown.values())
    for _ in log.chunks():
        pass
    assert all(keys.estimate() for keys in log.unknown.values())
