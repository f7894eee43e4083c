"""Simulated annealing over assignments: make many cheap random moves.

Kirkpatrick et al. 1983, doi:10.1126/science.220.4598.671. A GPU's time is rated by the sums
of its shards' priced costs (`solvers.model.knapsack.phases_at`), which a move changes for two
GPUs; nothing is filled exactly before the end. The energy is

    Σ over phases p of  c[p]·s[p]/T · Σ over GPUs g of (t[p,g]/s[p])^n / n

where s are the slowest GPUs' times at the start and T is their sum: nearly the largest times alone,
but lower with fewer slow GPUs. A phase counts the less, by c, the more GPUs are as slow as the
slowest: Σ over g of (t[p,g]/max t[p])^n is about their number. A chain of phases that is shorter
than the step is taken to be as long, so that it counts when it becomes so. Where GPUs of a host
slow each other by a share k of their times, (1 - k) of that counts, and k of Σ t[p,g]/T for each
host. The moves are in `solvers.search.annealing.moves`.
"""

import time
from collections.abc import Sequence

import numpy as np

from cost_models import Roofline
from placer import Problem, Topology
from placer.workloads import named_workload
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits, SearchState
from solvers.search.annealing.moves import run_moves
from solvers.search.annealing.problem import AnnealingProblem
from solvers.search.annealing.runs import (
    MANY_GPUS,
    SLOWER,
    STEPS_BETWEEN_LOOKS,
    Heat,
    Run,
    make_moves,
)
from solvers.search.annealing.state import HAS_COMPILER, is_compiled, is_loaded
from solvers.search.moves import improve

_HEATS: tuple[Heat, ...] = ((8, 0.3), (24, 0.03), (8, 0.03), (24, 0.003))
"""Powers and temperatures at the start of runs, in turns. High temperatures leave the best
assignment behind; the lowest one searches around it. A temperature is the share of a step that a
move may cost."""

_HEATS_OF_MANY: tuple[Heat, ...] = ((24, 0.001), (24, 0.0003))
"""The same for more than `MANY_GPUS`, where one GPU changes little of the step."""

_STEPS_PER_PLACE, _LEAST_STEPS = 300, 400_000
"""Steps of the first runs for each table × GPU, and their minimum; later runs are longer."""

_LEAST_TURNS = 2
"""Shorten first runs so that each heat gets this many runs in the time."""

_OPTIONS_SHARE = 0.15
"""Largest share of the time left for computing costs of sharding options."""

_MOST_THREADS = 16
"""Largest number of runs at once."""

_POLISHED, _POLISH_SHARE = 0.02, 0.05
"""Improve a run's end by exact local search if it is at most this share slower than the best,
within the second share of the time. That pays where curves jump, as those of caches do."""

_COMPILED_IN_S = 10.0
"""Compile only with a longer time limit: compiling takes this long, once."""

_LOADED_IN_S = 0.5
"""Load compiled code only with more time: loading takes about this long, once for a process."""

_LONGEST = 8
"""Longest run, as a multiple of the first run's steps."""

_IDLE_RUNS = 6
"""Stop after this many longest runs without a gain."""

_RESTARTS_SHARE = 0.8
"""Share of annealing's time for restarts, if there is another start."""

_LEAST_RESTARTS = 2
"""Shorten restarts so that each thread makes this many in the time."""

_RESTARTS, _ALIKE, _SAME = 6, 2, 1e-4
"""Stop annealing once the first number of restarts have ended, if the second number of them reached
the best step, within the third number as a share. Restarts end at several different steps, so two
equal ones are rarely both far from the best."""

_RESTART_STEPS = 3000
"""Steps of a run of a restart, for each table and each GPU. On DCNv2 with servers, drives and int8,
restarts of half or twice this length end at slower plans more often."""


def anneal(
    start: Assignment,
    *,
    other: Assignment | None = None,
    target_s: float,
    seed: int,
    clock: Clock,
) -> Assignment:
    """Return the best assignment of runs of growing length; each run starts from the best so far.

    There are as many runs at once as threads, or one if steps are limited. The search ends at
    `target_s` seconds, when the clock is spent, or when long runs gain nothing. With an `other`
    start, which may be slower, most of the time goes to short searches that all begin there.
    """
    if start.instance.gpus == 1 or not (is_compiled(run_moves) or clock.repeats):
        return start
    if not (is_loaded(run_moves) or clock.repeats) and clock.left_s < _LOADED_IN_S:
        return start
    if not _is_expressible(start):
        return start
    if not start.phase_s.any():  # The dense layers alone take time: no step is shorter.
        return start
    starts = [start] if other is None else [start, other]
    annealing = _Annealing(AnnealingProblem(starts, clock.part(_OPTIONS_SHARE)), seed, clock)
    if other is None:
        return annealing.improved(start, target_s)
    best, is_likely_best = annealing.restarted(start, other, target_s)
    return best if is_likely_best else annealing.improved(best, target_s)


