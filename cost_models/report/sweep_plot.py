"""The picture of `placer sweep --plot`."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cost_models.sweep.run import Sweep
from placer.errors import PlacerError
from placer.report.picture import INK, MARKERS, MUTED, SERIES, grid_behind, picture, plain_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS, _SHAPES = (*SERIES, INK), (*MARKERS, "p")
"""Of nine placements; the shapes tell lines apart without colour."""
_NONE = "#ffffff"
_LEGEND_POINTS = 8
_LEGEND_INCHES, _LINE_INCHES = 1.2, 0.17
"""Width of the longest name with its colour, and height of a line, at so many points."""
_MOST_GRID_AXES = 2


def plot_sweep(sweep: Sweep, path: str | os.PathLike[str]) -> None:
    """Draw throughput over each axis, and maps of the fastest placement; png, pdf or svg.

    One axis at a time: a row of panels per machine, and below them, for each axis, which placement
    is the fastest on which machine. A grid of two axes: such a map of both for each machine.

    Raises
    ------
    BackendError
        If matplotlib is missing.
    PlacerError
        If nothing is possible, a grid has other than two axes, the ending is another one, or the
        file cannot be written.
    """
    if not any(point.samples_per_s for point in sweep.points):
        raise PlacerError("there is nothing to draw: no placement is possible")
    if sweep.grid and len(sweep.axes) != _MOST_GRID_AXES:
        raise PlacerError(
            f"--plot draws a grid of two axes, not of {len(sweep.axes)}; vary two, or leave --grid"
        )
    colours = {
        name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(sweep.placements)
    }
    machines = len(sweep.platforms)
    if sweep.grid:
        columns, rows = map(len, sweep.axes.values())
        inches = max(7.0, 0.8 + machines * (0.8 + 0.45 * columns)), 1.4 + 0.35 * rows
    else:
        inches = 1.2 + 2.5 * len(sweep.axes), 1.0 + 2.3 * machines
    with picture(path, inches, font_size=8, dpi=130) as figure:
        draw = _draw_grid if sweep.grid else _draw_axes
        draw(figure, sweep, colours)
        _legend(figure, colours)


def _legend(figure: "Figure", colours: Mapping[str, str]) -> None:
    """Write names and colours below the panels, in as many lines as the width takes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=shape, linewidth=3, markersize=7, label=name)
        for (name, colour), shape in zip(colours.items(), itertools.cycle(_SHAPES), strict=False)
    ]
    across = min(len(handles), max(1, int(figure.get_figwidth() / _LEGEND_INCHES)))
    lines = math.ceil(len(handles) / across)
    figure.set_figheight(figure.get_figheight() + _LINE_INCHES * (lines - 1))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / lines),
        frameon=False,
        labelcolor=INK,
        fontsize=_LEGEND_POINTS,
    )


def _draw_axes(figure: "Figure", sweep: Sweep, colours: Mapping[str, str]) -> None:
    machines = [one.name for one in sweep.platforms]
    panels = figure.subplots(
        len(machines) + 1,
        len(sweep.axes),
        squeeze=False,
        height_ratios=[*[2.0] * len(machines), 0.5 + 0.25 * len(machines)],
    )
    for column, (axis, values) in enumerate(sweep.axes.items()):
        for panel, machine in zip(panels[:-1, column], machines, strict=True):
            _draw_lines(panel, sweep, machine, axis, colours)
            if column == 0:
                panel.set_ylabel(f"{machine}\nsamples/s", color=INK)
        names = [[_winner(sweep, machine, {axis: v}) for v in values] for machine in machines]
        below = panels[-1, column]
        _draw_map(below, names, colours)
        below.set_xticks(range(len(values)), [_short(v) for v in values], rotation=45)
        below.set_yticks(range(len(machines)), machines if column == 0 else [""] * len(machines))
        below.set_xlabel(f"{axis}: fastest", color=INK)


def _draw_grid(figure: "Figure", sweep: Sweep, colours: Mapping[str, str]) -> None:
    machines = [one.name for one in sweep.platforms]
    (across, columns), (down, rows) = sweep.axes.items()
    panels = figure.subplots(1, len(machines), squeeze=False)
    for panel, machine in zip(panels[0], machines, strict=True):
        names = [[_winner(sweep, machine, {across: x, down: y}) for x in columns] for y in rows]
        _draw_map(panel, names, colours)
        panel.set_title(machine, color=INK)
        panel.set_xticks(range(len(columns)), [_short(value) for value in columns], rotation=45)
        panel.set_yticks(range(len(rows)), [_short(value) for value in rows])
        panel.set_xlabel(across, color=MUTED)
        panel.set_ylabel(down, color=MUTED)


def _winner(sweep: Sweep, machine: str, varied: Mapping[str, float]) -> str | None:
    ranked = sweep.ranked(machine, varied)
    return ranked[0].placement if ranked else None


def _draw_lines(
    panel: "Axes", sweep: Sweep, machine: str, axis: str, colours: Mapping[str, str]
) -> None:
    for placement in reversed(sweep.placements):  # Of equals, the first is on top.
        line = [
            (point.varied[axis], point.samples_per_s)
            for point in sweep.points
            if (point.platform, point.placement) == (machine, placement)
            and axis in point.varied
            and point.samples_per_s
        ]
        if line:
            across, up = zip(*line, strict=True)
            shape = _SHAPES[sweep.placements.index(placement) % len(_SHAPES)]
            panel.plot(
                across, up, color=colours[placement], linewidth=1.3, marker=shape, markersize=4
            )
    values = sweep.axes[axis]
    if min(values) > 0:
        panel.set_xscale("log")
    panel.set_yscale("log")
    panel.minorticks_off()
    panel.set_xticks(values, [_short(value) for value in values], rotation=45)
    low, high = panel.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    panel.set_yticks(inside, [_short(tick) for tick in inside])
    grid_behind(panel, linewidth=0.6)
    plain_panel(panel)


def _draw_map(
    panel: "Axes", names: Sequence[Sequence[str | None]], colours: Mapping[str, str]
) -> None:
    """Cells in the colour of the placement that is the fastest; none where nothing is possible."""
    from matplotlib.colors import to_rgb

    panel.imshow(
        [[to_rgb(colours[name] if name else _NONE) for name in row] for row in names],
        aspect="auto",
        interpolation="nearest",
    )
    plain_panel(panel, INK)


def _short(value: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale and (value / scale * 10).is_integer():
            return f"{value / scale:g}{unit}"
    return f"{value:g}"
