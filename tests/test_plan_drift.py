"""Plans whose rows are not those that are hot now, and rows on the way from plan to plan."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import covers, in_dram, in_hbm, machine, plan_of
from problem_cases import counted_table, problem_of, zipf_table

from cost_models import Roofline, drawn_stream, simulate
from placer import Plan, Profile, Shard, Table
from placer.errors import TopologyError
from placer.plan.diff import diff
from placer.plan.drift import assumed_even
from placer.plan.fields import Provenance, RowOrder
from placer.plan.memory import slice_lookup_share
from placer.plan.migration import migration
from placer.plan.plan import Ranks, distinct
from placer.topology.topology import Topology
from solvers.report import plan_report

ROWS = 30


def ids_by_rank(plan: Plan, table: str) -> list[int]:
    """Every id of a table, in the order of the plan's ranks."""
    listed = plan.hot_ids[table].tolist() if plan.order_of(table).kind == "profile" else []
    rows = plan.tables_by_name[table].rows
    known = set(listed)
    return [*listed, *(row for row in range(rows) if row not in known)]


def ordered(plan: Plan, listed: list[int] | None) -> Plan:
    """The plan with a row order of its own for table t."""
    if listed is None:
        return plan
    ids = {"t": np.array(listed, dtype=np.int64)}
    return replace(plan, row_order={"t": RowOrder("profile")}, hot_ids=ids)


row_orders = st.none() | st.permutations(range(ROWS)).flatmap(
    lambda ids: st.integers(0, ROWS).map(lambda size: list(ids[:size]))
)


@given(row_orders, st.lists(st.integers(0, ROWS - 1)))
def test_ranks_are_places_in_the_order(listed: list[int] | None, some: list[int]) -> None:
    order = Ranks.of(listed or [])
    plan = ordered(plan_of(Table("t", ROWS, 8)), listed or [])
    ids = ids_by_rank(plan, "t")
    asked = np.array(some, dtype=np.int64)
    assert order.ranks(asked).tolist() == [ids.index(one) for one in some]
    unlisted = np.arange(order.listed.size, ROWS)
    assert order.unlisted_ids(unlisted).tolist() == ids[order.listed.size :]
    assert distinct(asked).tolist() == sorted(set(some))


@given(row_orders, st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS), st.data())
@examples(40)
def test_accesses_are_those_of_the_ids_at_a_plans_ranks(
    listed: list[int] | None, counts: list[int], data: st.DataObject
) -> None:
    profile = counted_table("t", counts)
    problem = problem_of(profile, topology=machine(2))
    shards = data.draw(covers(profile.table, problem.topology))
    plan = ordered(plan_of(profile.table, *shards), listed)
    found = problem.in_plan_order(plan).profile["t"].cdf
    if all(shard.lookup == "cached" for shard in shards if shard.row_count):
        assert found is profile.cdf
        return
    # Between two edges of shards, the hottest row is first; strided rows stay where they are.
    listed_first = [] if listed is None else listed
    hottest = profile.counts.hottest().tolist() if profile.counts is not None else []
    strided = any(shard.rows[2] > 1 for shard in shards) and listed_first[: len(hottest)] != hottest
    edges = sorted({0, ROWS, *(end for shard in shards for end in shard.rows[:2])})
    heat = [counts[one] for one in ids_by_rank(plan, "t")]
    expected: list[int] = []
    for low, high in pairwise(edges):
        expected += heat[low:high] if strided else sorted(heat[low:high], reverse=True)
    per_rank = np.diff(np.interp(np.arange(ROWS + 1), found.ranks, found.shares))
    assert per_rank == pytest.approx(np.array(expected) / max(1, sum(counts)), abs=1e-12)


def test_a_published_table_has_ids_for_ranks() -> None:
    profile = zipf_table("t", ROWS)
    problem = problem_of(profile)
    split = (in_hbm("t", (0, 10, 1), (0, 16)), in_dram("t", (10, ROWS, 1), (0, 16)))
    plan = plan_of(profile.table, *split)
    assert problem.in_plan_order(plan) is problem
    # The ten ids that were hot once are the coldest now.
    stale = problem.in_plan_order(ordered(plan, list(range(ROWS - 1, 19, -1))))
    share = float(np.interp(10, stale.profile["t"].cdf.ranks, stale.profile["t"].cdf.shares))
    assert share == pytest.approx(1 - float(profile.cdf.share(20)))
    times = [Roofline().evaluate(one, plan).step_time_s for one in (problem, stale)]
    assert times[0] < times[1]


