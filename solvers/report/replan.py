"""`placer replan`: what could follow a plan, what each would cost, and what was chosen."""

from cost_models.report.simulate import break_even
from placer.plan.diff import PlanDiff
from placer.report import section as form
from placer.report.moves import changed_share
from placer.report.section import Column, Report, Row, Section, columns, table_of
from placer.units import counted, format_bytes, format_seconds
from solvers.analysis.replan import Candidate, Replanned

_OF_CHOSEN = ("step_time_s", "moved_bytes", "migration_s", "break_even_steps")

MOST_TABLES = 12
"""Tables that move, as a table shows them."""


def replan_report(replanned: Replanned) -> Report:
    """Report candidates, fewest bytes first, and the tables that the chosen one moves."""
    chosen = replanned.chosen
    facts: Row = {
        "horizon_steps": replanned.horizon_steps,
        "old_step_time_s": replanned.old_step_time_s,
        "old_refused": replanned.old_refused,
        "chosen": None if chosen is None else chosen.name,
        **{name: getattr(chosen, name, None) for name in _OF_CHOSEN},
    }
    moves = replanned.moves
    tables = (_tables(moves),) if moves is not None and moves.moves else ()
    sections = (_candidates(replanned), *tables)
    return Report("What should follow the plan", sections, facts, tuple(_headline(replanned)))


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
    return break_even(one.break_even_steps, one.moved_bytes)


def _candidates(replanned: Replanned) -> Section:
    before = replanned.old_step_time_s
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
        Column("break_even", "pays after", of=lambda one: _break_even(replanned, one)),
        Column("cost_s", "over the horizon"),
        Column("on_front"),
        Column("front", "on front", spare=True, of=lambda one: "yes" if one.on_front else ""),
    )


def _tables(moves: PlanDiff) -> Section:
    moved = [table for table in moves.tables if table.moved_bytes]
    return table_of(
        sorted(moved, key=lambda table: -table.moved_bytes),
        "tables",
        "Tables that move",
        *columns(table="table", moved_bytes="to move"),
        Column("changed_share", "of its rows × columns", of=changed_share),
        shown=MOST_TABLES,
        order="most bytes first",
    )
