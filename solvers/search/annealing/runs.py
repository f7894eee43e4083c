"""Simulated annealing over assignments: many cheap moves instead of a few well-chosen ones.

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

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.result import Limits, SearchState
from solvers.search.annealing.compiled import HAS_COMPILER, is_compiled, is_loaded
from solvers.search.annealing.moves import run_moves
from solvers.search.annealing.problem import AnnealingProblem
from solvers.search.annealing.rating import rate, replace_items, weigh_phases
from solvers.search.annealing.state import HIGH_POWER, Model, Rules, State, tiny
from solvers.search.moves import improve

_COMPILED_IN_S = 10.0
"""With a shorter time limit nothing is compiled: that takes longer, though only once."""

_POLL_S = 0.02
"""Seconds between two looks at the clock while threads make moves."""

_LOADED_IN_S = 0.5
"""With less time nothing is loaded that has been compiled: that takes about as long, once for a
process."""

_LAUNCHES_SHARE, _MOST_TOGETHER = 0.05, 0.5
"""Share of a step that an arena's launches take from which shards of another option go to GPUs with
their arena half of the time; with less, in proportion."""

Heat = tuple[int, float]
"""A power, `LOW_POWER` or `HIGH_POWER`, and a temperature."""

_INTERPRETED = 1000
"""Times as long as a compiled step an interpreted one takes."""


@dataclass(frozen=True, slots=True)
class AnnealingParams:
    """Knobs of `anneal`.

    Attributes
    ----------
    heats : tuple of (int, float)
        Powers and temperatures at the start of a run, by turns: from those that leave the best
        assignment behind to one that looks around it. A temperature is what a move may cost, as a
        share of the step.
    heats_of_many : tuple of (int, float)
        The same on more than `many_gpus` GPUs, none of which changes much of the step by itself.
    cooling : float
        Temperature at the end of a run, beside that at its start.
    steps_per_place, least_steps : int
        Steps of the first runs, for each table and GPU, and at least; later runs are longer.
    least_turns : int
        Times that there is to be a run of each heat: with little time, first runs are shorter.
    longest : int
        Times the first run's steps that a run may take.
    idle_runs : int
        Runs of the longest kind without a gain after which the search ends.
    resharded_below, gathered_below, swapped_below : float
        Of a random number in [0, 1): below the first a table is sharded anew, below the second all
        shards of an arena leave a GPU, below the third two blocks are swapped, and else one is
        moved.
    most_shards : int
        Finer sharding options than this are not tried.
    most_items : int
        Shards whose costs are computed, besides those that tables have: other tables keep their
        options.
    options_share : float
        Of the time that is left, at most, for computing these.
    steps_between_looks : int
        Steps between two looks at the clock.
    many_gpus : int
        On more GPUs than these, a few are looked at where else all would be: for the slowest one,
        or for one to move a shard to.
    most_threads : int
        Runs at once, at most.
    polished : float
        A run's end is improved by moves that are rated exactly if it is slower than the best
        assignment by no more than this share: that pays where curves jump, as those of caches do.
    polish_share : float
        Of the time that is left, at most, for each of these.
    tried_share : float
        Of the time, for runs from several starts.
    clearly : float
        Share of its step by which a plan has to be faster for its start to come first.
    """

    heats: tuple[Heat, ...] = ((8, 0.3), (24, 0.03), (8, 0.03), (24, 0.003))
    heats_of_many: tuple[Heat, ...] = ((24, 0.001), (24, 0.0003))
    cooling: float = 1e-3
    steps_per_place: int = 300
    least_steps: int = 400_000
    least_turns: int = 2
    longest: int = 8
    idle_runs: int = 6
    resharded_below: float = 0.4
    gathered_below: float = 0.43
    swapped_below: float = 0.76
    most_shards: int = 8
    most_items: int = 20_000
    options_share: float = 0.15
    steps_between_looks: int = 20_000
    many_gpus: int = 64
    most_threads: int = 16
    polished: float = 0.02
    polish_share: float = 0.05
    tried_share: float = 0.2
    clearly: float = 0.007


def anneal(
    starts: Sequence[Assignment],
    *,
    target_s: float,
    seed: int,
    clock: Clock,
    params: AnnealingParams,
) -> Assignment:
    """The best assignment of runs of growing length, each from the best one so far.

    As many runs at once as there are threads; one where steps are limited. Ends at `target_s`
    seconds, when the clock is spent, or when long runs gain nothing. First there are short runs
    from each of `starts`, as where one leads depends on which tables it divides, much more than
    on how fast it is. The others have their turn once the one that led furthest leads no further.
    """
    best = starts[0]
    instance = best.instance
    if instance.gpus == 1 or not (is_compiled(run_moves) or clock.repeats):
        return best
    if not (is_loaded(run_moves) or clock.repeats) and clock.left_s < _LOADED_IN_S:
        return best
    slower = 1 if clock.repeats else _slower()
    first = max(params.least_steps, params.steps_per_place * (instance.tables + instance.gpus))
    starts = [one for one in starts if _is_expressible(one)]
    if not starts:
        return best
    problem = AnnealingProblem(
        starts, params.most_shards, params.most_items, clock.part(params.options_share)
    )
    # Limited steps lead to the same plan, however many cores there are.
    alone = clock.repeats or not HAS_COMPILER
    threads = 1 if alone else min(params.most_threads, clock.limits.thread_count)
    heats = params.heats if instance.gpus <= params.many_gpus else params.heats_of_many
    rng = np.random.default_rng(seed)
    rngs = [rng, *rng.spawn(threads - 1)]
    steps_per_s = 0.0 if clock.repeats else _speed(problem, problem.starts[0], rngs, clock, params)
    starts = problem.starts
    if len(starts) > 1:
        steps = first // slower
        if steps_per_s:
            one_s = clock.left_s * params.tried_share / _groups(len(starts), threads)
            steps = min(steps, int(steps_per_s * one_s))
        starts = _tried(problem, rngs, max(1, steps), heats[0], clock, params)
    if steps_per_s:
        rounds = params.least_turns * len(heats) / threads
        first = min(first, max(1, int(steps_per_s * slower * clock.left_s / rounds)))
    for start in starts:
        found = _line(
            problem, start, rngs, first // slower, heats, steps_per_s, target_s, clock, params
        )
        best = min(best, found, key=lambda one: one.step_time_s)
        if clock.spent or best.step_time_s <= target_s:
            break
    return best


def _line(
    problem: AnnealingProblem,
    best: Assignment,
    rngs: Sequence[np.random.Generator],
    first: int,
    heats: Sequence[Heat],
    steps_per_s: float,
    target_s: float,
    clock: Clock,
    params: AnnealingParams,
) -> Assignment:
    """The best of runs of `first` steps and more, each from the best one so far."""
    threads, number, idle = len(rngs), 0, 0
    while not clock.spent and best.step_time_s > target_s and idle < params.idle_runs:
        length = min(2 ** (number // len(heats)), params.longest)
        steps = length * first
        # A run that the deadline would end early finds nothing: it ends cold.
        if steps_per_s and not clock.repeats:
            steps = max(1, min(steps, int(steps_per_s * clock.left_s)))
        began = time.monotonic()
        turns = [heats[(number + at) % len(heats)] for at in range(threads)]
        runs = _runs(problem, [best] * threads, rngs, steps, turns, params)
        _make_moves(runs, clock)
        steps_per_s = steps / max(1e-9, time.monotonic() - began)
        before_s = best.step_time_s
        ends = [run.found() for run in runs]
        del runs  # With many GPUs their arrays are large.
        for annealed in filter(None, ends):
            if annealed.step_time_s < best.step_time_s * (1 + params.polished):
                improve(annealed, clock.part(params.polish_share), reshard_tables=False)
            if annealed.step_time_s < best.step_time_s * (1 - 1e-7):
                best = annealed
        if best.step_time_s < before_s:
            idle = 0
        elif length == params.longest:
            idle += threads
        number += threads
    return best


def _is_expressible(assignment: Assignment) -> bool:
    """Whether no GPU has two shards of a table, which the moves' arrays have no place for."""
    tables = ([shard.table for shard in shards] for shards in assignment.shards)
    return all(len(of_gpu) == len(set(of_gpu)) for of_gpu in tables)


