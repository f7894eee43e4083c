"""`auto` from the plan of a problem that differs little, beside `auto` from nothing."""

import argparse
import statistics
from dataclasses import replace
from typing import Any

from _problems import Case
from _runs import Claim, Save, case_record, print_table

from cost_models import Roofline
from solvers import Limits
from solvers.strategies.auto import Auto

LIMIT_S, FASTER = 10.0, 5
"""Seconds of a whole search, and how many times as many they are as those of a short one."""

CHANGES = {"batch + 10%": {"batch_size": 9_011}, "HBM + 12%": {"hbm": "4608MiB"}}
"""Of problems with 8,192 samples a GPU and 4 GiB of HBM."""

CASES = tuple(
    Case(f"random-{tables} on {machine}", f"random-{tables}@{seed}", machine, "4GiB", None, 8_192)
    for seed, (tables, machine) in enumerate(
        [(26, "8xh100"), (40, "4xa100-40"), (60, "8xh100"), (80, "2x4xh100"), (120, "8xh100")], 5000
    )
)


def run(options: argparse.Namespace, save: Save) -> tuple[list[dict[str, object]], list[Claim]]:
    """Records of all cases with each change, and what was claimed."""
    limit_s = options.time_limit or LIMIT_S
    whole = Limits(limit_s, 1e-4, threads=options.threads)
    short = replace(whole, time_limit_s=limit_s / FASTER)
    auto, model, records = Auto(), Roofline(), list[dict[str, object]]()
    auto.prepare(whole)
    print(f"\nwhole searches of {limit_s:g} s, short ones of {short.time_limit_s:g} s")
    for case in CASES[:1] if options.quick else CASES:
        before = auto.solve(case.problem(), model, whole).plan
        for change, fields in CHANGES.items():
            changed: dict[str, Any] = fields
            problem = replace(case, **changed).problem()
            found = {
                "from nothing": auto.solve(problem, model, whole),
                "warm": auto.solve(problem, model, whole, before),
                "short, from nothing": auto.solve(problem, model, short),
                "short, warm": auto.solve(problem, model, short, before),
            }
            times = {name: result.step_time_s for name, result in found.items()}
            records.append(case_record(case, problem) | {"change": change, "step_time_s": times})
            save(records)
    ratios = {
        name: [one["step_time_s"][name] / one["step_time_s"]["from nothing"] for one in records]  # type: ignore[index]
        for name in ("warm", "short, from nothing", "short, warm")
    }
    print_table(
        ("step time beside a whole search from nothing", "mean", "least", "greatest"),
        [
            (name, *(f"{of(each):.4f}" for of in (statistics.geometric_mean, min, max)))
            for name, each in ratios.items()
        ],
    )
    warm, cold = (statistics.geometric_mean(ratios[n]) for n in list(ratios)[:0:-1])
    return records, [
        Claim(
            "a short search is better with a warm start",
            warm < cold,
            f"{warm:.4f} of a whole search's step time instead of {cold:.4f}",
        )
    ]
