"""Plans of every solver are those that were recorded."""

import pytest
from fast_and_full import covering
from golden_cases import SOLVER_CASES, SOLVER_RUNS, solved
from golden_store import assert_same, recorded

from solvers import SOLVERS


def test_every_solver_is_recorded() -> None:
    assert {solver for _, solver in SOLVER_RUNS} == set(SOLVERS)
    assert recorded("solvers").keys() == SOLVER_CASES.keys()


@pytest.mark.parametrize(("case", "solver"), covering(SOLVER_RUNS))
def test_plans_are_as_recorded(case: str, solver: str) -> None:
    assert_same(solved(case, solver), recorded("solvers")[case][solver], f"{case}.{solver}")
