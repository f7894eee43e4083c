"""Named workloads: what is published is kept, what is drawn is reproducible, all is stated."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import ProfileError
from placer.workloads import named_workload, workload_names, workload_titles
from placer.workloads.drawn import RECSHARD_ROWS

DOCUMENTATION = Path(__file__).resolve().parent.parent / "docs" / "workloads.md"

NAMES = [name.replace("N[@seed]", "40@3") for name in workload_names()]


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_is_a_profile_that_states_its_assumptions(name: str) -> None:
    profile = named_workload(name)
    assert name in profile.source
    features = [feature.name for one in profile for feature in one.table.features]
    assert len(features) == len(set(features)) >= len(profile)
    for one in profile:
        assert one.counts is None
        assert one.cdf.rows == one.table.rows
        if one.table.lookups_per_sample == 0:
            continue
        least = 0.1 if name.startswith("recflex") else 0.6
        assert least <= one.zipf_exponent <= 1.3
        # Zipf's law itself: the hottest row is read 10**s times as often as the tenth.
        if one.table.rows >= 10:
            first, tenth = one.cdf.row_share[[0, 9]]
            assert first / tenth == pytest.approx(10**one.zipf_exponent, rel=1e-3)
    exponents = {one.zipf_exponent for one in profile} - {None}
    if len(exponents) == 1:
        assert f"Zipf {exponents.pop():g}" in profile.source
    else:
        assert "Zipf exponents uniform in" in profile.source


@pytest.mark.parametrize(
    ("name", "tables", "rows", "lookups"),
    [
        ("mlperf-dcnv2", 26, 204_184_588, 214),
        ("criteo-kaggle", 26, 33_762_577, 26),
        ("criteo-terabyte", 26, 177_944_275, 26),
        ("hugectr-t510", 510, 895_100_000, 2670),
        ("hugectr-t7", 7, 7_430_000_000, 163),
        ("nvidia-tiny", 55, 70_260_160, 85),
        ("recshard-rm3", 397, RECSHARD_ROWS["rm3"], None),
        ("meta-t856", 856, 2_328_942_965, None),
        ("mlperf-dlrm-v4", 11, 293_051_712, 5102),
        ("recflex-f", 10_000, 25_600_000, None),
    ],
)
def test_published_totals(name: str, tables: int, rows: int, lookups: int | None) -> None:
    profile = named_workload(name)
    assert len(profile) == tables
    assert sum(one.table.rows for one in profile) == rows
    if lookups is not None:
        assert sum(one.table.lookups_per_sample for one in profile) == lookups


def test_criteo_columns_have_their_names() -> None:
    kaggle = named_workload("criteo-kaggle")
    assert kaggle["C3"].table.rows == 10_131_227
    assert kaggle["C3"].table.dim == 16
    assert named_workload("mlperf-dcnv2")["C21"].table.features[0].pooling_factor == 100


def test_shared_tables_are_read_by_two_features() -> None:
    profile = named_workload("nvidia-small")
    shared = [one for one in profile if len(one.table.features) == 2]
    assert len(shared) == 9
    assert [feature.pooling_factor for feature in shared[0].table.features] == [1, 30]
    assert shared[0].table.lookups_per_sample == 31


def test_recshard_models_are_the_same_features_at_three_sizes() -> None:
    models = [named_workload(f"recshard-{model}") for model in RECSHARD_ROWS]
    for small, large in zip(models[0], models[2], strict=True):
        assert small.table.features == large.table.features
        assert small.zipf_exponent == large.zipf_exponent
        more = RECSHARD_ROWS["rm3"] / RECSHARD_ROWS["rm1"]
        assert large.table.rows == pytest.approx(small.table.rows * more, rel=0.01, abs=5)


def test_meta_keeps_tables_that_nobody_reads() -> None:
    unread = [one for one in named_workload("meta-t856") if one.table.lookups_per_sample == 0]
    assert len(unread) == 269
    assert {one.table.rows for one in unread} == {1}
    assert unread[0].expected_unique(65_536) == 0


@pytest.mark.real
def test_meta_rows_are_the_published_ones(real_data: Path) -> None:
    with (real_data / "meta_t856_rows.csv").open() as file:
        published = [int(row["rows"]) for row in csv.DictReader(file)]
    assert [one.table.rows for one in named_workload("meta-t856")] == published


@given(tables=st.integers(1, 60), seed=st.integers(0, 2**40))
@examples(20)
def test_random_workloads_keep_to_their_ranges(tables: int, seed: int) -> None:
    profile = named_workload(f"random-{tables}@{seed}")
    assert len(profile) == tables
    for one in profile:
        assert 1_000 <= one.table.rows <= 40_000_000
        assert one.table.dim in (16, 32, 64, 128)
        (feature,) = one.table.features
        assert 1 <= feature.pooling_factor <= 200
        assert 0.2 <= feature.coverage <= 1


def shapes(name: str) -> list[tuple[object, ...]]:
    return [(one.table, one.zipf_exponent) for one in named_workload(name)]


def test_random_workloads_follow_from_their_seed() -> None:
    assert shapes("random-30@5") == shapes("random-30@5")
    assert shapes("random-30") == shapes("random-30@0") != shapes("random-30@5")
    # Pinned: results that name a workload must mean the same tables in every version.
    first = named_workload("random-3@1").tables[0]
    assert (first.table.rows, first.table.dim, first.zipf_exponent) == (226_691, 128, 0.818)
    pooling = [one.table.features[0].pooling_factor for one in named_workload("random-400@2")]
    assert np.mean(pooling) > 1.5 * np.median(pooling)


@given(tables=st.integers(1, 60), seed=st.integers(0, 2**40))
@examples(20)
def test_neuroshard_tasks_are_metas_tables_that_fit_four_gpus(tables: int, seed: int) -> None:
    meta: dict[int, set[tuple[object, ...]]] = {}
    for one in named_workload("meta-t856"):
        (feature,) = one.table.features
        reads = (feature.pooling_factor, feature.coverage, one.zipf_exponent)
        meta.setdefault(max(100, one.table.rows), set()).add(reads)
    profile = named_workload(f"neuroshard-{tables}@{seed}")
    assert len(profile) == tables
    for one in profile:
        (feature,) = one.table.features
        assert one.table.dim in (4, 8, 16, 32, 64, 128)
        assert (feature.pooling_factor, feature.coverage, one.zipf_exponent) in meta[one.table.rows]
    assert sum(4 * one.table.rows * one.table.dim for one in profile) <= 15 * 2**30


def test_neuroshard_tasks_follow_from_their_seed() -> None:
    assert shapes("neuroshard-20") == shapes("neuroshard-20@0") != shapes("neuroshard-20@1")
    first = named_workload("neuroshard-3@1").tables
    pinned = [(100, 128), (100, 128), (5_999_934, 16)]
    assert [(one.table.rows, one.table.dim) for one in first] == pinned
    # 59 tables of mean rows and dim would take 25 GiB: most draws are drawn again.
    sizes = [named_workload(f"neuroshard-59@{seed}").total_bytes for seed in range(8)]
    assert max(sizes) < 16 * 2**30


@pytest.mark.parametrize(
    "name", ["criteo", "recshard-rm4", "rm1", "random-", "random-5@x", "neuroshard-x", ""]
)
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(ProfileError) as error:
        named_workload(name)
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in workload_names())


@pytest.mark.parametrize("name", ["random-0", "random-100001", "neuroshard-0", "neuroshard-61"])
def test_sizes_of_families_are_bounded(name: str) -> None:
    most = "100,000" if name.startswith("random") else "60"
    with pytest.raises(ProfileError, match=f"{name}: .*1 to {most} tables"):
        named_workload(name)


def test_the_documented_list_is_complete() -> None:
    text = DOCUMENTATION.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([0-9,N]+) \|", text, re.M)
    assert {name: title for name, title, _ in rows} == workload_titles()
    assert [name for name, _, _ in rows] == list(workload_names())
    for name, _, tables in rows:
        if "N[@seed]" in name:
            assert tables == "N"
            continue
        assert int(tables.replace(",", "")) == len(named_workload(name))
