"""The charts of a page: bars for the rows of a table, which the page's script draws."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cost_models import CostReport
from placer.report import section as form
from placer.report.section import Column, Section, columns, table_of
from placer.topology.topology import Topology
from placer.units import format_bytes, format_seconds, plain_line

_MOST_CAPACITIES = 3


@dataclass(frozen=True, slots=True)
class Chart:
    """A bar for each row of a table, and a text that says what they show.

    A bar stacks the values of `parts`, in a unit that is `scale` times a value's own. `lines` have
    a name and a value, and go over the whole width.
    """

    name: str
    words: str
    table: Section
    parts: Sequence[Column]
    unit: str
    scale: float
    lines: Sequence[tuple[str, float]] = ()

    def data(self) -> dict[str, Any]:
        """Return names, values and texts for the page's script."""
        rows = self.table.rows
        return {
            "unit": self.unit,
            "bars": [self.table.columns[0].cell(row) for row in rows],
            "parts": [
                {
                    "name": part.title,
                    "values": [row[part.key] / self.scale for row in rows],
                    "texts": [part.cell(row) for row in rows],
                }
                for part in self.parts
            ],
            "lines": [{"name": name, "value": value / self.scale} for name, value in self.lines],
        }


def memory_charts(memory: Section, topology: Topology) -> list[Chart]:
    """Draw the bytes of GPUs and of hosts by kind, and their capacity."""
    by_device = {row["device"]: row for row in memory.rows}
    kinds = "weight_bytes", "state_bytes", "cache_bytes", "row_map_bytes", "buffer_bytes"
    parts = [column for column in memory.columns if column.key in kinds]
    charts = []
    for name, title, devices in (
        ("memory-gpus", "Memory of the GPUs (HBM)", topology.gpus),
        ("memory-hosts", "Memory of the hosts (DRAM)", topology.hosts),
    ):
        rows = tuple(by_device[device.id] for device in devices)
        if not any(row["total_bytes"] for row in rows):
            continue
        used = sorted((row["used_share"] or 0.0, row["device"]) for row in rows)
        ends = dict.fromkeys((used[0], used[-1]))
        words = " to ".join(f"{form.share(part)} of {plain_line(device)}" for part, device in ends)
        sizes = sorted({row["capacity_bytes"] for row in rows})[-_MOST_CAPACITIES:]
        lines = [(f"capacity {format_bytes(size)}", size) for size in sizes]
        table = replace(memory, title=title, rows=rows)
        charts.append(Chart(name, f"{words} is in use.", table, parts, "GiB", 2**30, lines))
    return charts


def time_chart(cost: CostReport, bound_s: float | None) -> Chart:
    """Draw each GPU's seconds in the phases of a step, its waits, and the bound."""
    names, seconds = cost.longest_chain
    phases = dict(zip(names, seconds.tolist(), strict=True))
    dense_s = cost.dense_s if cost.has_dense_phase else None
    for name, added_s in (("dense", dense_s), ("other", cost.other_s)):
        if added_s:
            phases[name] = [added_s] * len(cost.gpus)
    step_s = cost.step_time_s
    busy = [sum(times) for times in zip(*phases.values(), strict=True)]
    waits = [max(0.0, step_s - busy_s) for busy_s in busy]
    shown = columns(device="device", **{f"{name}_s": name for name in phases}, waits_s="waits")
    rows = zip((gpu.device for gpu in cost.gpus), *phases.values(), waits, strict=True)
    table = table_of(rows, "phases_of_gpus", "Time of a step", *shown)
    slowest, mean = max(range(len(busy)), key=busy.__getitem__), sum(waits) / len(waits)
    words = (
        f"All GPUs finish a phase before the next one begins. {cost.gpus[slowest].device} is busy "
        f"longest, {format_seconds(busy[slowest])} of the step's {format_seconds(step_s)}; a GPU "
        f"waits {format_seconds(mean)} on average, {form.share(mean / step_s if step_s else 0.0)}."
    )
    lines = [(f"step {format_seconds(step_s)}", step_s)]
    if bound_s:
        lines.append((f"bound {format_seconds(bound_s)}", bound_s))
    return Chart("time", words, table, shown[1:], "ms", 1e-3, lines)


def front_charts(front: Section) -> list[Chart]:
    """Draw the bound and the step time over budgets of HBM, if a budget has a plan."""
    rows = [
        (row["hbm_bytes"], row["bound_s"] or 0.0, row["step_time_s"] - (row["bound_s"] or 0.0))
        for row in front.rows
        if row["step_time_s"] is not None
    ]
    shown = columns(hbm_bytes="HBM/GPU", bound_s="proven bound", above_s="above the bound")
    table = table_of(rows, "step_times", front.title, *shown)
    words = "No placement takes less than the proven bound of its budget."
    return [Chart("front", words, table, shown[1:], "ms", 1e-3)] if rows else []
