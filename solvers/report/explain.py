"""Reports of `placer show --explain` and `--memory`: a table's placement, and a step's memory."""

from collections.abc import Callable
from typing import Any

from placer.plan.peak_memory import DevicePeak, largest_batch, peak_memory
from placer.plan.plan import Plan
from placer.profile.profile import Profile
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, columns, table_of
from placer.topology.kinds import GPU_KINDS
from placer.units import counted, format_bytes, format_seconds
from solvers.analysis.alternatives import Alternative
from solvers.analysis.explain import Explanation, ShardMargin
from solvers.report.plan import MOST_DEVICES, devices_of, placement_kind

MOST_ALTERNATIVES = 12
"""Number of alternatives that the report shows."""


def explain_report(explanation: Explanation) -> Report:
    """Report what binds a table, the worth of HBM to its rows, and its alternatives."""
    current = explanation.current
    table = current.plan.tables_by_name[explanation.table]
    devices = devices_of(current.plan, explanation.table)
    facts: Row = {
        "table": explanation.table,
        **form.attributes(table, "rows", "dim"),
        "size_bytes": table.total_bytes,
        "placement": placement_kind(current.plan, explanation.table),
        "devices": devices,
        **form.attributes(current, "step_time_s", "table_s"),
        "pooled_price_s_per_byte": explanation.pooled_price_s_per_byte,
    }
    headline = (
        f"{form.count(table.rows)} rows x {table.dim}, {format_bytes(table.total_bytes)}: "
        f"{facts['placement']} on {devices}",
        f"{format_seconds(current.table_s)} of GPU time in a step of "
        f"{format_seconds(current.step_time_s)}",
    )
    # Rows that every GPU has are not split, so they have no margin to show.
    margins = (_margins(explanation),) if explanation.margins else ()
    shown = *columns(constraint="constraint", device="device"), Column("detail", "why", wraps=True)
    bindings = table_of(explanation.bindings, "bindings", "What binds it", *shown)
    sections = (bindings, *margins, _alternatives(explanation))
    return Report(f"Why table {explanation.table} is where it is", sections, facts, headline)


def _margins(explanation: Explanation) -> Section:
    """Report savings per byte of HBM as multiples of the pooled price; they hold for few bytes."""
    pooled = explanation.pooled_price_s_per_byte

    def beside(value: float | str) -> str:
        if isinstance(value, str):
            return value
        if value < 0:  # A cache of a few rows takes more time than they save.
            return "costs time"
        # Where servers hold all rows, the price is 0 apart from rounding: ratios say nothing.
        is_measure = pooled > 0 and value <= 1e6 * pooled
        return form.times(value / pooled) if is_measure else "more" if value else "0"

    def of(name: str) -> Callable[[ShardMargin], Any]:
        # Rows that take no HBM are free. JSON has no infinity.
        return lambda one: "free" if getattr(one, name) == float("inf") else getattr(one, name)

    return table_of(
        explanation.margins,
        "margins",
        "What a byte of HBM saves, in times of what the least useful byte of all GPUs' HBM saves",
        *columns(device="device", rows="rows", hot_rows="in HBM"),
        Column("last_s_per_byte", "coldest in HBM", beside, of=of("last_s_per_byte")),
        Column("next_s_per_byte", "hottest in DRAM", beside, of=of("next_s_per_byte")),
        Column("gpu_price_s_per_byte", "on this GPU", beside),
        Column("pooled_price_s_per_byte", of=lambda _: pooled),
        shown=MOST_ALTERNATIVES,
    )


def _alternatives(explanation: Explanation) -> Section:
    now, table = explanation.current, explanation.table

    def lacking(one: Alternative) -> str:
        short = one.short_bytes
        if not short:
            return ""
        worst = max(short, key=lambda device: short[device])
        others = len(short) - 1
        more = f", {counted(others, 'other')} at most as much" if others else ""
        return f"{worst} lacks {format_bytes(short[worst])}{more}"

    return table_of(
        (now, *explanation.alternatives),
        "alternatives",
        "Alternatives, everything else as it is",
        Column("placement", "placement", wraps=True, of=lambda one: one.name),
        Column("devices", "devices", spare=True, of=lambda one: devices_of(one.plan, table)),
        Column("step_time_s", "step"),
        Column("ratio", "vs planned", of=lambda one: form.ratio(one.step_time_s, now.step_time_s)),
        Column("table_s", "GPU time"),
        Column("fits", of=lambda one: not one.short_bytes),
        Column("short_bytes", of=lambda one: sum(one.short_bytes.values())),
        Column("detail", "does not fit", wraps=True, of=lacking),
        shown=MOST_ALTERNATIVES,
        order="of other GPUs and options the fastest that fit first",
    )


