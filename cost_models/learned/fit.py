"""From files of measurements to a learned cost model."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from cost_models.calibrated.calibration import Calibration
from cost_models.calibrated.fit import calibrate
from cost_models.calibrated.model import Calibrated
from cost_models.learned.features import features
from cost_models.learned.file import LearnedFile
from cost_models.learned.parts import contributions, fixed_times
from cost_models.learned.training import Example, train
from placer.errors import DataError
from placer.measurement import Dataset
from placer.measurement.dataset import repeated
from placer.measurement.times import Clock, step_s

_SAME = ("backend", "device", "threads")
"""What must be the same in all data sets of one model; ranks may differ."""


def learn(
    datasets: Sequence[Dataset],
    calibration: Calibration | None = None,
    *,
    clock: Clock = "wall",
    seed: int = 0,
    on_epoch: Callable[[int, float], None] | None = None,
) -> LearnedFile:
    """Train a model on measured steps.

    Parameters
    ----------
    datasets : sequence of Dataset
        Of one machine, backend and number of threads.
    calibration : Calibration, optional
        Of the same executor: where training starts. If not given, it is fitted to the data sets.
    clock : {"wall", "cpu"}
    on_epoch : callable, optional
        Called now and then with the epoch and the error on held-out workloads.

    Raises
    ------
    DataError
        If the data sets, or the calibration, are of different settings, or there are too few
        workloads.
    """
    setting = _setting(datasets, calibration)
    if calibration is None:
        together = tuple(m for dataset in datasets for m in dataset.measurements)
        calibration = calibrate(replace(datasets[0], measurements=together), clock)
    made = examples(datasets, calibration, clock)
    fit = train(made, seed=seed, on_epoch=on_epoch)
    errors = np.abs(np.expm1(fit.log_errors))
    base = np.abs(np.expm1(fit.base_log_errors))
    facts = {
        "setting": setting,
        "machine": datasets[0].machine,
        "clock": clock,
        "seed": seed,
        "plans": len(made),
        "workloads": len({example.group for example in made}),
        "epochs": fit.epochs,
        "held_out": {"mape": float(errors.mean()), "p90": float(np.quantile(errors, 0.9))},
        "calibrated": {"mape": float(base.mean()), "p90": float(np.quantile(base, 0.9))},
    }
    residual = float(np.sqrt(np.mean(fit.log_errors**2)))
    return LearnedFile(fit.networks, calibration, residual, float(errors.mean()), facts)


def examples(
    datasets: Sequence[Dataset], calibration: Calibration, clock: Clock = "wall"
) -> list[Example]:
    """The measured plans of data sets, as the networks see them."""
    model = Calibrated(calibration)
    made = []
    for dataset in datasets:
        for case, measured in repeated(dataset.measurements):
            problem, plan = case.problem(), case.plan()
            free, monotone = features(problem)
            parts_s = contributions(model, problem, plan)
            fixed_s = fixed_times(model, problem, plan)
            seconds = step_s(measured, clock)
            made.append(Example(case.workload, free, monotone, parts_s, fixed_s, seconds))
    return made


def _setting(datasets: Sequence[Dataset], calibration: Calibration | None) -> dict[str, Any]:
    if not datasets:
        raise DataError("no data set to learn from")
    setting = asdict(datasets[0].setting)
    others = [(asdict(dataset.setting), "another data set") for dataset in datasets]
    if calibration is not None:
        others.append((calibration.setting, "the calibration"))
    for other, whose in others:
        for key in _SAME:
            if key in other and other[key] != setting[key]:
                raise DataError(
                    f"a data set was measured with {key} {setting[key]!r}, {whose} with "
                    f"{other[key]!r}: a model learns of one executor"
                )
    return setting
