"""Cost models against step times that were measured: the committed data of the benchmarks."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau

from cost_models import Calibrated, CostModel, cost_model
from cost_models.calibrated import calibrate
from cost_models.learned.file import LearnedFile
from cost_models.learned.shipped import shipped, shipped_name
from placer import Topology
from placer.measurement import Case, Dataset
from placer.measurement.dataset import repeated
from placer.measurement.times import step_s

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
MEASURED = "amd-epyc-2-cores-tiered"


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
    many = [name for name in sorted(set(names)) if np.count_nonzero(names == name) >= 20]
    assert len(many) == 6
    return float(
        np.mean([kendalltau(guessed[names == n], measured[names == n]).statistic for n in many])
    )


def test_no_plan_of_the_test_set_is_fitted_to() -> None:
    learned = Dataset.load(RESULTS / f"learned-{MEASURED}.jsonl.gz")
    fitted = (*dataset("calibration").measurements, *learned.measurements)
    known = {one.case.tables for one in fitted}
    assert not any(one.case.tables in known for one in dataset("test").measurements)


@pytest.mark.slow
def test_calibrated_constants_predict_plans_they_have_not_seen(
    tested: tuple[list[Case], np.ndarray],
) -> None:
    cases, measured = tested
    guessed = predicted(Calibrated(calibrate(dataset("calibration"))), cases)
    assert np.mean(np.abs(guessed - measured) / measured) < 0.07
    assert rank_agreement(cases, guessed, measured) > 0.89


@pytest.mark.slow
def test_the_learned_model_that_comes_with_placer_predicts_them_better(
    tested: tuple[list[Case], np.ndarray],
) -> None:
    cases, measured = tested
    guessed = predicted(cost_model(f"learned:{MEASURED}"), cases)
    assert np.mean(np.abs(guessed - measured) / measured) < 0.065
    assert rank_agreement(cases, guessed, measured) > 0.89


def test_models_that_come_with_placer_are_named_after_their_machine() -> None:
    assert MEASURED in shipped()
    for name, path in shipped().items():
        file = LearnedFile.load(path)
        assert shipped_name(file) == name
        assert (RESULTS / f"learned-{name}.jsonl.gz").exists()
