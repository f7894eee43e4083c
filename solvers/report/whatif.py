"""Reports of `placer whatif` and `placer replan`: gains of changes, and plans that may follow."""

import os
from collections.abc import Sequence
from typing import Any

from cost_models.report.measured import break_even
from placer.errors import PlacerError
from placer.problem import Problem
from placer.report import section as form
from placer.report.moves import changed_share
from placer.report.picture import BOUND, INK, MUTED, STEP, picture, plain_grid
from placer.report.section import Column, Report, Row, Section, attributes, columns, table_of
from placer.units import counted, format_bytes, format_seconds, listed
from solvers.analysis.replan import Candidate, Replanned
from solvers.analysis.whatif import Effect, FrontPoint, WhatIf


def whatif_report(
    problem: Problem, answer: WhatIf, points: Sequence[FrontPoint] = (), *, solver: str
) -> Report:
    """Report the effects of changes, and step times over HBM budgets if there are any."""
    base = answer.base
    step_time_s = base.step_time_s or 0.0
    facts: Row = {
        "topology": problem.topology.name,
        "hbm_bytes": max(gpu.memory_bytes for gpu in problem.topology.gpus),
        "batch_size": problem.batch_size,
        "solver": solver,
        **attributes(base, "step_time_s", "bound_s", "gap"),
        "samples_per_s": problem.global_batch_size / step_time_s if step_time_s else None,
        "binding": "" if answer.binding is None else answer.binding.words,
        "binds": None if answer.binding is None else answer.binding.resource,
    }
    lines = [
        f"step {format_seconds(step_time_s)} by {solver}"
        + ("" if base.gap is None else f", at most {form.share(base.gap)} above the best possible"),
        *([] if answer.binding is None else [answer.binding.words]),
    ]
    sections = [_effects(answer.effects)] if answer.effects else []
    if points:
        sections.append(front_section(points, problem.global_batch_size))
    return Report(f"What if: {problem.topology.name}", tuple(sections), facts, tuple(lines))


def _effects(effects: Sequence[Effect]) -> Section:
    names = "change", "step_time_s", "bound_s", "gap"
    gains = "gain", "plan_gain", "least_gain", "most_gain"
    rows = [
        {**attributes(one, *names, *gains), "proven": one.is_proven, "verdict": _verdict(one)}
        for one in effects
    ]
    shown = (
        *columns(change="change", step_time_s="step", gap="gap"),
        *columns(gain, plan_gain="this plan", gain="re-solved"),
        Column("least_gain", "at least", gain, spare=True),
        Column("most_gain", "at most", gain, spare=True),
        Column("verdict", "effect", wraps=True),
    )
    return Section("effects", "Samples per second, if", shown, tuple(rows))


def _verdict(effect: Effect) -> str:
    if effect.gain is None:
        return f"no plan: {effect.detail}"
    if effect.least_gain is None or effect.most_gain is None:
        return "no bound"
    return "proven" if effect.is_proven else "within the gap"


def gain(value: float) -> str:
    """Format a relative gain with its sign: ``+1.2%``, ``-0.4%``."""
    if abs(value) < 5e-6:  # A solver's rounding error.
        return "0%"
    return f"{'-' if value < 0 else '+'}{form.share(abs(value))}"


def front_section(points: Sequence[FrontPoint], samples: int) -> Section:
    """Return the table of step times over HBM budgets, for steps of `samples` samples."""
    return table_of(
        points,
        "front",
        "Step time by HBM budget",
        *columns(hbm_bytes="HBM/GPU", step_time_s="step", bound_s="bound", gap="gap"),
        Column(
            "samples_per_s", "samples/s", of=lambda point: form.ratio(samples, point.step_time_s)
        ),
        Column("detail", "detail", wraps=True),
    )


