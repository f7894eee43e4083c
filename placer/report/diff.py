"""`placer diff`: what moves from one plan to the next."""

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

from placer.plan.diff import Move, PlanDiff, TableDiff
from placer.plan.plan import Plan
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, grouped, table_of
from placer.units import format_bytes, format_seconds

MOST_ROWS = 20
"""Tables and moves that a table shows."""


def diff_report(diff: PlanDiff) -> Report:
    """Report kinds of moves, tables and moves from device to device, most bytes first."""
    old, new = diff.old, diff.new
    share = diff.changed_cells / diff.compared_cells if diff.compared_cells else 0.0
    statuses = Counter(table.status for table in diff.tables)
    facts: Row = {
        "old_topology": old.topology.name,
        "new_topology": new.topology.name,
        "old_batch_size": old.batch_size,
        "new_batch_size": new.batch_size,
        "old_step_time_s": old.solver.step_time_s,
        "new_step_time_s": new.solver.step_time_s,
        "old_cost_model": old.solver.cost_model,
        "new_cost_model": new.solver.cost_model,
        "compared_cells": diff.compared_cells,
        "changed_cells": diff.changed_cells,
        "changed_share": share,
        "moved_bytes": diff.moved_bytes,
        **{f"{status}_tables": count for status, count in sorted(statuses.items())},
    }
    words = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    headline = (
        f"{form.share(share)} of rows × columns get another device or tier; "
        f"{format_bytes(diff.moved_bytes)} to move, optimizer state included",
        f"tables: {words}",
        f"step time {_time(old)} → {_time(new)}, as the plans record",
    )
    return Report(
        f"From a plan on {old.topology.name} to one on {new.topology.name}",
        (_tables(diff.tables), _kinds(diff), _moves(diff.moves)),
        facts,
        headline,
    )


def _time(plan: Plan) -> str:
    step_time_s = plan.solver.step_time_s
    return "unknown" if step_time_s is None else format_seconds(step_time_s)


def _tables(tables: Iterable[TableDiff]) -> Section:
    # What cannot be compared first: it is what nobody should overlook.
    first = {"reshaped": 0, "removed": 1, "added": 2}
    return table_of(
        sorted(tables, key=lambda table: (first.get(table.status, 3), -table.moved_bytes)),
        "tables",
        "Tables",
        Column("table", "table"),
        Column("status", "status"),
        Column("cells"),
        Column("changed_cells"),
        Column("changed_share", "changed", of=changed_share),
        Column("moved_bytes", "to move"),
        Column(
            "detail",
            "what",
            wraps=True,
            of=lambda table: table.detail or "; ".join(_kinds_in_words(table.moves)),
        ),
        shown=MOST_ROWS,
        order="most bytes first",
    )


def changed_share(table: TableDiff) -> float:
    """Return the share of a table's rows × columns that get another device or tier."""
    return table.changed_cells / table.cells if table.cells else 0.0


def _kinds_in_words(moves: Iterable[Move]) -> list[str]:
    totals = {kind: _bytes(alike) for kind, alike in grouped(moves, _kind).items()}
    return [
        f"{kind} {format_bytes(total)}" if total else kind for kind, total in sorted(totals.items())
    ]


def _kind(move: Move) -> str:
    return move.kind


def _cells(moves: Iterable[Move]) -> int:
    return sum(move.cells for move in moves)


def _bytes(moves: Iterable[Move]) -> int:
    return sum(move.moved_bytes for move in moves)


def _kinds(diff: PlanDiff) -> Section:
    return table_of(
        sorted(grouped(diff.moves, _kind).items(), key=lambda item: -_bytes(item[1])),
        "kinds",
        "Moves by kind",
        Column("kind", "kind", of=itemgetter(0)),
        Column("cells", of=lambda item: _cells(item[1])),
        Column(
            "cells_share",
            "of all cells",
            of=lambda item: _cells(item[1]) / diff.compared_cells,
        ),
        Column("moved_bytes", "to move", of=lambda item: _bytes(item[1])),
    )


def _moves(moves: Iterable[Move]) -> Section:
    def ends(move: Move) -> tuple[str, str, str | None]:
        return move.kind, str(move.source), None if move.target is None else str(move.target)

    rows: list[Row] = [
        {
            "kind": kind,
            "from": source,
            "to": target,
            "tables": len({move.table for move in alike}),
            "cells": _cells(alike),
            "moved_bytes": _bytes(alike),
        }
        for (kind, source, target), alike in grouped(moves, ends).items()
    ]
    rows.sort(key=lambda row: (-row["moved_bytes"], row["from"], row["to"] or ""))
    columns = (
        Column("from", "from"),
        Column("to", "to"),
        Column("kind", "kind", spare=True),
        Column("tables", "tables", form.count),
        Column("cells", "rows × columns", form.count),
        Column("moved_bytes", "to move"),
    )
    return Section("moves", "Moves by device", columns, tuple(rows), MOST_ROWS, "most bytes first")