def memory_report(plan: Plan, profile: Profile) -> Report:
    """Report a step's phases on the fullest GPU, each GPU's peak, and the largest batch that fits.

    A GPU's capacity is its card's memory if the chip is known, otherwise the memory that the plan
    and its dense part may take.
    """
    known = [(gpu, GPU_KINDS[gpu.chip]) for gpu in plan.topology.gpus if gpu.chip in GPU_KINDS]
    # Leave out cards with less memory than was planned for.
    sizes = {gpu.id: (kind.memory_bytes, gpu.memory_bytes) for gpu, kind in known}
    cards = {gpu: whole for gpu, (whole, planned) in sizes.items() if whole >= planned}
    peaks = peak_memory(plan, profile, capacity_bytes=cards)
    worst = min(peaks, key=lambda peak: peak.free_bytes)
    batch = largest_batch(plan, profile, capacity_bytes=cards)
    ways = ["make the batch smaller"] if batch else []
    # Without a card's memory, the peak is compared with the budget: less of it helps nothing.
    ways.append(
        "plan with less --hbm"
        if worst.device in cards
        else f"name the chip of {worst.device} in the machine's file: only its budget is known"
    )
    devices = table_of(
        sorted(peaks, key=lambda peak: peak.free_bytes),
        "devices",
        "Peak of each GPU",
        Column("device", "device"),
        Column("phase", "phase", of=lambda peak: peak.fullest.name),
        *columns(peak_bytes="peak", capacity_bytes="of", free_bytes="to spare"),
        shown=MOST_DEVICES,
        order="fullest first",
    )
    return Report(
        f"Memory of a training step: {counted(len(plan.tables), 'table')} on {plan.topology.name}",
        (_phase_section(worst), devices),
        facts={
            "fits": worst.free_bytes >= 0,
            "fullest_device": worst.device,
            "fullest_phase": worst.fullest.name,
            **form.attributes(worst, "peak_bytes", "capacity_bytes", "free_bytes"),
            "batch_size": plan.batch_size,
            "largest_batch_size": batch,
        },
        headline=(
            verdict(worst, ", or ".join(ways)),
            f"largest batch that fits this plan: {counted(batch, 'sample')} a GPU; it was made for "
            f"{plan.batch_size:,}",
        ),
    )


def verdict(peak: DevicePeak, advice: str) -> str:
    """Say how many bytes a step leaves free, or how many are short and what to do.

    >>> from placer.plan.peak_memory import DevicePeak, PhaseMemory
    >>> verdict(DevicePeak("gpu:0", 5 << 30, (PhaseMemory("update", {"weights": 2 << 30}),)), "")
    'fits, with 3 GiB to spare in phase update of gpu:0'
    """
    where = f"in phase {peak.fullest.name} of {peak.device}"
    if peak.free_bytes >= 0:
        return f"fits, with {format_bytes(peak.free_bytes)} to spare {where}"
    return (
        f"does not fit: {format_bytes(-peak.free_bytes)} ({-peak.free_bytes} bytes) are short "
        f"{where}; {advice}"
    )


def _phase_section(peak: DevicePeak) -> Section:
    def most(purpose: str) -> int:
        return max(phase.parts.get(purpose, 0) for phase in peak.phases)

    purposes = {purpose for phase in peak.phases for purpose in phase.parts}
    rows: list[tuple[Any, ...]] = [
        (purpose, *(phase.parts.get(purpose, 0) for phase in peak.phases))
        for purpose in sorted(purposes, key=lambda purpose: (-most(purpose), purpose))
    ]
    rows.append(("total", *(phase.total_bytes for phase in peak.phases)))
    phases = {f"{phase.name.replace(' ', '_')}_bytes": phase.name for phase in peak.phases}
    shown = columns(purpose="purpose", **phases)
    return table_of(rows, "phases", f"{peak.device} in each phase of a step", *shown)
