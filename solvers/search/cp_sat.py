"""Run CP-SAT within a search's limits."""

import threading
from typing import Any

from placer.errors import BackendError
from solvers.result import Limits

_POLL_S = 0.05
"""Seconds between two checks whether the caller wants to stop."""


_GAP = 0.05
"""Relative gap of the objective, the bytes that devices lack."""

_REPEATED_S = 10.0
"""Limit of CP-SAT's deterministic time, roughly seconds, if steps are limited instead of time."""


def run_cp_sat(model: Any, limits: Limits, time_limit_s: float) -> tuple[Any, Any]:
    """Solve a model; return CP-SAT's solver, which has the values, and its status."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, time_limit_s)
    solver.parameters.num_workers = limits.thread_count
    if limits.max_steps is not None:  # The same answer on any machine.
        solver.parameters.max_time_in_seconds = limits.time_limit_s
        solver.parameters.max_deterministic_time = _REPEATED_S
    solver.parameters.random_seed = limits.seed
    solver.parameters.relative_gap_limit = _GAP
    # Deterministic for a seed unless the time limit is reached.
    solver.parameters.interleave_search = True
    status = _solved(solver, model, limits)
    if status == cp_model.MODEL_INVALID:
        raise BackendError(f"CP-SAT rejects the model: {model.validate()}")
    return solver, status


def _solved(solver: Any, model: Any, limits: Limits) -> Any:
    """Return CP-SAT's status for a model; stop at once if the caller asks or on Ctrl-C.

    CP-SAT runs in its own thread: Python handles signals only between bytecodes of the main thread,
    which also polls the caller.
    """
    # CP-SAT's own handling of Ctrl-C would hide the signal from Python.
    solver.parameters.catch_sigint_signal = False
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(solver.solve(model))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="CP-SAT", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            if limits.stop is not None and limits.stop():
                solver.stop_search()
    except BaseException:
        while thread.is_alive():  # A search that has not begun ignores a stop, so repeat it.
            solver.stop_search()
            thread.join(_POLL_S)
        raise
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
