"""How far predictions are off what others have measured, by presets and published figures alone.

    python benchmarks/published.py [--output FOLDER] [--only SOURCE]
    python benchmarks/published.py --fit
    python benchmarks/published.py --markdown

Every row of ``published/*.yaml`` becomes a problem and a plan (`_published`, `_published_plans`),
which `roofline` prices. Printed are, by source and over all rows, the median factor between
prediction and measurement, whichever is larger over the other, and Spearman's rank correlation.
Then constants are fitted to all sources but one and judged on that one, source after source
(`_published_fit`), and public figures of hardware and kernels are held against placer's
(`_published_figures`). Rows go to results/published.json, a picture beside it; docs/published.md
has what follows. ``--fit`` prints the constants of a fit to all sources, ``--markdown`` the page's
tables from the results.
Nothing is measured here: results repeat exactly. Four minutes.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _machine import RESULTS, markdown
from _published import Measurement, sources
from _published_figures import NEAR, Figure, figures
from _published_fit import Asked, Values, as_they_are, ask, fit, left_out
from scipy.stats import spearmanr

from placer.files.atomic import write_text


@dataclass(frozen=True, slots=True)
class Prediction:
    """A measurement beside what the model says of it.

    `predicted_s` is by the constants as they are, `left_out_s` by constants that were fitted to
    other sources alone; `detail` is what the step waits for.
    """

    measurement: Measurement
    predicted_s: float
    left_out_s: float
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
            "left_out_ms": 1e3 * self.left_out_s,
            "detail": self.detail,
        }


def predictions_of(rows: Sequence[Asked], constants: Mapping[str, Values]) -> list[Prediction]:
    """Predictions by the constants as they are, and by those of each source when left out."""
    own = as_they_are()
    return [
        Prediction(
            row.measurement,
            row.predicted_s(own),
            row.predicted_s(constants[row.measurement.source]),
            row.report.bottleneck,
        )
        for row in rows
    ]


def summary(predictions: Sequence[Prediction], *, left_out: bool = False) -> dict[str, Any]:
    """How far predictions are off, and whether they order the measurements."""
    measured = np.array([one.measurement.measured_s for one in predictions])
    predicted = np.array([one.left_out_s if left_out else one.predicted_s for one in predictions])
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


def show_figures(found: Sequence[Figure]) -> None:
    """Figures of hardware and kernels, one a line."""
    print(f"\n{'figure':<62}{'public':>10}{'placer':>10}{'error':>8}")
    for one in found:
        facts, why = one.facts, "" if abs(one.error) <= NEAR else f"  {one.facts.get('reason')}"
        print(f"{facts['what'][:62]:<62}{facts['value']:>10.4g}{one.ours:>10.4g}"
              f"{one.error:>+8.0%}{why}")  # fmt: skip


def tables(results: Mapping[str, Any]) -> str:
    """The tables of docs/published.md."""

    def line(title: str, found: Mapping[str, Any], rows: int) -> tuple[str, ...]:
        own, fitted = found, found["left_out"]
        orders = ["-" if x["spearman"] is None else f"{x['spearman']:.2f}" for x in (own, fitted)]
        return (
            title,
            str(rows),
            f"{own['median_factor']:.2f}",
            orders[0],
            f"{fitted['median_factor']:.2f}",
            f"{fitted['p90_factor']:.2f}",
            orders[1],
        )

    headers = ("source", "rows", "factor", "Spearman", "left out: factor", "P90", "Spearman")
    lines = [line(title, one, one["rows"]) for title, one in results["sources"].items()]
    lines.append(line("**all**", results["all"], results["all"]["rows"]))
    figure_lines = [
        (
            f"[{one['what']}]({one['url']})",
            f"{one['value']:.4g} {one['unit']}".strip(),
            f"{one['placer']:.4g}",
            f"{one['error']:+.0%}",
            one["reason"] if abs(one["error"]) > NEAR else "",
        )
        for one in results["figures"]
    ]
    near = sum(abs(one["error"]) <= NEAR for one in results["figures"])
    return "\n\n".join(
        (
            markdown(headers, lines),
            f"{near} of {len(figure_lines)} within {NEAR:.0%}",
            markdown(("figure", "public", "placer", "error", "why"), figure_lines),
        )
    )


def main() -> None:
    """Predict all rows, fit, print, plot and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only", default="", help="rows of sources whose title has these words")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to all sources")
    parser.add_argument("--markdown", action="store_true", help="print tables of the results")
    options = parser.parse_args()
    if options.markdown:
        print(tables(json.loads((options.output / "published.json").read_text())))
        return
    found = [source for source in sources() if options.only.lower() in source.title.lower()]
    if not found:
        parser.error(f"--only {options.only!r}: no source is called so")
    judged = frozenset(source.title for source in found if "judged" in source.facts)
    rows = [ask(row) for source in found for row in source.rows]
    own = as_they_are()
    if options.only:
        for one in predictions_of(rows, dict.fromkeys((s.title for s in found), own)):
            row = one.measurement
            print(f"  {row.name:<30}{1e3 * row.measured_s:>9.3f} ms measured"
                  f"{1e3 * one.predicted_s:>9.3f} predicted, {one.detail}")  # fmt: skip
        return
    if options.fit:
        fitted = fit([row for row in rows if row.measurement.source not in judged])
        print(json.dumps({name: float(f"{value:.3g}") for name, value in fitted.items()}, indent=1))
        return
    constants = left_out(rows, judged)
    predictions = predictions_of(rows, constants)
    print(f"{'source':<58}{'rows':>5}{'median x':>9}{'P90 x':>8}{'pred/meas':>9}{'Spearman':>10}")
    by_source: dict[str, Any] = {}
    for source in found:
        of_source = [one for one in predictions if one.measurement.source == source.title]
        by_source[source.title] = {
            **source.facts,
            **summary(of_source),
            "left_out": {
                **summary(of_source, left_out=True),
                "constants": constants[source.title],
            },
        }
        show(source.title, by_source[source.title])
        show("  left out of the fit", by_source[source.title]["left_out"])
    overall = {**summary(predictions), "left_out": summary(predictions, left_out=True)}
    show("all", overall)
    show("all, each left out of its fit", overall["left_out"])
    figures_found = figures(
        {(p.measurement.source, p.measurement.name): 1e3 * p.predicted_s for p in predictions}
    )
    show_figures(figures_found)
    results = {
        "benchmark": "predicted against published times",
        "all": overall,
        "constants": own,
        "sources": by_source,
        "figures": [one.row() for one in figures_found],
        "rows": [one.row() for one in predictions],
    }
    write_text(options.output / "published.json", json.dumps(results, indent=1, default=str) + "\n")
    plot(predictions, options.output / "published.png")
    print(f"\nrows: {options.output / 'published.json'}")


if __name__ == "__main__":
    main()
