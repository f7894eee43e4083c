"""Predicted against measured step times, for every cost model, on plans that no fit has seen.

    python benchmarks/cost_accuracy.py measure calibration --backend tiered --budget 9min
    python benchmarks/cost_accuracy.py measure test --backend tiered --budget 9min
    python benchmarks/cost_accuracy.py report --backend tiered

`measure` appends to files in benchmarks/results/ and goes on where it ended: call it until it says
that all is measured. They may be compressed then (`gzip -9`), as those that are committed are. The
calibration set is that of `placer calibrate`. The test set is drawn with another seed: 6 workloads
under 50 random plans each, and 100 workloads under one plan each. All are measured `--repeats`
times, minutes apart. A step time is the least of a case's measurements, as whatever else runs only
ever adds time, in bursts of seconds. With `--ranks 2` plans are for two GPUs, trained by two
processes over gloo. `--seed 2 --quick` draws and measures another, smaller test set, and `--seed
11,12,13 --quick` one of three seeds; `measure calibration` with the same seeds is its calibration
set, of the same day.

`report` fits constants to the calibration set alone and predicts the test set. The roofline of this
machine (`--topology auto`), TorchRec's estimators and HugeCTR's formula (its ρ fitted too) get the
one scale factor that suits them best on the calibration set, since none of them claims to know this
machine; TorchRec is asked for the plans that it knows. Errors are relative to the measured time;
Kendall's τ is of the ranking of one workload's plans, the mean over workloads. The regret is what
the plan that a model ranks first takes beyond the one that the first measurement ranks first; both
are timed by the other measurements. The model "measured" is the first measurement itself, compared
with the others: no model can be expected to do better.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _hugectr import hugectr_units
from _machine import RESULTS, machine, slug, versions

from cost_models import Calibrated, CostModel, Roofline, cost_model
from cost_models.calibrated.fit import calibrate
from placer.errors import PlacerError
from placer.files.atomic import write_text
from placer.measurement import Case, Dataset, Measured, Setting, collect, random_cases, repeated
from placer.measurement.cases import resolved, step_s
from placer.measurement.machine import calibration_cases, case_sha256
from placer.topology.topology import Topology
from placer.units import parse_seconds

Float = npt.NDArray[np.float64]
Predict = Callable[[Case], float]
"""Step time of a case, or nan where a model does not know its plan."""

TEST_SEED = 1
RANKED_WORKLOADS, QUICK_WORKLOADS, RANKED_PLANS = 6, 2, 50
SINGLE_WORKLOADS = 100
LEAST_REPEATS = 2

RHOS = np.concatenate(([0.0], np.geomspace(0.01, 1000, 60)))


def unseen_cases(gpus: int, seed: int, *, quick: bool) -> Iterator[Case]:
    """Workloads under many plans each, then many workloads."""
    if quick:
        yield from random_cases(seed, QUICK_WORKLOADS, plans=RANKED_PLANS, gpus=gpus)
        return
    yield from random_cases(seed, RANKED_WORKLOADS, plans=RANKED_PLANS, gpus=gpus)
    yield from random_cases(seed, SINGLE_WORKLOADS, gpus=gpus, first=1000)


def file_of(what: str, setting: Setting, seed: int = TEST_SEED) -> Path:
    """Where measurements of a test set, by its first seed, or of its own calibration set are."""
    ranks = f"-{setting.ranks}-ranks" if setting.ranks > 1 else ""
    drawn = f"-seed-{seed}" if seed != TEST_SEED else ""
    name = f"cost-accuracy-{what}-{slug()}-{setting.backend}{ranks}{drawn}"
    return RESULTS / f"{name}.{'jsonl' if what != 'report' else 'json'}"


def measure(what: str, setting: Setting, options: argparse.Namespace) -> None:
    """Append measurements to the file of a set."""
    if what == "calibration":
        cases = list(calibration_cases(setting))
    else:
        cases = [
            case
            for seed in options.seeds
            for case in unseen_cases(setting.ranks, seed, quick=options.quick)
        ]
    path, repeats = file_of(what, setting, options.seeds[0]), options.repeats
    total, budget_s = len(cases) * repeats, parse_seconds(options.budget)

    def show(done: int) -> None:
        print(f"\r{done} of {total} measured", end="", file=sys.stderr, flush=True)

    done = collect(cases, path, setting, budget_s=budget_s, repeats=repeats, on_case=show)
    print(f"\n{path}: {'all is measured' if done else 'call again to go on'}", file=sys.stderr)


def read(what: str, setting: Setting, seed: int = TEST_SEED) -> Dataset:
    """A set that was measured, compressed or not; another seed's may have no calibration set."""
    path = file_of(what, setting, seed)
    path = path if path.exists() else path.with_name(f"{path.name}.gz")
    if what == "calibration" and seed != TEST_SEED and not path.exists():
        return read(what, setting)
    return Dataset.load(path)


