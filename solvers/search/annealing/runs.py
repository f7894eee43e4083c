"""Simulated annealing over assignments: many cheap moves instead of a few well-chosen ones.

Kirkpatrick et al. 1983, doi:10.1126/science.220.4598.671. A GPU's time is rated by the sums
of its shards' priced costs (`solvers.model.knapsack.phases_at`), which a move changes for two
GPUs; nothing is filled exactly before the end. The energy is

    Σ over phases p of  s[p]/T · Σ over GPUs g of (t[p,g]/s[p])^n / n

where s are the slowest GPUs' times at the start and T is their sum: nearly the largest times alone,
but lower with fewer slow GPUs. A chain of phases that is shorter than the step is taken to be as
long, so that it counts when it becomes so. The moves are in `solvers.search.annealing.moves`.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.result import Limits, SearchState
from solvers.search.annealing.compiled import HAS_COMPILER, is_compiled
from solvers.search.annealing.moves import run_moves
from solvers.search.annealing.problem import AnnealingProblem
from solvers.search.annealing.rating import rate, replace_items
from solvers.search.annealing.state import HIGH_POWER, Rules, tiny
from solvers.search.moves import improve

_COMPILED_IN_S = 10.0
"""With a shorter time limit nothing is compiled: that takes longer, though only once."""

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
        Shards whose costs are computed, the largest tables' first: other tables keep their options.
    steps_between_looks : int
        Steps between two looks at the clock.
    many_gpus : int
        On more GPUs than these, the slowest of a few is taken for the slowest of all.
    polished : float
        A run's end is improved by moves that are rated exactly if it is slower than the best
        assignment by no more than this share: that pays where curves jump, as those of caches do.
    polish_share : float
        Of the time that is left, at most, for each of these.
    """

    heats: tuple[Heat, ...] = ((8, 0.3), (24, 0.03), (8, 0.03), (24, 0.003))
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
    most_items: int = 2000
    steps_between_looks: int = 20_000
    many_gpus: int = 64
    polished: float = 0.02
    polish_share: float = 0.05


def anneal(
    start: Assignment, *, target_s: float, seed: int, clock: Clock, params: AnnealingParams
) -> Assignment:
    """The best assignment of runs of growing length, each from the best one so far.

    Ends at `target_s` seconds, when the clock is spent, or when long runs gain nothing.
    """
    instance = start.instance
    best = start
    if instance.gpus == 1 or not (is_compiled(run_moves) or clock.repeats):
        return best
    slower = 1 if clock.repeats else _slower()
    first = max(params.least_steps, params.steps_per_place * (instance.tables + instance.gpus))
    problem = AnnealingProblem(start, params.most_shards, params.most_items)
    rng = np.random.default_rng(seed)
    number = idle = 0
    steps_per_s = 0.0 if clock.repeats else _speed(problem, best, clock, params)
    if steps_per_s:
        runs = params.least_turns * len(params.heats)
        first = min(first, max(1, int(steps_per_s * slower * clock.left_s / runs)))
    while not clock.spent and best.step_time_s > target_s and idle < params.idle_runs:
        length = min(2 ** (number // len(params.heats)), params.longest)
        steps = length * first // slower
        # A run that the deadline would end early finds nothing: it ends cold.
        if steps_per_s and not clock.repeats:
            steps = max(1, min(steps, int(steps_per_s * clock.left_s)))
        began = time.monotonic()
        heat = params.heats[number % len(params.heats)]
        annealed = _run(problem, best, rng, steps, heat, clock, params)
        steps_per_s = steps / max(1e-9, time.monotonic() - began)
        if annealed is not None and annealed.step_time_s < best.step_time_s * (1 + params.polished):
            improve(annealed, clock.part(params.polish_share), reshard_tables=False)
        if annealed is not None and annealed.step_time_s < best.step_time_s * (1 - 1e-7):
            best, idle = annealed, 0
        elif length == params.longest:
            idle += 1
        number += 1
    return best


def _slower() -> int:
    """Times as long as a compiled step one takes here."""
    return 1 if HAS_COMPILER else _INTERPRETED


def _speed(
    problem: AnnealingProblem, start: Assignment, clock: Clock, params: AnnealingParams
) -> float:
    """Steps a second, of as many as there are between two looks at the clock."""
    steps, rng = params.steps_between_looks // _slower(), np.random.default_rng(0)
    began = time.monotonic()
    _run(problem, start, rng, steps, params.heats[-1], clock, params)
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
    rules = Rules(0.0, 0.0, 0.0, 1, HIGH_POWER, 1.0, 1.0, 0.0)
    rng = np.random.default_rng(0)
    rate(model, state, rules, 0)
    replace_items(model, state, 0)
    run_moves(model, state, rules, 0, 0, 1.0, state.option.copy(), state.gpu.copy(), rng)


def _run(
    problem: AnnealingProblem,
    start: Assignment,
    rng: np.random.Generator,
    steps: int,
    heat: Heat,
    clock: Clock,
    params: AnnealingParams,
) -> Assignment | None:
    """The best assignment of `steps` moves, filled exactly; None if none was better."""
    power, hot = heat
    model, state, step_s = problem.start(start, power)
    rules = Rules(
        params.resharded_below,
        params.gathered_below,
        params.swapped_below,
        params.many_gpus,
        power,
        step_s,
        hot,
        math.log(params.cooling) / max(1, steps),
    )
    option, gpu = state.option.copy(), state.gpu.copy()
    chunk = params.steps_between_looks // _slower()
    best_s = run_moves(model, state, rules, 0, 0, step_s, option, gpu, rng)
    done = 0
    while done < steps and not clock.spent:
        after = min(done + chunk, steps, done + (clock.steps_left or steps))
        best_s = run_moves(model, state, rules, done, after, best_s, option, gpu, rng)
        clock.step(after - done)
        done = after
    return problem.assignment(option, gpu) if best_s < step_s * (1 - 1e-7) else None
