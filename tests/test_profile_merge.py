"""Profiles of the pieces of a log, merged, are the profile of the log."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import assert_same_profile, batches, count, profile_of

from placer import AccessCdf, Feature, Profile, Table, TableProfile
from placer.data import open_log
from placer.data.encoding import Encoding, Vocabulary
from placer.errors import ProfileError
from placer.profile.count import profile_log
from placer.profile.table_profile import RowCounts

PIECES = st.lists(st.lists(batches(), min_size=1, max_size=3), min_size=1, max_size=4)


@examples(40)
@given(PIECES)
def test_merged_pieces_equal_the_whole(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[dict[str, object]]]
) -> None:
    whole = count([batch for piece in pieces for batch in piece])  # type: ignore[misc]
    parts = []
    for piece in pieces:
        folder = tmp_path_factory.mktemp("piece")
        count(piece).save(folder)  # type: ignore[arg-type]
        parts.append(Profile.load(folder))
    assert_same_profile(Profile.merge(parts), whole, same_source=False)
    in_two_steps = Profile.merge([Profile.merge(parts[:1]), *parts[1:]])
    assert_same_profile(in_two_steps, whole, same_source=False)


def test_sampled_pieces_weigh_by_what_they_stand_for() -> None:
    counts = {"t": RowCounts.from_dense(np.array([1, 2]))}
    merged = Profile.merge(
        [
            profile_of(counts, samples=100, sampling=0.5, source="a"),
            profile_of(counts, samples=100, sampling=1.0, source="b"),
        ]
    )
    assert merged.sampling == pytest.approx(200 / 300)
    assert merged.source == "a + b"


def test_different_tables_are_named() -> None:
    base = {"t": RowCounts.from_dense(np.ones(3)), "u": RowCounts.from_dense(np.ones(4))}
    one = profile_of(base)
    for other, message in [
        (profile_of({"t": base["t"]}), r"u \(4 rows .* and none"),
        (profile_of({"u": base["u"], "t": base["t"]}), r"t \(3 rows .* and u \(4 rows"),
        (
            profile_of(base | {"u": RowCounts.from_dense(np.ones(5))}),
            r"u \(4 rows × 64 float32, rowwise_adagrad, .* and u \(5 rows × 64",
        ),
        (one.with_tables(dim=8), r"t \(3 rows × 64 .* and t \(3 rows × 8 .*; u \("),
    ]:
        with pytest.raises(ProfileError, match=message):
            Profile.merge([one, other])
    (table, *_) = one.tables
    renamed = replace(table, table=replace(table.table, features=(Feature("new"),)))
    with pytest.raises(ProfileError, match=r"features \{\}\) and t .* features \{'new': "):
        Profile.merge([one, replace(one, tables=(renamed, *one.tables[1:]))])


def test_different_vocabularies_cannot_be_merged() -> None:
    def profile(*keys: int) -> Profile:
        vocabulary = Vocabulary(np.array(keys, dtype=np.uint64))
        encoding = Encoding({"t": "t"}, {"t": vocabulary})
        return profile_of({"t": RowCounts.from_dense(np.ones(3))}, encoding=encoding)

    assert Profile.merge([profile(1, 2), profile(1, 2)])["t"].lookups == 6
    with pytest.raises(ProfileError, match="the same vocabulary"):
        Profile.merge([profile(1, 2), profile(2, 1)])


def test_profiles_without_counts_cannot_be_merged() -> None:
    published = Profile((TableProfile(Table("t", 9, 4), AccessCdf.zipf(9, 1.0)),))
    with pytest.raises(ProfileError, match="'t' has no counts"):
        Profile.merge([published, published])
    with pytest.raises(ProfileError, match="no profile to merge"):
        Profile.merge([])


@pytest.mark.real
def test_halves_of_the_real_sample(real_data: Path, tmp_path: Path) -> None:
    import lzma

    packed = (real_data / "criteo_sample.train.xz").read_bytes()
    lines = lzma.decompress(packed).splitlines(keepends=True)
    options = {"id_mapping": "hash", "rows": 5000}
    files = []
    for number, part in enumerate((lines[:3000], lines[3000:])):
        files.append(tmp_path / f"{number}.tsv")
        files[-1].write_bytes(b"".join(part))
    halves = [profile_log(open_log(file, **options)) for file in files]  # type: ignore[arg-type]
    whole = profile_log(open_log(real_data / "criteo_sample.train.xz", **options))  # type: ignore[arg-type]
    assert_same_profile(Profile.merge(halves), whole, same_source=False)
