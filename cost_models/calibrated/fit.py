"""Fit constants of the step equation to measured steps by non-negative least squares.

A step time is linear in the constants, so a least squares problem without negative constants finds
them (Lawson and Hanson 1974, ch. 23). Errors are relative to the measured time. Outliers count
little: the fit is iteratively reweighted with a Cauchy weight (Holland and Welsch 1977,
doi:10.1080/03610927708827533). With several GPUs, the step waits for the slowest. Which GPU that is
depends on the constants, so each iteration takes the slowest GPU of the last fit. Error bars come
from fits to resampled workloads (Efron 1979, doi:10.1214/aos/1176344552).
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.arenas import ArenaCosts, arena_loads
from cost_models.base import Float
from cost_models.calibrated.model import (
    ARENA_TERMS,
    TERMS,
    Calibration,
    Constant,
    Noise,
    unit_costs_of,
)
from cost_models.step_equation.work import work_of
from placer.errors import PlacerError
from placer.measurement.cases import NOISY_SPREAD, NOISY_WAIT, Case, Clock, step_s
from placer.measurement.machine import LEAST_CASES, Dataset, repeated

NOISY_DRIFT = 0.15
"""Call a machine noisy if times of the same case range over more than this share of the median."""

_FOLDS = 6
_RESAMPLES = 40
_REWEIGHTED = 4
_OUTLIER = 0.15


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured case: its work and its step time."""

    case: Case
    amounts: Float  # Shape (gpus, len(TERMS)): units of work of each constant on each GPU.
    seconds: float


def amounts(case: Case, *, tiers: bool) -> Float:
    """Return the units of work of each of `TERMS` on each GPU, shape (gpus, len(TERMS))."""
    problem, plan = case.problem(), case.plan()
    counted = np.zeros((case.gpus, len(TERMS)))
    # Set one constant at a time to one second, to count its units.
    one: dict[str, Float] = dict(zip(TERMS, np.eye(len(TERMS)), strict=True))
    exchange_byte_s = one["exchange_byte"] * (case.gpus - 1) / case.gpus
    for work in work_of(problem, plan):
        optimizer = problem.profile.tables[work.table].table.optimizer
        costs = unit_costs_of(one.__getitem__, optimizer, tiers, exchange_byte_s, one["shard"])
        read = costs.read(work.kind)
        seconds = work.resource_s(read.hbm + read.link) + work.extras.phase_s(costs).sum(axis=0)
        counted[list(work.gpus)] += seconds
    of_arenas: list[Any] = [
        one[term] if tiers or term == "replicas" else 0.0 for term in ARENA_TERMS
    ]
    for gpu, loads in enumerate(arena_loads(problem, plan)):
        arenas_s = ArenaCosts(*of_arenas).seconds(loads.values())
        counted[gpu] += one["step"] + len(loads) * one["arena"] + arenas_s
    return counted


def observations(dataset: Dataset, clock: Clock = "wall") -> list[Observation]:
    """Return the measured cases of a data set, each with its units of work and its time."""
    tiers = dataset.setting.tiers
    return [
        Observation(case, amounts(case, tiers=tiers), step_s(measured, clock))
        for case, measured in repeated(dataset.measurements)
    ]


def fit(observed: Sequence[Observation]) -> Float:
    """Return the fitted constants, in seconds, shape (len(TERMS),)."""
    from scipy.optimize import nnls

    times = np.array([one.seconds for one in observed])
    rows = np.stack([one.amounts.mean(axis=0) for one in observed])
    constants = np.zeros(len(TERMS))
    trust = np.ones(len(observed))
    for _ in range(_REWEIGHTED):
        weighed = rows / times[:, None]
        scale = np.maximum(weighed.max(0), 1e-300)
        constants = nnls(weighed / scale * trust[:, None], trust)[0] / scale
        rows = np.stack([o.amounts[int((o.amounts @ constants).argmax())] for o in observed])
        errors = (rows @ constants - times) / times
        trust = 1 / np.sqrt(1 + np.square(errors / _OUTLIER))
    return constants


