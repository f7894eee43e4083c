"""Plans for 128 and 1,024 GPUs, executed step by step with shapes and routes only."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from executor_cases import machine, plan_of, shard
from ranks_cases import large_plan
from simulated_ranks import SimulatedRank, Step, World, check_gradients, check_outputs, run

from cost_models import cost_model
from cost_models.step_equation.loads import replica_bytes
from placer import Problem
from placer.executor import BagBatch
from placer.executor.distributed.row_sums import RowSums, all_reduce_rows
from placer.plan.plan import Plan
from placer.tables import Feature, Table
from placer.training.distributed import Ranks
from placer.workloads import named_workload
from solvers import solve

GPUS = 128


def a_batch(plan: Plan, samples: int, seed: int, most: int | None = None) -> BagBatch:
    """Bags of a feature's mean length, or of up to `most` lookups; half of them of hot rows."""
    generator = np.random.default_rng(seed)
    ids, lengths = [], []
    for table in plan.tables:
        hot = plan.hot_ids.get(table.name, np.zeros(0, dtype=np.int64))
        for feature in table.features:
            bag = round(feature.pooling_factor * feature.coverage)
            own = (
                np.full(samples, bag) if most is None else generator.integers(0, most + 1, samples)
            )
            drawn = (generator.random(own.sum()) ** 3 * table.rows).astype(np.int64)
            if hot.size:
                some = generator.random(drawn.size) < 0.5
                drawn[some] = generator.choice(hot, int(some.sum()))
            ids.append(drawn)
            lengths.append(own)
    ends = np.concatenate([[0], *lengths]).cumsum()
    return BagBatch(torch.from_numpy(np.concatenate(ids)), torch.from_numpy(ends), samples)


def executed(plan: Plan, batches: list[BagBatch]) -> tuple[World, list[Step]]:
    """A step on all ranks, whose results are checked."""
    torch.set_num_threads(1)
    world = World(plan, batches)
    steps = world.step()
    check_outputs(world, steps)
    check_gradients(world)
    for table in plan.tables:
        bytes_there = {step.routing_bytes.get(table.name, 0) for step in steps}
        assert max(bytes_there) <= table.total_bytes / 100
    return world, steps


def sent(steps: list[Step], *kinds: str) -> int:
    """Bytes that all ranks sent to others."""
    return sum(step.sent_bytes[kind] for step in steps for kind in kinds)


def exchanged_by_model(problem: Problem, plan: Plan) -> float:
    """Bytes that the cost model has all GPUs exchange, but for replicas' gradients."""
    alone = tuple(shard for shard in plan.shards if len(shard.devices) == 1)
    report = cost_model("roofline").evaluate(problem, replace(plan, shards=alone))
    bandwidth = problem.topology.peer_bytes_per_s("gpu:0")
    return sum(gpu.communication_s for gpu in report.gpus) * bandwidth


@pytest.mark.slow
def test_a_solvers_plan_of_mlperfs_tables_on_128_gpus() -> None:
    """Every rank has the same samples: expected and real bytes are then the same."""
    profile = named_workload("mlperf-dcnv2")
    tables = tuple(
        replace(found, table=replace(found.table, optimizer="adagrad")) for found in profile
    )
    # Of one host, so that all that is sent takes the same link.
    topology = machine(GPUS, hbm_bytes=2**31)
    samples = 1
    problem = Problem(replace(profile, tables=tables), topology, samples)
    plan = solve(problem, "greedy-cost").plan
    assert plan is not None
    world, steps = executed(plan, [a_batch(plan, samples, 0)] * GPUS)
    assert any(target.cols != (0, target.table.dim) for target in world.survey.targets) or any(
        len(columns.targets) > 1
        for known in world.survey.routes.values()
        for columns in known.column_slices
    )
    measured = sent(steps, "ids", "lengths", "outputs", "gradients")
    assert measured == pytest.approx(exchanged_by_model(problem, plan), rel=1e-9)


@pytest.mark.slow
def test_hot_rows_everywhere_and_every_cut_over_128_gpus() -> None:
    plan = large_plan(GPUS)
    _, steps = executed(plan, [a_batch(plan, 1, rank, most=3) for rank in range(GPUS)])
    assert sent(steps, "replicas") > 0


def test_replicas_send_the_bytes_of_the_cost_model() -> None:
    """The same samples everywhere: all replicas touch the same rows, and deal all of them out."""
    gpus = 16
    plan = large_plan(gpus)
    same = [a_batch(plan, 1, 0, most=9)] * gpus
    again, steps = executed(plan, same)
    (everywhere,) = (t for t in again.survey.targets if t.replicated)
    bounds = same[0].bounds
    ids = same[0].ids[bounds[0] : bounds[1]].unique()
    hot = np.isin(ids.numpy(), plan.hot_ids[everywhere.table.name]).sum()
    assert hot
    each = replica_bytes(everywhere.width, hot, hot, gpus, gpus) * (gpus - 1) / gpus
    assert sent(steps, "replicas") == pytest.approx(gpus * each, rel=1e-12)


