"""Runs of annealing: each cools down from a start assignment in its own thread."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.search.annealing.moves import run_moves
from solvers.search.annealing.problem import AnnealingProblem
from solvers.search.annealing.state import HAS_COMPILER, Model, Rules, State

Heat = tuple[int, float]
"""A power, `LOW_POWER` or `HIGH_POWER`, and a temperature."""

_POLL_S = 0.02
"""Seconds between two looks at the clock while threads make moves."""

_LAUNCHES_SHARE, _MOST_TOGETHER = 0.05, 0.5
"""If an arena's launches take this share of a step, put resharded shards on GPUs with their arena
half of the time; if they take less, in proportion less often."""

MANY_GPUS = 64
"""On more GPUs, look at a few of them for the slowest one and for where a shard goes."""

STEPS_BETWEEN_LOOKS = 20_000
"""Steps between two looks at the clock."""

_RESHARDED_BELOW, _SWAPPED_BELOW = 0.4, 0.75
"""Draw a number in [0, 1): reshard a table below the first limit, swap two blocks below the second,
else move one."""

_COOLING = 1e-3
"""Temperature at the end of a run, as a share of the one at its start."""

SLOWER = 1 if HAS_COMPILER else 1000
"""Time of a step, as a multiple of a compiled one: without numba steps are interpreted."""


class Run:
    """One run of a given length from an assignment, with the best that it found."""

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
        """Whether the run has steps left."""
        return self._done < self._steps

    def move(self, most: int | None = None) -> int:
        """Make at most this many moves, until the next look at the clock; return their number."""
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
        """Skip the remaining steps."""
        self._steps = 0

    def found(self) -> Assignment | None:
        """Return the best assignment, filled exactly; None if no better one was found."""
        if self._best_s >= self._start_s * (1 - 1e-7):
            return None
        return self._problem.assignment(self._option, self._gpu)


def _together(model: Model, step_s: float) -> float:
    """Return how often resharded shards go to GPUs that have their arena."""
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
            # Ask in this thread whether to stop: the callback belongs to the caller's thread.
            while wait(moves, _POLL_S).not_done and not clock.spent:
                pass
        finally:
            for run in runs:
                run.end()
    for one in moves:
        one.result()