class _Annealing:
    """Runs of annealing on one problem, one for each thread."""

    def __init__(self, problem: AnnealingProblem, seed: int, clock: Clock) -> None:
        self._problem, self._clock = problem, clock
        instance = problem.instance
        self._heats = _HEATS_OF_MANY if instance.gpus > MANY_GPUS else _HEATS
        places = instance.tables + instance.gpus
        self._most_steps = max(_LEAST_STEPS, _STEPS_PER_PLACE * places)
        # With limited steps, the plan must not depend on the number of cores.
        alone = clock.repeats or not HAS_COMPILER
        threads = 1 if alone else min(_MOST_THREADS, clock.limits.thread_count)
        rng = np.random.default_rng(seed)
        self._rngs = [rng, *rng.spawn(threads - 1)]

    def _steps_of_first_runs(self, steps_per_s: float) -> int:
        """Steps of a first run, so that each heat gets some runs in the time."""
        steps = self._most_steps
        if steps_per_s:
            rounds = _LEAST_TURNS * len(self._heats) / len(self._rngs)
            possible = int(steps_per_s * SLOWER * self._clock.left_s / rounds)
            steps = min(steps, max(1, possible))
        return steps // SLOWER

    def restarted(
        self, best: Assignment, start: Assignment, target_s: float
    ) -> tuple[Assignment, bool]:
        """Anneal from `start` several times, each thread on its own.

        Return the best of all, and whether several restarts ended with its step.
        """
        clock, heats = self._clock.part(_RESTARTS_SHARE), _HEATS[:-1]
        instance = self._problem.instance
        steps = _RESTART_STEPS * (instance.tables + instance.gpus) // SLOWER
        if not clock.repeats:
            possible = self._speed(start) * clock.left_s / (_LEAST_RESTARTS * len(heats))
            steps = max(1, min(steps, int(possible)))
        steps_s: list[float] = []
        is_likely_best = False
        while not clock.spent and best.step_time_s > target_s and not is_likely_best:
            ends = [start for _ in self._rngs]
            for heat in heats:
                pairs = zip(ends, self._rngs, strict=True)
                runs = [
                    Run(self._problem, self._problem.start(end, heat[0]), rng, steps, heat)
                    for end, rng in pairs
                ]
                make_moves(runs, clock)
                ends = [self._end(run, best) or end for run, end in zip(runs, ends, strict=True)]
            best = min(best, *ends, key=lambda one: one.step_time_s)
            steps_s += [end.step_time_s for end in ends]
            alike = sum(step_s <= best.step_time_s * (1 + _SAME) for step_s in steps_s)
            is_likely_best = alike >= _ALIKE and len(steps_s) >= _RESTARTS
        return best, is_likely_best

    def improved(self, best: Assignment, target_s: float) -> Assignment:
        """Make ever longer runs; each continues from the best so far."""
        clock, heats = self._clock, self._heats
        threads, number, idle = len(self._rngs), 0, 0
        steps_per_s = 0.0 if clock.repeats else self._speed(best)
        first = self._steps_of_first_runs(steps_per_s)
        while not clock.spent and best.step_time_s > target_s and idle < _IDLE_RUNS:
            length = min(2 ** (number // len(heats)), _LONGEST)
            steps = length * first
            # A run that the deadline cuts short finds nothing, as it is still hot.
            if steps_per_s and not clock.repeats:
                steps = max(1, min(steps, int(steps_per_s * clock.left_s)))
            began = time.monotonic()
            turns = [heats[(number + at) % len(heats)] for at in range(threads)]
            runs = self._runs(best, steps, turns)
            make_moves(runs, clock)
            steps_per_s = steps / max(1e-9, time.monotonic() - began)
            before_s = best.step_time_s
            ends = [self._end(run, best) for run in runs]
            del runs  # With many GPUs their arrays are large.
            for annealed in filter(None, ends):
                if annealed.step_time_s < best.step_time_s * (1 - 1e-7):
                    best = annealed
            if best.step_time_s < before_s:
                idle = 0
            elif length == _LONGEST:
                idle += threads
            number += threads
        return best

    def _end(self, run: Run, best: Assignment) -> Assignment | None:
        """Return the best of a run, improved if it is nearly as fast as the best known one."""
        found = run.found()
        if found is not None and found.step_time_s < best.step_time_s * (1 + _POLISHED):
            improve(found, self._clock.part(_POLISH_SHARE), reshard_tables=False)
        return found

    def _speed(self, start: Assignment) -> float:
        """Return the steps a second of a run, measured between two looks at the clock."""
        steps = STEPS_BETWEEN_LOOKS // SLOWER
        runs = self._runs(start, steps, [_HEATS[-1]] * len(self._rngs))
        began = time.monotonic()
        make_moves(runs, self._clock)
        return steps / max(1e-9, time.monotonic() - began)

    def _runs(self, start: Assignment, steps: int, heats: Sequence[Heat]) -> list[Run]:
        """Return a run of each heat; runs of one power share arrays."""
        problem = self._problem
        made = {power: problem.start(start, power) for power in {power for power, _ in heats}}
        return [
            Run(problem, made[heat[0]], rng, steps, heat)
            for rng, heat in zip(self._rngs, heats, strict=True)
        ]


def _is_expressible(assignment: Assignment) -> bool:
    """Return whether every GPU has at most one shard of each table, as the arrays need."""
    tables = ([shard.table for shard in shards] for shards in assignment.shards)
    return all(len(of_gpu) == len(set(of_gpu)) for of_gpu in tables)


def prepare(limits: Limits) -> None:
    """Compile the moves before a search begins, so that its time limit holds.

    Compiling takes some twenty seconds, once for an installation. Until then, searches of less
    than ten seconds do without annealing.
    """
    if is_compiled(run_moves) or limits.time_limit_s < _COMPILED_IN_S:
        return
    if limits.on_state is not None:
        limits.on_state(SearchState("compiling the search, once", None, 0.0))
    problem = Problem(named_workload("random-2"), Topology.parse("2xh100"), batch_size=64)
    instance = Instance(problem, Roofline())
    start = Assignment.of(instance, [(instance.whole(table), table) for table in range(2)])
    assert start is not None, "two tables fit on two GPUs"
    arrays = AnnealingProblem([start], Clock.start(limits))
    Run(arrays, arrays.start(start), np.random.default_rng(0), 0, _HEATS[0])
