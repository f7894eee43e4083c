"""Reports and pictures of `placer compare` and `placer fleet`."""

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from placer.errors import PlacerError
from placer.report import section as form
from placer.report.picture import BOUND, INK, MUTED, SKY, STEP, picture, plain_grid
from placer.report.section import Column, Report, Row, Section, attributes, columns, grouped
from placer.units import format_bytes, format_seconds, significant
from solvers.analysis.compare import Cheapest, CompareRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _case(row: CompareRow) -> tuple[str, int, str]:
    """Return a row's machine, budget and cost model; rows with equal ones can be compared."""
    return row.topology, row.hbm_budget_bytes, row.cost_model


def compare_report(rows: Sequence[CompareRow], title: str = "Comparison") -> Report:
    """Report the rows, each compared with the best of its machine, budget and cost model."""
    best = {
        case: min((one.step_time_s for one in same if one.step_time_s is not None), default=None)
        for case, same in grouped(rows, _case).items()
    }
    # Those that describe solvers; those of machines follow.
    names = [one.name for one in fields(CompareRow)]
    names = names[: names.index("gpus")]
    names += ["ssd_used_bytes"] * any(row.ssd_used_bytes for row in rows)
    values = [
        {**attributes(row, *names), "ratio_to_best": form.ratio(row.step_time_s, best[_case(row)])}
        for row in rows
    ]
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
        Column("ssd_used_bytes", "SSD", spare=True),
        Column("balance", "balance", form.fraction, spare=True),
        Column("hbm_lookup_share", "from HBM"),
        *([Column("detail", "detail", wraps=True)] if without_plan else ()),
    )
    headline = [f"cost model {name}" for name in models] if len(models) == 1 else []
    words = ["steps are embeddings alone", "steps have dense layers"]
    kinds = {row.dense_s is not None for row in rows if row.step_time_s is not None}
    headline += [words[known] for known in sorted(kinds)]
    section = Section("comparison", "Placements", shown, tuple(values))
    return Report(title, (section,), headline=tuple(headline))


def plot_compare(rows: Sequence[CompareRow], path: str | os.PathLike[str]) -> None:
    """Draw each solver's step time and bound, in a panel per machine, budget and cost model.

    Raises a `PlacerError` if no row has a plan. See `picture` for formats of the file and for other
    errors.
    """
    if all(row.step_time_s is None for row in rows):
        raise PlacerError("there is nothing to draw: no solver found a plan")
    several = len({row.topology for row in rows}) > 1
    panels = grouped(rows, _case)
    heights = [len(members) + 0.6 for members in panels.values()]
    with picture(path, (10, 0.9 + sum(0.42 * height + 0.5 for height in heights))) as figure:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        how: Any = {"squeeze": False, "sharex": True, "height_ratios": heights}
        axes = figure.subplots(len(panels), **how)[:, 0]
        for axis, ((machine, hbm_bytes, model), members) in zip(axes, panels.items(), strict=True):
            budget = f"{format_bytes(hbm_bytes)} of HBM per GPU"
            title = " · ".join([machine] * several + [budget, model])
            axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
            _draw_bars(axis, members)
        axes[-1].set_xlabel("step time, of the slowest GPU", color=MUTED)
        axes[-1].xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
        look: Any = {"ncols": 3, "frameon": False, "labelcolor": INK}
        line = Line2D([], [], color=BOUND, linewidth=2, label="proven bound")
        boxes = Patch(color=STEP, label="best"), Patch(color=SKY, label="others")
        figure.legend(handles=[*boxes, line], loc="outside upper right", **look)


def _draw_bars(axis: "Axes", members: Sequence[CompareRow]) -> None:
    best = min((row.step_time_s for row in members if row.step_time_s is not None), default=None)
    names = []
    for place, row in enumerate(members):
        if row.step_time_s is None:
            names.append(f"{row.solver}: {row.status.replace('_', ' ')}")
            continue
        names.append(f"{row.solver}: {format_seconds(row.step_time_s)}")
        color = STEP if row.step_time_s == best else SKY
        axis.barh(place, row.step_time_s, height=0.62, color=color)
        if row.bound_s:
            axis.plot([row.bound_s] * 2, [place - 0.38, place + 0.38], color=BOUND, linewidth=2)
    axis.set_ylim(len(members) - 0.5, -0.5)
    axis.set_yticks(range(len(members)), names)
    plain_grid(axis, axis="x")
    axis.tick_params(axis="y", labelcolor=INK)


_OF_MACHINES = (
    "gpus", "hosts", "status", "step_time_s", "bound_s", "gap", "samples_per_s", "train_s",
    "memory_left", "hbm_left_bytes", "price_per_hour", "price_source",
)  # fmt: skip
_HOUR_S = 3600.0
_SOURCES = (
    "prices are list prices, and some constants are assumed: --format json has the source of each"
)


