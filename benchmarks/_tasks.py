"""`auto` against others on many small tasks, all solvers of a task in one process.

A hundred in NeuroShard's setting, against greedies and beam search; and drawn ones of many kinds,
against every strategy, none of which should ever have a better plan.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from _problems import Case, drawn_tasks, neuroshard_tasks
from _runs import (
    CLASSIC,
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

TASKS, QUICK_TASKS = {"neuroshard": 100, "drawn": 300}, 4
LIMIT_S = {"neuroshard": 5.0, "drawn": 10.0}
CONTENDER = "auto"
SPLIT = "greedy-cost"
RIVALS = (*CLASSIC, SPLIT, "beam")
ALSO = ("local-search",)
BETTER_SHARE, NEVER_WORSE = 0.95, 0.005
EQUAL = 1e-6
"""Relative difference of step times below which nobody is better."""

GAP = 0.005
NOTABLE = 1e-3
"""Share of the step by which another's plan is notably better."""

Task = dict[str, Run]


def run(
    part: str, options: argparse.Namespace, solvers: Sequence[str], save: Save
) -> tuple[list[dict[str, object]], list[Claim]]:
    """Run a part: records of its tasks, and what was claimed."""
    effort = Effort(options.time_limit or LIMIT_S[part], threads=options.threads)
    count = options.tasks or (QUICK_TASKS if options.quick else TASKS[part])
    if part == "neuroshard":
        wanted = [CONTENDER, *RIVALS, *ALSO]
        cases = neuroshard_tasks(count, effort.time_limit_s)
        print(
            f"\n{len(cases)} tasks of 10 to 59 tables on {cases[0].topology} with {cases[0].hbm} "
            f"of HBM a GPU, {4 * cases[0].batch_size:,} samples a step; "
            f"{effort.time_limit_s:g} s each"
        )
    else:
        wanted = [CONTENDER, *(one for one in SOLVERS if one != CONTENDER)]
        cases = drawn_tasks(count, effort.time_limit_s)
        print(f"\n{len(cases)} drawn tasks; {effort.time_limit_s:g} s each")
    chosen = [one for one in wanted if one in solvers]
    tasks, records = _solved(cases, chosen, effort, save)
    _print(tasks, [one for one in chosen if one != CONTENDER])
    if CONTENDER not in chosen:
        return records, []
    return records, _claims(tasks) if part == "neuroshard" else _claims_of_drawn(tasks)


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
    known = [one for one in RIVALS if one in tasks[0]]
    missing = [one for one in RIVALS if one not in known]
    note = f" ({', '.join(missing)} was not run)" if missing else ""
    anchors = [one for one in known if one != SPLIT]
    # Where a solver has to cut or spill, whole-table greedies are easy to beat.
    fitting = [task for task in tasks if any(task[o].all_in_hbm for o in CLASSIC if o in task)]
    worst = max(_to_best(task, known) for task in tasks) - 1
    return [
        Claim(
            f"auto better than every classic greedy and beam on {BETTER_SHARE:.0%} of the tasks",
            _better(tasks, anchors) >= BETTER_SHARE * len(tasks),
            f"{_score(tasks, anchors)}; where a classic greedy keeps every row in HBM, "
            f"{_score(fitting, anchors)}{note}",
        ),
        Claim(
            f"auto better than {SPLIT} and them on as many, or both proven optimal",
            _better(tasks, known) + _settled(tasks, known) >= BETTER_SHARE * len(tasks),
            f"{_score(tasks, known)}{note}",
        ),
        Claim(
            f"auto never more than {NEVER_WORSE:.1%} worse than the best of them all",
            worst <= NEVER_WORSE,
            f"{worst:+.3%} at most{note}",
        ),
    ]


def _claims_of_drawn(tasks: Sequence[Task]) -> list[Claim]:
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


def _better(tasks: Sequence[Task], rivals: Sequence[str]) -> int:
    return sum(_to_best(task, rivals) < 1 - EQUAL for task in tasks)


def _equal(tasks: Sequence[Task], rivals: Sequence[str]) -> list[Task]:
    return [task for task in tasks if 1 - EQUAL <= _to_best(task, rivals) <= 1 + EQUAL]


def _settled(tasks: Sequence[Task], rivals: Sequence[str]) -> int:
    """How often a rival has a plan that nobody can beat."""
    return sum(task[CONTENDER].reason == "optimal" for task in _equal(tasks, rivals))


def _score(tasks: Sequence[Task], rivals: Sequence[str]) -> str:
    return (
        f"better on {_better(tasks, rivals)} of {len(tasks)}, "
        f"equal on {len(_equal(tasks, rivals))} ({_settled(tasks, rivals)} proven optimal)"
    )
