"""Reports of `placer train`: figures of a run, lookups by memory, and phases of a step."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, attributes, columns, table_of
from placer.units import format_seconds

if TYPE_CHECKING:  # They import torch, and every command imports this.
    from placer.executor.local.hit_rates import HitRates
    from placer.growing.options import KeyCounts
    from placer.training.loop import TrainResult
    from placer.training.pilot import Candidate, ParityResult
    from placer.training.trace import TraceSummary


def train_values(result: "TrainResult") -> dict[str, Any]:
    """Return the figures of a run, by name."""
    names = ("steps", "samples", "unlabelled_samples", "train_s", "read_s", "samples_per_s")
    values = attributes(result, *names, "step_s", "planned_step_s")
    if result.planned_on is not None and result.planned_step_s is not None:
        values["planned_step_is_of"] = f"{result.planned_on}, and step s of this CPU"
    return {
        **values,
        "first_loss": result.losses[0][1] if result.losses else None,
        "last_loss": result.losses[-1][1] if result.losses else None,
        "held_out_samples": result.eval_samples,
        **attributes(result, "auc", "log_loss"),
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "interrupted": result.interrupted,
    }


def training_reports(
    result: "TrainResult", planned: Mapping[str | None, float]
) -> dict[str, Report]:
    """Return the reports of a run by name: keys, hit rates and trace, if it has them."""
    reports = {}
    if result.keys:
        reports["keys"] = Report("Tables that grow", (keys_section(result.keys),))
    if result.hit_rates is not None:
        reports["hit_rates"] = hit_rate_report(result.hit_rates, planned)
    if result.trace is not None:
        reports["trace"] = trace_report(result.trace)
    return reports


def parity_lines(parity: "ParityResult") -> Iterator[str]:
    """Yield lines with the losses of the placed and unplaced model, and whether they are equal."""
    yield f"{'step':>6} {'placed':>10} {'unplaced':>10} {'difference':>11}"
    for step in sorted({*range(0, parity.steps, max(1, parity.steps // 10)), parity.steps - 1}):
        placed, unplaced = parity.placed_losses[step], parity.unplaced_losses[step]
        yield f"{step + 1:>6} {placed:>10.6f} {unplaced:>10.6f} {abs(placed - unplaced):>11.1e}"
    if parity.placed_auc is not None and parity.unplaced_auc is not None:
        yield (
            f"{'AUC':>6} {parity.placed_auc:>10.6f} {parity.unplaced_auc:>10.6f}  "
            f"of {parity.eval_samples:,} held-out samples"
        )
    yield (
        f"largest difference of a loss {parity.max_loss_difference:.1e}: "
        + ("equal to float tolerance, step for step" if parity.equal else "NOT EQUAL")
        + f"; a step takes {format_seconds(parity.placed_step_s)} placed, "
        f"{format_seconds(parity.unplaced_step_s)} unplaced on this CPU"
    )


def pilot_report(candidates: Sequence["Candidate"]) -> Report:
    """Report AUC and log loss of each candidate. The first candidate is float32."""
    usual = candidates[0]
    within = [one.name for one in candidates[1:] if one.is_within_spread(usual)]
    runs = [
        {"name": one.name, "run": number, "auc": auc, "log_loss": log_loss}
        for one in candidates
        for number, (auc, log_loss) in enumerate(zip(one.aucs, one.log_losses, strict=True))
    ]
    summary = table_of(
        candidates,
        "candidates",
        "",
        Column("name", "types"),
        Column("table_bytes", "tables"),
        Column("exchanged_bytes", "exchanged a sample"),
        Column("auc", "AUC", _digits, of=lambda one: mean(one.aucs)),
        Column("least_auc", "least", _digits, of=lambda one: min(one.aucs)),
        Column("most_auc", "most", _digits, of=lambda one: max(one.aucs)),
        Column("log_loss", "log loss", _digits, of=lambda one: mean(one.log_losses)),
        Column("least_log_loss", "least", _digits, of=lambda one: min(one.log_losses)),
        Column("most_log_loss", "most", _digits, of=lambda one: max(one.log_losses)),
        Column(
            "within_spread",
            "within",
            lambda value: "yes" if value else "no",
            of=lambda one: one.is_within_spread(usual),
        ),
    )
    return Report(
        f"AUC and log loss: means of {len(usual.aucs)} seeds, and the least and the most of them",
        (summary,),
        {"runs": runs},
        (f"no worse than float32's worst seed: {', and '.join(within) or 'none'}",),
    )


def _digits(value: float) -> str:
    return f"{value:.4f}"


def hit_rate_report(rates: "HitRates", planned: Mapping[str | None, float]) -> Report:
    """Report lookups by the memory that held their rows when a step read them.

    `planned` has the shares of lookups from HBM that the plan expects, if they are known: by table,
    and for all tables under None.
    """
    cache = rates.row_cache
    served = {
        "HBM, rows that the plan keeps there": rates.home_lookups,
        "HBM, staged or cached before": cache.hit_lookups,
        "DRAM, staged or cached now": cache.lookups - cache.hit_lookups,
        "DRAM, left there": rates.lookups - rates.home_lookups - cache.lookups,
    }
    facts: Row = {
        **attributes(rates, "lookups", "hbm_hit_rate"),
        "planned_hbm_share": planned.get(None),
        "pool_rows": cache.rows,
        "pool_hit_rows": cache.hit_rows,
        "rows_read_in_place": cache.in_place_rows,
        "rows_written_back": cache.written_back_rows,
    }
    title = f"Lookups: {form.share(rates.hbm_hit_rate)} found their row in HBM"
    if None in planned:
        title += f", the plan counts on {form.share(planned[None])}"
    lookups = rates.lookups
    rows = [(memory, own, own / lookups if lookups else 0.0) for memory, own in served.items()]
    shown = Column("from", "rows in"), *columns(lookups="lookups", share="share")
    tables = table_of(
        sorted(rates.tables.items(), key=lambda item: item[1] - (planned.get(item[0]) or 0.0)),
        "tables",
        "Lookups from HBM by table",
        *columns(table="table", hbm_share="from HBM"),
        Column("planned_hbm_share", "planned", of=lambda item: planned.get(item[0])),
        shown=10,
        order="those furthest below the plan",
    )
    served_from = table_of(rows, "served", "", *shown)
    return Report(title, (served_from, tables) if tables.rows else (served_from,), facts)


def keys_section(counts: "Mapping[str, KeyCounts]") -> Section:
    """Return a section with the hits, misses and evictions of each growing table."""
    names = ("hits", "misses", "waiting", "refused", "admitted", "evicted", "expired", "live")
    return table_of(
        ({"table": table, **attributes(one, "hit_rate", *names)} for table, one in counts.items()),
        "keys",
        "Keys of tables that grow",
        Column("table", "table"),
        Column("hit_rate", "hit rate", form.share),
        *columns(form.count, **{name: name for name in names}),
    )


def trace_report(summary: "TraceSummary") -> Report:
    """Report the phases of a traced step."""
    step_s = summary.step_s
    phases = table_of(
        summary.phases,
        "phases",
        "",
        Column("phase", "phase", of=lambda phase: phase.name),
        Column("host_s", "host"),
        Column("share", "share", of=lambda phase: phase.host_s / step_s if step_s else 0.0),
        Column("device_s", "GPU"),
    )
    facts: Row = {"path": str(summary.path), "steps": summary.steps, "step_s": step_s}
    title = (
        f"A step under the profiler: {form.seconds(step_s)}, "
        f"the mean of {summary.steps} in {summary.path}"
    )
    return Report(title, (phases,), facts)
