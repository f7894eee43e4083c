"""Costs of plans, shards and pieces are those that were recorded."""

from fast_and_full import combinations
from golden_costs import COST_PROBLEMS, costs_of_plans, dense_record, machines_record
from golden_problems import MODELS
from golden_store import assert_same, recorded


@combinations("problem, model", COST_PROBLEMS, MODELS)
def test_costs_of_plans(problem: str, model: str) -> None:
    key = f"{problem}/{model}"
    assert_same(costs_of_plans(problem, model), recorded("costs")[key], key)


def test_the_dense_part() -> None:
    assert_same(dense_record(), recorded("dense"))


def test_the_figures_of_machines() -> None:
    assert_same(machines_record(), recorded("machines"))
