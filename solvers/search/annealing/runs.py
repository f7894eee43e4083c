"""Runs of annealing: moves that grow colder, from an assignment, in a thread of their own."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.search.annealing.compiled import HAS_COMPILER
from solvers.search.annealing.moves import run_moves
from solvers.search.annealing.problem import AnnealingProblem
from solvers.search.annealing.state import Model, Rules, State

Heat = tuple[int, float]
"""A power, `LOW_POWER` or `HIGH_POWER`, and a temperature."""

_POLL_S = 0.02
"""Seconds between two looks at the clock while threads make moves."""

_LAUNCHES_SHARE, _MOST_TOGETHER = 0.05, 0.5
"""Share of a step that an arena's launches take from which shards of another option go to GPUs with
their arena half of the time; with less, in proportion."""

MANY_GPUS = 64
"""On more GPUs than these, a few are looked at where else all would be: for the slowest one, or for
one to move a shard to."""

STEPS_BETWEEN_LOOKS = 20_000
"""Steps between two looks at the clock."""

_RESHARDED_BELOW, _SWAPPED_BELOW = 0.4, 0.75
"""Of a random number in [0, 1): below the first a table is sharded again, below the second two
blocks are swapped, and else one is moved."""

_COOLING = 1e-3
"""Temperature at the end of a run, beside that at its start."""

SLOWER = 1 if HAS_COMPILER else 1000
"""Times as long as a compiled step one takes here: without a compiler they are interpreted."""


class Run:
    """One run of some length from an assignment, with what it has found so far."""

    def __init__(
        self,
        problem: AnnealingProblem,
        start: tuple[Model, State, float],
        rng: np.random.Generator,
        steps: int,
        heat: Heat,
    ) -> None:
        power, hot = heat
        self._problem, self._rng = problem, rng
        self._model, state, self._start_s = start
        self._state = deepcopy(state)
        self._rules = Rules(
            _RESHARDED_BELOW,
            _SWAPPED_BELOW,
            MANY_GPUS,
            _together(self._model, self._start_s),
            power,
            self._start_s,
            hot,
            math.log(_COOLING) / max(1, steps),
        )
        self._best_s = self._start_s
        self._option, self._gpu = self._state.option.copy(), self._state.gpu.copy()
        self._chunk = STEPS_BETWEEN_LOOKS // SLOWER
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
        """Return the best assignment, filled exactly; None if none was better than the first."""
        if self._best_s >= self._start_s * (1 - 1e-7):
            return None
        return self._problem.assignment(self._option, self._gpu)


def _together(model: Model, step_s: float) -> float:
    """Return how often shards of another option go to GPUs with their arena."""
    launches_s = float((model.launches @ (model.counted_s > 0)).max())
    return _MOST_TOGETHER * min(1.0, launches_s / (_LAUNCHES_SHARE * step_s))


def make_moves(runs: Sequence[Run], clock: Clock) -> None:
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
