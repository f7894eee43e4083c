"""Plans and profiles on a store: fsspec's, in memory."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
from click.testing import CliRunner
from plan_cases import in_dram, in_hbm, plan_of

from cli import main
from placer import Plan, Profile, Table
from placer.data.files.staging import Staging
from placer.data.files.stores import find
from placer.errors import DataError, PlacerError, ProfileError
from placer.plan.fields import RowOrder
from placer.workloads import named_workload

PROFILE, PLAN = "memory://bucket/placed/profile", "memory://bucket/placed/plan.json"


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """A store that is empty before and after."""
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True)


def files(store: fsspec.AbstractFileSystem) -> list[str]:
    """The names of what is there."""
    return [name.rpartition("/")[2] for name in store.find("/bucket")]


def test_a_profile_replaces_one_and_its_parts(store: fsspec.AbstractFileSystem) -> None:
    first = named_workload("random-3@7")
    first.save(PROFILE)
    before = files(store)
    loaded = Profile.load(PROFILE)
    assert (loaded.table_names, loaded.reference) == (first.table_names, PROFILE)
    store.pipe("/bucket/placed/profile/counts-of-somebody.txt", b"kept")
    first.with_tables(dim=8, names=["t2"]).save(PROFILE)
    assert Profile.load(PROFILE).table_names == ["t2"]
    assert set(before) - set(files(store)) == {name for name in before if "safetensors" in name}
    assert "counts-of-somebody.txt" in files(store)


def test_a_failure_sends_nothing_and_names_the_store(store: fsspec.AbstractFileSystem) -> None:
    store.pipe("/bucket/other", b"")

    def fail() -> None:
        with Staging() as staging:
            place = staging.output(PLAN)
            place.write_text("{}")
            raise PlacerError(f"{place}, which is {place!s}")

    with pytest.raises(PlacerError, match=f"^{PLAN}, which is {PLAN}$"):
        fail()
    assert files(store) == ["other"]
    with pytest.raises(PlacerError, match=f"there is nothing at {PLAN}"):
        Plan.load(PLAN)
    with pytest.raises(PlacerError, match=r"memory://bucket is a folder without profile.json"):
        Profile.load("memory://bucket")


def test_a_profile_that_is_replaced_meanwhile_is_read_whole(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its JSON and its counts, another one takes its place."""
    from placer.data.files import staging

    named_workload("random-3@7").save(PROFILE)
    read, replaced = staging._read, []

    def read_and_replace(*arguments: object) -> bytes:
        content = read(*arguments)
        if not replaced:
            replaced.append(True)
            named_workload("random-2@1").save(PROFILE)
        return content

    monkeypatch.setattr(staging, "_read", read_and_replace)
    assert Profile.load(PROFILE).table_names == ["t1", "t2"]
    store.rm(next(name for name in store.find("/bucket") if "counts-" in name))
    with pytest.raises(ProfileError, match=rf"cannot read {PROFILE}/counts-\w+.safetensors"):
        Profile.load(PROFILE)


def test_a_plan_goes_with_its_row_order(store: fsspec.AbstractFileSystem) -> None:
    shards = in_hbm("t", (0, 2, 1), (0, 8)), in_dram("t", (2, 9, 1), (0, 8))
    for hot in ([4, 2], [1, 3]):
        plan = plan_of(Table("t", 9, 8), *shards)
        ids = {"t": np.array(hot, np.int64)}
        replace(plan, row_order={"t": RowOrder("profile")}, hot_ids=ids).save(PLAN)
        assert Plan.load(PLAN).hot_ids["t"].tolist() == hot
        assert len(files(store)) == 2


@pytest.mark.parametrize(
    ("pattern", "matched"),
    {
        "*.csv": ["day_2.csv", "day_10.csv"],
        "day_?.csv": ["day_2.csv"],
        "day?2.csv": ["day_2.csv"],
        "a?day_3.csv": [],  # No sign but ** stands for a slash.
        "a*csv": [],
        "*/day_3.csv": ["a/day_3.csv"],
        "**/day_*.csv": ["a/b/day_4.csv", "a/day_3.csv", "day_2.csv", "day_10.csv"],
        "a/**/day_*.csv": ["a/b/day_4.csv", "a/day_3.csv"],
        "**/day_[!24].csv": ["a/day_3.csv"],
        "day_[1-3]*.csv": ["day_2.csv", "day_10.csv"],
        "day_2.c[ts]v": ["day_2.csv"],
        "dayx2.csv*": ["dayx2.csvs"],
        "day_2xcs[v]": [],  # A dot stands for itself.
        "*.cs[v]": ["day_2.csv", "day_10.csv"],
    }.items(),
)
def test_a_pattern_matches_on_a_store_what_it_matches_here(
    store: fsspec.AbstractFileSystem, tmp_path: Path, pattern: str, matched: list[str]
) -> None:
    for name in ("day_2.csv", "day_10.csv", "dayx2.csvs", "a/day_3.csv", "a/b/day_4.csv"):
        store.pipe(f"/bucket/{name}", b"1")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    for folder in ("memory://bucket", str(tmp_path)):
        if matched:
            found = find(f"{folder}/{pattern}")
            assert found == [f"{folder}/{name}" for name in matched]
        else:
            with pytest.raises(DataError, match="no file"):
                find(f"{folder}/{pattern}")


@pytest.mark.slow
def test_commands_read_and_write_stores(
    store: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    lines = [f"{rng.randrange(2)},{rng.randrange(40)},{rng.randrange(9)}" for _ in range(300)]
    Path("log.csv").write_text("\n".join(["click,user,item", *lines]) + "\n")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    assert f"profile written to {PROFILE}" in run("profile", "log.csv", "-o", PROFILE)
    machine = ("--topology", "1xh100", "--batch-size", "64", "--solver", "greedy-cost")
    assert f"plan written to {PLAN}" in run("plan", "--profile", PROFILE, *machine, "-o", PLAN)
    assert Plan.load(PLAN).provenance.profile == PROFILE
    assert "user" in run("show", PLAN)
    run("plan", "--profile", PROFILE, *machine, "-o", "plan.json")
    assert Plan.load("plan.json").provenance.profile == PROFILE
    assert f"{PLAN} is sound" in run("verify", PLAN)
    assert not list(tmp_path.glob("memory*"))
    refused = CliRunner().invoke(main, ["verify", PLAN, "--seal"])
    assert f"{PLAN} is on a store; copy it here, seal it, and copy it back" in refused.output