def by_model(model: CostModel, like: Topology) -> Predict:
    """A cost model's step times."""

    def predict(case: Case) -> float:
        try:
            return model.evaluate(case.problem(like), case.plan(like)).step_time_s
        except PlacerError:
            return float("nan")

    return predict


def best_scale(predicted: Float, measured: Float) -> float:
    """The factor of least mean relative error: a weighted median of the ratios."""
    known = np.isfinite(predicted) & (predicted > 0)
    ratios, weights = (measured / predicted)[known], (predicted / measured)[known]
    order = np.argsort(ratios)
    cumulative = np.cumsum(weights[order])
    return float(ratios[order][np.searchsorted(cumulative, cumulative[-1] / 2)])


def scaled(predict: Predict, cases: Sequence[Case], measured: Float) -> tuple[Predict, float]:
    """A model with the factor that suits it best on the calibration set."""
    predicted = np.array([predict(case) for case in cases])
    scale = best_scale(predicted, measured)
    error = np.nanmean(np.abs(predicted * scale - measured) / measured)
    return (lambda case: predict(case) * scale), float(error)


def best_hugectr(cases: Sequence[Case], measured: Float) -> tuple[Predict, float]:
    """HugeCTR's formula with the ρ and the factor of least error on the calibration set."""
    tried = []
    for rho in RHOS.tolist():
        predict, error = scaled(partial(hugectr_units, rho=rho), cases, measured)
        tried.append((error, rho, predict))
    _, rho, predict = min(tried, key=lambda found: found[0])
    return predict, rho


def accuracy(
    predict: Predict, tested: Sequence[tuple[Case, tuple[Measured, ...]]], clock: Any
) -> dict[str, Any]:
    """Errors, τ and regret of a model on the test set, and each prediction."""
    from scipy.stats import kendalltau

    measured = np.array([step_s(times, clock) for _, times in tested])
    predicted = np.array([predict(case) for case, _ in tested])
    known = np.isfinite(predicted)
    errors = (np.abs(predicted - measured) / measured)[known]
    scale = best_scale(predicted, measured) if errors.size else 1.0
    scaled_errors = (np.abs(predicted * scale - measured) / measured)[known]
    groups: dict[str, list[int]] = defaultdict(list)
    for number, (case, _) in enumerate(tested):
        if known[number]:
            groups[case.workload].append(number)
    ranked = {name: np.array(group) for name, group in groups.items() if len(group) >= 20}
    taus = {n: float(kendalltau(predicted[g], measured[g]).statistic) for n, g in ranked.items()}
    regrets = {}
    for name, group in ranked.items():
        first = np.array([tested[number][1][0].seconds(clock) for number in group])
        others = [tested[number][1][1:] or tested[number][1] for number in group]
        again = np.array([step_s(times, clock) for times in others])
        chosen = int(predicted[group].argmin())
        regrets[name] = float(again[chosen] / again[int(first.argmin())] - 1)
    return {
        "cases": int(known.sum()),
        "mape": float(errors.mean()) if errors.size else None,
        "median_error": float(np.median(errors)) if errors.size else None,
        "p90_error": float(np.quantile(errors, 0.9)) if errors.size else None,
        # With the factor that suits the test set: machines are faster on one day than on another.
        "scaled_mape": float(scaled_errors.mean()) if errors.size else None,
        "bias": float(np.median(predicted[known] / measured[known]) - 1) if errors.size else None,
        "tau": float(np.mean(list(taus.values()))) if taus else None,
        "taus": taus,
        "regret": float(np.mean(list(regrets.values()))) if regrets else None,
        "worst_regret": max(regrets.values(), default=None),
        "regrets": regrets,
        "predicted_s": [float(f"{value:.5g}") for value in predicted],
        "measured_s": [float(f"{value:.5g}") for value in measured],
    }


