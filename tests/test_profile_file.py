"""Profiles on disk: what is saved is loaded, and damage is told."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import assert_same_profile, profile_of, profiles

from placer import AccessCdf, Feature, Profile, Table, TableProfile
from placer.data.encoding import Encoding, Hash, Identity, Vocabulary
from placer.errors import ProfileError
from placer.profile.table_profile import RowCounts


@examples(40)
@given(profiles())
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, profile: Profile
) -> None:
    folder = tmp_path_factory.mktemp("profile")
    profile.save(folder)
    assert_same_profile(Profile.load(folder), profile)
    assert_same_profile(Profile.load(folder / "profile.json"), profile)
    names = sorted(path.name.split("-")[0] for path in folder.iterdir())
    assert names == ["counts", "profile.json"]


@examples(40)
@given(
    st.dictionaries(st.integers(0, 10**9 - 1), st.integers(1, 2**40), max_size=30),
    st.sampled_from([30, 1000, 10**9]),
)
def test_sparse_and_dense_counts_survive(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[int, int], rows: int
) -> None:
    kept = {row % rows: count for row, count in counts.items()}
    ids = np.array(sorted(kept), dtype=np.int64)
    row_counts = RowCounts(rows, ids, np.array([kept[row] for row in sorted(kept)], dtype=np.int64))
    profile = profile_of({"t": row_counts})
    folder = tmp_path_factory.mktemp("profile")
    profile.save(folder)
    assert_same_profile(Profile.load(folder), profile)


def test_counts_take_little_space(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dense = RowCounts.from_dense(rng.integers(0, 200, 100_000))
    few = RowCounts(40_000_000, np.arange(10_000) * 200, np.full(10_000, 7))
    profile_of({"dense": dense, "few": few}).save(tmp_path)
    (binary,) = tmp_path.glob("counts-*")
    # A byte a row where most rows were read; a byte for the gap and one for the count elsewhere.
    assert binary.stat().st_size < 100_000 + 2 * 10_000 + 1000


def test_a_published_workload_keeps_its_cdf(tmp_path: Path) -> None:
    table = Table("t", 10**7, 128, features=(Feature("a", 20.0, 0.5, "mean"),))
    of_table = TableProfile(table, AccessCdf.zipf(10**7, 1.05), zipf_exponent=1.05)
    published = Profile((of_table,), source="a paper")
    published.save(tmp_path / "new" / "folder")
    loaded = Profile.load(tmp_path / "new" / "folder")
    assert_same_profile(loaded, published)
    assert loaded["t"].counts is None


def profile_with(encoding: Encoding) -> Profile:
    counts = {name: RowCounts.from_dense(np.ones(rows)) for name, rows in encoding.tables.items()}
    return profile_of(counts, encoding=encoding)


def test_vocabularies_are_saved_beside(tmp_path: Path) -> None:
    encoding = Encoding(
        feature_tables={"a": "t", "b": "u", "c": "v", "d": "w"},
        mappings={
            "t": Vocabulary(np.array([2**64 - 1, 0, 7], dtype=np.uint64)),
            "u": Hash(5),
            "v": Identity(2),
            "w": Vocabulary(np.zeros(0, dtype=np.uint64)),
        },
    )
    profile_with(encoding).save(tmp_path)
    assert Profile.load(tmp_path).encoding == encoding
    (vocabulary,) = tmp_path.glob("vocabulary-*.parquet")
    vocabulary.write_bytes(vocabulary.read_bytes()[:-1])
    with pytest.raises(ProfileError, match=r"vocabulary-.* was cut short or replaced"):
        Profile.load(tmp_path)


LOAD = """
import os, sys
import pyarrow.parquet
from placer import Profile

before = set(os.listdir("/proc/self/task"))
Profile.load(sys.argv[1])
print(len(set(os.listdir("/proc/self/task")) - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_loading_leaves_no_threads(tmp_path: Path) -> None:
    """Threads that clean up after a read may meet Python's end, and the process aborts."""
    vocabulary = Vocabulary(np.arange(50, dtype=np.uint64))
    encoding = Encoding(feature_tables={"a": "t"}, mappings={"t": vocabulary})
    profile_with(encoding).save(tmp_path)
    words = [sys.executable, "-c", LOAD, str(tmp_path)]
    assert int(subprocess.check_output(words)) == 0


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    profile_of({"t": RowCounts.from_dense(np.arange(100))}).save(tmp_path)
    return tmp_path


def test_saving_again_replaces_and_cleans_up(saved: Path) -> None:
    other = profile_of({"t": RowCounts.from_dense(np.arange(50))})
    other.save(saved)
    assert_same_profile(Profile.load(saved), other)
    assert len(list(saved.iterdir())) == 2


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        Profile.load(folder)


def test_damage_is_told(saved: Path) -> None:
    (binary,) = saved.glob("counts-*")
    document = saved / "profile.json"
    content, text = binary.read_bytes(), document.read_text()

    binary.write_bytes(content[:-5])
    refused(saved, rf"{binary.name} has \d+ bytes instead of \d+")
    binary.write_bytes(content[:-1] + b"\xff")
    refused(saved, f"{binary.name} was altered")
    binary.unlink()
    refused(saved, f"cannot read .*{binary.name}: No such file")
    binary.write_bytes(content)

    for damaged, words in (
        (text[:-20], r"profile\.json is cut short or no JSON"),
        (text.replace('"dim": 64', '"dim": 32'), r"profile\.json was altered"),
        (text.replace('_version": 1', '_version": 2'), "version 2, this placer reads up to 1"),
        ("[]", "is no profile"),
    ):
        document.write_text(damaged)
        refused(saved, words)
    document.unlink()
    refused(saved, r"is a folder without profile.json and no profile")


def test_a_profile_that_was_rewritten_by_hand(saved: Path) -> None:
    from placer.files.atomic import sealed

    def rewrite(**changes: object) -> None:
        document = sealed(json.loads((saved / "profile.json").read_text()) | changes)
        (saved / "profile.json").write_text(json.dumps(document))

    document = json.loads((saved / "profile.json").read_text())
    files = document["files"]
    rewrite(tables=[{"name": "t"}])
    refused(saved, r"tables\.0\.rows: Field required")
    rewrite(tables=document["tables"])
    rewrite(files={"counts": files["counts"] | {"name": "../" + files["counts"]["name"]}})
    refused(saved, "beside its JSON")
