"""What is printed, tabled and plotted of plans for RecShard's models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from _markdown import markdown
from _runs import CLASSIC, print_table

from placer.units import format_seconds

SPLITTING = ("greedy-cost", "auto")
SOLVERS = (*CLASSIC, *SPLITTING)

CASE, BALANCE = ("model", "HBM", "solver"), ("balance: std", "max / mean")
OTHERS = ("counted here", "expected")


def ratios(plans: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """How many times better each splitting solver is than the best classic greedy at each.

    The best is taken for each figure by itself, which no single greedy need reach.
    """
    classic = [plans[name] for name in CLASSIC if name in plans]
    if not classic:
        return {}

    def ratio(worst: float, own: float) -> float | None:
        return worst / own if own > 0 else None

    found: dict[str, dict[str, float | None]] = {}
    for name in SPLITTING:
        if name not in plans:
            continue
        found[name] = {
            figure: ratio(min(read(one) for one in classic), read(plans[name]))
            for figure, read in FIGURES.items()
        }
    return found


FIGURES = {
    "slow_lookups": lambda plan: plan["slow_lookups"],
    "slow_rows": lambda plan: plan["slow_rows"],
    "balance_std": lambda plan: plan["in_place"]["lookups"]["std_s"],
    "balance_max_over_mean": lambda plan: plan["in_place"]["lookups"]["max_over_mean"],
    "lookup_time_in_place": lambda plan: plan["in_place"]["lookups"]["max_s"],
    "lookup_time_staged": lambda plan: plan["staged"]["lookups"]["max_s"],
    "step_time_staged": lambda plan: plan["staged"]["step_time_s"],
}
RATIOS = [figure for figure in FIGURES if figure != "lookup_time_staged"]


def print_plans(plans: Mapping[str, dict[str, Any]]) -> None:
    """The figures of each solver's plan, and how they compare."""
    rows = [
        (
            name,
            f"{plan['slow_lookups']:,.0f}",
            f"{plan['slow_share']:.3%}",
            f"{plan['slow_rows']:,.0f}",
            f"{plan['in_place']['lookups']['std_s'] * 1e3:.3f} ms",
            f"{plan['in_place']['lookups']['max_over_mean']:.3f}",
            format_seconds(plan["in_place"]["lookups"]["max_s"]),
            format_seconds(plan["staged"]["lookups"]["max_s"]),
            format_seconds(plan["staged"]["step_time_s"]),
        )
        for name, plan in plans.items()
    ]
    print_table(
        (
            "solver",
            "slow lookups",
            "share",
            "slow rows",
            "std",
            "max/mean",
            "in place",
            "staged",
            "step",
        ),
        rows,
    )
    for name, found in ratios(plans).items():
        shown = ", ".join(
            f"{figure} {'all' if value is None else f'{value:.2f}x'}"
            for figure, value in found.items()
        )
        print(f"  {name} over the best classic greedy: {shown}")


def tables(report: dict[str, Any]) -> list[str]:
    """The plans, the ratios and the check, as docs/studies.md has them."""
    plans, factors, checks = [], [], []
    published = report["published"]
    factors.append(
        [
            "published",
            "24 GB",
            "RecShard",
            f"{published['slow_access_ratio']:g}x",
            "",
            f"{published['balance_ratio']:g}x",
            "",
            f"{published['throughput_ratio']:g}x",
            "",
        ]
    )
    for case in report["cases"]:
        title = [case["model"].upper(), case["memory"]]
        shown = {"best greedy": [_best(case, figure) for figure in FIGURES]}
        for name in SPLITTING:
            shown[name] = [read(case["plans"][name]) for read in FIGURES.values()]
        for name, (lookups, rows, std, peak, in_place, staged, step) in shown.items():
            share = lookups / case["lookups_per_step"]
            plans.append(
                [*title, name, f"{lookups:,.0f} ({share:.3%})", f"{rows:,.0f}"]
                + [f"{std * 1e3:.2f} ms", f"{peak:.2f}"]
                + [f"{seconds * 1e3:.1f} ms" for seconds in (in_place, staged, step)]
            )
        if not shown["best greedy"][0]:
            continue
        for name, found in case["ratio_to_best_classic"].items():
            cells = [
                "none left" if found[figure] is None else f"{found[figure]:.1f}x"
                for figure in RATIOS
            ]
            factors.append([*title, name, *cells])
        for name, plan in case["plans"].items():
            if "simulated" in plan:
                one = plan["simulated"]
                checks.append(
                    [title[0], name]
                    + [f"{one[key]:,.0f}" for key in ("slow_lookups", "counted_slow_lookups")]
                    + [f"{one['expected_slow_lookups']:,.0f}", f"{one['slow_rows']:,.0f}"]
                    + [f"{one['counted_slow_rows']:,.0f}", f"{one['expected_slow_rows']:,.0f}"]
                )
    return [
        markdown(
            [
                *CASE,
                "slow lookups a step",
                "slow rows",
                *BALANCE,
                "lookups, in place",
                "lookups, staged",
                "step, staged",
            ],
            plans,
            texts=3,
        ),
        markdown(
            [*CASE, "slow lookups", "slow rows", *BALANCE, "lookup time, in place", "step, staged"],
            factors,
            texts=3,
        ),
        markdown(
            ["model", "solver", "lookups: simulator", *OTHERS, "rows: simulator", *OTHERS],
            checks,
            texts=2,
        ),
    ]


def plot(report: dict[str, Any], path: Path) -> None:
    """Lookups of slow memory and predicted step times, where whole tables do not all fit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [case for case in report["cases"] if _best(case, "slow_lookups")]
    figure, panels = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True)
    width = 0.8 / len(SOLVERS)
    for place, solver in enumerate(SOLVERS):
        with_plan = [n for n, case in enumerate(found) if solver in case["plans"]]
        plans = [found[n]["plans"][solver] for n in with_plan]
        at = np.array(with_plan) + (place - (len(SOLVERS) - 1) / 2) * width
        panels[0].bar(at, [100 * plan["slow_share"] for plan in plans], width, label=solver)
        panels[1].bar(at, [1e3 * plan["staged"]["step_time_s"] for plan in plans], width)
    panels[0].set_ylabel("lookups of host memory, %")
    panels[1].set_ylabel("predicted step time, ms")
    panels[0].set_yscale("log")
    for axes in panels:
        axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="upper center", ncols=len(SOLVERS), fontsize=8)
    labels = [f"{case['model'].upper()}\n{case['memory']}" for case in found]
    panels[1].set_xticks(np.arange(len(found)), labels)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _best(case: Mapping[str, Any], figure: str) -> float:
    """The best of the classic greedies at a figure."""
    return min(FIGURES[figure](case["plans"][name]) for name in CLASSIC if name in case["plans"])
