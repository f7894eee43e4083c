"""Charts of accesses, and of optional questions: other solvers, a log, a second plan."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from placer.plan.plan import Plan
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.report import section as form
from placer.report.picture import BOUND, DRAM, GREY, HBM, SERIES, STEP
from placer.report.section import Row, Section, columns, table_of
from placer.units import format_bytes, format_seconds, plain
from solvers.report.page.figures import Chart, Trace, axis, label, line

MOST_CURVES = 6
"""Largest number of access curves in one chart; more cannot be told apart."""
CURVE_POINTS = 40
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MOST_HOMES = 20
"""Largest number of sources or targets of moves to draw one by one; more are drawn by host."""


def curve(cdf: AccessCdf) -> tuple[list[float], list[float]]:
    """Return shares of rows and of lookups at a few points, even on a logarithmic axis."""
    ranks = cdf.ranks[1:]
    if not ranks.size:
        return [], []
    at = np.searchsorted(ranks, np.geomspace(ranks[0], ranks[-1], CURVE_POINTS))
    chosen = np.unique(np.minimum(at, ranks.size - 1)) + 1
    rows = [float(f"{one:.5g}") for one in cdf.ranks[chosen] / cdf.rows]
    return rows, [float(f"{one:.5g}") for one in cdf.shares[chosen]]


def skew_chart(tables: Sequence[Row], profile: Profile) -> Chart:
    """Draw access CDFs of the tables with most GPU time, and their splits."""
    by_name = {one.name: one for one in profile}
    ranked = sorted(tables, key=lambda row: -(row["time_s"] or 0.0))
    split = [row for row in ranked if 0 < (row["hot_row_share"] or 0.0) < 1]
    drawn = (split or ranked)[:MOST_CURVES]
    traces: list[Trace] = []
    for number, row in enumerate(drawn):
        across, up = curve(by_name[row["table"]].cdf)
        name, look = label(row["table"]), (SERIES[number], _DASHES[number], _SYMBOLS[number])
        read = f"{name}<br>%{{x:.3%}} of rows: %{{y:.1%}} of lookups"
        split_at = f"{name}: split<br>%{{x:.3%}} of rows in HBM serve %{{y:.1%}}"
        law = line(name, across, up, *look, read)
        point = line(name, [row["hot_row_share"]], [row["hbm_lookup_share"]], *look, split_at)
        marker = {"color": look[0], "size": 12, "line": {"width": 1.5, "color": "ink"}}
        group = {"legendgroup": str(number)}
        traces.append({**law, **group, "mode": "lines", "showlegend": False})
        traces.append({**point, **group, "marker": {**point["marker"], **marker}})
    words = (
        "A line says which share of a table's lookups its hottest rows take, a marker how many of "
        "them the plan has in HBM. A marker high on a steep line is a good split."
        if split
        else "No table is split between HBM and DRAM: each is whole in one of them."
    )
    served = columns(hbm_lookup_share="lookups served by them", time_s="GPU time")
    shown = *columns(table="table", hot_row_share="rows in HBM"), *served
    rows_axis = axis(
        "share of the table's rows, hottest first", type="log", tickformat="~%", nticks=6
    )
    layout = {
        "hovermode": "closest",
        "xaxis": rows_axis,
        "yaxis": axis("share of its lookups", tickformat=".0%", range=[0, 1.04]),
    }
    table = table_of(drawn, "splits", "Splits", *shown)
    which = f"the {len(drawn)} slowest split tables" if split else "tables"
    return Chart("skew", f"How {which} are read", words, tuple(traces), layout, table, 360)


def comparison_chart(section: Section) -> Chart:
    """Draw the step times of solvers, the best on top, and the bound."""
    solved = [row for row in section.rows if row["step_time_s"] is not None]
    solved.sort(key=lambda row: -row["step_time_s"])
    names = [label(row["solver"]) for row in solved]
    times = {
        "type": "bar",
        "orientation": "h",
        "name": "step time",
        "y": names,
        "x": [1e3 * row["step_time_s"] for row in solved],
        "text": [format_seconds(row["step_time_s"]) for row in solved],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "marker": {"color": STEP},
    }
    traces: list[Trace] = [times]
    named = zip(names, solved, strict=True)
    proven = {name: 1e3 * row["bound_s"] for name, row in named if row["bound_s"]}
    if proven:
        look = BOUND, "dash", "diamond", "bound: %{x:.4g} ms"
        traces.append(line("proven bound", [*proven.values()], [*proven], *look))
    words = "No solver found a plan."
    if solved:
        best, worst = solved[-1], solved[0]
        words = (
            f"{best['solver']} finds the fastest plan, {format_seconds(best['step_time_s'])} a "
            f"step; {worst['solver']}'s takes "
            f"{form.times(worst['step_time_s'] / best['step_time_s'])} as long."
        )
    longest_s = max((row["step_time_s"] for row in solved), default=1.0)
    layout = {
        "hovermode": "closest",
        "xaxis": axis("step time in ms", range=[0, 1.15e3 * longest_s]),
        "yaxis": {"type": "category", "automargin": True, "showgrid": False},
    }
    height = 130 + 34 * len(solved)
    return Chart("comparison", "Other solvers", words, tuple(traces), layout, section, height)


def drift_chart(windows: Section) -> Chart:
    """Draw the share of lookups that HBM serves in each window of a log."""
    names = [label(row["window"]) for row in windows.rows]
    traces: list[Trace] = []
    for key, name, colour, symbol, dash in (
        ("hbm_share", "this plan", HBM, "circle", "solid"),
        ("other_hbm_share", "the second plan", DRAM, "square", "dash"),
    ):
        values = [row[key] for row in windows.rows]
        if any(value is not None for value in values):
            hover = "%{x}: %{y:.2%} of lookups from HBM"
            traces.append(line(name, names, values, colour, dash, symbol, hover))
    first, last = windows.rows[0], windows.rows[-1]
    lost = first["hbm_share"] - last["hbm_share"]
    words = (
        f"HBM serves {form.share(first['hbm_share'])} of lookups in the first window and "
        f"{form.share(last['hbm_share'])} in the last one: "
        + ("accesses have drifted from the plan." if lost > 0.01 else "no drift to act on.")
    )
    layout = {"xaxis": {"type": "category"}, "yaxis": axis("lookups from HBM", tickformat=".1%")}
    return Chart("drift", "Hits over the log", words, tuple(traces), layout, windows, 300)


_KINDS = ("HBM to HBM", "HBM to DRAM", "DRAM to HBM", "DRAM to DRAM")
_KIND_COLOURS = dict(zip(_KINDS, SERIES, strict=False))


def moves_chart(moves: Section, old: Plan, new: Plan) -> Chart:
    """Draw the bytes that move, from their old to their new memories."""
    rows = [row for row in moves.rows if row["moved_bytes"] and row["to"] is not None]
    homes = max(len({row[end] for row in rows}) for end in ("from", "to")) if rows else 0
    grouped = homes > _MOST_HOMES
    flows: dict[tuple[str, str, str], int] = defaultdict(int)
    for row in rows:
        source, target = row["from"], row["to"]
        if grouped:
            source, target = _by_host(source, old), _by_host(target, new)
        flows[source, target, row["kind"]] += row["moved_bytes"]
    sources = sorted({source for source, _, _ in flows}, key=_natural)
    targets = sorted({target for _, target, _ in flows}, key=_natural)
    link: dict[str, list[Any]] = defaultdict(list)
    for (source, target, kind), moved in sorted(flows.items(), key=lambda item: -item[1]):
        link["source"].append(sources.index(source))
        link["target"].append(len(sources) + targets.index(target))
        link["value"].append(moved)
        link["color"].append(_KIND_COLOURS.get(kind, GREY) + "99")
        link["customdata"].append(f"{kind}: {format_bytes(moved)}")
    total = sum(row["moved_bytes"] for row in rows)
    ends = [*sources, *targets]
    hover = "%{source.label} → %{target.label}<br>%{customdata}<extra></extra>"
    trace = {
        "type": "sankey",
        "arrangement": "fixed",
        "node": {
            "label": [label(name) for name in ends],
            "color": [HBM if name.endswith("hbm") else DRAM for name in ends],
            **{"pad": 8, "thickness": 14, "line": {"width": 0}},
            "hovertemplate": "%{label}<extra></extra>",
        },
        "link": {**link, "hovertemplate": hover},
    }
    largest = max(rows, key=lambda row: row["moved_bytes"], default=None)
    words = "No bytes move."
    if largest is not None:
        words = (
            f"{format_bytes(total)} move, most of them from {plain(largest['from'])} to "
            f"{plain(largest['to'])} ({format_bytes(largest['moved_bytes'])}). Blue is HBM, orange "
            "is DRAM; the left side is this plan, the right side the second one."
        )
    height = 140 + 24 * max(len(sources), len(targets), 3)
    return Chart("moves", "What moves", words, (trace,) if rows else (), {}, moves, height)


def _by_host(home: str, plan: Plan) -> str:
    """Replace a GPU by its host: ``host:0 hbm`` for ``gpu:3 hbm``."""
    device, _, tier = home.rpartition(" ")
    gpu = plan.topology.gpus_by_id.get(device)
    return home if gpu is None else f"{gpu.host} {tier}"


def _natural(name: str) -> tuple[str, int, str]:
    """Return a sort key that puts gpu:2 before gpu:10."""
    device, _, tier = name.rpartition(" ")
    prefix, _, number = device.rpartition(":")
    return prefix, int(number) if number.isdecimal() else -1, tier
