"""CP-SAT within a search's limits."""

import threading
from typing import Any

from placer.errors import BackendError
from solvers.result import Limits

_POLL_S = 0.05
"""How often the caller is asked whether to stop."""


_GAP = 0.05
"""How far from the least the objective may be: bytes that devices are said to lack."""

_REPEATED_S = 10.0
"""CP-SAT's own measure of its work, about seconds, where steps are limited and not time."""


def run_cp_sat(model: Any, limits: Limits, time_limit_s: float) -> tuple[Any, Any]:
    """Solve a model, and return CP-SAT with its values, and its status.

    Parameters
    ----------
    model : cp_model.CpModel
    limits : Limits
    time_limit_s : float
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, time_limit_s)
    solver.parameters.num_workers = limits.thread_count
    if limits.max_steps is not None:  # The same answer on any machine.
        solver.parameters.max_time_in_seconds = limits.time_limit_s
        solver.parameters.max_deterministic_time = _REPEATED_S
    solver.parameters.random_seed = limits.seed
    solver.parameters.relative_gap_limit = _GAP
    # Deterministic for a seed as long as the time limit does not strike.
    solver.parameters.interleave_search = True
    status = _solved(solver, model, limits)
    if status == cp_model.MODEL_INVALID:
        raise BackendError(f"CP-SAT rejects the model: {model.validate()}")
    return solver, status


def _solved(solver: Any, model: Any, limits: Limits) -> Any:
    """Return CP-SAT's status for a model; it ends at once if the caller says so, or is interrupted.

    It runs in a thread of its own, as Python handles signals, and the caller's wish is asked
    for, between the bytecodes of the main thread alone.
    """
    # Its own handling of Ctrl-C would keep the signal from Python.
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
        while thread.is_alive():  # A search that has not begun yet cannot be stopped yet.
            solver.stop_search()
            thread.join(_POLL_S)
        raise
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