def test_strided_slices_of_ids_get_the_lookups_of_their_ids() -> None:
    """All lookups on one GPU of two were predicted as half on each."""
    profile = counted_table("t", [1000, 0] * 500, 16, lookups=4.0)
    problem = problem_of(profile, topology=machine(2, launch_s=0.0), batch_size=512)
    slices = (in_hbm("t", (n, 1000, 2), (0, 16), f"gpu:{n}") for n in range(2))
    plan = plan_of(profile.table, *slices, topology=problem.topology)
    model = Roofline()
    known = problem.in_plan_order(plan)
    shares = [slice_lookup_share(known.profile["t"], (n, 1000, 2)) for n in range(2)]
    assert shares == pytest.approx([1.0, 0.0])
    even, uneven = (model.evaluate(one, plan) for one in (problem, known))
    assert even.balance > 0.99
    assert uneven.gpus[0].hbm_s > 1.8 * even.gpus[0].hbm_s
    assert uneven.step_time_s > 1.3 * even.step_time_s
    simulated = simulate(plan, [drawn_stream(problem.profile, 1024, 4)], model, problem.profile)
    assert simulated.gpu_s[0] > 3 * simulated.gpu_s[1]
    # Listed in the profile's order, rows are spread evenly.
    spread = ordered(plan, profile.counts.hottest().tolist() if profile.counts else [])
    assert problem.in_plan_order(spread) is problem


def test_where_counts_are_not_known_load_is_said_to_be_assumed_even() -> None:
    counted, drawn = counted_table("t", [5, 1, 1, 1]), zipf_table("t", 4)
    slices = [in_hbm("t", (n, 4, 2), (0, 16), f"gpu:{n}") for n in range(2)]
    plan = plan_of(drawn.table, *slices, topology=machine(2))
    assert assumed_even(plan) == ("t",)
    assert assumed_even(plan, Profile((drawn,))) == ("t",)
    assert assumed_even(plan, Profile((counted,))) == ()
    shown = plan_report(plan, even=assumed_even(plan))
    assert "load is assumed even over the slices of t" in shown.headline[-1]
    for name in ("workload random-1@1: drawn", "random-1@1", "neuroshard-7", "mlperf-dcnv2"):
        published = replace(plan, provenance=Provenance("", "", "", name))
        assert assumed_even(published) == ()
    for name in ("random-log", "my/random-1@1", "mlperf"):
        assert assumed_even(replace(plan, provenance=Provenance("", "", "", name))) == ("t",)
    whole = plan_of(drawn.table, in_hbm("t", (0, 4, 1), (0, 16)))
    assert assumed_even(whole) == ()


def test_the_profiles_own_order_changes_nothing() -> None:
    counts = [3, 9, 1, 0, 7, 7, 2]
    problem = problem_of(counted_table("t", counts))
    split = (in_hbm("t", (0, 3, 1), (0, 16)), in_dram("t", (3, 7, 1), (0, 16)))
    plan = plan_of(problem.profile["t"].table, *split)
    assert problem.in_plan_order(ordered(plan, [1, 4, 5])) is problem
    assert problem.in_plan_order(ordered(plan, [1, 4])) is not problem
    whole = plan_of(problem.profile["t"].table, in_hbm("t", (0, 7, 1), (0, 16)))
    assert problem.in_plan_order(ordered(whole, [3])) is problem


SGD = Table("t", 24, 8, optimizer="sgd")


def loads(old: Plan, new: Plan, *, nvlink: bool = True) -> dict[str, float]:
    """Seconds that each link and memory needs, one cell at a time."""
    hosts = {gpu.id: gpu.host for plan in (old, new) for gpu in plan.topology.gpus}

    # Replicas in one host's memory are copies of their own, so these are no sets.
    def places(plan: Plan) -> dict[tuple[int, int], list[tuple[str, str]]]:
        return {
            (one, column): [
                (hosts.get(d, d), d if shard.memory == "hbm" else "") for d in shard.devices
            ]
            for shard in plan.shards
            for one in (ids_by_rank(plan, "t")[rank] for rank in range(*shard.rows))
            for column in range(*shard.cols)
        }

    bytes_: dict[str, float] = defaultdict(float)
    before, after = places(old), places(new)
    for cell, targets in after.items():
        ((host, gpu),) = before[cell]
        for to_host, to_gpu in targets:
            if (to_host, to_gpu) == (host, gpu):
                continue
            near = host == to_host
            kind = "nvlink" if near and gpu and to_gpu and nvlink else "pcie"
            crossed = [f"{gpu} {kind} out" if gpu else f"{host} dram"]
            crossed += [f"{to_gpu} {kind} in" if to_gpu else f"{to_host} dram"]
            crossed += [] if near else [f"{host} network out", f"{to_host} network in"]
            for name in crossed:
                bytes_[name] += 4
    speeds = {"pcie": 1e10, "nvlink": 1e11, "network": 1e10, "dram": 1e11}
    return {name: size / speeds[name.split()[1]] for name, size in bytes_.items()}


