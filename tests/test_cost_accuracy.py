"""Cost models against step times that were measured: the committed data of the benchmarks."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cost_models import Calibrated, CostModel
from cost_models.calibrated.fit import calibrate
from placer import Topology
from placer.measurement import Case, Dataset
from placer.measurement.cases import step_s
from placer.measurement.machine import repeated

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
MEASURED = "amd-epyc-2-cores-tiered"


@cache
def dataset(what: str) -> Dataset:
    return Dataset.load(RESULTS / f"cost-accuracy-{what}-{MEASURED}.jsonl.gz")


@pytest.fixture(scope="module")
def tested() -> tuple[list[Case], np.ndarray]:
    """Plans that no fit has seen, and how long their steps took."""
    found = [(case, step_s(times)) for case, times in repeated(dataset("test").measurements)]
    return [case for case, _ in found], np.array([seconds for _, seconds in found])


def predicted(model: CostModel, cases: list[Case]) -> np.ndarray:
    like = Topology.parse("1xh100")
    times = [model.evaluate(case.problem(like), case.plan(like)).step_time_s for case in cases]
    return np.array(times)


def rank_agreement(cases: list[Case], guessed: np.ndarray, measured: np.ndarray) -> float:
    """Kendall's τ over one workload's plans, the mean over workloads of many plans."""
    names = np.array([case.workload for case in cases])
    from scipy.stats import kendalltau  # Importing it takes more than a second.

    many = [name for name in sorted(set(names)) if np.count_nonzero(names == name) >= 20]
    assert len(many) == 6
    return float(
        np.mean([kendalltau(guessed[names == n], measured[names == n]).statistic for n in many])
    )


@pytest.mark.slow
def test_no_plan_of_the_test_set_is_fitted_to() -> None:
    fitted, tested = (
        {one.case.tables for one in dataset(what).measurements} for what in ("calibration", "test")
    )
    assert fitted.isdisjoint(tested)


@pytest.mark.slow
def test_calibrated_constants_predict_plans_they_have_not_seen(
    tested: tuple[list[Case], np.ndarray],
) -> None:
    cases, measured = tested
    guessed = predicted(Calibrated(calibrate(dataset("calibration"))), cases)
    assert np.mean(np.abs(guessed - measured) / measured) < 0.07
    assert rank_agreement(cases, guessed, measured) > 0.89
