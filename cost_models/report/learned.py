"""Report of a learned cost model: what it learned from, and how wrong it is."""

from collections.abc import Mapping
from typing import Any

from placer.report import section as form
from placer.report.section import Column, Report, Section


def learned_report(facts: Mapping[str, Any]) -> Report:
    """Errors on workloads that were held out of training, beside the constants' own."""
    held_out, calibrated = facts["held_out"], facts["calibrated"]
    return Report(
        title=f"Learned cost model of backend {facts['setting']['backend']}",
        facts={"plans": facts["plans"], "workloads": facts["workloads"]},
        headline=(
            f"{facts['plans']} plans of {facts['workloads']} workloads; step times of workloads "
            f"that were held out are off by {form.share(held_out['mape'])} on average",
        ),
        sections=(
            Section(
                "errors",
                "Errors of step times",
                (
                    Column("model", "cost model"),
                    Column("mape", "mean", form.share),
                    Column("p90", "one of ten exceeds", form.share),
                ),
                (
                    {"model": "learned, on held-out workloads", **held_out},
                    {"model": "the constants that it starts from", **calibrated},
                ),
            ),
        ),
    )
