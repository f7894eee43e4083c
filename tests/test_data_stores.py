"""Logs on a store, fsspec's in memory; results are on this machine."""

from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner
from plan_cases import in_hbm, plan_of

from cli import main
from placer import Plan, Profile, Table
from placer.data.files.stores import find
from placer.errors import DataError, PlacerError
from placer.workloads import named_workload

PLAN = plan_of(Table("t", 9, 8), in_hbm("t", (0, 9, 1), (0, 8)))


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """A store that is empty before and after."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def test_plans_and_profiles_are_read_and_written_here() -> None:
    for load in (Profile.load, Plan.load):
        with pytest.raises(PlacerError, match=r"^s3://bucket/x is on a store: copy it here first$"):
            load("s3://key:secret@bucket/x")
    for save in (named_workload("random-3@7").save, PLAN.save):
        with pytest.raises(PlacerError, match=r"^hf://a/b is on a store: write it here, and copy"):
            save("hf://a/b")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan --profile s3://b/p --topology 8xh100", "s3://b/p is on a store: copy it here first"),
        ("verify gs://b/plan.json", "gs://b/plan.json is on a store: copy it here first"),
        ("profile log.csv -o abfs://c@b/p", "abfs://c@b/p is on a store: write it here"),
        ("report --plan a.json -o s3://b/r.html", "s3://b/r.html is on a store: write it here"),
    ],
)
def test_commands_write_results_here(words: str, line: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    assert line in result.output


def test_a_result_may_be_named_by_a_uri_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "a plan.json"
    PLAN.save(file.as_uri())
    assert Plan.load(file.as_uri()).tables[0].name == "t"
    assert CliRunner().invoke(main, ["verify", file.as_uri()]).exit_code == 0


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
