"""Time to solve as tables × GPUs grow tenfold from rung to rung."""

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from _problems import SCALE, Case, pick
from _runs import (
    Claim,
    Effort,
    Measured,
    Save,
    case_record,
    describe,
    print_table,
    shown_bytes,
    shown_percent,
    shown_s,
    solve_apart,
)

GROWTH = 15.0
"""Most that ten times as large a problem may take longer."""

PROCEDURES = {
    # To its end: a limit that it does not reach.
    "greedy-cost": Effort(600.0, gap=1e-4),
    # Until a plan is proven within 5%.
    "auto": Effort(60.0, gap=0.05),
}

Point = tuple[int, Measured]


def run(
    options: argparse.Namespace, solvers: Sequence[str], save: Save, plot: Path | None
) -> tuple[list[dict[str, object]], list[Claim]]:
    """Run the part: a ladder of problems for each amount of HBM, and a plot of both."""
    records: list[dict[str, object]] = []
    claims: list[Claim] = []
    curves: dict[str, list[Point]] = {}
    for title, cases in SCALE.items():
        for case in pick(cases, options.only, options.quick):
            problem = case.problem()
            size = len(problem.profile) * len(problem.topology.gpus)
            print(f"\n{describe(case, problem)}", flush=True)
            measured = []
            for solver, effort in PROCEDURES.items():
                if solver not in solvers:
                    continue
                runs = [
                    one
                    for seed in range(options.runs)
                    for one in solve_apart(
                        case,
                        problem,
                        [solver],
                        Effort(effort.time_limit_s, effort.gap, seed, options.threads),
                    )
                ]
                measured.append(Measured(solver, tuple(runs)))
                curves.setdefault(f"{solver}, {title}", []).append((size, measured[-1]))
            _print(measured)
            records.append(
                case_record(case, problem)
                | {"ladder": title, "size": size, "solvers": [one.to_json() for one in measured]}
            )
            save(records)
    for name, points in curves.items():
        claims += [_claim(name, low, high) for low, high in pairwise(points)]
    if plot is not None and any(len(points) > 1 for points in curves.values()):
        _plot(curves, plot)
    return records, claims


def cases() -> tuple[Case, ...]:
    """All rungs of all ladders."""
    return tuple(case for ladder in SCALE.values() for case in ladder)


def _print(measured: Sequence[Measured]) -> None:
    headers = ("solver", "step time", "bound", "gap", "solved in", "peak", "runs", "waits for")
    rows = [
        (
            one.solver,
            shown_s(one.step_time_s),
            shown_s(one.bound_s),
            shown_percent(one.gap),
            f"{one.seconds:.2f} s",
            shown_bytes(one.peak_bytes),
            str(len(one.runs)),
            one.last.binds or one.last.reason,
        )
        for one in measured
    ]
    print_table(headers, rows)
    for one in measured:
        if one.last.fault:
            print(f"  {one.solver}: {one.last.fault}")


def _claim(name: str, low: Point, high: Point) -> Claim:
    """Whether a rung takes at most `GROWTH` times as long as the one below per tenfold size."""
    text = f"{name}: {low[0]:,} to {high[0]:,} tables × GPUs within {GROWTH:g}x per 10x"
    if not (low[1].solved and high[1].solved):
        return Claim(text, False, "not solved")
    exponent = math.log(high[1].seconds / low[1].seconds) / math.log(high[0] / low[0])
    figures = f"{low[1].seconds:.2f} s to {high[1].seconds:.2f} s, {10**exponent:.1f}x"
    return Claim(text, 10**exponent <= GROWTH, figures)


def _plot(curves: dict[str, list[Point]], path: Path) -> None:
    """Seconds over size, both logarithmic, beside the growth that is the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in curves.items():
        solved = [(size, one.seconds) for size, one in points if one.solved]
        axes.plot(*zip(*solved, strict=True), marker="o", label=name)
    sizes = [size for points in curves.values() for size, _ in points]
    start = min(one.seconds for points in curves.values() for _, one in points)
    ends = (min(sizes), max(sizes))
    guide = [start * (size / ends[0]) ** math.log10(GROWTH) for size in ends]
    axes.plot(ends, guide, linestyle=":", color="gray", label=f"{GROWTH:g}x per 10x")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tables × GPUs",
        ylabel="seconds to solve",
        title="Time to solve as tables and GPUs grow together",
    )
    axes.legend()
    axes.grid(which="both", alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"\nplot: {path}")
