"""Annealing over arrays: what it adds up, and that it does the same compiled and interpreted."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from fast_and_full import combinations
from problem_cases import problem_of, unequal_machine, zipf_table

from cost_models import Roofline, ShardingOption
from placer import Constraints, Problem
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.model.knapsack import BYTES, PHASES
from solvers.result import Limits
from solvers.search.annealing import anneal, prepare, runs, search, state
from solvers.search.annealing import problem as arrays_of_problems
from solvers.search.annealing.moves import (
    find_candidates,
    first_with_arena,
    other_gpu,
    run_moves,
    unit_back,
)
from solvers.search.annealing.problem import AnnealingProblem
from solvers.search.annealing.rating import drive_s, weigh_phases
from solvers.search.annealing.state import NOBODY, Rules, State, is_compiled
from solvers.search.construction import construct


def problem() -> Problem:
    """Eight tables of three widths on unequal GPUs that cannot hold them all."""
    tables = [
        zipf_table(f"t{number}", 20_000 + 7_000 * number, (16, 32, 64)[number % 3], lookups=8.0)
        for number in range(8)
    ]
    return problem_of(*tables, topology=unequal_machine(8 << 20), batch_size=512)


@cache
def begun() -> Assignment:
    """A first assignment, which is not changed."""
    instance = Instance(problem(), Roofline())
    bound = lagrangian_bound(instance)
    start = construct(instance, bound, bound.step_time_s)
    assert start is not None
    return start


def annealed(
    steps: int, hot: float, power: int = 24, many_gpus: int = 64
) -> tuple[AnnealingProblem, State, Assignment, float, float]:
    """The state after some moves, the best assignment, and step times of both."""
    start = begun()
    arrays = AnnealingProblem([start], Clock.start(Limits(time_limit_s=60.0)))
    model, state, step_s = arrays.start(start, power)
    rules = Rules(0.4, 0.75, many_gpus, 0.5, power, step_s, hot, 0.0)
    option, gpu = state.option.copy(), state.gpu.copy()
    rng = np.random.default_rng(5)
    best_s = run_moves(model, state, rules, 0, steps, step_s, option, gpu, rng)
    best = arrays.assignment(option, gpu)
    assert best is not None
    return arrays, state, best, best_s, step_s


@combinations("hot, many_gpus", [1.0, 1e-9], [64, 2])
def test_sums_of_a_state_are_those_of_its_shards(hot: float, many_gpus: int) -> None:
    """Whether most moves are made, or undone; and where only some GPUs are looked at."""
    arrays, state, _, _, _ = annealed(3_000, hot, 8, many_gpus)
    now = arrays.assignment(state.option, state.gpu)
    rows = [BYTES, *range(PHASES.start, now.sums.shape[1])]
    sums = state.sums.swapaxes(1, 2)
    assert sums == pytest.approx(now.sums[:, rows], rel=1e-9, abs=1e-12)
    assert state.held.tolist() == [len(now.instance.blocks(shards)) for shards in now.shards]
    assert state.arenas.tolist() == [
        len(now.instance.arenas((*shards, *now.replicas))) for shards in now.shards
    ]
    again, fresh, _ = arrays.start(now)
    replicated = state.replicated[: state.replicated_count[0]]
    assert sorted(replicated.tolist()) == [
        unit for unit, number in enumerate(state.option.tolist()) if again.replica[number] >= 0
    ]
    assert again.costs is arrays.start(now)[0].costs
    assert fresh.phase_s == pytest.approx(state.phase_s, rel=1e-6)


def test_of_two_starts_neither_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps go to searches from the other start, the rest to runs from the best so far."""
    monkeypatch.setattr(search, "_STEPS_PER_PLACE", 0)
    monkeypatch.setattr(search, "_LEAST_STEPS", 100)
    monkeypatch.setattr(search, "_RESTART_STEPS", 5)
    slow, begins = begun(), list[float]()
    problem_start = AnnealingProblem.start

    def noted(self: AnnealingProblem, start: Assignment, power: int) -> tuple[object, ...]:
        begins.append(start.step_time_s)
        return problem_start(self, start, power)

    def found_from(start: Assignment, other: Assignment | None, steps: int) -> float:
        clock = Clock.start(Limits(time_limit_s=600, max_steps=steps))
        best.append(anneal(start, other=other, target_s=0, seed=1, clock=clock))
        return best[-1].step_time_s

    best: list[Assignment] = []
    fast_s = found_from(slow, None, 500)
    fast = best[0]
    assert fast_s < 0.9 * slow.step_time_s
    assert found_from(slow, fast, 1) <= fast_s
    assert found_from(fast, slow, 1) <= fast_s
    monkeypatch.setattr(AnnealingProblem, "start", noted)
    assert found_from(slow, slow, 2_000) < 0.9 * slow.step_time_s
    assert begins[:3].count(slow.step_time_s) < 3, "a restart goes on from its own runs"
    assert begins[3:].count(slow.step_time_s) >= 3, "and the next one begins again"
    assert begins[-1] == min(begins)


