"""Charts of accesses, and of what else was asked: other solvers, a log, a second plan."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from placer.plan.plan import Plan
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.report import section as form
from placer.report.picture import BOUND, DRAM, GREY, HBM, SERIES, STEP
from placer.report.plain import plain
from placer.report.section import Column, Row, Section
from placer.units import format_bytes, format_seconds
from solvers.report.page.figures import Chart, Trace, label, line

MOST_CURVES = 6
"""Access curves in one chart: more cannot be told apart."""
CURVE_POINTS = 40
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MOST_HOMES = 20
"""Sources or targets of moves that are drawn one by one; more are drawn by host."""


def curve(cdf: AccessCdf) -> tuple[list[float], list[float]]:
    """Shares of rows and of lookups, at few points that are even on a logarithmic axis."""
    ranks = cdf.ranks[1:]
    if not ranks.size:
        return [], []
    at = np.searchsorted(ranks, np.geomspace(ranks[0], ranks[-1], CURVE_POINTS))
    chosen = np.unique(np.minimum(at, ranks.size - 1)) + 1
    rows = [float(f"{one:.5g}") for one in cdf.ranks[chosen] / cdf.rows]
    return rows, [float(f"{one:.5g}") for one in cdf.shares[chosen]]


def skew_chart(tables: Sequence[Row], profile: Profile) -> Chart:
    """Access CDFs of the tables with most GPU time, and where each is split."""
    by_name = {one.name: one for one in profile}
    ranked = sorted(tables, key=lambda row: -(row["time_s"] or 0.0))
    split = [row for row in ranked if 0 < (row["hot_row_share"] or 0.0) < 1]
    drawn = (split or ranked)[:MOST_CURVES]
    traces: list[Trace] = []
    for number, row in enumerate(drawn):
        across, up = curve(by_name[row["table"]].cdf)
        name, colour = label(row["table"]), SERIES[number]
        shared = {"type": "scatter", "legendgroup": str(number), "name": name}
        traces.append(
            {
                **shared,
                "mode": "lines",
                "x": across,
                "y": up,
                "showlegend": False,
                "line": {"color": colour, "width": 2, "dash": _DASHES[number]},
                "hovertemplate": f"{name}<br>%{{x:.3%}} of rows: %{{y:.1%}} of lookups"
                "<extra></extra>",
            }
        )
        traces.append(
            {
                **shared,
                "mode": "lines+markers",
                "x": [row["hot_row_share"]],
                "y": [row["hbm_lookup_share"]],
                "line": {"color": colour, "width": 2, "dash": _DASHES[number]},
                "marker": {
                    "color": colour,
                    "size": 12,
                    "symbol": _SYMBOLS[number],
                    "line": {"width": 1.5, "color": "ink"},
                },
                "hovertemplate": f"{name}: split<br>%{{x:.3%}} of rows in HBM serve %{{y:.1%}}"
                "<extra></extra>",
            }
        )
    words = (
        "A line says which share of a table's lookups its hottest rows take, a marker how many of "
        "them the plan has in HBM. A marker high on a steep line is a good split."
        if split
        else "No table is split between HBM and DRAM: each is whole in one of them."
    )
    table = Section(
        "splits",
        "Splits",
        (
            Column("table", "table"),
            Column("hot_row_share", "rows in HBM"),
            Column("hbm_lookup_share", "lookups served by them"),
            Column("time_s", "GPU time"),
        ),
        tuple(drawn),
    )
    layout = {
        "hovermode": "closest",
        "xaxis": {
            "type": "log",
            "title": {"text": "share of the table's rows, hottest first"},
            "tickformat": "~%",
            "nticks": 6,
            "fixedrange": True,
        },
        "yaxis": {
            "title": {"text": "share of its lookups"},
            "tickformat": ".0%",
            "range": [0, 1.04],
        },
    }
    title = (
        f"How the {len(drawn)} slowest split tables are read" if split else "How tables are read"
    )
    return Chart("skew", title, words, tuple(traces), layout, table, 360)


def comparison_chart(section: Section) -> Chart:
    """Draw the step times of solvers, the best of them first, and the bound."""
    solved = [row for row in section.rows if row["step_time_s"] is not None]
    solved.sort(key=lambda row: -row["step_time_s"])
    names = [label(row["solver"]) for row in solved]
    traces: list[Trace] = [
        {
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
    ]
    bounds = [(name, row["bound_s"]) for name, row in zip(names, solved, strict=True)]
    if any(bound for _, bound in bounds):
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "proven bound",
                "y": [name for name, bound in bounds if bound],
                "x": [1e3 * bound for _, bound in bounds if bound],
                "line": {"color": BOUND, "width": 2, "dash": "dash"},
                "marker": {"symbol": "diamond", "size": 8},
                "hovertemplate": "bound: %{x:.4g} ms<extra></extra>",
            }
        )
    words = "No solver found a plan."
    if solved:
        best, worst = solved[-1], solved[0]
        words = (
            f"{best['solver']} finds the fastest plan, {format_seconds(best['step_time_s'])} a "
            f"step; {worst['solver']}'s takes "
            f"{form.times(worst['step_time_s'] / best['step_time_s'])} as long."
        )
    layout = {
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": "step time in ms"},
            "range": [0, 1.15e3 * max((row["step_time_s"] for row in solved), default=1.0)],
            "fixedrange": True,
        },
        "yaxis": {"type": "category", "automargin": True, "showgrid": False},
    }
    height = 130 + 34 * len(solved)
    return Chart("comparison", "Other solvers", words, tuple(traces), layout, section, height)


def drift_chart(windows: Section) -> Chart:
    """Draw the share of lookups that HBM serves, window by window of a log."""
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
    layout = {
        "xaxis": {"type": "category", "fixedrange": True},
        "yaxis": {"title": {"text": "lookups from HBM"}, "tickformat": ".1%"},
    }
    return Chart("drift", "Hits over the log", words, tuple(traces), layout, windows, 300)


_KIND_COLOURS = {
    "HBM to HBM": SERIES[0],
    "HBM to DRAM": SERIES[1],
    "DRAM to HBM": SERIES[2],
    "DRAM to DRAM": SERIES[3],
}


def moves_chart(moves: Section, old: Plan, new: Plan) -> Chart:
    """Draw bytes from where they are to where they go."""
    rows = [row for row in moves.rows if row["moved_bytes"] and row["to"] is not None]
    homes = max(len({row[end] for row in rows}) for end in ("from", "to")) if rows else 0
    grouped = homes > _MOST_HOMES
    flows: dict[tuple[str, str, str], int] = defaultdict(int)
    for row in rows:
        ends = (row["from"], row["to"])
        if grouped:
            ends = (_by_host(row["from"], old), _by_host(row["to"], new))
        flows[ends[0], ends[1], row["kind"]] += row["moved_bytes"]
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
    trace = {
        "type": "sankey",
        "arrangement": "fixed",
        "node": {
            "label": [label(name) for name in [*sources, *targets]],
            "color": [HBM if name.endswith("hbm") else DRAM for name in [*sources, *targets]],
            "pad": 8,
            "thickness": 14,
            "line": {"width": 0},
            "hovertemplate": "%{label}<extra></extra>",
        },
        "link": {
            **link,
            "hovertemplate": "%{source.label} → %{target.label}<br>%{customdata}<extra></extra>",
        },
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
    """``host:0 hbm`` for ``gpu:3 hbm``."""
    device, _, tier = home.rpartition(" ")
    gpu = plan.topology.gpus_by_id.get(device)
    return home if gpu is None else f"{gpu.host} {tier}"


def _natural(name: str) -> tuple[str, int, str]:
    """Sort gpu:2 before gpu:10."""
    device, _, tier = name.rpartition(" ")
    prefix, _, number = device.rpartition(":")
    return prefix, int(number) if number.isdecimal() else -1, tier
