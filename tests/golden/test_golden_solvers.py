"""Plans of every solver are those that were recorded."""

import pytest
from fast_and_full import covering
from golden_problems import SOLVER_CASES, SOLVER_RUNS, solved
from golden_store import assert_same, recorded

from solvers import SOLVERS

BRANCHING = {"auto", "ilp"}
"""Of vertices that are as good, a simplex takes one or another by the last bits of a processor."""


def test_every_solver_is_recorded() -> None:
    assert {solver for _, solver in SOLVER_RUNS} == set(SOLVERS)
    assert recorded("solvers").keys() == SOLVER_CASES.keys()


# Of solvers that find a case's plan, the fast tests run those that do not branch.
@pytest.mark.parametrize(
    ("case", "solver"), covering(sorted(SOLVER_RUNS, key=lambda run: run[1] in BRANCHING))
)
def test_plans_are_as_recorded(case: str, solver: str) -> None:
    # Half of its steps are enough for what is asked of `ilp` below.
    steps = 20 if solver == "ilp" else None
    actual, expected = solved(case, solver, steps), recorded("solvers")[case][solver]
    if solver not in BRANCHING or expected["plan"] is None:
        assert_same(actual, expected, f"{case}.{solver}")
        return
    assert actual["step_time_s"] <= expected["step_time_s"] * 1.02
    assert actual["bound_s"] >= expected["bound_s"] * 0.95
    assert actual["bound_s"] <= expected["step_time_s"] * (1 + 1e-9)
