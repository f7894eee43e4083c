"""Reports and the picture of `placer sweep`: the fastest placements of models and machines."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cost_models.sweep.run import Point, Sweep
from placer.errors import PlacerError
from placer.report import section as form
from placer.report.picture import INK, MARKERS, SERIES, picture, plain_grid
from placer.report.section import (
    Column,
    Report,
    Row,
    Section,
    attributes,
    columns,
    grouped,
    table_of,
)
from placer.units import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_LOOKS = [*zip((*SERIES, INK), (*MARKERS, "p"), strict=True)]
"""Colours and markers of nine placements. Markers tell lines apart without colours."""
_LEGEND_POINTS, _LEGEND_INCHES = 8, 1.2
"""Font size of the legend, and the width of its longest entry."""


def sweep_report(sweep: Sweep) -> Report:
    """Report all points and each case's fastest placement, for JSON and CSV."""
    points: list[Row] = [_point_row(point) for point in sweep.points]
    facts: Row = {
        "cost_model": sweep.cost_model,
        "base": asdict(sweep.base),
        "axes": {axis: list(values) for axis, values in sweep.axes.items()},
        "grid": sweep.grid,
        "placements": list(sweep.placements),
        "platforms": [{"name": one.name, "sources": dict(one.sources)} for one in sweep.platforms],
    }
    all_points = Section("points", "Points", (), tuple(points))
    winners = Section("winners", "Fastest placements", (), tuple(_winner_rows(sweep)))
    return Report("Sweep", (all_points, winners), facts)


def sweep_tables(sweep: Sweep) -> Report:
    """Report samples per second by machine and placement, as tables for people."""
    sections: list[Section] = []
    winners = {(row["platform"], row["varied"]): row for row in _winner_rows(sweep)}
    cases = grouped(sweep.points, _case).values()
    for platform in sweep.platforms:
        rows: list[Row] = [
            winners[platform.name, _words(points[0].varied)]
            | {one.placement: one.samples_per_s for one in points}
            for points in cases
            if points[0].platform == platform.name
        ]
        shown = (
            Column("varied", "model"),
            *columns(form.count, **{name: name for name in sweep.placements}),
            Column("winner", "fastest"),
            Column("lead", "ahead by", form.times, spare=True),
            Column("waits_for", "waits for", spare=True),
        )
        title = f"{platform.name}: samples/s by placement"
        sections.append(Section(platform.name, title, shown, tuple(rows)))
    if len(sweep.platforms) > 1:
        sections.append(_machines(sweep, winners))
    sections.append(_impossible(sweep))
    base = (f"{axis} {significant(value, 6)}" for axis, value in asdict(sweep.base).items())
    return Report(
        "Sweep over placements",
        tuple(sections),
        headline=(
            f"what --set and --vary leave as it is: {', '.join(base)}",
            f"cost model {sweep.cost_model}; remote needs more machines: it is called the fastest "
            "only where nothing else fits",
        ),
    )


def _point_row(point: Point) -> Row:
    lacks = point.shortage
    return {
        **attributes(point, "platform", "placement"),
        "varied": _words(point.varied),
        **asdict(point.setting),
        "feasible": point.samples_per_s is not None,
        **attributes(point, "step_time_s", "samples_per_s"),
        "waits_for": point.waits_for or None,
        "hbm_lookup_share": point.hbm_lookup_share,
        "short_device": getattr(lacks, "device", None),
        "short_resource": getattr(lacks, "resource", None),
        "short_bytes": getattr(lacks, "short_bytes", None),
        **attributes(point, "extra_servers", "detail"),
    }


def _case(point: Point) -> tuple[object, ...]:
    """Return the key of a case, in which placements are compared: machine and model."""
    return point.platform, *point.varied.items()


def _words(case: Mapping[str, float]) -> str:
    words = {axis: significant(value, 6).replace(",", "") for axis, value in case.items()}
    return " ".join(f"{axis}={value}" for axis, value in words.items())


def _winner_rows(sweep: Sweep) -> list[dict[str, Any]]:
    rows = []
    for first_of_case, *_ in grouped(sweep.points, _case).values():
        platform, case = first_of_case.platform, first_of_case.varied
        ranked = sweep.ranked(platform, case)
        first = next(iter(ranked), None)
        best = getattr(first, "samples_per_s", None)
        # If all rows fit in HBM, several placements are equal: the runner-up must be slower.
        later = (one for one in ranked if (one.samples_per_s or 0.0) < (best or 0.0) * (1 - 1e-9))
        second = next(later, None)
        rows.append(
            {
                "platform": platform,
                "varied": _words(case),
                **dict.fromkeys(sweep.axes, None),
                **case,
                "winner": getattr(first, "placement", None),
                "samples_per_s": best,
                "waits_for": getattr(first, "waits_for", None),
                "runner_up": getattr(second, "placement", None),
                "lead": form.ratio(best, getattr(second, "samples_per_s", None)),
            }
        )
    return rows


