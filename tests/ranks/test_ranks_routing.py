"""Who has which row: slices, routes, and their size on machines of many GPUs."""

import itertools

import numpy as np
import pytest
import torch
from executor_cases import machine, placements, plan_of, shard
from fast_and_full import combinations, mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from ranks_cases import large_plan, table_with
from simulated_ranks import ids_of

from placer.errors import PlanMismatchError
from placer.executor.distributed.channels import Survey, all_channels, channels_of, local_plan
from placer.executor.distributed.division import (
    Target,
    divide,
    holders_of,
    joined,
    meet,
    positions,
    ranks_of_devices,
    refined,
    trimmed,
)
from placer.executor.distributed.table_routes import TableRoutes, table_routes
from placer.executor.lookups.batch_reads import feature_reads
from placer.plan.plan import Plan, Ranks
from placer.plan.verify import violations
from placer.tables import OPTIMIZERS

HOST = torch.device("cpu")
slices = st.builds(range, st.integers(0, 30), st.integers(0, 60), st.integers(1, 12))


@given(slices, slices)
def test_slices_meet_where_their_rows_do(one: range, other: range) -> None:
    met = meet(one, other)
    expected = sorted(set(one) & set(other))
    assert list(met) == expected
    if met:
        for same in (met, trimmed(met)):  # Whatever the step of a single row.
            assert [one[i] for i in positions(one, same)] == expected


@st.composite
def partitions(draw: st.DrawFn) -> list[range]:
    """Slices that have each of 40 rows once: cut into ranges, each dealt out in strides."""
    ends = sorted({0, 40, *draw(st.lists(st.integers(1, 39), max_size=3))})
    parts = []
    for low, high in itertools.pairwise(ends):
        step = draw(st.integers(1, 5))
        parts += [range(low + i, high, step) for i in range(step)]
    return draw(st.permutations(parts))


@given(partitions())
def test_joined_slices_have_the_same_rows(parts: list[range]) -> None:
    found = joined(parts)
    assert sorted(row for part in found for row in part) == list(range(40))
    assert len(found) <= len(parts)
    assert joined(found) == found


def test_a_split_that_one_rank_holds_is_one_slice() -> None:
    assert joined([range(7, 40), range(0, 7)]) == (range(0, 40),)
    strided = [range(1, 9, 4), range(9, 40, 4), range(0, 40, 4)]
    assert joined(strided) == (range(0, 37, 4), range(1, 38, 4))


@given(partitions(), partitions())
def test_refined_slices_lie_in_one_of_each(one: list[range], other: list[range]) -> None:
    atoms = refined([tuple(one), tuple(other)])
    assert sorted(row for atom in atoms for row in atom) == list(range(40))
    for atom, cut in itertools.product(atoms, (one, other)):
        assert any(set(atom) <= set(part) for part in cut)


def division(plan: Plan, world: int) -> tuple[list[Target], dict[str, TableRoutes]]:
    ranks = ranks_of_devices(plan.topology, world)
    column_slices = divide(plan, ranks, {table.name: table.optimizer for table in plan.tables})
    targets = [t for parts in column_slices.values() for columns in parts for t in columns.targets]
    return targets, table_routes(plan, column_slices, HOST)


@combinations("placement, world", list(placements(table_with("sgd"))), [2, 3, 4, 6])
def test_every_row_is_routed_to_the_ranks_that_hold_it(placement: str, world: int) -> None:
    plan = placements(table_with("rowwise_adagrad"))[placement]
    _, maps = division(plan, world)
    ranks = ranks_of_devices(plan.topology, world)
    known = maps["t"]
    by_rank = _ids_by_rank(plan)
    for columns in known.column_slices:
        position, rows = known.route(torch.arange(61), columns)
        for id in range(61):
            target = columns.targets[int(position[id])]
            row = int(rows[id])
            assert ids_of(Ranks.in_plan(plan, "t"), target, torch.tensor([row])).tolist() == [id]
            rank = by_rank.index(id)
            (holding,) = [
                shard
                for shard in plan.shards
                if rank in range(*shard.rows) and shard.cols[0] <= columns.cols[0] < shard.cols[1]
            ]
            assert target.holders == holders_of(holding, ranks)