@given(st.data(), row_orders, row_orders)
@examples(40)
def test_migration_is_that_of_brute_force(
    data: st.DataObject, first: list[int] | None, then: list[int] | None
) -> None:
    topology = machine(2, 2)
    plans = []
    for listed in (first, then):
        shards = data.draw(covers(SGD, topology))
        if not plans:  # Of several copies, which one is taken is not what this is about.
            shards = [replace(shard, devices=shard.devices[:1]) for shard in shards]
        within = None if listed is None else [one for one in listed if one < SGD.rows]
        plans.append(ordered(plan_of(SGD, *shards, topology=topology), within))
    expected = loads(*plans)
    found = migration(diff(*plans))
    assert found.seconds == pytest.approx(max(expected.values(), default=0.0))
    if expected:
        assert expected[found.waits_for] == pytest.approx(found.seconds)
    else:
        assert (found.moved_bytes, found.waits_for) == (0, "")


def moved(old: Shard, new: Shard, topology: Topology, then: Topology | None = None) -> str:
    before = plan_of(SGD, old, topology=topology)
    return migration(diff(before, plan_of(SGD, new, topology=then or topology))).waits_for


def test_links_that_rows_cross() -> None:
    two, one = machine(2, 2), machine(1, 1)
    whole = (0, 24, 1), (0, 8)
    here, there, far = (in_hbm("t", *whole, f"gpu:{gpu}") for gpu in (0, 1, 2))
    assert moved(here, there, two) in ("gpu:0 nvlink out", "gpu:1 nvlink in")
    assert moved(here, far, two) in (
        "gpu:0 pcie out", "gpu:2 pcie in", "host:0 network out", "host:1 network in",
    )  # fmt: skip
    assert moved(here, in_dram("t", *whole), two) == "gpu:0 pcie out"
    assert moved(here, in_dram("t", *whole, "gpu:1"), two) == "gpu:0 pcie out"
    assert moved(in_dram("t", *whole), in_dram("t", *whole, "gpu:1"), two) == ""
    # The drive writes fewer blocks than it reads.
    disk = two.with_memory(ssd="1MiB")
    slow = replace(disk.hosts[0].drive, reads_per_s=9e4, writes_per_s=1e4)
    disk = replace(disk, hosts=(replace(disk.hosts[0], drive=slow), *disk.hosts[1:]))
    cold = replace(in_dram("t", *whole), memory="ssd", staging_rows=24)
    ends = [plan_of(SGD, shard, topology=disk) for shard in (here, cold)]
    out, back = (migration(diff(*pair)).seconds for pair in (ends, ends[::-1]))
    assert out == pytest.approx(9 * back)
    # A GPU that is not there any more can be read once more.
    assert moved(there, here, machine(2), one) in ("gpu:1 nvlink out", "gpu:0 nvlink in")
    alone = replace(two, links=tuple(link for link in two.links if link.kind != "network"))
    with pytest.raises(TopologyError, match="no network link"):
        moved(here, far, alone)
    ends = plan_of(SGD, far, topology=two), plan_of(SGD, here, topology=one)
    with pytest.raises(TopologyError, match=r"host:0 of .* has no network link"):
        migration(diff(*ends))
    assert migration(diff(*ends), in_files=True).waits_for in (
        "gpu:2 pcie out", "host:1 network out", "gpu:0 pcie in",
    )  # fmt: skip
    # Without NVLink, GPUs and hosts share PCIe.
    plain = replace(two, links=tuple(link for link in two.links if link.kind != "nvlink"))
    assert moved(here, there, plain) in ("gpu:0 pcie out", "gpu:1 pcie in")


def test_a_copy_that_is_still_there_is_the_source() -> None:
    whole = (0, 24, 1), (0, 8)
    old = plan_of(SGD, in_hbm("t", *whole, "gpu:0", "gpu:3"), topology=machine(2, 2))
    new = plan_of(SGD, in_dram("t", *whole, "gpu:2"), topology=machine(3, 1))
    (move,) = diff(old, new).moves
    assert str(move.source) == "gpu:0 hbm"