def plot_front(points: Sequence[FrontPoint], path: str | os.PathLike[str]) -> None:
    """Draw step times and proven bounds over HBM budgets.

    Raises a `PlacerError` if no budget has a plan. See `picture` for formats of the file and for
    other errors.
    """
    solved = [
        (p.hbm_bytes / 2**30, p.step_time_s * 1e3, p.bound_s * 1e3)
        for p in points
        if p.step_time_s is not None and p.bound_s is not None
    ]
    if not solved:
        raise PlacerError("there is nothing to draw: no budget has a plan")
    with picture(path, (8, 4.5)) as figure:
        axis = figure.subplots()
        budgets, times, bounds = zip(*solved, strict=True)
        axis.fill_between(budgets, bounds, times, color=BOUND, alpha=0.15, linewidth=0)
        axis.plot(budgets, bounds, color=BOUND, linewidth=1.5, linestyle="--", label="proven bound")
        look: Any = {"linewidth": 2, "marker": "o", "markersize": 5}
        axis.plot(budgets, times, color=STEP, label="step time", **look)
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [format_bytes(budget * 2**30) for budget in budgets])
        axis.minorticks_off()
        axis.set_ylim(0, max(times) * 1.05)
        axis.set_xlabel("HBM per GPU", color=MUTED)
        axis.set_ylabel("step time in ms", color=MUTED)
        plain_grid(axis)
        axis.legend(frameon=False, labelcolor=INK)


_OF_CHOSEN = ("step_time_s", "moved_bytes", "migration_s", "break_even_steps")

MOST_TABLES = 12
"""Number of moving tables that the report shows."""


def replan_report(replanned: Replanned) -> Report:
    """Report candidates by moved bytes, and the tables that the chosen candidate moves."""
    chosen = replanned.chosen
    facts: Row = {
        **attributes(replanned, "horizon_steps", "old_step_time_s", "old_refused"),
        "chosen": getattr(chosen, "name", None),
        **{name: getattr(chosen, name, None) for name in _OF_CHOSEN},
    }
    sections = [_candidates(replanned)]
    if replanned.moves is not None and replanned.moves.moves:
        moved = [table for table in replanned.moves.tables if table.moved_bytes]
        tables = table_of(
            sorted(moved, key=lambda table: -table.moved_bytes),
            "tables",
            "Tables that move",
            *columns(table="table", moved_bytes="to move"),
            Column("changed_share", "of its rows × columns", of=changed_share),
            shown=MOST_TABLES,
            order="most bytes first",
        )
        sections.append(tables)
    headline = tuple(_headline(replanned))
    return Report("What should follow the plan", tuple(sections), facts, headline)


def _headline(replanned: Replanned) -> list[str]:
    chosen = replanned.chosen
    if replanned.old_step_time_s is None:
        lines = [f"the old placement does not work any more: {replanned.old_refused}"]
    else:
        lines = [f"the old placement would take {format_seconds(replanned.old_step_time_s)} a step"]
    if chosen is None:
        return [*lines, "nothing fits"]
    move = "; nothing moves"
    if chosen.moved_bytes:
        move = (
            f", {format_seconds(chosen.step_time_s)} a step; {format_bytes(chosen.moved_bytes)} "
            f"move in {format_seconds(chosen.migration_s)}, waiting for {chosen.waits_for}"
        )
    lines.append(f"chosen for {counted(replanned.horizon_steps, 'step')}: {chosen.name}{move}")
    unlike = [
        f"{table.table} ({table.status})"
        for table in (() if replanned.moves is None else replanned.moves.tables)
        if table.status in ("added", "removed", "reshaped")
    ]
    if unlike:
        lines.append(f"not counted as moved: {listed(unlike, most=8)}")
    return lines


def _candidates(replanned: Replanned) -> Section:
    before = replanned.old_step_time_s

    def pays_after(one: Candidate) -> str | None:
        return None if before is None else break_even(one.break_even_steps, one.moved_bytes)

    return table_of(
        replanned.candidates,
        "candidates",
        "Candidates, fewest bytes first",
        Column("chosen", "", of=lambda one: "*" if one is replanned.chosen else ""),
        Column("candidate", "candidate", of=lambda one: one.name),
        Column("step_time_s", "step"),
        Column("ratio", "vs old", of=lambda one: form.ratio(one.step_time_s, before)),
        *columns(moved_bytes="to move", migration_s="in"),
        Column("waits_for", "waits for", spare=True),
        Column("break_even_steps"),
        Column("break_even", "pays after", of=pays_after),
        Column("cost_s", "over the horizon"),
        Column("on_front"),
        Column("front", "on front", spare=True, of=lambda one: "yes" if one.on_front else ""),
    )
