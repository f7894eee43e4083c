"""Any placement that fits, where memory is short."""

import time
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import machine
from problem_cases import counted_table, problem_of, zipf_table

from cost_models import Roofline
from placer import Constraints, Problem, Profile, TableRule, Topology
from solvers import solve
from solvers.bounds.feasibility import impossible, usable_options
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits, Termination
from solvers.search.room import _Room, make_room
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import anneal


def replicated_and_wide(hbm_bytes: int) -> Problem:
    """A table that 64 GPUs can only hold together, and one that each of them has to hold whole."""
    return problem_of(
        zipf_table("wide", 1_000_000, 64, lookups=12.0),
        zipf_table("hot", 40_000, 128, lookups=14.0),
        topology=machine(8, 8, hbm_bytes=hbm_bytes),
        batch_size=16_384,
    )


@pytest.mark.slow
def test_rows_that_every_gpu_has_to_hold_leave_less_room() -> None:
    problem = replicated_and_wide(260 << 20)
    assert impossible(Instance(problem, Roofline())) is None
    termination = solve(problem, "greedy-cost", threads=1).termination
    assert termination.reason == "infeasible"
    assert "table 'wide' fits no GPU" in termination.detail
    assert "of other tables that have to be replicated" in termination.detail
    alone = replace(problem, profile=Profile(problem.profile.tables[:1], source="test"))
    assert solve(alone, "greedy-cost", threads=1).plan is not None
    roomier = usable_options(Instance(replicated_and_wide(360 << 20), Roofline()))
    assert not isinstance(roomier, Termination)
    assert [len(of) for of in roomier] == [2, 1]  # Of three, one does not fit beside them.


@pytest.mark.parametrize(
    ("gpus_mib", "said"),
    [
        ((3, 3), "one needs 4.69 MiB of HBM for it, and has 3 MiB at most"),
        ((3, 6), "each needs 4.69 MiB of HBM for it, and the smallest has 3 MiB"),
    ],
)
def test_a_table_for_which_a_gpu_is_too_small_names_what_that_gpu_has(
    gpus_mib: tuple[int, ...], said: str
) -> None:
    pair = machine(2, servers=1)
    gpus = zip(pair.gpus, gpus_mib, strict=True)
    topology = replace(
        pair,
        gpus=tuple(replace(gpu, memory_bytes=mib << 20) for gpu, mib in gpus),
        hosts=(pair.hosts[0], replace(pair.hosts[1], memory_bytes=5 << 20)),
    )
    problem = problem_of(
        zipf_table("t", 1000, 64, lookups=40.0), topology=topology, batch_size=2048
    )
    whole = Constraints.of({"t": TableRule(forbid=frozenset(("row-wise", "column-wise")))})
    termination = usable_options(Instance(replace(problem, constraints=whole), Roofline()))
    assert isinstance(termination, Termination)
    assert said in termination.detail
    assert termination.shortages[0].short_bytes > 0


def test_room_is_made_for_tables_that_fit_only_as_replicas() -> None:
    instance = Instance(replicated_and_wide(310 << 20), Roofline())
    options = usable_options(instance)
    assert not isinstance(options, Termination)
    clock = Clock(Limits(), deadline=time.monotonic() + 60, steps_left=None)
    assignment = make_room(instance, options, 0, clock)
    assert [replica.table for replica in assignment.replicas] == [1]


@pytest.mark.parametrize(
    "topology",
    [
        machine(1, hbm_bytes=1 << 20, dram_bytes=2 << 20, servers=1).with_memory(ssd="1GiB"),
        machine(1, hbm_bytes=3 << 20, dram_bytes=5 << 19),
    ],
    ids=["rows on a drive, which servers lack", "rows in HBM and DRAM, which caches do not spare"],
)
def test_room_is_made_where_rows_can_be(topology: Topology) -> None:
    table = counted_table("t", [9] * 1000 + [1] * 32_000, 32)
    instance = Instance(problem_of(table, topology=topology, batch_size=8), Roofline())
    options = usable_options(instance)
    assert not isinstance(options, Termination)
    clock = Clock(Limits(), deadline=time.monotonic() + 60, steps_left=None)
    assert make_room(instance, options, 0, clock) is not None


def test_a_block_goes_where_the_fewest_bytes_lack() -> None:
    """What lacks with the block on each GPU is what lacks if it is put there and all is counted."""
    problem = problem_of(
        *(zipf_table(f"t{n}", 20_000, 32, lookups=20.0) for n in range(4)),
        topology=machine(2, 2, hbm_bytes=3 << 20, dram_bytes=4 << 20),
        batch_size=512,
    )
    room, rng = _Room(Instance(problem, Roofline()), []), np.random.default_rng(3)
    for _ in range(20):
        least, cold = rng.integers(0, 5 << 20, 4) * 1.0, rng.integers(0, 4 << 20, (2, 4)) * 1.0
        more, rows = float(rng.integers(0, 3 << 20)), rng.integers(0, 3 << 20, 2) * 1.0
        lacking = room._lacking_with(least, cold, more, rows)
        for gpu in range(4):
            one = np.arange(4) == gpu
            over = room._over_bytes(least + more * one, cold + rows[:, None] * one)
            assert lacking[gpu] == pytest.approx(sum(float(of.sum()) for of in over), abs=1e-3)


def test_room_is_made_by_whole_tables_if_no_time_is_left() -> None:
    tables = [zipf_table(f"t{n}", 3000 * n, 32, lookups=float(n)) for n in range(1, 8)]
    problem = problem_of(*tables, topology=machine(2, hbm_bytes=3 << 20))
    instance = Instance(problem, Roofline())
    options = usable_options(instance)
    assert not isinstance(options, Termination)
    costed: list[int] = []
    for left_s in (60.0, -1.0):
        clock = Clock(Limits(), deadline=time.monotonic() + left_s, steps_left=None)
        fresh = Instance(problem, Roofline())
        assignment = make_room(fresh, options, 0, clock)
        assert assignment is not None
        costed.append(len(fresh._model_curves))
    assert costed[1] < costed[0] / 2
    assert all(option.shard_count == 1 for option in assignment.option_of.values())


class Unlucky(StagedStrategy):
    """A strategy whose construction finds nothing."""

    name = "unlucky"

    def stages(self, instance: Instance) -> dict[str, Stage]:
        return {"nothing": lambda search: None, "annealed": lambda search: anneal(search, 1.0)}


def test_what_fits_at_all_is_improved() -> None:
    """Where construction finds no plan, room is looked for before other stages, and not after."""
    tables = [zipf_table(f"t{n}", 3000 * n, 32, lookups=float(n)) for n in range(1, 8)]
    problem = problem_of(*tables, topology=machine(2, hbm_bytes=3 << 20))
    result = Unlucky().solve(problem, Roofline(), Limits(max_steps=500, threads=1))
    assert result.plan is not None
    assert result.step_time_s < 0.999 * result.stats["room_s"]  # type: ignore[operator]