def fleet_report(
    rows: Sequence[CompareRow], answer: Cheapest, within_s: float, title: str
) -> Report:
    """Report machines, and which one trains a billion samples in time for the least money."""
    values = [
        {
            "machine": row.topology,
            **attributes(row, *_OF_MACHINES),
            "cost": row.cost_per_billion_samples,
            "assumed": ", ".join(row.assumed),
            **attributes(row, "detail", "least_cost"),
            "answer": row is answer.row,
        }
        for row in rows
    ]
    without_plan = any(row.step_time_s is None for row in rows)
    shown = (
        Column("machine", "machine"),
        Column("gpus", "GPUs", form.count),
        *columns(step_time_s="step", gap="gap", samples_per_s="samples/s"),
        Column("memory_left", "memory left", form.share),
        Column("price_per_hour", "$/h", form.count),
        Column("train_s", "time/1G", _hours),
        Column("cost", "$/1G", form.number),
        Column("assumed", "assumed", wraps=True, spare=True),
        *([Column("detail", "detail", wraps=True)] if without_plan else ()),
    )
    facts: Row = {
        "within_s": within_s,
        "cheapest": None if answer.row is None else answer.row.topology,
        **{name: list(getattr(answer, name)) for name in ("rivals", "without_price")},
    }
    section = Section("fleet", "Machines", shown, tuple(values))
    return Report(title, (section,), facts, tuple(_words(rows, answer, within_s)))


def _words(rows: Sequence[CompareRow], answer: Cheapest, within_s: float) -> list[str]:
    row, limit = answer.row, _hours(within_s)
    planless = [one for one in rows if one.step_time_s is None and one.topology in answer.rivals]
    better = "a better plan, or a first one" if planless else "a better plan"
    if row is None:
        words = [f"no machine with a price trains a billion samples in {limit}"]
    else:
        rivals = ", ".join(answer.rivals)
        cost, hours = form.number(row.cost_per_billion_samples or 0.0), _hours(row.train_s or 0.0)
        words = [
            f"cheapest in {limit} for a billion samples: {row.topology}, {cost} dollars, {hours}",
            f"{better}, if there is one, could be cheaper on {rivals}"
            if rivals
            else "proven at these prices: no plan makes another machine cheaper",
        ]
    if unknown := ", ".join(answer.without_price):
        words.append(f"fast enough, but without a known price: {unknown}")
    return [*words, _SOURCES]


def _hours(seconds: float) -> str:
    """Format a duration in hours, as ``3.5 h``, or in smaller units below an hour."""
    return f"{significant(seconds / _HOUR_S)} h" if seconds >= _HOUR_S else format_seconds(seconds)


def plot_fleet(drawn: tuple[Sequence[CompareRow], Cheapest], path: str | os.PathLike[str]) -> None:
    """Draw the cost of a billion samples over their training time, machine by machine.

    Raises a `PlacerError` if no machine has a plan and a price. See `picture` for formats and other
    errors.
    """
    rows, answer = drawn
    shown = [
        (row, row.train_s, row.cost_per_billion_samples)
        for row in rows
        if row.train_s is not None and row.cost_per_billion_samples is not None
    ]
    if not shown:
        raise PlacerError("there is nothing to draw: no machine has a plan and a price")
    with picture(path, (9, 5.5)) as figure:
        axis = figure.subplots()
        front = _front(shown)
        axis.plot(*zip(*front, strict=True), color=STEP, linewidth=1, linestyle="--", zorder=1)
        for row, seconds, cost in shown:
            is_best, is_answer = (seconds, cost) in front, row is answer.row
            size, marker = (140, "*") if is_answer else (36, "o" if is_best else "s")
            color = STEP if is_best or is_answer else SKY
            axis.scatter(seconds, cost, s=size, marker=marker, color=color, zorder=2)
            beside: Any = {"xytext": (5, 4), "textcoords": "offset points"}
            axis.annotate(row.topology, (seconds, cost), **beside, fontsize=8, color=INK)
        axis.set(xscale="log", yscale="log")
        axis.xaxis.set_major_formatter(lambda seconds, _: _hours(seconds))
        axis.xaxis.set_minor_formatter(lambda seconds, _: _hours(seconds))
        axis.yaxis.set_major_formatter(lambda dollars, _: form.number(dollars))
        axis.yaxis.set_minor_formatter(lambda dollars, _: form.number(dollars))
        axis.set_xlabel("time for a billion samples", color=MUTED)
        axis.set_ylabel("dollars for a billion samples", color=MUTED)
        plain_grid(axis, which="both")


def _front(shown: Sequence[tuple[CompareRow, float, float]]) -> list[tuple[float, float]]:
    """Return seconds and dollars of machines unless another is both faster and cheaper."""
    front: list[tuple[float, float]] = []
    for seconds, cost in sorted((seconds, cost) for _, seconds, cost in shown):
        if not front or cost < front[-1][1]:
            front.append((seconds, cost))
    return front
