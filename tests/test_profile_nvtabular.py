"""Categorify's folder, written as NVTabular's `_save_encodings` writes it."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_cases import succeed

from placer import Profile
from placer.errors import DataError
from placer.profile.from_counts import profile_counts


def write(
    folder: Path,
    name: str,
    parts: list[dict[str, int]],
    null_size: int | None = 0,
    oov: tuple[int, int] = (1, 0),
) -> None:
    """The files of a column: its values by falling counts, missing ones, and (rows, lookups) of
    others."""
    unique = folder / f"unique.{name}.parquet"
    buckets, oov_size = oov
    if len(parts) > 1:
        unique.mkdir(parents=True)
    size = 2 + buckets
    for number, part in enumerate(parts):
        frame = pd.DataFrame({name: list(part), f"{name}_size": list(part.values())})
        frame.index = pd.RangeIndex(start=size, stop=size + len(part), step=1)
        frame.to_parquet(unique / f"part.{number}.parquet" if len(parts) > 1 else unique,
                         compression=None)  # fmt: skip
        size += len(part)
    pd.DataFrame(
        {
            "kind": ["pad", "null", "oov", "unique"],
            "offset": [0, 1, 2, 2 + buckets],
            "num_indices": [1, 1, buckets, sum(map(len, parts))],
            "num_observed": [0, null_size, oov_size, sum(sum(part.values()) for part in parts)],
        }
    ).to_parquet(folder / f"meta.{name}.parquet")


def dense(profile: Profile, table: str) -> list[int]:
    counts = profile[table].counts
    assert counts is not None
    found = [0] * counts.rows
    for row, count in zip(counts.ids.tolist(), counts.counts.tolist(), strict=True):
        found[row] = count
    return found


def test_counts_of_categories(tmp_path: Path) -> None:
    write(tmp_path, "author", [{"User_C": 2, "User_B": 1}], null_size=5, oov=(3, 7))
    many = [{f"v{part}-{i}": 40 - 3 * part - i for i in range(3)} for part in range(11)]
    write(tmp_path, "product.id", many, null_size=None)
    profile = profile_counts(tmp_path, samples=15, dim=8)
    assert profile.table_names == ["author", "product.id"]
    assert dense(profile, "author") == [0, 5, 3, 2, 2, 2, 1]
    assert dense(profile, "product.id") == [0, 0, 0, *(40 - i for i in range(33))]
    (feature,) = profile["author"].table.features
    assert (feature.name, feature.coverage, feature.pooling_factor) == ("author", 1.0, 1.0)


def test_the_command_takes_the_folder(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    write(tmp_path / "made", "item", [{"a": 3}])
    succeed("profile", tmp_path / "made", "--log-format", "counts", "--samples", "3",
            "-o", tmp_path / "profile")  # fmt: skip
    assert Profile.load(tmp_path / "profile")["item"].table.rows == 4


def test_what_does_not_fit(tmp_path: Path) -> None:
    def changed(file: str, **columns: Any) -> None:
        write(tmp_path, "item", [{"a": 3, "b": 1}])
        pd.read_parquet(tmp_path / file).assign(**columns).to_parquet(tmp_path / file)

    unique, meta = "unique.item.parquet", "meta.item.parquet"
    cases: list[tuple[str, dict[str, Any], str]] = [
        (meta, {"kind": ["a", "b", "c", "d"]}, "holds pad, null, oov, unique, in this order"),
        (meta, {"offset": [0, 1, 2, 4]}, "do not follow from the sizes"),
        (unique, {"item_size": [3, 2]}, "2 values that were read 5 times, but"),
        (unique, {"item_size": [5, -1]}, "a value was read -1 times"),
        (unique, {"item_size": ["x", "y"]}, "column 'item_size' holds integers"),
    ]
    for file, columns, message in cases:
        changed(file, **columns)
        with pytest.raises(DataError, match=message):
            profile_counts(tmp_path, samples=4)
    write(tmp_path, "item", [{"a": 3}])
    with pytest.raises(DataError, match="leave out rows="):
        profile_counts(tmp_path, samples=4, rows={"item": 9})
    pd.DataFrame({"item": ["a"]}).to_parquet(tmp_path / unique)
    with pytest.raises(DataError, match="unless it was given a vocabulary"):
        profile_counts(tmp_path, samples=4)
    (tmp_path / meta).unlink()
    with pytest.raises(DataError, match=r"no meta\.item\.parquet beside it"):
        profile_counts(tmp_path, samples=4)
