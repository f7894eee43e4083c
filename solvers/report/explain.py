"""`placer show --explain`: what decided the placement of one table."""

from collections.abc import Callable, Mapping
from typing import Any

from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, columns, table_of
from placer.units import counted, format_bytes, format_seconds
from solvers.analysis.alternatives import Alternative
from solvers.analysis.explain import Explanation, ShardMargin
from solvers.report.plan import placement_kind, short_names

MOST_ALTERNATIVES = 12
"""Alternatives that a table shows."""


def explain_report(explanation: Explanation) -> Report:
    """Report what binds the table, its worth of HBM beside the price, and its alternatives."""
    current = explanation.current
    table = current.plan.tables_by_name[explanation.table]
    shards = current.plan.shards_by_table[explanation.table]
    devices = short_names(device for shard in shards for device in shard.devices)
    facts: Row = {
        "table": explanation.table,
        "rows": table.rows,
        "dim": table.dim,
        "size_bytes": table.total_bytes,
        "placement": placement_kind(current.plan, explanation.table),
        "devices": devices,
        "step_time_s": current.step_time_s,
        "table_s": current.table_s,
        "pooled_price_s_per_byte": explanation.pooled_price_s_per_byte,
    }
    headline = (
        f"{form.count(table.rows)} rows x {table.dim}, {format_bytes(table.total_bytes)}: "
        f"{facts['placement']} on {devices}",
        f"{format_seconds(current.table_s)} of GPU time in a step of "
        f"{format_seconds(current.step_time_s)}",
    )
    # Rows that every GPU has are not split, so that there is no margin to show.
    margins = (_margins(explanation),) if explanation.margins else ()
    sections = (_bindings(explanation), *margins, _alternatives(explanation))
    return Report(f"Why table {explanation.table} is where it is", sections, facts, headline)


def _bindings(explanation: Explanation) -> Section:
    return table_of(
        explanation.bindings,
        "bindings",
        "What binds it",
        *columns(constraint="constraint", device="device"),
        Column("detail", "why", wraps=True),
    )


def _margins(explanation: Explanation) -> Section:
    """Show slopes beside that of all GPUs' HBM together: none of them holds for many bytes."""
    pooled = explanation.pooled_price_s_per_byte

    def beside(value: float | str) -> str:
        if isinstance(value, str) or not pooled:
            return value if isinstance(value, str) else "more" if value else "0"
        return form.times(value / pooled)

    def of(name: str) -> Callable[[ShardMargin], Any]:
        # JSON has no infinity: rows that take no HBM are free.
        return lambda one: "free" if getattr(one, name) == float("inf") else getattr(one, name)

    return table_of(
        explanation.margins,
        "margins",
        "What a byte of HBM saves at the split, beside the last one of all GPUs' HBM together",
        *columns(device="device", rows="rows", hot_rows="in HBM"),
        Column("last_s_per_byte", "coldest in HBM", beside, of=of("last_s_per_byte")),
        Column("next_s_per_byte", "hottest in DRAM", beside, of=of("next_s_per_byte")),
        Column("gpu_price_s_per_byte", "on this GPU", beside),
        Column("pooled_price_s_per_byte", of=lambda _: pooled),
        shown=MOST_ALTERNATIVES,
    )


def _lacking(short_bytes: Mapping[str, int]) -> str:
    """Return what an alternative lacks, by the device that lacks most."""
    if not short_bytes:
        return ""
    worst = max(short_bytes, key=lambda device: short_bytes[device])
    others = len(short_bytes) - 1
    more = f", {counted(others, 'other')} at most as much" if others else ""
    return f"{worst} lacks {format_bytes(short_bytes[worst])}{more}"


def _alternatives(explanation: Explanation) -> Section:
    now = explanation.current

    def devices(one: Alternative) -> str:
        shards = one.plan.shards_by_table[explanation.table]
        return short_names(device for shard in shards for device in shard.devices)

    return table_of(
        (now, *explanation.alternatives),
        "alternatives",
        "Alternatives, everything else as it is",
        Column("placement", "placement", wraps=True, of=lambda one: one.name),
        Column("devices", "devices", spare=True, of=devices),
        Column("step_time_s", "step"),
        Column("ratio", "vs planned", of=lambda one: form.ratio(one.step_time_s, now.step_time_s)),
        Column("table_s", "GPU time"),
        Column("fits", of=lambda one: not one.short_bytes),
        Column("short_bytes", of=lambda one: sum(one.short_bytes.values())),
        Column("detail", "does not fit", wraps=True, of=lambda one: _lacking(one.short_bytes)),
        shown=MOST_ALTERNATIVES,
        order="of other GPUs and options the fastest that fit first",
    )
