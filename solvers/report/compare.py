"""`placer compare`: machines × budgets × cost models × solvers on one workload, and a picture."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from placer.errors import PlacerError
from placer.report import section as form
from placer.report.picture import BOUND, INK, MUTED, SKY, STEP, picture, plain_grid
from placer.report.section import Column, Report, Section, columns
from placer.units import format_bytes, format_seconds
from solvers.analysis.compare import CompareRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIGURES = ("step time", "gap", "from HBM", "solved in")


def compare_report(rows: Sequence[CompareRow], title: str = "Comparison") -> Report:
    """Report the rows, each beside the best of its machine, budget and cost model."""
    best: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if row.step_time_s is not None:
            key = (row.topology, row.hbm_budget_bytes, row.cost_model)
            best[key] = min(row.step_time_s, best.get(key, row.step_time_s))
    values = []
    for row in rows:
        lead = best.get((row.topology, row.hbm_budget_bytes, row.cost_model))
        values.append({**asdict(row), "ratio_to_best": form.ratio(row.step_time_s, lead)})
    models = {row.cost_model for row in rows}
    without_plan = any(row.step_time_s is None for row in rows)
    several = len({row.topology for row in rows}) > 1
    priced = any(row.price_per_hour is not None for row in rows)
    shown = (
        *(columns(topology="machine") if several else ()),
        *columns(hbm_budget_bytes="HBM/GPU", solver="solver"),
        *(columns(cost_model="cost model") if len(models) > 1 else ()),
        *columns(status="status", step_time_s="step"),
        Column("ratio_to_best", "vs best", form.times, spare=True),
        *(columns(samples_per_s="samples/s") if several or priced else ()),
        Column("cost_per_billion_samples", "cost/1G", form.number),
        *columns(gap="gap", solve_s="solve"),
        Column("hbm_used_bytes", "HBM", spare=True),
        Column("dram_used_bytes", "DRAM", spare=True),
        Column("balance", "balance", form.fraction, spare=True),
        Column("hbm_lookup_share", "from HBM"),
        *([Column("detail", "detail", wraps=True)] if without_plan else ()),
    )
    facts = {"cost_model": next(iter(models))} if len(models) == 1 else {}
    words = ["steps are embeddings alone", "steps have dense layers"]
    kinds = {row.dense_s is not None for row in rows if row.step_time_s is not None}
    headline = (
        *(f"cost model {name}" for name in facts.values()),
        *(words[known] for known in sorted(kinds)),
    )
    section = Section("comparison", "Placements", shown, tuple(values))
    return Report(title, (section,), headline=headline)


def plot_compare(rows: Sequence[CompareRow], path: str | os.PathLike[str]) -> None:
    """Draw the step time of each solver and its bound, one panel per machine, budget and model.

    Raises
    ------
    PlacerError
        If no row has a plan; see `picture` for other errors, and for formats of the file.
    """
    if all(row.step_time_s is None for row in rows):
        raise PlacerError("there is nothing to draw: no solver found a plan")
    several = len({row.topology for row in rows}) > 1
    panels: dict[tuple[str, ...], list[CompareRow]] = {}
    for row in rows:
        machine = (row.topology,) if several else ()
        budget = f"{format_bytes(row.hbm_budget_bytes)} of HBM per GPU"
        panels.setdefault((*machine, budget, row.cost_model), []).append(row)
    heights = [len(members) for members in panels.values()]
    inches = 0.9 + sum(0.42 * height + 0.75 for height in heights)
    with picture(path, (10, inches)) as figure:
        axes = figure.subplots(
            len(panels),
            2,
            squeeze=False,
            sharex="col",
            sharey="row",
            height_ratios=[height + 0.6 for height in heights],
            width_ratios=[1.0, 0.55],
        )
        widest = max(row.step_time_s for row in rows if row.step_time_s is not None)
        scale, unit = _unit(widest)
        for (bars, figures), (key, members) in zip(axes, panels.items(), strict=True):
            _draw_bars(bars, key, members, scale)
            _write_figures(figures, members)
        axes[-1][0].set_xlabel(f"step time in {unit}, of the slowest GPU", color=MUTED)
        axes[0][0].set_xlim(0, widest * scale * 1.02)
        figure.legend(
            handles=_legend(), loc="outside upper right", ncols=3, frameon=False, labelcolor=INK
        )


def _unit(longest_s: float) -> tuple[float, str]:
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if longest_s * scale >= 1:
            return scale, unit
    return 1e6, "us"


def _draw_bars(
    axis: "Axes", key: tuple[str, ...], members: Sequence[CompareRow], scale: float
) -> None:
    reached = [row.step_time_s for row in members if row.step_time_s is not None]
    best = min(reached, default=None)
    for place, row in enumerate(members):
        if row.step_time_s is None:
            across = axis.get_yaxis_transform()
            words = row.status.replace("_", " ")
            axis.text(0.01, place, words, va="center", color=MUTED, transform=across)
            continue
        color = STEP if row.step_time_s == best else SKY
        axis.barh(place, row.step_time_s * scale, height=0.62, color=color)
        if row.bound_s:
            ends = [place - 0.38, place + 0.38]
            axis.plot([row.bound_s * scale] * 2, ends, color=BOUND, linewidth=2)
    axis.set_ylim(-0.5, len(members) - 0.5)
    axis.set_yticks(range(len(members)), [row.solver for row in members], color=INK)
    axis.invert_yaxis()
    axis.set_title(" · ".join(key), loc="left", fontsize=11, fontweight="bold", color=INK)
    plain_grid(axis, axis="x")
    axis.tick_params(axis="y", labelcolor=INK)


def _write_figures(axis: "Axes", members: Sequence[CompareRow]) -> None:
    """Write the figures of each row in columns, beside its bar."""
    axis.set_axis_off()
    axis.set_xlim(0, len(_FIGURES))
    for column, heading in enumerate(_FIGURES):
        style: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9}
        axis.text(column + 0.95, -0.72, heading, color=MUTED, **style)
        for place, row in enumerate(members):
            axis.text(column + 0.95, place, _figures(row)[column], color=INK, **style)


def _figures(row: CompareRow) -> tuple[str, ...]:
    shown = (
        (format_seconds, row.step_time_s),
        (form.share, row.gap),
        (form.share, row.hbm_lookup_share),
        (format_seconds, row.solve_s),
    )
    return tuple("–" if value is None else show(value) for show, value in shown)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=STEP, label="best"),
        Patch(color=SKY, label="others"),
        Line2D([], [], color=BOUND, linewidth=2, label="proven bound"),
    ]