def predicted_s(observed: Sequence[Observation], constants: Float) -> Float:
    """Return the step time of each case with these constants, in seconds."""
    return np.array([(one.amounts @ constants).max() for one in observed])


def calibrate(dataset: Dataset, clock: Clock = "wall") -> Calibration:
    """Return constants with error bars, fitted to measurements.

    Raises PlacerError if there are too few measurements.
    """
    observed = observations(dataset, clock)
    if len(observed) < LEAST_CASES:
        raise PlacerError(
            f"{len(observed)} cases are too few to calibrate with, at least {LEAST_CASES} are "
            "needed; run the command again, with a larger budget if it was not interrupted"
        )
    constants = fit(observed)
    errors = _held_out_errors(observed)
    low, high = _error_bars(observed)
    low, high = np.minimum(low, constants), np.maximum(high, constants)
    met = np.stack([one.amounts.sum(0) for one in observed]).sum(0) > 0
    noise = noise_of(dataset, clock)
    waited = clock == "wall" and noise.wait > NOISY_WAIT
    return Calibration(
        constants={
            term: Constant(*(float(f"{value[n]:.6g}") for value in (constants, low, high)))
            for n, term in enumerate(TERMS)
            if met[n]
        },
        tiers=dataset.setting.tiers,
        relative_error=round(float(np.median(errors)), 4),
        p90_error=round(float(np.quantile(errors, 0.9)), 4),
        cases=len(observed),
        noise=noise,
        noisy=noise.spread > NOISY_SPREAD or waited or noise.drift > NOISY_DRIFT,
        setting={**asdict(dataset.setting), "clock": clock},
        machine=dataset.machine,
    )


def noise_of(dataset: Dataset, clock: Clock = "wall") -> Noise:
    """Return how the machine's speed varied during the measurements, as this clock shows it."""
    measured = [one.measured for one in dataset.measurements]
    # This case is measured several times in a session.
    reference = (one for one in dataset.measurements if one.case.kind == "reference")
    again = [step_s(times, clock) for _, times in repeated(reference)]
    waits = [m.seconds("wall") / max(m.seconds("cpu"), 1e-12) - 1 for m in measured]
    # Waiting of several ranks says nothing, as they also wait for each other.
    alone = dataset.setting.ranks == 1 and dataset.setting.device == "cpu"
    return Noise(
        spread=round(statistics.median(m.spread(clock) for m in measured), 4),
        drift=round((max(again) - min(again)) / statistics.median(again), 4) if again else 0.0,
        wait=round(max(0.0, statistics.median(waits)), 4) if alone else 0.0,
    )


def _held_out_errors(observed: Sequence[Observation]) -> Float:
    """Return the relative errors of cases, each from a fit without the case's workload."""
    names = dict.fromkeys(one.case.workload for one in observed)
    fold_of = {name: n % _FOLDS for n, name in enumerate(names)}
    folds = np.array([fold_of[one.case.workload] for one in observed])
    errors = np.zeros(len(observed))
    for fold in set(folds.tolist()):
        kept = [one for one, n in zip(observed, folds, strict=True) if n != fold]
        left = [one for one, n in zip(observed, folds, strict=True) if n == fold]
        if not kept:
            continue
        times = np.array([one.seconds for one in left])
        errors[folds == fold] = np.abs(predicted_s(left, fit(kept)) - times) / times
    return errors


def _error_bars(observed: Sequence[Observation]) -> tuple[Float, Float]:
    """Return the range of each constant in nine of ten fits to resampled workloads."""
    by_workload: dict[str, list[Observation]] = defaultdict(list)
    for one in observed:
        by_workload[one.case.workload].append(one)
    names = list(by_workload)
    rng = np.random.default_rng(0)
    fits = []
    for _ in range(_RESAMPLES):
        drawn: npt.NDArray[np.int64] = rng.integers(len(names), size=len(names))
        fits.append(fit([one for n in drawn for one in by_workload[names[n]]]))
    constants = np.stack(fits)
    return np.quantile(constants, 0.05, axis=0), np.quantile(constants, 0.95, axis=0)
