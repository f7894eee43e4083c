"""Profiles from counts that a database made."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import misuse, succeed
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import FEATURES, TABLES, assert_same_profile, batches, count

from placer import Profile
from placer.errors import DataError
from placer.profile.from_counts import profile_counts


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@examples(30)
@given(st.lists(batches(), min_size=1, max_size=3), st.booleans())
def test_aggregated_counts_equal_counting_the_log(
    tmp_path_factory: pytest.TempPathFactory, log: list[Any], split: bool
) -> None:
    folder = tmp_path_factory.mktemp("counts")
    expected = count(log)
    lines = [("t", 0, 0), ("u", 0, 0)]
    for profile in expected:
        pairs = zip(profile.counts.ids.tolist(), profile.counts.counts.tolist(), strict=True)
        for row, times in pairs:
            lines += [(profile.name, row, 1)] * times if split else [(profile.name, row, times)]
    tables, ids, counts = zip(*lines, strict=True)
    path = write(folder / "counts.parquet", table=tables, id=ids, count=counts)
    measured = [
        (feature, profile.name, counted.lookups, counted.bags)
        for profile in expected
        for feature, counted in profile.features.items()
    ]
    assert len(FEATURES) == len(measured)
    if split:  # Features may be counted in parts, too.
        halves = [(*names, own // 2, bags // 2) for *names, own, bags in measured]
        rest = [(*names, own - own // 2, bags - bags // 2) for *names, own, bags in measured]
        measured = halves + rest
    columns = zip(("feature", "table", "lookups", "bags"), zip(*measured, strict=True), strict=True)
    features = write(folder / "features.parquet", **dict(columns))
    found = profile_counts(path, samples=expected.samples, rows=TABLES, features=features)
    assert_same_profile(found, expected, same_source=False)


def test_defaults(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", table=["x", "y"], id=[4, 0], count=[30.0, 3.0])
    ten = pa.array([Decimal(10)], pa.decimal128(38))
    view = pa.array(["x"], pa.string_view())  # As polars writes texts.
    two = write(tmp_path / "2.parquet", table=view, id=[1], count=ten)
    profile = profile_counts([one, two], samples=20, dim=8, sampling=0.1)
    assert profile["x"].table.rows == 5
    assert profile["x"].counts.hottest().tolist() == [4, 1]
    (wide,), (narrow,) = profile["x"].table.features, profile["y"].table.features
    assert (wide.name, wide.pooling_factor, wide.coverage) == ("x", 2.0, 1.0)
    assert (narrow.pooling_factor, narrow.coverage) == (1.0, 3 / 20)
    assert profile.sampling == 0.1
    assert profile.source == f"{one}, {two}"


def test_tables_may_take_turns_and_a_dictionary_may_have_other_names(tmp_path: Path) -> None:
    names = pa.DictionaryArray.from_arrays([2, 0, 2, 0, 2], ["x", "none", "y", "never"])
    path = write(tmp_path / "c.parquet", table=names, id=[3, 1, 0, 0, 1], count=[5, 4, 3, 2, 0])
    profile = profile_counts(path, samples=20)
    hottest = {one.table.name: one.counts.hottest().tolist() for one in profile}
    assert hottest == {"y": [3, 0], "x": [1, 0], "none": [], "never": []}
    assert profile["y"].counts.total == 8
    empty = write(tmp_path / "none.parquet", table=pa.array([], pa.string()), id=[], count=[])
    with pytest.raises(DataError, match="there is no count in it"):
        profile_counts(empty, samples=20)


def test_what_cannot_be_used(tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", table=["x", "x"], id=[0, 7], count=[1, 2])

    def features(**columns: Any) -> Path:
        return write(tmp_path / "features.parquet", **columns)

    (tmp_path / "text").write_text("hello, I am no Parquet")
    for path, options, message in [
        (good, {"samples": 0}, "samples must be at least 1"),
        (good, {"sampling": 0.0}, "sampling must be a share"),
        (good, {"rows": {"x": 7}}, r"'x' has id 7, but rows 0\.\.6"),
        (good, {"rows": {"z": 7}}, "rows are given for table 'z'"),
        (tmp_path / "none.parquet", {}, "No such file"),
        (tmp_path / "text", {}, "as Parquet"),
    ]:
        with pytest.raises(DataError, match=message):
            profile_counts(path, **({"samples": 10} | options))
    bad = tmp_path / "bad.parquet"
    for columns, message in [
        ({"id": [0]}, r"bad\.parquet has no column 'count'; it has table, id"),
        ({"id": ["a"], "count": [1]}, "it holds integers"),
        ({"id": [0], "count": [1.5]}, "'count' holds integers: Float value 1.5"),
        ({"id": [0], "count": [-1]}, "-1 is negative"),
        ({"id": [None], "count": [1]}, "missing values"),
        ({"id": [-1], "count": [1]}, "has id -1"),
    ]:
        with pytest.raises(DataError, match=message):
            profile_counts(write(bad, table=["x"], **columns), samples=10)
    for columns, message in [
        ({"lookups": [2]}, "have 2 lookups, but its counts sum to 3"),
        ({"table": ["y"]}, "reads table 'y', of which nothing was counted"),
        ({"bags": [4]}, "3 lookups in 4 bags"),
        ({"bags": [3]}, "3 bags that are not empty, more than there are samples: 2"),
    ]:
        base = {"feature": ["f"], "table": ["x"], "lookups": [3], "bags": [1]}
        with pytest.raises(DataError, match=message):
            profile_counts(good, samples=2, features=features(**(base | columns)))
    empty = write(tmp_path / "6.parquet", table=pa.array([], pa.string()), id=[], count=[])
    with pytest.raises(DataError, match="there is no count"):
        profile_counts(empty, samples=1)


def test_a_dim_is_of_a_table_that_was_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.parquet", table=["x", "y"], id=[1, 2], count=[3, 4])
    profile = profile_counts(path, samples=9, dim={"*": 16, "x": 8}, rows={"*": 7, "y": 5})
    assert [(one.table.dim, one.table.rows) for one in profile] == [(8, 7), (16, 5)]
    with pytest.raises(DataError, match="dim is given for table 'z'; there are x, y"):
        profile_counts(path, samples=9, dim={"z": 8})


def test_the_command_obeys_or_refuses_each_option(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.parquet", table=["x", "y"], id=[1, 2], count=[3, 4])
    command = ["profile", str(path), "--log-format", "counts", "--samples", "9"]
    folder = tmp_path / "profile"
    succeed(*command, "--dim", "x=8", "--rows", "x=7", "-o", folder)
    said = [(one.name, one.table.dim, one.table.rows) for one in Profile.load(folder)]
    assert said == [("x", 8, 7), ("y", 64, 3)]
    for option in ("--headroom=0.2", "--sparse=x", "--sample=0.5", "--header"):
        said = misuse(*command, option)
        assert f"{option.split('=')[0]} does not go with --log-format counts" in said
    said = misuse("profile", path, "--samples", "9")
    assert "--samples is for --log-format counts" in said