def plan_of_1024() -> Plan:
    """Tables cut in all ways, each over a few of the GPUs; hot rows of one are on 64 of them."""
    gpus = 1024
    hot = 5_000
    tables = [
        Table(name, 1_000_000, 32, "float32", "rowwise_adagrad", (Feature(name),))
        for name in ("whole", "rows", "columns", "grid", "head")
    ]
    whole, rows, columns, grid, head = tables
    some = tuple(f"gpu:{i}" for i in range(0, gpus, 16))
    count = whole.rows
    shards = [shard(whole, on="gpu:1023"), shard(head, (0, hot, 1), on=some)]
    shards += [shard(rows, (i, count, 16), on=f"gpu:{100 + i}") for i in range(16)]
    shards += [shard(columns, None, (8 * i, 8 * i + 8), on=f"gpu:{500 + i}") for i in range(4)]
    shards += [
        shard(grid, (i, count, 8), (16 * k, 16 * k + 16), on=f"gpu:{600 + 8 * k + i}")
        for i in range(8)
        for k in range(2)
    ]
    shards += [
        shard(head, (hot + i, count, 8), on=f"gpu:{800 + i}", memory="dram") for i in range(8)
    ]
    order = np.random.default_rng(0).permutation(count)[:hot].tolist()
    topology = machine(gpus, hbm_bytes=2**36, hosts=128)
    return plan_of(tables, shards, {"head": order, "grid": order}, topology)


@pytest.mark.slow
def test_a_plan_of_1024_gpus() -> None:
    plan = plan_of_1024()
    world, steps = executed(plan, [a_batch(plan, 1, rank, most=2) for rank in range(1024)])
    assert world.arrivals.squares, "row-wise Adagrad adds up over column slices"
    assert sent(steps, "rows") > 0
    assert sent(steps, "replicas") > 0


def test_all_groups_of_holders_add_up_in_four_collectives() -> None:
    """Ranks 0 and 1 hold two tables, 1 and 2 one, all of them another; rank 3 holds none."""
    groups = {(0, 1): (4, 3), (1, 2): (2,), (0, 1, 2): (5,)}
    calls: list[tuple[int, str]] = []

    def rows_of(rank: int, table: int) -> torch.Tensor:
        return torch.tensor([0, 3 + rank, 7 + table])  # Two of them are those of all holders.

    def groups_of(rank: int) -> list[tuple[int, ...]]:
        return [holders for holders in sorted(groups) if rank in holders]

    def work(rank: SimulatedRank) -> list[list[RowSums]]:
        exchange = rank.exchange

        def counted(kind, *options):
            calls.append((rank.rank, kind))
            return exchange(kind, *options)

        rank.exchange = counted  # type: ignore[method-assign]
        sums = [
            [
                (rows_of(rank.rank, n), torch.full((3, width), 10.0**rank.rank))
                for n, width in enumerate(groups[holders])
            ]
            for holders in groups_of(rank.rank)
        ]
        return all_reduce_rows(rank, groups_of(rank.rank), sums)

    for rank, totals in enumerate(run(4, work)):
        assert sum(who == rank for who, _ in calls) == 4
        for holders, own in zip(groups_of(rank), totals, strict=True):
            for table, (width, (rows, sums)) in enumerate(zip(groups[holders], own, strict=True)):
                every = sum(10.0**holder for holder in holders)
                expected = {3 + holder: 10.0**holder for holder in holders}
                expected |= {0: every, 7 + table: every}
                assert sums.shape == (len(expected), width)
                assert dict(zip(rows.tolist(), sums[:, 0].tolist(), strict=True)) == expected
                assert (sums == sums[:, :1]).all()


def test_ranks_that_are_not_in_step_are_found_out() -> None:
    def work(rank: SimulatedRank) -> None:
        counts = [rank.rank, 1]
        rank.exchange("ids", torch.zeros(sum(counts)), counts, [1, 1])

    with pytest.raises(AssertionError, match="expect other sizes"):
        run(2, work)


def test_ranks_that_train_share_samples_and_agree_on_flags() -> None:
    def agreed(comm: SimulatedRank) -> tuple[bool, bool, tuple[int, int]]:
        ranks = Ranks(comm)
        return ranks.any(comm.rank == 1), ranks.any(False), ranks.part_of(10)

    assert run(3, agreed) == [(True, False, (0, 3)), (True, False, (3, 6)), (True, False, (6, 10))]