def models(
    calibration: Dataset, clock: Any, like: Topology
) -> tuple[dict[str, Predict], dict[str, Any]]:
    """Every model, ready to predict, and what was fitted."""
    pairs = list(repeated(calibration.measurements))
    cases = [case for case, _ in pairs]
    measured = np.array([step_s(times, clock) for _, times in pairs])
    constants = calibrate(calibration, clock)
    found: dict[str, Predict] = {"calibrated": by_model(Calibrated(constants), like)}
    found["roofline"], _ = scaled(by_model(Roofline(), like), cases, measured)
    try:
        torchrec, _ = scaled(by_model(cost_model("torchrec"), like), cases, measured)
        found["torchrec"] = torchrec
    except (PlacerError, ImportError, IndexError) as error:
        print(f"left out: torchrec: {error}", file=sys.stderr)
    found["hugectr"], rho = best_hugectr(cases, measured)
    fitted = {
        "hugectr_rho": rho,
        "calibration": {
            "cases": constants.cases,
            "relative_error": constants.relative_error,
            "p90_error": constants.p90_error,
            "noise": [constants.noise.spread, constants.noise.drift, constants.noise.wait],
            "noisy": constants.noisy,
            "constants": {name: c.value_s for name, c in constants.constants.items()},
        },
    }
    return found, fitted


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Predicted over measured, a panel for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results), 3.5), sharey=True)
    for axis, (name, result) in zip(np.atleast_1d(axes), results.items(), strict=True):
        measured, predicted = np.array(result["measured_s"]), np.array(result["predicted_s"])
        axis.loglog(measured * 1e3, predicted * 1e3, ".", markersize=3, alpha=0.5)
        ends = np.array([measured.min(), measured.max()]) * 1e3
        axis.plot(ends, ends, color="black", linewidth=0.8)
        tau = "" if result["tau"] is None else f", τ {result['tau']:.2f}"
        axis.set_title(f"{name}\nMAPE {result['mape']:.0%}{tau}")
        axis.set_xlabel("measured ms")
    np.atleast_1d(axes)[0].set_ylabel("predicted ms")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(setting: Setting, options: argparse.Namespace) -> None:
    """Fit, predict, print a table, write JSON and a picture."""
    clock, seed = options.clock, options.seeds[0]
    calibration, test = read("calibration", setting, seed), read("test", setting, seed)
    tested = list(repeated(test.measurements))
    like = Topology.parse("auto", hbm="1GiB")
    found, fitted = models(calibration, clock, like)
    tested = [(case, times) for case, times in tested if len(times) >= LEAST_REPEATS]
    if not tested:
        sys.exit(f"nothing in the test set is measured {LEAST_REPEATS} times yet; go on measuring")
    results = {name: accuracy(predict, tested, clock) for name, predict in found.items()}
    first = {case_sha256(case): times[0].seconds(clock) for case, times in tested}
    later = [(case, times[1:]) for case, times in tested]
    results["measured"] = accuracy(lambda case: first[case_sha256(case)], later, clock)
    print(f"{'model':<12}{'cases':>6}{'MAPE':>8}{'median':>8}{'P90':>8}{'scaled':>8}{'tau':>7}"
          f"{'regret':>9}{'worst':>9}")  # fmt: skip
    for name, r in results.items():
        shown = [f"{r[key]:.1%}" if r[key] is not None else "-" for key in
                 ("mape", "median_error", "p90_error", "scaled_mape", "regret",
                  "worst_regret")]  # fmt: skip
        tau = "-" if r["tau"] is None else f"{r['tau']:.3f}"
        print(f"{name:<12}{r['cases']:>6}{shown[0]:>8}{shown[1]:>8}{shown[2]:>8}{shown[3]:>8}{tau:>7}"
              f"{shown[4]:>9}{shown[5]:>9}")  # fmt: skip
    path = options.output or file_of("report", setting, seed)
    data = {
        "benchmark": "predicted against measured step times of plans that no fit has seen",
        "setting": {
            "backend": setting.backend,
            "ranks": setting.ranks,
            "threads": setting.threads,
            "clock": clock,
        },
        "machine": machine(),
        "measured_on": {"calibration": calibration.machine, "test": test.machine},
        "versions": versions("torch", "numba", "numpy", "scipy", "torchrec"),
        "fitted": fitted,
        "results": results,
    }
    write_text(path, json.dumps(data, indent=1) + "\n")
    plot({n: r for n, r in results.items() if r["mape"] is not None}, path.with_suffix(".png"))
    print(f"\nraw numbers: {path}")


def main() -> None:
    """Measure, or report."""
    parser = argparse.ArgumentParser(description="how far cost models are off")
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument("set", nargs="?", choices=["calibration", "test"])
    parser.add_argument("--backend", default="tiered")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--budget", default="9min")
    parser.add_argument("--repeats", type=int, default=2, help="how often each case is measured")
    parser.add_argument("--seed", default=str(TEST_SEED), help="of the test set; several by commas")
    parser.add_argument("--quick", action="store_true", help="measure two workloads, 50 plans each")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--unpinned", action="store_true", help="let processes change cores")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    options.seeds = tuple(map(int, options.seed.split(",")))
    setting = resolved(
        Setting(options.backend, options.device, options.ranks, pinned=not options.unpinned)
    )
    if options.what == "report":
        report(setting, options)
    elif options.set is None:
        parser.error("measure what: calibration or test?")
    else:
        measure(options.set, setting, options)


if __name__ == "__main__":
    main()
