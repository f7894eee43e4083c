"""Problems whose tables grow: capacities of hit rates, accesses, plans and their memory."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cli_cases import Workbench, succeed
from fast_and_full import mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import machine

from placer import AccessCdf, Plan, Problem, Profile
from placer.data import open_log
from placer.errors import PlanMismatchError, ProblemError
from placer.growing import Growing, working_sets
from placer.plan.memory import device_memory
from placer.plan.origin import open_log_of, profile_of
from placer.plan.verify import verify
from placer.profile.count import profile_log
from placer.profile.growing_tables import (
    capacity_for,
    hit_rate_for,
    hit_rates_of_windows,
    with_growing,
    with_hit_rates,
)
from placer.report import growing_words
from placer.workloads import named_workload
from solvers import solve


def _profile(window: int | None = 2000, mapping: str = "vocabulary") -> Profile:
    """Items that come into fashion and go, and a city that does not."""
    random = np.random.default_rng(0)
    items = 3 * (np.arange(12_000) // 20 + 300 - random.geometric(0.02, 12_000)).clip(0)
    cities = random.integers(0, 30, 12_000)
    table = pa.table({"item": items, "city": cities})
    log = open_log(table, sparse=["item", "city"], id_mapping=mapping)
    profile = profile_log(log, dim=16)
    return profile if window is None else with_hit_rates(profile, working_sets(log, window))


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 80))
def test_the_accesses_of_another_number_of_rows(counts: list[int], rows: int) -> None:
    cdf = AccessCdf.from_counts(np.array(counts, np.int64))
    over = cdf.over(rows)  # Which checks that it is concave and ends at 1.
    assert over.rows == rows
    assert over.shares[-1] == pytest.approx(cdf.shares[-1])
    places = np.arange(rows + 1)
    kept = over.ranks[-2]
    np.testing.assert_allclose(over.share(places[: kept + 1]), cdf.share(places[: kept + 1]))
    assert (over.share(places) >= cdf.share(places) - 1e-12).all()


def test_the_profile_file_keeps_hit_rates(tmp_path: Path) -> None:
    profile = _profile()
    profile.save(tmp_path)
    assert [one.hit_rates for one in Profile.load(tmp_path)] == [one.hit_rates for one in profile]
    assert profile["item"].hit_rates[-1].capacity == profile["item"].table.rows - 1


def test_a_capacity_has_the_hit_rate_that_was_asked_for() -> None:
    item = _profile()["item"]
    rates = [hit_rate_for(item, capacity) for capacity in range(1, 700)]
    assert rates == sorted(rates)
    least = min(one.capacity for one in item.hit_rates)
    assert capacity_for(item, 1e-3) == least
    assert 0 < hit_rate_for(item, least - 1) < hit_rate_for(item, least)
    for wanted in (0.4, 0.75, 0.9):
        capacity = capacity_for(item, wanted)
        assert hit_rate_for(item, capacity) >= wanted - 1e-9
        assert hit_rate_for(item, capacity - 1) < wanted
        low, high = hit_rates_of_windows(item, capacity) or (1, 0)
        assert low < wanted < high
    without = replace(item, hit_rates=tuple(replace(r, of_windows=None) for r in item.hit_rates))
    assert hit_rates_of_windows(without, 100) is None
    with pytest.raises(ProblemError, match=r"a hit rate of 99.9%: with one for each id it has 9\d"):
        capacity_for(item, 0.999)
    with pytest.raises(ProblemError, match="profile the log with --window"):
        capacity_for(_profile(window=None)["item"], 0.9)


def test_a_growing_table_enters_with_its_capacity() -> None:
    profile, how = _profile(), Growing(200)
    problem = Problem(profile, machine(1), 64, growing={"item": how})
    item = problem.profile["item"]
    assert (item.table.rows, item.cdf.rows, item.counts) == (201, 201, None)
    assert problem.profile["city"] is profile["city"]
    skewed = AccessCdf.zipf(10_000, 1.1)
    assert skewed.over(2000).share(500) == pytest.approx(skewed.share(500))
    assert problem.profile.encoding.mappings["item"].kind == "key"
    assert with_growing(problem.profile, {"item": how}) is problem.profile
    fixed = Problem(profile, machine(1), 64)
    others = Problem(profile, machine(1), 64, growing={"item": Growing(200, admission=2)})
    assert len({fixed.sha256, problem.sha256, others.sha256}) == 3
    assert Problem(profile, machine(1), 64, growing={}).sha256 == fixed.sha256


@pytest.mark.parametrize("solver", mostly_slow(["greedy-cost", "auto"], "greedy-cost"))
def test_plans_leave_room_for_key_maps_and_do_not_split(solver: str) -> None:
    profile, how = named_workload("random-6@3"), Growing(20_000)
    name = max(profile, key=lambda one: one.table.lookups_per_sample).name
    hbm = sum(one.table.total_bytes for one in profile) // 4
    roomy = machine(2, hbm_bytes=hbm)
    plan = solve(Problem(profile, roomy, 64, growing={name: how}), solver, time_limit_s=2).plan
    verify(plan)
    assert plan.growing == {name: how}
    assert plan.tables_by_name[name].rows == 20_001
    assert len({shard.memory for shard in plan.shards_by_table[name]}) == 1
    assert device_memory(plan)["host:0"].row_map_bytes >= how.nbytes


@pytest.mark.parametrize("solver", ["greedy-cost", "auto"])
def test_tables_that_grow_go_to_hosts_without_a_gpu_where_others_are_full(solver: str) -> None:
    profile, how = named_workload("random-2@1"), Growing(100_000)
    name = profile.table_names[0]
    small = machine(1, hbm_bytes=1 << 20, dram_bytes=0, servers=1)
    roomy = replace(small.servers[0], memory_bytes=1 << 40)
    key_map = replace(small.hosts[0], memory_bytes=how.nbytes)
    topology = replace(small, hosts=(key_map, roomy))
    problem = Problem(profile, topology, 64, growing={name: how})
    plan = solve(problem, solver, time_limit_s=2).plan
    verify(plan)
    assert {shard.devices for shard in plan.shards_by_table[name]} == {("host:1",)}
    # Keys are mapped where GPUs are, whoever has the rows.
    assert device_memory(plan)["host:0"].row_map_bytes == how.nbytes


def test_a_gpu_has_room_for_the_copy_of_the_key_map() -> None:
    profile, how = named_workload("random-2@1"), Growing(100_000)
    growing = {profile.table_names[0]: how}
    for hbm_bytes, fits in ((how.copy_nbytes + 2**20, True), (how.copy_nbytes // 2, False)):
        topology = machine(1, hbm_bytes=hbm_bytes, dram_bytes=2**40)
        result = solve(Problem(profile, topology, 64, growing=growing), "greedy-cost")
        assert (result.plan is not None) == fits
        if result.plan is None:
            assert "key maps of the tables that grow (t1) take" in result.termination.detail
        else:
            verify(result.plan)
            assert device_memory(result.plan)["gpu:0"].row_map_bytes >= how.copy_nbytes


def test_without_dram_for_the_key_map_there_is_no_plan() -> None:
    profile, how = named_workload("random-2@1"), Growing(1000)
    total = sum(one.table.total_bytes for one in profile)
    full = machine(1, hbm_bytes=total // 8, dram_bytes=total)
    assert solve(Problem(profile, full, 64), "greedy-cost").plan is not None
    growing = {profile.table_names[0]: how}
    problem = Problem(profile, full, 64, growing=growing)
    least = problem.profile.total_bytes + how.nbytes
    for dram, fits in ((least, True), (problem.profile.total_bytes - total // 8, False)):
        tight = Problem(
            profile, machine(1, hbm_bytes=total // 8, dram_bytes=dram), 64, growing=growing
        )
        assert (solve(tight, "greedy-cost").plan is not None) == fits


@pytest.fixture(scope="module")
def planned(workbench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile that the command made in windows, and a plan of it."""
    folder = tmp_path_factory.mktemp("growing")
    windows = "--window", "100", "--dim", "4"
    succeed("profile", workbench.log, *windows, "-o", folder / "profile")
    command = (*workbench.machine(), "--profile", folder / "profile", "--growing", "C4=300,C3=50%")
    answer = succeed("plan", *command, "-o", folder / "plan.json")
    (folder / "stderr").write_text(answer.stderr)
    return folder


