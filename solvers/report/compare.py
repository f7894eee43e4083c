"""Reports and pictures of `placer compare` and `placer fleet`."""

import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from placer.errors import PlacerError
from placer.report import section as form
from placer.report.picture import BOUND, INK, MUTED, SKY, STEP, picture, plain_grid
from placer.report.section import Column, Report, Row, Section, attributes, columns
from placer.units import format_bytes, format_seconds, significant
from solvers.analysis.compare import Cheapest, CompareRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_FIGURES = columns(
    step_time_s="step time", gap="gap", hbm_lookup_share="from HBM", solve_s="solved in"
)


def _compared(row: CompareRow) -> Row:
    """Return the row's values that describe solvers, by name, without those of machines."""
    names = [one.name for one in fields(CompareRow)]
    return attributes(row, *names[: names.index("gpus")])


def compare_report(rows: Sequence[CompareRow], title: str = "Comparison") -> Report:
    """Report the rows, each compared with the best of its machine, budget and cost model."""
    best: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if row.step_time_s is not None:
            key = (row.topology, row.hbm_budget_bytes, row.cost_model)
            best[key] = min(row.step_time_s, best.get(key, row.step_time_s))
    on_drives = any(row.ssd_used_bytes for row in rows)
    values = []
    for row in rows:
        lead = best.get((row.topology, row.hbm_budget_bytes, row.cost_model))
        known = {**_compared(row), **(attributes(row, "ssd_used_bytes") if on_drives else {})}
        values.append({**known, "ratio_to_best": form.ratio(row.step_time_s, lead)})
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
        *([Column("ssd_used_bytes", "SSD", spare=True)] if on_drives else []),
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
    """Draw each solver's step time and bound, in a panel per machine, budget and cost model.

    Raises a `PlacerError` if no row has a plan. See `picture` for formats of the file and for other
    errors.
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
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        ratios = {"height_ratios": [n + 0.6 for n in heights], "width_ratios": [1.0, 0.55]}
        how: Any = {"squeeze": False, "sharex": "col", "sharey": "row", **ratios}
        axes = figure.subplots(len(panels), 2, **how)
        widest = max(row.step_time_s for row in rows if row.step_time_s is not None)
        scales = {1.0: "s", 1e3: "ms", 1e6: "us"}
        scale = next((one for one in scales if widest * one >= 1), 1e6)
        for (bars, figures), (key, members) in zip(axes, panels.items(), strict=True):
            _draw_bars(bars, key, members, scale)
            _write_figures(figures, members)
        axes[-1][0].set_xlabel(f"step time in {scales[scale]}, of the slowest GPU", color=MUTED)
        axes[0][0].set_xlim(0, widest * scale * 1.02)
        look: Any = {"ncols": 3, "frameon": False, "labelcolor": INK}
        line = Line2D([], [], color=BOUND, linewidth=2, label="proven bound")
        boxes = Patch(color=STEP, label="best"), Patch(color=SKY, label="others")
        figure.legend(handles=[*boxes, line], loc="outside upper right", **look)


def _draw_bars(
    axis: "Axes", key: tuple[str, ...], members: Sequence[CompareRow], scale: float
) -> None:
    best = min((row.step_time_s for row in members if row.step_time_s is not None), default=None)
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
    """Write the figures of each row in columns next to its bar."""
    axis.set_axis_off()
    axis.set_xlim(0, len(_FIGURES))
    style: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9}
    for number, column in enumerate(_FIGURES):
        axis.text(number + 0.95, -0.72, str(column.title), color=MUTED, **style)
        for place, row in enumerate(members):
            words = column.cell(asdict(row))
            axis.text(number + 0.95, place, words, color=INK, **style)


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
    values: list[Row] = []
    for row in rows:
        more = {"assumed": ", ".join(row.assumed), **attributes(row, "detail", "least_cost")}
        known = {"machine": row.topology, **attributes(row, *_OF_MACHINES)}
        cost = {"cost": row.cost_per_billion_samples}
        values.append({**known, **cost, **more, "answer": row is answer.row})
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
        "rivals": list(answer.rivals),
        "without_price": list(answer.without_price),
    }
    section = Section("fleet", "Machines", shown, tuple(values))
    return Report(title, (section,), facts, tuple(_words(answer, within_s)))


def _words(answer: Cheapest, within_s: float) -> list[str]:
    """Return the answer in sentences."""
    row, limit = answer.row, _hours(within_s)
    if row is None:
        words = [f"no machine with a price trains a billion samples in {limit}"]
    else:
        rivals = ", ".join(answer.rivals)
        cost, hours = form.number(row.cost_per_billion_samples or 0.0), _hours(row.train_s or 0.0)
        words = [
            f"cheapest in {limit} for a billion samples: {row.topology}, {cost} dollars, {hours}",
            f"a better plan, if there is one, could be cheaper on {rivals}"
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
