"""Costs of plans, shards and pieces are those that were recorded."""

from fast_and_full import combinations
from golden_costs import (
    COST_PROBLEMS,
    batched_costs,
    costs_of_plans,
    curves,
    dense_record,
    machines_record,
)
from golden_problems import MODELS
from golden_store import assert_same, recorded

BATCHED = [model for model in MODELS if "torchrec" not in model]


@combinations("problem, model", COST_PROBLEMS, MODELS)
def test_costs_of_plans(problem: str, model: str) -> None:
    key = f"{problem}/{model}"
    assert_same(costs_of_plans(problem, model), recorded("costs")[key], key)


@combinations("problem, model", COST_PROBLEMS, MODELS)
def test_cuts_and_curves_of_pieces(problem: str, model: str) -> None:
    key = f"{problem}/{model}"
    assert_same(curves(problem, model), recorded("curves")[key], key)


@combinations("problem, model", COST_PROBLEMS, BATCHED)
def test_costs_of_shards_at_once(problem: str, model: str) -> None:
    key = f"{problem}/{model}"
    assert_same(batched_costs(problem, model), recorded("batched")[key], key)


def test_the_dense_part() -> None:
    assert_same(dense_record(), recorded("dense"))


def test_the_figures_of_machines() -> None:
    assert_same(machines_record(), recorded("machines"))
