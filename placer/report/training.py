"""`placer train`: which memory served the lookups, and where the time of a step went."""

from typing import TYPE_CHECKING

from placer.report import section as form
from placer.report.section import Column, Report, Row, Section

if TYPE_CHECKING:  # They import torch, and every command imports this.
    from placer.executor.local.hit_rates import HitRates
    from placer.training.trace import TraceSummary


def hit_rate_report(rates: "HitRates") -> Report:
    """Lookups by the memory that held their rows when a step asked for them."""
    pool = rates.row_cache
    served = {
        "HBM, rows that the plan keeps there": rates.home_lookups,
        "HBM, staged or cached before": pool.hit_lookups,
        "DRAM, staged or cached now": pool.lookups - pool.hit_lookups,
        "DRAM, left there": rates.lookups - rates.home_lookups - pool.lookups,
    }
    rows: tuple[Row, ...] = tuple(
        {"from": name, "lookups": count, "share": count / rates.lookups if rates.lookups else 0.0}
        for name, count in served.items()
    )
    columns = (
        Column("from", "rows in"),
        Column("lookups", "lookups", form.count),
        Column("share", "share", form.share),
    )
    facts: Row = {
        "lookups": rates.lookups,
        "hbm_hit_rate": rates.hbm_hit_rate,
        "pool_rows": pool.rows,
        "pool_hit_rows": pool.hit_rows,
        "rows_read_in_place": pool.in_place_rows,
        "rows_written_back": pool.written_back_rows,
    }
    title = f"Lookups: {form.share(rates.hbm_hit_rate)} found their row in HBM"
    return Report(title, (Section("served", "", columns, rows),), facts)


def trace_report(summary: "TraceSummary") -> Report:
    """Phases of a traced step."""
    rows: tuple[Row, ...] = tuple(
        {
            "phase": phase.name,
            "host_s": phase.host_s,
            "share": phase.host_s / summary.step_s if summary.step_s else 0.0,
            "device_s": phase.device_s,
        }
        for phase in summary.phases
    )
    columns = (
        Column("phase", "phase"),
        Column("host_s", "host", form.seconds),
        Column("share", "share", form.share),
        Column("device_s", "GPU", form.seconds),
    )
    facts: Row = {"path": str(summary.path), "steps": summary.steps, "step_s": summary.step_s}
    title = (
        f"A step under the profiler: {form.seconds(summary.step_s)}, "
        f"the mean of {summary.steps} in {summary.path}"
    )
    return Report(title, (Section("phases", "", columns, rows),), facts)
