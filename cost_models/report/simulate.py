"""`placer simulate`: what a replayed log did under a plan, device by device and over time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from placer.report import section as form
from placer.report.section import Column, Report, Row, Section
from placer.units import counted, format_seconds

if TYPE_CHECKING:
    from cost_models.simulation import Simulated
    from placer.simulator.counts import Totals
    from placer.simulator.summary import DeviceTotals
    from placer.simulator.windows import Drifted, StepRecord


def simulate_report(simulated: "Simulated") -> Report:
    """Facts of all steps, and a table of devices, of what they exchanged and of windows."""
    totals, served, options = simulated.totals, simulated.served, simulated.options
    times, sums = simulated.step_times, simulated.sum_times
    steps = totals.steps
    share = served.hbm_lookups / served.lookups if served.lookups else 1.0
    facts: Row = {
        "steps": steps,
        "samples": totals.samples,
        "cache_policy": options.cache_policy,
        "look_ahead": options.look_ahead,
        "lookups": served.lookups,
        "hbm_lookups": served.hbm_lookups,
        "hbm_share": share,
        "slow_lookups_per_step": served.slow_lookups / steps,
        "slow_rows_per_step": served.slow_rows / steps,
        "step_mean_s": times.mean_s,
        "step_p50_s": times.p50_s,
        "step_p99_s": times.p99_s,
        "sum_mean_s": sums.mean_s,
        "sum_p50_s": sums.p50_s,
        "sum_p99_s": sums.p99_s,
        "dense_s": simulated.dense_s,
    }
    dense = "steps are embeddings alone"
    if simulated.dense_s is not None:
        dense = f"{format_seconds(simulated.dense_s)} of each are dense layers"
    overlap = "beside the step before" if options.look_ahead else "within the step"
    headline = (
        f"{counted(steps, 'step')}, {counted(totals.samples, 'sample')}; HBM served "
        f"{form.share(share)} of {form.count(served.lookups)} lookups",
        f"a step: mean {format_seconds(times.mean_s)}, median {format_seconds(times.p50_s)}, "
        f"p99 {format_seconds(times.p99_s)}, copies {overlap}; without any overlap "
        f"{format_seconds(sums.mean_s)}; {dense}",
    )
    devices = _devices(simulated.devices, steps, simulated.gpu_s.tolist())
    sections = [devices, _exchange(totals)]
    windows = simulated.windows
    if len(windows) > 1 or any(one.other is not None for one in windows):
        sections.append(_windows(windows))
    sections.append(_steps(simulated.records))
    return Report("Simulated", tuple(sections), facts, headline)


def _devices(devices: "Sequence[DeviceTotals]", steps: int, gpu_s: Sequence[float]) -> Section:
    rows: list[Row] = []
    for number, one in enumerate(devices):
        per_step = {name: getattr(one, name) / steps for name in _PER_STEP}
        rows.append(
            {
                "device": one.device,
                **per_step,
                "hbm_share": one.hbm_share,
                "pool_entries": one.cache_entries,
                "most_held": one.most_held,
                "most_needed": one.most_needed,
                "hbm_bytes": one.hbm_bytes,
                "most_hbm_bytes": one.most_hbm_bytes,
                "work_s": gpu_s[number] if number < len(gpu_s) else None,
            }
        )
    return Section(
        "devices",
        "A step of each device (means)",
        (
            Column("device", "device"),
            Column("work_s", "work", form.seconds),
            Column("lookups", "lookups", form.count),
            Column("rows", "rows", form.count),
            Column("hbm_share", "in HBM", form.share),
            Column("staged_rows", "copied in", form.count),
            Column("written_back_rows", "back", form.count),
            Column("in_place_rows", "in place", form.count),
            Column("link_in_bytes", "link in", form.size),
            Column("link_out_bytes", "out", form.size),
            Column("sent_bytes", "sent", form.size),
            Column("received_bytes", "received", form.size),
            Column("dram_read_bytes", "DRAM read", form.size, spare=True),
            Column("pool_entries", "entries", form.count, spare=True),
            Column("most_held", "most used", form.count, spare=True),
            Column("most_needed", "most asked", form.count, spare=True),
        ),
        tuple(rows),
    )


_PER_STEP = (
    "lookups", "rows", "hbm_lookups", "staged_rows", "in_place_rows", "written_back_rows",
    "hbm_read_bytes", "hbm_written_bytes", "link_in_bytes", "link_out_bytes", "sent_bytes",
    "received_bytes", "dram_read_bytes", "dram_written_bytes",
)  # fmt: skip


def _exchange(totals: "Totals") -> Section:
    rows: list[Row] = []
    for kind, sent in totals.sent.items():
        kept = int(sent.diagonal().sum())
        rows.append(
            {
                "kind": kind,
                "to_others_bytes": (int(sent.sum()) - kept) / totals.steps,
                "to_self_bytes": kept / totals.steps,
            }
        )
    return Section(
        "exchange",
        "Exchanged in a step",
        (
            Column("kind", "what"),
            Column("to_others_bytes", "between GPUs", form.size),
            Column("to_self_bytes", "within one", form.size),
        ),
        tuple(rows),
    )


def _windows(drift: "Sequence[Drifted]") -> Section:
    rows: list[Row] = []
    for one in drift:
        other = one.other
        rows.append(
            {
                "window": one.window.name,
                "steps": one.window.steps,
                "hbm_share": one.window.hbm_share,
                "lost_share": one.lost_share,
                "slow_lookups": one.window.slow_lookups,
                "slow_rows": one.window.slow_rows,
                "step_mean_s": one.window.mean_s,
                "step_p99_s": one.window.p99_s,
                "ratio": one.window.mean_s / one.first.mean_s if one.first.mean_s else None,
                "other_hbm_share": None if other is None else other.hbm_share,
                "other_step_mean_s": None if other is None else other.mean_s,
                "migration_s": one.migration_s,
                "break_even_steps": one.break_even_steps,
                "break_even": _break_even(one),
            }
        )
    return Section(
        "windows",
        "Over time",
        (
            Column("window", "window"),
            Column("steps", "steps", form.count),
            Column("hbm_share", "in HBM", form.share),
            Column("lost_share", "lost", form.share),
            Column("slow_lookups", "slow lookups", form.count),
            Column("step_mean_s", "step", form.seconds),
            Column("step_p99_s", "p99", form.seconds),
            Column("ratio", "vs first", form.times),
            Column("other_hbm_share", "other: in HBM", form.share),
            Column("other_step_mean_s", "step", form.seconds),
            Column("migration_s", "to move", form.seconds),
            Column("break_even", "pays after"),
        ),
        tuple(rows),
    )


def _break_even(one: "Drifted") -> str | None:
    """Break-even in words, as `placer replan` has it."""
    if one.other is None:
        return None
    if one.break_even_steps is None:
        return "never"
    if not one.migration_s:
        return "never needed"
    return f"{counted(math.ceil(one.break_even_steps), 'step')}"


def _steps(records: "Sequence[StepRecord]") -> Section:
    """Each step's numbers; a table shows none of them."""
    rows: list[Row] = [
        {
            "lookups": one.lookups,
            "hbm_lookups": one.hbm_lookups,
            "slow_rows": one.slow_rows,
            "entries_held": one.held,
            "entries_needed": one.needed,
            "step_s": one.step_s,
            "sum_s": one.sum_s,
        }
        for one in records
    ]
    columns = (Column("step_s", "step", form.seconds), Column("sum_s", "sum", form.seconds))
    return Section("steps_in_order", "Steps", columns, tuple(rows), shown=3, order="first ones")