def _machines(sweep: Sweep, winners: Mapping[tuple[Any, Any], Row]) -> Section:
    rows: dict[str, dict[str, str | None]] = {}
    for (machine, case), row in winners.items():
        words = row["winner"] and f"{form.count(row['samples_per_s'])} ({row['winner']})"
        rows.setdefault(case, {"varied": case})[machine] = words
    names = [one.name for one in sweep.platforms]
    shown = (Column("varied", "model"), *columns(**{name: name for name in names}))
    title = "The fastest placement of each machine"
    return Section("machines", title, shown, tuple(rows.values()))


def _impossible(sweep: Sweep) -> Section:
    """List placements that are not possible: in which cases, and why in the last of them."""
    points = (one for one in sweep.points if one.samples_per_s is None)
    total = len(grouped(sweep.points, _case)) // max(1, len(sweep.platforms))
    rows = [
        (
            *key,
            "all" if len(of) == total else ", ".join(_words(p.varied) for p in of),
            of[-1].detail,
        )
        for key, of in grouped(points, attrgetter("platform", "placement")).items()
    ]
    shown = (
        *columns(platform="machine", placement="placement"),
        Column("cases", "model", wraps=True),
    )
    why = Column("detail", "why not", wraps=True)
    return table_of(rows, "impossible", "Not possible", *shown, why)


def plot_sweep(sweep: Sweep, path: str | os.PathLike[str]) -> None:
    """Draw throughput over each axis, with a row of panels for each machine.

    Raises a `PlacerError` if nothing is possible, or the sweep is a grid; see `picture` for other
    errors.
    """
    if not any(point.samples_per_s for point in sweep.points):
        raise PlacerError("there is nothing to draw: no placement is possible")
    if sweep.grid:
        raise PlacerError("--plot draws one axis at a time: leave --grid, or take --format csv")
    machines = [one.name for one in sweep.platforms]
    inches = 1.2 + 2.5 * len(sweep.axes), 1.2 + 2.3 * len(machines)
    with picture(path, inches, font_size=8, dpi=130) as figure:
        panels = figure.subplots(len(machines), len(sweep.axes), squeeze=False)
        for column, axis in enumerate(sweep.axes):
            for panel, machine in zip(panels[:, column], machines, strict=True):
                _draw_lines(panel, sweep, machine, axis)
            panels[-1, column].set_xlabel(axis, color=INK)
        for panel, machine in zip(panels[:, 0], machines, strict=True):
            panel.set_ylabel(f"{machine}\nsamples/s", color=INK)
        lines = {line.get_label(): line for panel in panels.flat for line in panel.lines}
        _legend(figure, [lines[name] for name in sweep.placements if name in lines])


def _legend(figure: "Figure", lines: "Sequence[Line2D]") -> None:
    """Write the names of lines below the panels, as many beside each other as fit."""
    across = max(1, int(figure.get_figwidth() / _LEGEND_INCHES))
    look: Any = {"frameon": False, "labelcolor": INK, "fontsize": _LEGEND_POINTS}
    figure.legend(handles=lines, ncols=across, loc="outside lower center", **look)


def _draw_lines(panel: "Axes", sweep: Sweep, machine: str, axis: str) -> None:
    from matplotlib.ticker import LogLocator

    looks = [*zip(sweep.placements, itertools.cycle(_LOOKS), strict=False)]
    for placement, (colour, shape) in reversed(looks):  # Of equal lines, the first is on top.
        of_line = (p for p in sweep.points if (p.platform, p.placement) == (machine, placement))
        known = (p for p in of_line if axis in p.varied and p.samples_per_s)
        line = [(point.varied[axis], point.samples_per_s) for point in known]
        if line:
            across, up = zip(*line, strict=True)
            look: Any = {"color": colour, "linewidth": 1.3, "marker": shape, "markersize": 4}
            panel.plot(across, up, label=placement, **look)
    values = sweep.axes[axis]
    if min(values) > 0:
        panel.set_xscale("log")
    panel.set_yscale("log")
    panel.minorticks_off()
    panel.set_xticks(values, [_short(value) for value in values], rotation=45)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
    panel.yaxis.set_major_formatter(lambda tick, _: _short(tick))
    plain_grid(panel, linewidth=0.6)


def _short(value: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale and (value / scale * 10).is_integer():
            return f"{value / scale:g}{unit}"
    return f"{value:g}"
