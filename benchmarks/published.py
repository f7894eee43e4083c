"""How far predictions are off what others have measured, by presets and published figures alone.

    python benchmarks/published.py [--output FOLDER] [--only SOURCE]

Every row of ``published/*.yaml`` becomes a problem and a plan (`_published`, `_published_plans`),
which `roofline` prices. Printed are, by source and over all rows, the median factor between
prediction and measurement, whichever is larger over the other, and Spearman's rank correlation.
Rows go to results/published.json, a picture beside it. docs/published.md has what follows from it.
Nothing is measured here: results repeat exactly.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _machine import RESULTS
from _published import Measurement, sources
from _published_plans import plan_of
from scipy.stats import spearmanr

from cost_models import CostModel, cost_model
from placer.files import write_text

FORWARD = ("ids", "copies", "lookup", "outputs")
"""Phases of a step before its dense layers."""

EAGER_STEP_S = {"step": 17.5e-3, "embedding": 1.9e-3}
"""Seconds that a step takes at least where Python launches each kernel: of a DLRM, and of a fused
lookup with its update. Fitted to the sources that say so; trainers differ."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A measurement beside what the model says of it.

    Attributes
    ----------
    predicted_s : float
    detail : str
        What the step waits for.
    """

    measurement: Measurement
    predicted_s: float
    detail: str

    @property
    def factor(self) -> float:
        """Prediction over measurement or its inverse, whichever is at least 1."""
        ratio = self.predicted_s / self.measurement.measured_s
        return max(ratio, 1 / ratio)

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        found = self.measurement
        return {
            "source": found.source,
            "name": found.name,
            "kind": found.kind,
            "machine": found.machine,
            "placement": found.placement,
            "batch_per_gpu": found.batch_size,
            "measured_ms": 1e3 * found.measured_s,
            "predicted_ms": 1e3 * self.predicted_s,
            "factor": self.factor,
            "detail": self.detail,
        }


def predict(measurement: Measurement, model: CostModel) -> Prediction:
    """What the model says of a measurement."""
    problem = measurement.problem()
    report = model.evaluate(problem, plan_of(problem, measurement.placement))
    if measurement.kind == "forward":
        phases = [phase for phase in report.phases if phase.name in FORWARD]
        latency_s = 3 * problem.topology.exchange_latency_s
        return Prediction(
            measurement,
            sum(phase.slowest_s for phase in phases) + latency_s,
            max(phases, key=lambda phase: phase.slowest_s).name,
        )
    least_s = EAGER_STEP_S[measurement.kind] if measurement.eager else 0.0
    if report.step_time_s < least_s:
        return Prediction(measurement, least_s, "kernels that Python launches")
    return Prediction(measurement, report.step_time_s, report.bottleneck)


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """How far predictions are off, and whether they order the measurements."""
    measured = np.array([one.measurement.measured_s for one in predictions])
    predicted = np.array([one.predicted_s for one in predictions])
    factors = np.maximum(predicted / measured, measured / predicted)
    # Three rows or fewer, or equal ones, have no order to speak of.
    ordered = len(predictions) > 3 and np.ptp(measured) > 0 and np.ptp(predicted) > 0
    return {
        "rows": len(predictions),
        "median_factor": float(np.median(factors)),
        "p90_factor": float(np.quantile(factors, 0.9)),
        "worst_factor": float(factors.max()),
        "median_ratio": float(np.median(predicted / measured)),
        "spearman": float(spearmanr(measured, predicted).statistic) if ordered else None,
    }


def show(title: str, found: dict[str, Any]) -> None:
    """One line of the table."""
    order = "-" if found["spearman"] is None else f"{found['spearman']:.3f}"
    print(f"{title[:58]:<58}{found['rows']:>5}{found['median_factor']:>9.2f}"
          f"{found['p90_factor']:>8.2f}{found['median_ratio']:>9.2f}{order:>10}")  # fmt: skip


def plot(predictions: Sequence[Prediction], path: Path) -> None:
    """Predicted over measured, a colour for each source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 6))
    for number, title in enumerate(dict.fromkeys(one.measurement.source for one in predictions)):
        rows = [one for one in predictions if one.measurement.source == title]
        axis.loglog(
            [1e3 * one.measurement.measured_s for one in rows],
            [1e3 * one.predicted_s for one in rows],
            "o^sDv"[number % 5],
            markersize=4,
            label=title,
        )
    ends = np.array([0.2, 500.0])
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.fill_between(ends, ends / 1.5, ends * 1.5, color="black", alpha=0.08, linewidth=0)
    axis.set_xlabel("measured ms")
    axis.set_ylabel("predicted ms")
    axis.set_title("Published measurements; grey: within a factor of 1.5")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Predict all rows, print, plot and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only", default="", help="sources whose title has these words")
    options = parser.parse_args()
    model = cost_model("roofline")
    found = [source for source in sources() if options.only.lower() in source.title.lower()]
    if not found:
        parser.error(f"--only {options.only!r}: no source is called so")
    print(f"{'source':<58}{'rows':>5}{'median x':>9}{'P90 x':>8}{'pred/meas':>9}{'Spearman':>10}")
    predictions: list[Prediction] = []
    by_source: dict[str, Any] = {}
    for source in found:
        rows = [predict(row, model) for row in source.rows]
        by_source[source.title] = {**source.facts, **summary(rows)}
        show(source.title, by_source[source.title])
        predictions += rows
    overall = summary(predictions)
    show("all", overall)
    if options.only:
        for one in predictions:
            row = one.measurement
            print(f"  {row.name:<30}{1e3 * row.measured_s:>9.3f} ms measured"
                  f"{1e3 * one.predicted_s:>9.3f} predicted, {one.detail}")  # fmt: skip
        return
    results = {
        "benchmark": "predicted against published times",
        "all": overall,
        "sources": by_source,
        "rows": [one.row() for one in predictions],
    }
    write_text(options.output / "published.json", json.dumps(results, indent=1, default=str) + "\n")
    plot(predictions, options.output / "published.png")
    print(f"\nrows: {options.output / 'published.json'}")


if __name__ == "__main__":
    main()
