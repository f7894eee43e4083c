"""Reports of `placer diff` and `placer grow`: rows that move to another plan, or stay."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING

from placer.errors import TopologyError
from placer.plan.diff import Move, PlanDiff, TableDiff
from placer.plan.migration import Migration, migration
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, columns, grouped, table_of
from placer.units import format_bytes, format_seconds

if TYPE_CHECKING:  # It imports torch, and every command imports this.
    from placer.training.growing import Grown

MOST_ROWS = 20
"""Most tables and moves that are printed."""


def diff_report(diff: PlanDiff) -> Report:
    """Report moves by kind, by table and by device, most bytes first."""
    old, new = diff.old, diff.new
    share = diff.changed_cells / diff.compared_cells if diff.compared_cells else 0.0
    statuses = Counter(table.status for table in diff.tables)
    way = None
    with contextlib.suppress(TopologyError):  # No link joins the hosts: rows move in files only.
        way = migration(diff)
    facts: Row = {
        "old_topology": old.topology.name,
        "new_topology": new.topology.name,
        "old_batch_size": old.batch_size,
        "new_batch_size": new.batch_size,
        "old_step_time_s": old.solver.step_time_s,
        "new_step_time_s": new.solver.step_time_s,
        "old_cost_model": old.solver.cost_model,
        "new_cost_model": new.solver.cost_model,
        **form.attributes(diff, "compared_cells", "changed_cells"),
        "changed_share": share,
        **form.attributes(diff, "moved_bytes", "kept_bytes"),
        "migration_s": getattr(way, "seconds", None),
        "waits_for": getattr(way, "waits_for", None),
        **{f"{status}_tables": count for status, count in sorted(statuses.items())},
    }
    words = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    times = (facts["old_step_time_s"], facts["new_step_time_s"])
    old_s, new_s = ("unknown" if time_s is None else format_seconds(time_s) for time_s in times)
    headline = (
        f"{form.share(share)} of rows × columns get another device or tier; "
        f"{format_bytes(diff.moved_bytes)} to move, optimizer state included",
        f"{format_bytes(diff.kept_bytes)} stay in their memory; {_time(way)}",
        f"tables: {words}",
        f"step time {old_s} → {new_s}, as the plans record",
    )
    alike = sorted(grouped(diff.moves, _kind).items(), key=lambda item: -_bytes(item[1]))
    kinds = table_of(
        [
            (kind, _cells(moves), _cells(moves) / diff.compared_cells, _bytes(moves))
            for kind, moves in alike
        ],
        "kinds",
        "Moves by kind",
        *columns(kind="kind", cells=None, cells_share="of all cells", moved_bytes="to move"),
    )
    title = f"From a plan on {old.topology.name} to one on {new.topology.name}"
    return Report(title, (_tables(diff.tables), kinds, _moves(diff.moves)), facts, headline)


def _tables(tables: Iterable[TableDiff]) -> Section:
    # Put tables that cannot be compared first, so that nobody overlooks them.
    first = {"reshaped": 0, "removed": 1, "added": 2}

    def words(table: TableDiff) -> str:
        totals = sorted((kind, _bytes(of)) for kind, of in grouped(table.moves, _kind).items())
        kinds = (f"{kind} {format_bytes(total)}" if total else kind for kind, total in totals)
        return "; ".join((*kinds, *([table.detail] if table.detail else [])))

    return table_of(
        sorted(tables, key=lambda table: (first.get(table.status, 3), -table.moved_bytes)),
        "tables",
        "Tables",
        *columns(table="table", status="status", cells=None, changed_cells=None),
        Column("changed_share", "changed", of=changed_share),
        Column("moved_bytes", "to move"),
        Column("detail", "what", wraps=True, of=words),
        shown=MOST_ROWS,
        order="most bytes first",
    )


def changed_share(table: TableDiff) -> float:
    """Return the share of a table's rows × columns that move to another device or tier."""
    return table.changed_cells / table.cells if table.cells else 0.0


def _time(way: Migration | None) -> str:
    if way is None:
        return "the others move in files, as no network link joins the hosts"
    waits = f", waiting for {way.waits_for}" if way.waits_for else ""
    return f"moving takes {format_seconds(way.seconds)} over the machine's links{waits}"


_kind: Callable[[Move], str] = attrgetter("kind")


def _cells(moves: Iterable[Move]) -> int:
    return sum(move.cells for move in moves)


def _bytes(moves: Iterable[Move]) -> int:
    return sum(move.moved_bytes for move in moves)


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
    shown = (
        Column("from", "from"),
        Column("to", "to"),
        Column("kind", "kind", spare=True),
        *columns(form.count, tables="tables", cells="rows × columns"),
        Column("moved_bytes", "to move"),
    )
    return Section("moves", "Moves by device", shown, tuple(rows), MOST_ROWS, "most bytes first")


def grown_report(tables: "Iterable[Grown]") -> Report:
    """Report for each table how many rows were kept, are new, or were dropped."""
    kinds = columns(table="table", kept_rows="kept", new_rows="new", dropped_rows="dropped")
    section = table_of(map(asdict, tables), "tables", "Rows by table", *kinds)
    return Report("Tables with other rows", (section,), {}, ())
