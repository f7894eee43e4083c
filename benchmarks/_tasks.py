"""`auto` against every strategy on drawn problems of many kinds: none should have a better plan.

One process runs all strategies of a problem.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from _problems import Case, drawn_tasks
from _runs import (
    Claim,
    Effort,
    Run,
    Save,
    case_record,
    print_table,
    shown_percent,
    solve_apart,
)

from solvers import SOLVERS

TASKS, QUICK_TASKS = 40, 4
LIMIT_S = 10.0
CONTENDER = "auto"
EQUAL = 1e-6
"""Relative difference of step times below which nobody is better."""

GAP = 0.005
NOTABLE = 1e-3
"""Share of the step by which another's plan is notably better."""

Task = dict[str, Run]


def run(
    options: argparse.Namespace, solvers: Sequence[str], save: Save
) -> tuple[list[dict[str, object]], list[Claim]]:
    """Run the part: records of its tasks, and what was claimed."""
    effort = Effort(options.time_limit or LIMIT_S, threads=options.threads)
    count = options.tasks or (QUICK_TASKS if options.quick else TASKS)
    cases = drawn_tasks(count, effort.time_limit_s)
    print(f"\n{len(cases)} drawn tasks; {effort.time_limit_s:g} s each")
    wanted = (CONTENDER, *(one for one in SOLVERS if one != CONTENDER))
    chosen = [one for one in wanted if one in solvers]
    tasks, records = _solved(cases, chosen, effort, save)
    _print(tasks, [one for one in chosen if one != CONTENDER])
    return records, _claims(tasks) if CONTENDER in chosen else []


def _solved(
    cases: Sequence[Case], solvers: Sequence[str], effort: Effort, save: Save
) -> tuple[list[Task], list[dict[str, object]]]:
    """Every case by every solver."""
    tasks: list[Task] = []
    records: list[dict[str, object]] = []
    for case in cases:
        problem = case.problem()
        runs = solve_apart(case, problem, solvers, effort)
        tasks.append({one.solver: one for one in runs})
        records.append(case_record(case, problem) | {"solvers": [asdict(one) for one in runs]})
        save(records)
        for one in runs:
            if one.fault:
                print(f"  {case.name}, {one.solver}: {one.fault}", flush=True)
        best = min(runs, key=lambda one: one.step_time_s or math.inf)
        ahead = _to_best(tasks[-1], solvers) - 1 if CONTENDER in tasks[-1] else 0.0
        if ahead > NOTABLE:
            print(f"  {case.name}: {best.solver} is ahead by {ahead:.2%}", flush=True)
    return tasks, records


def _ratio(task: Task, rival: str) -> float | None:
    """Step time of `CONTENDER` over a rival's; None where one of them has no plan."""
    own = task[CONTENDER].step_time_s if CONTENDER in task else None
    other = task[rival].step_time_s if rival in task else None
    return None if own is None or other is None else own / other


def _to_best(task: Task, rivals: Sequence[str]) -> float:
    """Step time of `CONTENDER` over the best rival's; no plan is as bad as an infinite time."""
    times = [task[one].step_time_s for one in rivals if one in task]
    best = min((time for time in times if time is not None), default=math.inf)
    own = task[CONTENDER].step_time_s
    if own is None:
        return math.inf if best < math.inf else 1.0
    return own / best


def _print(tasks: Sequence[Task], rivals: Sequence[str]) -> None:
    rows = []
    for rival in rivals:
        ratios = [ratio for task in tasks if (ratio := _ratio(task, rival)) is not None]
        if not ratios:
            rows.append((rival, *"-" * 5, "0"))
            continue
        rows.append(
            (
                rival,
                f"{sum(r < 1 - EQUAL for r in ratios) / len(ratios):.0%}",
                f"{sum(r > 1 + EQUAL for r in ratios) / len(ratios):.0%}",
                f"{statistics.geometric_mean(1 / r for r in ratios):.3f}x",
                f"{1 / max(ratios):.3f}x",
                f"{statistics.median(task[rival].seconds for task in tasks):.2f} s",
                str(len(ratios)),
            )
        )
    headers = (f"{CONTENDER} beside", "better", "worse", "mean speed-up", "least", "its time")
    print_table((*headers, "tasks"), rows)
    if all(CONTENDER in task for task in tasks):
        seconds = [task[CONTENDER].seconds for task in tasks]
        gaps = [gap for task in tasks if (gap := task[CONTENDER].gap) is not None]
        print(
            f"  {CONTENDER}: {statistics.median(seconds):.2f} s in the median, "
            f"{max(seconds):.2f} s at most; gap {shown_percent(statistics.median(gaps or [0.0]))} "
            f"in the median, {shown_percent(max(gaps, default=0.0))} at most"
        )


def _claims(tasks: Sequence[Task]) -> list[Claim]:
    rivals = [one for one in tasks[0] if one != CONTENDER]
    behind = [ratio - 1 for task in tasks if (ratio := _to_best(task, rivals)) > 1 + NOTABLE]
    gaps = [gap for task in tasks if (gap := task[CONTENDER].gap) is not None]
    few = sum(gap <= GAP for gap in gaps)
    return [
        Claim(
            f"no strategy ahead of auto by more than {NOTABLE:.1%}",
            not behind,
            f"{len(behind)} of {len(tasks)} tasks, {max(behind, default=0.0):.2%} at most",
        ),
        Claim(
            f"a gap of at most {GAP:.1%} on every task",
            few == len(tasks),
            f"on {few} of {len(tasks)}, {shown_percent(statistics.median(gaps or [0.0]))} in the "
            f"median, {shown_percent(max(gaps, default=0.0))} at most",
        ),
    ]
