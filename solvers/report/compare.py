"""`placer compare`: machines × budgets × cost models × solvers on one workload."""

from collections.abc import Sequence
from dataclasses import asdict

from placer.report import section as form
from placer.report.section import Column, Report, Row, Section
from solvers.analysis.compare import CompareRow


def compare_report(rows: Sequence[CompareRow], title: str = "Comparison") -> Report:
    """The rows, each beside the best of its machine, budget and cost model."""
    best: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if row.step_time_s is not None:
            key = (row.topology, row.hbm_budget_bytes, row.cost_model)
            best[key] = min(row.step_time_s, best.get(key, row.step_time_s))
    values: list[Row] = []
    for row in rows:
        lead = best.get((row.topology, row.hbm_budget_bytes, row.cost_model))
        ratio = row.step_time_s / lead if row.step_time_s is not None and lead else None
        values.append({**asdict(row), "ratio_to_best": ratio})
    models = {row.cost_model for row in rows}
    without_plan = any(row.step_time_s is None for row in rows)
    several = len({row.topology for row in rows}) > 1
    priced = any(row.price_per_hour is not None for row in rows)
    columns = [
        *([Column("topology", "machine")] if several else []),
        Column("hbm_budget_bytes", "HBM/GPU", form.size),
        Column("solver", "solver"),
        *([Column("cost_model", "cost model")] if len(models) > 1 else []),
        Column("status", "status"),
        Column("step_time_s", "step", form.seconds),
        Column("ratio_to_best", "vs best", form.times, spare=True),
        *([Column("samples_per_s", "samples/s", form.count)] if several or priced else []),
        Column("cost_per_billion_samples", "cost/1G", form.number),
        Column("gap", "gap", form.share),
        Column("solve_s", "solve", form.seconds),
        Column("hbm_used_bytes", "HBM", form.size, spare=True),
        Column("dram_used_bytes", "DRAM", form.size, spare=True),
        Column("balance", "balance", form.fraction, spare=True),
        Column("hbm_lookup_share", "from HBM", form.share),
        *([Column("detail", "detail", wraps=True)] if without_plan else []),
    ]
    facts = {"cost_model": next(iter(models))} if len(models) == 1 else {}
    words = ["steps are embeddings alone", "steps have dense layers"]
    kinds = {row.dense_s is not None for row in rows if row.step_time_s is not None}
    return Report(
        title,
        (Section("comparison", "Placements", tuple(columns), tuple(values)),),
        headline=(
            *(f"cost model {name}" for name in facts.values()),
            *(words[known] for known in sorted(kinds)),
        ),
    )