def _tried(
    problem: AnnealingProblem,
    rngs: Sequence[np.random.Generator],
    steps: int,
    heat: Heat,
    clock: Clock,
    params: AnnealingParams,
) -> list[Assignment]:
    """What is found from the problem's starts, the best first; the slower half has fewer runs.

    The first start stays first unless another one leads clearly further: there is luck in runs.
    """
    left = [
        (one, 1 + params.clearly if number else 1.0) for number, one in enumerate(problem.starts)
    ]
    out: list[tuple[Assignment, float]] = []
    while len(left) > 1 and not clock.spent:
        ends: list[tuple[Assignment, float]] = []
        for first in range(0, len(left), len(rngs)):
            together = left[first : first + len(rngs)]
            starts = [start for start, _ in together]
            runs = _runs(problem, starts, rngs, steps, [heat] * len(starts), params)
            _make_moves(runs, clock)
            ends += [
                (run.found() or start, handicap)
                for run, (start, handicap) in zip(runs, together, strict=True)
            ]
        ends.sort(key=lambda end: end[0].step_time_s * end[1])
        left, out = ends[: len(ends) // 2], ends[len(ends) // 2 :] + out
    return [one for one, _ in left + out]


def _groups(starts: int, threads: int) -> int:
    """How often `_tried` makes runs at once."""
    return -(-starts // threads) + _groups(starts // 2, threads) if starts > 1 else 0


def _slower() -> int:
    """Times as long as a compiled step one takes here."""
    return 1 if HAS_COMPILER else _INTERPRETED


def _speed(
    problem: AnnealingProblem,
    start: Assignment,
    rngs: Sequence[np.random.Generator],
    clock: Clock,
    params: AnnealingParams,
) -> float:
    """Steps a second of each run, of as many as there are between two looks at the clock."""
    steps = params.steps_between_looks // _slower()
    starts = [start] * len(rngs)
    runs = _runs(problem, starts, rngs, steps, [params.heats[-1]] * len(rngs), params)
    began = time.monotonic()
    _make_moves(runs, clock)
    return steps / max(1e-9, time.monotonic() - began)


def prepare(limits: Limits) -> None:
    """Compile the moves before a search begins, so that its time limit holds.

    That takes some twenty seconds, once for an installation. Searches of less than ten leave
    annealing out until then.
    """
    if is_compiled(run_moves) or limits.time_limit_s < _COMPILED_IN_S:
        return
    if limits.on_state is not None:
        limits.on_state(SearchState("compiling the search, once", None, 0.0))
    model, state = tiny()
    rules = Rules(0.0, 0.0, 0.0, 1, 0.0, HIGH_POWER, 1.0, 1.0, 0.0)
    rng = np.random.default_rng(0)
    rate(model, state, rules, 0)
    replace_items(model, state, 0)
    weigh_phases(model, state, rules)
    run_moves(model, state, rules, 0, 0, 1.0, state.option.copy(), state.gpu.copy(), rng)


def _runs(
    problem: AnnealingProblem,
    starts: Sequence[Assignment],
    rngs: Sequence[np.random.Generator],
    steps: int,
    heats: Sequence[Heat],
    params: AnnealingParams,
) -> list["_Run"]:
    """A run of each heat from each start; those of one power and start begin with one's arrays."""
    made: dict[tuple[int, int], tuple[Model, State, float]] = {}
    runs = []
    for start, rng, heat in zip(starts, rngs, heats, strict=False):  # Threads may be more.
        key = id(start), heat[0]
        if key not in made:
            made[key] = problem.start(start, heat[0])
        runs.append(_Run(problem, made[key], rng, steps, heat, params))
    return runs


class _Run:
    """One run of some length from an assignment, with what it has found so far."""

    def __init__(
        self,
        problem: AnnealingProblem,
        start: tuple[Model, State, float],
        rng: np.random.Generator,
        steps: int,
        heat: Heat,
        params: AnnealingParams,
    ) -> None:
        power, hot = heat
        self._problem, self._rng = problem, rng
        self._model, state, self._start_s = start
        self._state = deepcopy(state)
        self._rules = Rules(
            params.resharded_below,
            params.gathered_below,
            params.swapped_below,
            params.many_gpus,
            _together(self._model, self._start_s),
            power,
            self._start_s,
            hot,
            math.log(params.cooling) / max(1, steps),
        )
        self._best_s = self._start_s
        self._option, self._gpu = self._state.option.copy(), self._state.gpu.copy()
        self._chunk = params.steps_between_looks // _slower()
        self._done, self._steps = 0, steps
        self._move_to(0)

    @property
    def is_open(self) -> bool:
        """Whether it has steps left."""
        return self._done < self._steps

    def move(self, most: int | None = None) -> int:
        """Make moves until it is time to look at the clock, at most so many; their number."""
        left = self._steps - self._done
        count = min(self._chunk, left, left if most is None else most)
        self._move_to(self._done + count)
        return count

    def _move_to(self, last: int) -> None:
        self._best_s = run_moves(
            self._model, self._state, self._rules, self._done, last, self._best_s,
            self._option, self._gpu, self._rng,
        )  # fmt: skip
        self._done = last

    def move_all(self) -> None:
        """Make all moves, until another thread ends the run."""
        while self.is_open:
            self.move()

    def end(self) -> None:
        """Leave the steps that are left."""
        self._steps = 0

    def found(self) -> Assignment | None:
        """The best assignment, filled exactly; None if none was better than the first."""
        if self._best_s >= self._start_s * (1 - 1e-7):
            return None
        return self._problem.assignment(self._option, self._gpu)


def _together(model: Model, step_s: float) -> float:
    """How often shards of another option go to GPUs with their arena."""
    launches_s = float((model.launches @ (model.counted_s > 0)).max())
    return _MOST_TOGETHER * min(1.0, launches_s / (_LAUNCHES_SHARE * step_s))


def _make_moves(runs: Sequence[_Run], clock: Clock) -> None:
    """Make the moves of all runs at once, each in a thread of its own, until the clock is spent."""
    if len(runs) == 1:
        (run,) = runs
        while run.is_open and not clock.spent:
            clock.step(run.move(clock.steps_left))
        return
    with ThreadPoolExecutor(len(runs)) as pool:
        moves = [pool.submit(run.move_all) for run in runs]
        try:
            # Here, as the caller's wish to stop is asked for in the caller's thread.
            while wait(moves, _POLL_S).not_done and not clock.spent:
                pass
        finally:
            for run in runs:
                run.end()
    for one in moves:
        one.result()