def test_merged_profiles_say_that_they_lack_what_windows_measured(
    planned: Path, workbench: Workbench, tmp_path: Path
) -> None:
    lacks = "the merged profile lacks what --window measured in its parts\n"
    for part, note in ((planned / "profile", lacks), (workbench.profile, "")):
        other = shutil.copytree(part, tmp_path / f"other{len(note)}")
        merged = succeed("merge", part, other, "-o", tmp_path / "merged")
        assert merged.stderr == f"{note}profile written to {tmp_path / 'merged'}\n"
        assert not any(table.hit_rates for table in Profile.load(tmp_path / "merged"))


def test_the_command_plans_tables_that_grow(planned: Path) -> None:
    plan, profile = Plan.load(planned / "plan.json"), Profile.load(planned / "profile")
    capacity = capacity_for(profile["C3"], 0.5)
    assert plan.growing == {"C4": Growing(300), "C3": Growing(capacity)}
    said = f"C3 grows: a row for each of {capacity:,} keys, for a predicted hit rate of 50%"
    assert f"{said} (" in (planned / "stderr").read_text()
    assert "% in windows of the log)" in (planned / "stderr").read_text()
    for command in ("show", "verify"):
        assert "are not those" not in succeed(command, planned / "plan.json").stderr
    known = profile_of(plan, planned / "plan.json")
    assert known is not None
    assert Problem.of_plan(plan, known).sha256 == plan.provenance.problem_sha256
    succeed("replan", planned / "plan.json", "--profile", planned / "profile",
            "--steps", "1", "-o", planned / "next.json")  # fmt: skip
    assert Plan.load(planned / "next.json").growing == plan.growing


