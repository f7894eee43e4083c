"""`placer fleet`: one workload on many machines, and a picture of price against time."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from placer.errors import PlacerError
from placer.report import section as form
from placer.report.picture import INK, MUTED, SKY, STEP, picture, plain_grid
from placer.report.section import Column, Report, Row, Section, columns
from placer.units import format_seconds, significant
from solvers.analysis.fleet import Cheapest, FleetRow

_HOUR_S = 3600.0
_SOURCES = (
    "prices are of lists, and constants that nobody has measured are assumed: JSON names both"
)


def fleet_report(rows: Sequence[FleetRow], answer: Cheapest, within_s: float, title: str) -> Report:
    """Report machines as rows, and which trains a billion samples in time for least money."""
    values: list[Row] = [
        {
            **asdict(row),
            "assumed": ", ".join(row.assumed),
            "least_cost": row.least_cost,
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
        "cheapest": None if answer.row is None else answer.row.machine,
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
        words = [
            f"cheapest in {limit} for a billion samples: {row.machine}, "
            f"{form.number(row.cost or 0.0)} dollars, {_hours(row.train_s or 0.0)}",
            f"a better plan, if there is one, could be cheaper on {rivals}"
            if rivals
            else "proven at these prices: no plan makes another machine cheaper",
        ]
    if unknown := ", ".join(answer.without_price):
        words.append(f"fast enough, but without a known price: {unknown}")
    return [*words, _SOURCES]


def _hours(seconds: float) -> str:
    """Return a duration of hours: ``3.5 h``."""
    return f"{significant(seconds / _HOUR_S)} h" if seconds >= _HOUR_S else format_seconds(seconds)


def plot_fleet(drawn: tuple[Sequence[FleetRow], Cheapest], path: str | os.PathLike[str]) -> None:
    """Draw what a billion samples cost over the time that they take.

    Raises
    ------
    PlacerError
        If no machine has a plan and a price; see `picture` for other errors, and for formats.
    """
    rows, answer = drawn
    shown = [
        (row, row.train_s, row.cost)
        for row in rows
        if row.train_s is not None and row.cost is not None
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
            axis.annotate(row.machine, (seconds, cost), **beside, fontsize=8, color=INK)
        axis.set(xscale="log", yscale="log")
        axis.xaxis.set_major_formatter(lambda seconds, _: _hours(seconds))
        axis.yaxis.set_major_formatter(lambda dollars, _: form.number(dollars))
        axis.yaxis.set_minor_formatter(lambda dollars, _: form.number(dollars))
        axis.set_xlabel("time for a billion samples", color=MUTED)
        axis.set_ylabel("dollars for a billion samples", color=MUTED)
        plain_grid(axis, which="both")


def _front(shown: Sequence[tuple[FleetRow, float, float]]) -> list[tuple[float, float]]:
    """Return seconds and dollars of machines than which none is both faster and cheaper."""
    front: list[tuple[float, float]] = []
    for seconds, cost in sorted((seconds, cost) for _, seconds, cost in shown):
        if not front or cost < front[-1][1]:
            front.append((seconds, cost))
    return front
