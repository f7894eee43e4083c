"""The charts of a page, each with a text, a table of its figures, and traces for Plotly."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cost_models import CostReport
from placer.report import section as form
from placer.report.picture import BOUND, SERIES, STEP
from placer.report.section import Row, Section, columns, table_of
from placer.topology.topology import Topology
from placer.units import format_bytes, format_seconds, plain

Trace = Mapping[str, Any]

PATTERNS = ("", "/", ".", "\\", "x", "-", "+", "|")
"""Patterns of Plotly's bars, one for each colour of `SERIES`: bars differ without colours, too."""
_HATCHES = {"fillmode": "overlay", "size": 7, "solidity": 0.2, "fgcolor": "#ffffff"}

_MOST_NAMED = 24
"""Largest number of devices whose names are all written on an axis."""
_LONGEST_LABEL = 28
_MOST_CAPACITIES = 3
"""Largest number of lines of capacity in one chart."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of a page: its id, its title, and a text that says what it shows.

    Traces and layout are in Plotly's format. The page replaces the colours ``ink``, ``muted`` and
    ``faint``. The table has the same figures.
    """

    name: str
    title: str
    words: str
    traces: tuple[Trace, ...]
    layout: Mapping[str, Any]
    table: Section | None
    height_px: int = 320


def label(text: object) -> str:
    """Return a name for Plotly without markup and control characters, and not too long.

    >>> label("<b>C1</b>")
    '&lt;b&gt;C1&lt;/b&gt;'
    """
    words = plain(str(text))
    if len(words) > _LONGEST_LABEL:
        words = f"{words[: _LONGEST_LABEL - 8]}…{words[-7:]}"
    return html.escape(words, quote=False)


def bars(
    x: Sequence[str], y: Sequence[float], name: str, number: int, texts: Sequence[str]
) -> Trace:
    """Return one part of stacked bars, with the colour and pattern of its number."""
    pattern = {"shape": PATTERNS[number % len(PATTERNS)], **_HATCHES}
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "customdata": list(texts),
        "hovertemplate": f"%{{x}}<br>{name}: %{{customdata}}<extra></extra>",
        "marker": {"color": SERIES[number % len(SERIES)], "pattern": pattern},
    }