def test_what_predictions_leave_out_is_said() -> None:
    profile, topology = _profile(), machine()
    assert len(topology.gpus) > 1

    def words(batch_size: int, how: Growing) -> list[str]:
        problem = Problem(profile, topology, batch_size, growing={"item": how})
        return list(growing_words(profile, problem))

    # Three steps of 20 × GPUs samples read less than 300 ids.
    (usual,) = words(20, Growing(300))
    assert usual.endswith("in windows of the log)")
    (other,) = words(20, Growing(300, eviction="lru"))
    assert other.endswith("), with lfu and admit=1")
    ids = profile["item"].expected_unique(3 * 2000 * len(topology.gpus))
    assert ids > 300
    _, large = words(2000, Growing(300))
    assert f"3 steps read about {ids:,.0f} ids, more than it has rows" in large
    alone = Problem(profile, machine(1), 2000, growing={"item": Growing(300)})
    assert ": 2 steps read" in [*growing_words(profile, alone)][1]


def test_its_log_has_keys_as_they_are(planned: Path, workbench: Workbench) -> None:
    plan = Plan.load(planned / "plan.json")
    log = open_log_of(plan, planned / "plan.json", [workbench.log])
    raw = open_log(workbench.log, id_mapping="hash", rows=2**62)
    grows = set(plan.growing)
    for chunk, other in zip(log.chunks(100), raw.chunks(100), strict=True):
        for feature, bags in chunk.features.items():
            same = np.array_equal(bags.ids, other.features[feature].ids)
            assert same or log.feature_tables[feature] not in grows
    with pytest.raises(PlanMismatchError, match="other rows than the profile"):
        open_log_of(Plan.load(workbench.plan), workbench.plan, [workbench.log],
                    profile=_altered(planned, workbench))  # fmt: skip


def _altered(planned: Path, workbench: Workbench) -> Path:
    """A profile of the same tables whose ids became rows in another way."""
    profile = Profile.load(workbench.profile)
    assert profile.encoding is not None
    name = profile.table_names[0]
    growing = {name: Growing(profile[name].table.rows - 1)}
    with_growing(profile, growing).save(planned / "altered")
    return planned / "altered"
