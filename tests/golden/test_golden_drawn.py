"""Drawn plans cost, and drawn problems are solved, as was recorded."""

import golden_drawn as drawn
import pytest
from golden_store import assert_same, recorded


@pytest.mark.parametrize("model", drawn.MODELS)
@pytest.mark.parametrize("problem", drawn.problems())
def test_costs_of_drawn_plans(problem: str, model: str) -> None:
    assert_same(drawn.costs(problem, model), recorded("drawn")["costs"][f"{problem}/{model}"])


def test_sharding_options_on_many_gpus() -> None:
    assert_same(drawn.options(), recorded("drawn")["options"])


@pytest.mark.parametrize("problem", drawn.problems())
def test_memory_and_moves_of_drawn_plans(problem: str) -> None:
    assert_same(drawn.placements(problem), recorded("drawn")["placements"][problem])


@pytest.mark.parametrize("kind", drawn.DRAWN)
def test_bounds_and_plans_of_drawn_problems(kind: str) -> None:
    for seed, expected in zip(drawn.SEEDS[kind], recorded("drawn")["problems"][kind], strict=True):
        assert_same(drawn.drawn(kind, seed), expected, f"{kind}.{seed}")