def line(
    name: str, x: Sequence[Any], y: Sequence[Any], colour: str, dash: str, symbol: str, hover: str
) -> dict[str, Any]:
    """Return points joined by a line, with the text to show for the point under the pointer."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "hovertemplate": f"{hover}<extra></extra>",
        "line": {"color": colour, "width": 2.5, "dash": dash},
        "marker": {"symbol": symbol, "size": 9},
    }


def levels(lines: Sequence[tuple[float, str, str, str]]) -> tuple[list[Trace], list[Trace]]:
    """Return legend entries and shapes of horizontal lines over the whole width.

    A line is given by its value, name, colour and dashes.
    """
    names: list[Trace] = []
    shapes: list[Trace] = []
    for value, words, colour, dash in lines:
        style = {"color": colour, "width": 2.5, "dash": dash}
        named = {"type": "scatter", "mode": "lines", "name": words, "x": [None], "y": [None]}
        across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
        names.append({**named, "line": style})
        shapes.append({**across, "line": style})
    return names, shapes


def axis(words: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": words}, **more}


def device_axis(devices: Sequence[str], topology: Topology) -> dict[str, Any]:
    """Return an x axis of devices; with many devices, label only each host's first GPU."""
    if len(devices) <= _MOST_NAMED:
        return {"type": "category"}
    known = topology.gpus_by_id
    hosts: dict[str, str] = {}
    for device in devices:
        if device in known:
            hosts.setdefault(known[device].host, device)
    every = max(1, len(hosts) // 8)
    chosen = dict(list(hosts.items())[::every])
    places = [label(device) for device in chosen.values()]
    names = [label(host.removeprefix("host:")) for host in chosen]
    ticks = {"tickangle": 0, "tickmode": "array", "tickvals": places, "ticktext": names}
    return axis("GPUs, by host", type="category", **ticks)


_KINDS = (
    ("weight_bytes", "weights"),
    ("state_bytes", "optimizer state"),
    ("cache_bytes", "cached rows"),
    ("row_map_bytes", "row maps"),
    ("buffer_bytes", "buffers"),
)


def memory_charts(memory: Section, topology: Topology) -> list[Chart]:
    """Draw the bytes of GPUs and of hosts by kind, and their capacity."""
    by_device = {row["device"]: row for row in memory.rows}
    gpus = [gpu.id for gpu in topology.gpus]
    own = [by_device[gpu] for gpu in gpus]
    ends = "memory-gpus", "Memory of the GPUs (HBM)", "GPUs"
    charts = [_memory_chart(*ends, own, device_axis(gpus, topology), memory)]
    own = [by_device[host.id] for host in topology.hosts]
    if any(row["total_bytes"] for row in own):
        ends = "memory-hosts", "Memory of the hosts (DRAM)", "hosts"
        charts.append(_memory_chart(*ends, own, {"type": "category", "nticks": 8}, memory))
    return charts


def _memory_chart(
    name: str, title: str, among: str, rows: Sequence[Row], across_axis: Any, memory: Section
) -> Chart:
    across = [label(row["device"]) for row in rows]
    most = max(float(max(row["capacity_bytes"], row["total_bytes"])) for row in rows)
    scale, unit = (2**40, "TiB") if most >= 2**41 else (2**30, "GiB")
    traces = []
    for number, (key, kind) in enumerate(_KINDS):
        sizes = [row[key] for row in rows]
        if any(sizes):
            texts = [*map(format_bytes, sizes)]
            traces.append(bars(across, [size / scale for size in sizes], kind, number, texts))
    capacities = sorted({row["capacity_bytes"] for row in rows})
    which = "capacity"
    if len(capacities) > _MOST_CAPACITIES:
        which, capacities = "largest capacity", capacities[-1:]
    names, shapes = levels(
        [(size / scale, f"{which} {format_bytes(size)}", "ink", "dash") for size in capacities]
    )
    fullest = max(rows, key=lambda row: row["used_share"] or 0.0)
    emptiest = min(rows, key=lambda row: row["used_share"] or 0.0)
    words = (
        f"{plain(fullest['device'])} uses {form.share(fullest['used_share'] or 0.0)} of its "
        f"{format_bytes(fullest['capacity_bytes'])}"
    )
    if len(rows) > 1:
        words = (
            f"The fullest of {len(rows)} {among}, {words}; the emptiest, "
            f"{plain(emptiest['device'])}, {form.share(emptiest['used_share'] or 0.0)}"
        )
    of = {row["device"] for row in rows}
    own = tuple(row for row in memory.rows if row["device"] in of)
    layout = {
        "barmode": "stack",
        "xaxis": across_axis,
        "yaxis": axis(unit, range=[0, 1.05 * most / scale]),
        "shapes": shapes,
    }
    if len(rows) == 1:  # Keep the bar as narrow as with several devices.
        traces = [{**trace, "width": 0.3} for trace in traces]
    table = Section(memory.name, title, memory.columns, own)
    return Chart(name, title, f"{words}.", (*traces, *names), layout, table)


def time_chart(cost: CostReport, topology: Topology, bound_s: float | None) -> Chart:
    """Draw each GPU's seconds in the phases of a step, its waits, and the bound."""
    names, seconds = cost.longest_chain
    phases = [(name, times.tolist()) for name, times in zip(names, seconds, strict=True)]
    devices = [gpu.device for gpu in cost.gpus]
    if cost.has_dense_phase:
        at = next((n for n, phase in enumerate(names) if phase == "gradients"), len(phases))
        phases.insert(at, ("dense", [cost.dense_s or 0.0] * len(devices)))
    if cost.other_s:
        phases.append(("other", [cost.other_s] * len(devices)))
    step_s, across = cost.step_time_s, [label(device) for device in devices]
    busy = [sum(times[gpu] for _, times in phases) for gpu in range(len(devices))]
    waits = [max(0.0, step_s - seconds) for seconds in busy]
    traces = [
        bars(across, [1e3 * t for t in times], label(name), number, [*map(format_seconds, times)])
        for number, (name, times) in enumerate(phases)
    ]
    wait = bars(across, [1e3 * t for t in waits], "waits", 0, [*map(format_seconds, waits)])
    wait = {**wait, "marker": {"color": "faint"}}
    lines = [(1e3 * step_s, f"step {format_seconds(step_s)}", "ink", "solid")]
    if bound_s:
        lines.append((1e3 * bound_s, f"bound {format_seconds(bound_s)}", "ink", "dash"))
    legend, shapes = levels(lines)
    seconds_of_gpus = zip(*(times for _, times in phases), strict=True)
    rows = [
        (gpu, *own, wait_s)
        for gpu, own, wait_s in zip(devices, seconds_of_gpus, waits, strict=True)
    ]
    slowest = max(range(len(devices)), key=lambda gpu: busy[gpu])
    mean = sum(waits) / len(waits)
    words = (
        f"All GPUs finish a phase before the next one begins. {plain(devices[slowest])} is busy "
        f"longest, {format_seconds(busy[slowest])} of the step's {format_seconds(step_s)}; a GPU "
        f"waits {format_seconds(mean)} on average, {form.share(mean / step_s if step_s else 0.0)}."
    )
    shown = columns(device="device", **{f"{name}_s": name for name, _ in phases}, waits_s="waits")
    layout = {
        "barmode": "stack",
        "xaxis": device_axis(devices, topology),
        "yaxis": axis("ms", range=[0, 1.06e3 * step_s]),
        "shapes": shapes,
    }
    table = table_of(rows, "phases_of_gpus", "Phases of each GPU", *shown)
    return Chart("time", "Time of a step", words, (*traces, wait, *legend), layout, table, 340)


def front_chart(section: Section) -> Chart:
    """Draw the step time and the bound over budgets of HBM."""
    rows = [row for row in section.rows if row["step_time_s"] is not None]
    budgets = [format_bytes(row["hbm_bytes"]) for row in rows]
    traces = []
    for key, name, colour, dash, symbol in (
        ("step_time_s", "step time", STEP, "solid", "circle"),
        ("bound_s", "proven bound", BOUND, "dash", "square"),
    ):
        known = [(b, row[key]) for b, row in zip(budgets, rows, strict=True) if row[key]]
        across, values = [budget for budget, _ in known], [value for _, value in known]
        hover = f"%{{x}}<br>{name}: %{{customdata}}"
        trace = line(name, across, [1e3 * value for value in values], colour, dash, symbol, hover)
        traces.append({**trace, "customdata": [*map(format_seconds, values)]})
    words = "No budget has a plan."
    if rows:
        first, last = rows[0], rows[-1]
        words = (
            f"A step takes {format_seconds(first['step_time_s'])} with "
            f"{budgets[0]} of each GPU, and {format_seconds(last['step_time_s'])} with "
            f"{budgets[-1]}. Under the dashed line no placement exists."
        )
    layout = {
        "xaxis": axis("HBM of each GPU", type="category"),
        "yaxis": axis("ms", rangemode="tozero"),
    }
    return Chart("front", "Step time with other budgets", words, tuple(traces), layout, section)