def _ids_by_rank(plan: Plan) -> list[int]:
    hot = plan.hot_ids.get("t", np.zeros(0, dtype=np.int64)).tolist()
    return [*hot, *(id for id in range(61) if id not in set(hot))]


@combinations(
    "placement, optimizer, world", list(placements(table_with("sgd"))), OPTIMIZERS, [2, 4, 6]
)
def test_the_plans_of_the_ranks_are_sound_and_hold_all(
    placement: str, optimizer: str, world: int
) -> None:
    plan = placements(table_with(optimizer))[placement]
    survey = Survey.of(plan, feature_reads(plan.tables, {}), {"t": optimizer}, world, HOST)
    targets, ranks = survey.targets, survey.ranks
    held = []
    for rank in range(world):
        own = [target for target in targets if rank in target.holders]
        gpus = [gpu for gpu in plan.topology.gpus if ranks[gpu.id] == rank]
        local = local_plan(plan, own, {}, survey.shards, survey.optimizers, gpus).plan
        assert violations(local) == []
        held += [
            (shard.memory, shard.lookup, shard.row_count * shard.width, rank)
            for shard in local.shards
        ]
    expected: dict[tuple[str, str], int] = {}
    for whole in plan.shards:
        cells = whole.row_count * whole.width * len(holders_of(whole, ranks))
        kind = whole.memory, whole.lookup
        expected[kind] = expected.get(kind, 0) + cells
    for (memory, lookup), cells in expected.items():
        assert sum(size for m, how, size, _ in held if (m, how) == (memory, lookup)) == cells


def test_devices_fold_on_ranks_in_order() -> None:
    topology = machine(8, hosts=2)
    folded = ranks_of_devices(topology, 4)
    assert [folded[f"gpu:{i}"] for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (folded["host:0"], folded["host:1"]) == (0, 0)  # host:1 has GPUs 1, 3, 5 and 7.
    spread = ranks_of_devices(machine(2), 4)
    assert [spread[f"gpu:{i}"] for i in range(2)] == [0, 2]
    with pytest.raises(PlanMismatchError, match="0 ranks cannot hold a plan"):
        ranks_of_devices(topology, 0)


def test_columns_that_are_partly_replicated_are_refused_for_row_wise_adagrad() -> None:
    table = table_with("rowwise_adagrad")
    gpus = ("gpu:0", "gpu:1", "gpu:2", "gpu:3")
    shards = [shard(table, None, (0, 4), on=gpus), shard(table, None, (4, 8), on="gpu:1")]
    with pytest.raises(PlanMismatchError, match=r"table 't': some columns of row ranks 0\.\.61"):
        division(plan_of([table], shards), 4)
    assert division(plan_of([table_with("adagrad")], shards), 4)


@pytest.mark.parametrize("gpus", mostly_slow([128, 1024], 128))
def test_routing_tables_stay_small_and_ranks_agree_on_large_machines(gpus: int) -> None:
    plan = large_plan(gpus)
    targets, maps = division(plan, gpus)
    for table in plan.tables:
        assert maps[table.name].nbytes <= table.total_bytes / 100
    assert maps["whole"].nbytes == 0
    ids = torch.randint(0, plan.tables[0].rows, (200,))
    for name, known in maps.items():
        order = Ranks.in_plan(plan, name)
        for columns in known.column_slices:
            position, rows = known.route(ids, columns)
            for id, at, row in zip(*(part.tolist() for part in (ids, position, rows)), strict=True):
                found = ids_of(order, columns.targets[at], torch.tensor([row]))
                assert found.tolist() == [id]
    features = feature_reads(plan.tables, {})
    channels = all_channels(features, maps)
    some = [0, 1, gpus // 2, gpus - 1]
    by_rank = {rank: channels_of(rank, gpus, targets, channels) for rank in some}
    for source, holder in itertools.product(some, some):
        sent = [channel for rank, channel in by_rank[source].sent if rank == holder]
        at_holder = by_rank[holder]
        assert sent == [at_holder.served[at] for at in at_holder.serves[source].nonzero()[0]]
    # Hot rows are read at home, so each rank serves the replica to itself alone.
    assert all(
        unit.sources == ((rank,) if unit.replicated else tuple(range(gpus)))
        for rank in some
        for unit in by_rank[rank].units
    )