def test_restarts_end_once_several_find_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_RESTART_STEPS", 1000)
    slow = begun()
    left, steps_s = list[int](), list[float]()
    for restarts in (search._RESTARTS, 10**6):
        monkeypatch.setattr(search, "_RESTARTS", restarts)
        clock = Clock.start(Limits(time_limit_s=600, max_steps=400_000))
        steps_s.append(anneal(slow, other=slow, target_s=0, seed=1, clock=clock).step_time_s)
        left.append(clock.steps_left or 0)
    assert left[0] > 100_000 > left[1]
    assert steps_s[0] == pytest.approx(steps_s[1], rel=1e-3)


def test_each_start_may_read_a_group_in_its_own_way() -> None:
    ways = [ShardingOption(cold=cold) for cold in ("staged", "uva")]
    ways.append(ShardingOption(row_slices=2))  # Then the group is on two GPUs.
    together = Constraints.of(together=[["t0", "t1"]])
    grouped = replace(problem(), topology=unequal_machine(), constraints=together)
    instance = Instance(grouped, Roofline())
    every = [[instance.shards(table, way) for table in range(instance.tables)] for way in ways]
    starts = [
        Assignment.of(
            instance,
            [(one, (one.table // 2 + n) % 2) for shards in of for n, one in enumerate(shards)],
        )
        for of in every
    ]
    arrays = AnnealingProblem(starts, Clock.start(Limits(time_limit_s=60.0)))
    for start in starts:
        state = arrays.start(start)[1]
        assert arrays.assignment(state.option, state.gpu).shards == start.shards


def test_phases_count_less_where_more_gpus_are_the_slowest() -> None:
    arrays, state, best, _, step_s = annealed(500, hot=0.01)
    model, state, _ = arrays.start(best)
    rules = Rules(0.4, 0.75, 64, 0.5, 24, step_s, 0.01, 0.0)
    phases = np.flatnonzero(model.counted_s)
    state.phase_s[:] = 0.5 * model.scale_s
    state.phase_s[0] = model.scale_s
    state.phase_s[:, phases[0]] = model.scale_s[phases[0]]
    weigh_phases(model, state, rules)
    weight = state.weight_s[phases] / model.counted_s[phases]
    assert weight[1:] == pytest.approx(weight[1])
    assert weight[1] / weight[0] == pytest.approx(state.held.size, rel=1e-3)
    # GPU 0 alone is the slowest in the others, so that it has nearly all of their energy.
    assert state.energy[0] > 1.5 * state.energy[1]


def test_a_shard_comes_back_from_where_a_table_goes() -> None:
    arrays, state, best, _, _ = annealed(500, hot=0.01)
    model, state, _ = arrays.start(best)
    rng, found = np.random.default_rng(3), set[bool]()
    for unit, here, there in product(range(8), range(3), range(3)):
        back = unit_back(model, state, unit, there, here, rng)
        holds = unit in state.on[there, : state.held[there]]
        if here == there or holds or not state.held[there]:
            assert back == NOBODY
        elif back >= 0:
            assert back in state.on[there, : state.held[there]]
            assert back not in state.on[here, : state.held[here]]
        found.add(back >= 0)
    assert found == {False, True}


def test_of_many_gpus_a_shard_goes_to_one_with_little_to_do() -> None:
    _, state, _, _, step_s = annealed(500, hot=0.01)
    state.energy[:] = range(state.held.size)
    rng, slow = np.random.default_rng(3), state.held.size - 1

    def mean_of(many_gpus: int, swaps: bool) -> float:
        rules = Rules(0.4, 0.75, many_gpus, 0.5, 24, step_s, 0.01, 0.0)
        chosen = [other_gpu(state, rules, slow, swaps, rng) for _ in range(300)]
        assert slow not in chosen
        return float(np.mean(chosen))

    assert mean_of(64, swaps=False) > 1.5 * mean_of(1, swaps=True) > 0
    assert mean_of(1, swaps=False) < 0.1 * mean_of(1, swaps=True)


def test_a_shard_goes_to_the_gpu_with_its_arena_that_is_done_first() -> None:
    arrays, _, best, _, _ = annealed(500, hot=0.01)
    _, state, _ = arrays.start(best)
    gpus = np.arange(state.held.size)
    state.counts[:, 0] = [0, 2, 1, *np.zeros(gpus.size - 3, dtype=np.int64)]
    state.done_s[:] = np.arange(gpus.size)[::-1]
    assert first_with_arena(state, 0, 0, gpus, gpus.size) == 2
    state.done_s[2] = np.inf  # A GPU that may not serve it.
    assert first_with_arena(state, 0, 0, gpus, gpus.size) == 1
    state.counts[:, 0] = 0
    assert first_with_arena(state, 0, 3, gpus, gpus.size) == 3


def test_what_a_gpu_adds_to_the_time_of_drives_by_hand() -> None:
    chain = np.array([1.0, 0.0, 0.5])
    phase_s = np.array([4.0, 100.0, 2.0, 3.0, 7.0])  # The last two: of drives, and DRAM's worth.
    assert drive_s(chain, 2.0, phase_s) == (4 + 1 + 3) + 7 + (8 - 2) ** 2 / 2
    assert drive_s(chain, 0.0, phase_s) == 7.0


def test_shards_go_to_their_arenas_the_more_often_the_more_launches_take() -> None:
    arrays, _, best, _, _ = annealed(500, hot=0.01)
    model, _, _ = arrays.start(best)
    launches_s = float((model.launches @ (model.counted_s > 0)).max())
    assert launches_s > 0
    shares = [runs._together(model, launches_s / share) for share in (0.5, 0.05, 0.025, 0.001)]
    assert shares == pytest.approx([0.5, 0.5, 0.25, 0.01])


def test_of_many_gpus_those_of_the_table_and_some_others_are_looked_at() -> None:
    arrays, _, best, _, step_s = annealed(500, hot=0.01)
    model, state, _ = arrays.start(best)
    rng = np.random.default_rng(3)
    for unit, option in enumerate(state.option.tolist()):
        own = {int(gpu) for gpu in state.gpu[unit] if gpu >= 0}
        rules = Rules(0.4, 0.75, 64, 0.5, 24, step_s, 0.01, 0.0)
        count = find_candidates(model, state, rules, unit, option, rng)
        assert state.candidates[:count].tolist() == list(range(state.held.size))
        rules = Rules(0.4, 0.75, 2, 0.5, 24, step_s, 0.01, 0.0)
        looked_at = [
            state.candidates[: find_candidates(model, state, rules, unit, option, rng)].tolist()
            for _ in range(50)
        ]
        assert all(set(one) >= own and len(one) == len(own) + 1 for one in looked_at)
        assert {gpu for one in looked_at for gpu in one} == set(range(state.held.size))


def test_tables_with_much_work_and_with_few_lookups_are_sharded_anew_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The light table returns as much as the other one, and looks up far less."""
    tables = [
        zipf_table("other", 50_000, 64, lookups=6.0),
        zipf_table("light", 50_000, 64, lookups=1.0),
        zipf_table("heavy", 50_000, 64, lookups=9.0),
    ]
    instance = Instance(problem_of(*tables, batch_size=512), Roofline())
    bound = lagrangian_bound(instance)
    start = construct(instance, bound, bound.step_time_s)
    clock, own, room, anew = Clock.start(Limits(time_limit_s=60.0)), start.option_of, 0, set[int]()
    for table in (2, 1, 0):
        room += sum(
            max(1, option.shard_count)
            for option in instance.options_of(table)
            if option != own[table] and option.shard_count <= instance.gpus
        )
        for most_items, more in ((room - 1, set[int]()), (room, {table})):
            monkeypatch.setattr(arrays_of_problems, "_MOST_ITEMS", most_items)
            options = AnnealingProblem([start], clock).options
            assert {one for one in range(3) if len(options[one]) > 1} == anew | more
        anew.add(table)


def test_the_best_state_is_at_least_as_fast_when_it_is_filled_exactly() -> None:
    _, _, best, best_s, step_s = annealed(3_000, hot=0.01)
    assert best_s < step_s * 0.999
    assert best.step_time_s <= best_s * (1 + 1e-6)


@pytest.mark.parametrize(("max_steps", "at_once"), [(None, 3), (20, 1)])
def test_as_many_runs_at_once_as_threads(
    max_steps: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One where steps are limited, so that a plan does not depend on the machine."""
    pytest.importorskip("numba")
    made, counts = search.make_moves, set[int]()

    def counted(every: Sequence[runs.Run], clock: Clock) -> None:
        counts.add(len(every))
        made(every, clock)

    monkeypatch.setattr(search, "make_moves", counted)
    monkeypatch.setattr(search, "_STEPS_PER_PLACE", 0)
    monkeypatch.setattr(search, "_LEAST_STEPS", 1000)
    monkeypatch.setattr(search, "_LONGEST", 1)
    start = begun()
    limits = Limits(time_limit_s=20.0, threads=3, max_steps=max_steps)
    prepare(limits)
    anneal(start, target_s=0.0, seed=1, clock=Clock.start(limits))
    assert counts == {at_once}


def roomy() -> Instance:
    """Eight tables that every GPU has room for, of which the plans are many."""
    machine = unequal_machine(1 << 30)
    return Instance(problem_of(*problem().profile.tables, topology=machine), Roofline())


def test_two_shards_of_a_table_on_a_gpu_are_left_as_they_are() -> None:
    """Searches put none together, but a plan to begin with may: the arrays have no such place."""
    instance = roomy()
    halves = next(o for o in instance.options_of(7) if o.shard_count == 2)
    options = [instance.options_of(table)[0] for table in range(7)]
    shards, _ = instance.sharded([*options, halves])
    start = Assignment.of(instance, [(shard, 0) for shard in shards])
    assert start is not None
    clock = Clock.start(Limits(max_steps=1000))
    best = anneal(start, target_s=0.0, seed=1, clock=clock)
    assert best is start


def test_threads_stop_when_asked_in_the_thread_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what they have found until then counts."""
    asked_in: list[threading.Thread] = []

    def stop() -> bool:
        asked_in.append(threading.current_thread())
        return len(asked_in) > 20

    monkeypatch.setattr(search, "_LEAST_STEPS", 10**12)
    monkeypatch.setattr(search, "_IDLE_RUNS", 10**9)
    start = begun()
    limits = Limits(time_limit_s=600.0, threads=3, stop=stop)
    prepare(limits)
    best = anneal(start, target_s=0.0, seed=1, clock=Clock.start(limits))
    assert best.step_time_s < start.step_time_s
    assert set(asked_in) == {threading.current_thread()}


def test_code_that_is_kept_of_another_version_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(state, "__file__", str(tmp_path / "compiled.py"))
    path, beside = tmp_path / "one.py", tmp_path / "two.py"
    path.write_text(
        "from solvers.search.annealing.state import compiled\n"
        "@compiled\n"
        "def one(x):\n"
        "    return x + 1\n"
    )

    def loaded() -> Callable[[int], int]:
        spec = importlib.util.spec_from_file_location("one", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.one

    assert not is_compiled(loaded())
    assert loaded()(1) == 2
    assert is_compiled(loaded())
    path.write_text(path.read_text() + "# An upgrade.\n")
    assert not is_compiled(loaded())
    assert loaded()(1) == 2
    assert is_compiled(loaded())
    beside.write_text("# Functions of this module may be part of the code.\n")
    assert not is_compiled(loaded())


@pytest.mark.slow
def test_moves_are_the_same_interpreted() -> None:
    program = (
        "from test_solvers_annealing import annealed\n"
        "_, state, _, best_s, _ = annealed(300, hot=0.1)\n"
        "print(best_s, state.gpu.tolist(), state.phase_s.tolist())"
    )
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": path, "NUMBA_DISABLE_JIT": disabled},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for disabled in ("0", "1")
    ]
    assert outputs[0] == outputs[1]
