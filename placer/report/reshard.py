"""`placer reshard`: what stays where it is, and what goes from device to device."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from placer.errors import TopologyError
from placer.plan.diff import PlanDiff
from placer.plan.migration import Migration, migration
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, attributes
from placer.units import format_bytes, format_seconds

if TYPE_CHECKING:  # They import torch, and every command imports this.
    from placer.storage.growing import Grown
    from placer.storage.shards import Resharded

MOST_ROWS = 20
"""Pairs of devices that a table shows."""


def reshard_report(difference: PlanDiff, files: "Resharded | None" = None) -> Report:
    """Bytes by device, and of files where there are some."""
    try:
        way = migration(difference)
    except TopologyError:  # Rows move between hosts that no link joins, and so by files alone.
        way = None
    facts: dict[str, Any] = {
        "kept_bytes": difference.kept_bytes,
        "moved_bytes": difference.moved_bytes,
        "migration_s": None if way is None else way.seconds,
        "waits_for": None if way is None else way.waits_for,
        "dropped_tables": list(difference.dropped_tables),
    }
    headline = [
        f"{format_bytes(difference.kept_bytes)} stay in the memory that they are in, "
        f"{format_bytes(difference.moved_bytes)} move{_time(way)}"
    ]
    if files is not None:
        facts |= attributes(
            files, "kept_files", "written_files", "kept_file_bytes", "written_file_bytes"
        )
        headline.append(
            f"files: {files.kept_files} kept, {files.written_files} written; "
            f"{format_bytes(files.written_file_bytes)} written to disk, "
            f"{format_bytes(files.kept_file_bytes)} not"
        )
    if difference.dropped_tables:
        headline.append(f"dropped, not in the new plan: {', '.join(difference.dropped_tables)}")
    title = "What resharding would move" if files is None else "Resharded"
    return Report(title, (_by_device(difference),), facts, tuple(headline))


def grown_report(tables: "Iterable[Grown]") -> Report:
    """Rows of each table that were carried over, are new, or were left out."""
    rows: list[Row] = [asdict(one) for one in tables]
    columns = [Column(f"{kind}_rows", kind, form.count) for kind in ("kept", "new", "dropped")]
    section = Section("tables", "Rows by table", (Column("table", "table"), *columns), tuple(rows))
    return Report("Tables with other rows", (section,), {}, ())


def _time(way: Migration | None) -> str:
    if way is None:
        return ", between hosts that no network link joins"
    waits = f", waiting for {way.waits_for}" if way.waits_for else ""
    return f": {format_seconds(way.seconds)} over the machine's links{waits}"


def _by_device(difference: PlanDiff) -> Section:
    totals: dict[tuple[str, str, str], list[Any]] = defaultdict(lambda: [set(), 0, 0])
    for table in difference.tables:
        for move in (*table.kept, *table.moves):
            if move.target is not None:
                total = totals[str(move.source), str(move.target), move.kind]
                total[0].add(table.table)
                total[1] += move.size_bytes - move.moved_bytes
                total[2] += move.moved_bytes
    rows: list[Row] = [
        {
            "from": source,
            "to": target,
            "kind": kind,
            "tables": len(names),
            "kept_bytes": kept_bytes,
            "moved_bytes": moved_bytes,
        }
        for (source, target, kind), (names, kept_bytes, moved_bytes) in totals.items()
    ]
    rows.sort(key=lambda row: (-row["moved_bytes"], -row["kept_bytes"], row["from"], row["to"]))
    return Section(
        "transfers",
        "Rows by device",
        (
            Column("from", "from"),
            Column("to", "to"),
            Column("kind", "kind", spare=True),
            Column("tables", "tables", form.count),
            Column("kept_bytes", "kept", form.size),
            Column("moved_bytes", "moved", form.size),
        ),
        tuple(rows),
        shown=MOST_ROWS,
        order="most moved bytes first",
    )
