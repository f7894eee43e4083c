"""`placer replan`: what could follow a plan, what each would cost, and what was chosen."""

import math

from placer.plan.diff import PlanDiff
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, attributes
from placer.units import counted, format_bytes, format_seconds
from solvers.analysis.candidates import Candidate, Replanned

_OF_CHOSEN = ("step_time_s", "moved_bytes", "migration_s", "break_even_steps")

MOST_TABLES = 12
"""Tables that move, as a table shows them."""


def replan_report(replanned: Replanned) -> Report:
    """Candidates, fewest bytes first, and the tables that the chosen one moves."""
    chosen = replanned.chosen
    facts: Row = {
        "horizon_steps": replanned.horizon_steps,
        "old_step_time_s": replanned.old_step_time_s,
        "old_refused": replanned.old_refused,
        "chosen": None if chosen is None else chosen.name,
        **{name: getattr(chosen, name, None) for name in _OF_CHOSEN},
    }
    sections = [_candidates(replanned)]
    if replanned.moves is not None and replanned.moves.moves:
        sections.append(_tables(replanned.moves))
    return Report(
        "What should follow the plan", tuple(sections), facts, tuple(_headline(replanned))
    )


def _headline(replanned: Replanned) -> list[str]:
    chosen = replanned.chosen
    if replanned.old_step_time_s is None:
        lines = [f"the old placement does not work any more: {replanned.old_refused}"]
    else:
        lines = [f"the old placement would take {format_seconds(replanned.old_step_time_s)} a step"]
    if chosen is None:
        return [*lines, "nothing fits"]
    if chosen.moved_bytes:
        lines.append(
            f"chosen for {counted(replanned.horizon_steps, 'step')}: {chosen.name}, "
            f"{format_seconds(chosen.step_time_s)} a step; {format_bytes(chosen.moved_bytes)} move "
            f"in {format_seconds(chosen.migration_s)}, waiting for {chosen.waits_for}"
        )
    else:
        lines.append(
            f"chosen for {counted(replanned.horizon_steps, 'step')}: {chosen.name}; nothing moves"
        )
    unlike = [] if replanned.moves is None else [
        f"{table.table} ({table.status})" for table in replanned.moves.tables
        if table.status in ("added", "removed", "reshaped")
    ]  # fmt: skip
    if unlike:
        more = f" and {len(unlike) - 8} more" if len(unlike) > 8 else ""
        lines.append(f"not counted as moved: {', '.join(unlike[:8])}{more}")
    return lines


def _break_even(replanned: Replanned, one: Candidate) -> str | None:
    """Break-even in words; None where there is no old placement to compare with."""
    if replanned.old_step_time_s is None:
        return None
    if one.break_even_steps is None:
        return "never"
    if not one.moved_bytes:
        return "never needed"
    return f"{counted(math.ceil(one.break_even_steps), 'step')}"


def _candidates(replanned: Replanned) -> Section:
    before = replanned.old_step_time_s
    rows: list[Row] = [
        {
            "chosen": "*" if one is replanned.chosen else "",
            "candidate": one.name,
            "step_time_s": one.step_time_s,
            "ratio": None if not before else one.step_time_s / before,
            **attributes(one, "moved_bytes", "migration_s", "waits_for", "break_even_steps"),
            "break_even": _break_even(replanned, one),
            "cost_s": one.cost_s,
            "on_front": one.on_front,
            "front": "yes" if one.on_front else "",
        }
        for one in replanned.candidates
    ]
    return Section(
        "candidates",
        "Candidates, fewest bytes first",
        (
            Column("chosen", ""),
            Column("candidate", "candidate"),
            Column("step_time_s", "step", form.seconds),
            Column("ratio", "vs old", form.times),
            Column("moved_bytes", "to move", form.size),
            Column("migration_s", "in", form.seconds),
            Column("waits_for", "waits for", spare=True),
            Column("break_even", "pays after"),
            Column("cost_s", "over the horizon", form.seconds),
            Column("front", "on front", spare=True),
        ),
        tuple(rows),
    )


def _tables(moves: PlanDiff) -> Section:
    rows: list[Row] = [
        {
            "table": table.table,
            "moved_bytes": table.moved_bytes,
            "changed_share": table.changed_cells / table.cells if table.cells else 0.0,
        }
        for table in sorted(moves.tables, key=lambda table: -table.moved_bytes)
        if table.moved_bytes
    ]
    return Section(
        "tables",
        "Tables that move",
        (
            Column("table", "table"),
            Column("moved_bytes", "to move", form.size),
            Column("changed_share", "of its rows × columns", form.share),
        ),
        tuple(rows),
        shown=MOST_TABLES,
        order="most bytes first",
    )
