"""TorchRec's planner against ours, under TorchRec's own perf model.

Its planner runs with each of its proposers; `auto` then gets as long as the one with the best
plan took, enumeration included, or less. TorchRec rates all plans, ours too: the time of the
slowest rank, if its own storage estimate fits every rank.

Of random models of one size there are several, and the target is on the geometric mean of the
ratios. All proposers run on MLPerf DCNv2, and on the first model of 400 tables, where they take
minutes each; on the others, and with prefetching, only dynamic programming, whose plans are the
best of the four on such models. (On 856 tables the default proposer takes 21 minutes.)
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _problems import TORCHREC, Case, pick
from _runs import (
    LIMIT_SHARE,
    Claim,
    Effort,
    Measured,
    Run,
    Save,
    case_record,
    describe,
    print_table,
    shown_bytes,
    shown_percent,
    shown_s,
    solve_apart,
    talk,
)

from placer import Problem

PROPOSERS = ("default", "greedy", "dynamic", "scale-up")
BEST_ON_RANDOM = "dynamic"
FEW_TABLES, MOST_TABLES = 100, 400
"""Models of more tables get all proposers only without prefetching, or not at all."""

CONTENDER, ALSO = "auto", ("greedy-cost",)
LEAST_S = 1.0
"""We get so long even where TorchRec's planner is faster."""

AGREES = 1e-6
"""Relative difference at which TorchRec's rating is that of our cost model."""

PATIENCE_S = 900.0
"""TorchRec's planner is killed after so long."""

TARGETS = {
    ("torchrec-400", False): 0.68,
    ("torchrec-856", False): 0.68,
    ("torchrec-400", True): 0.985,
    ("torchrec-856", True): 0.985,
    ("torchrec-dcnv2-8GiB", False): 0.72,
    ("torchrec-dcnv2-16GiB", False): 0.99,
    ("torchrec-dcnv2-80GiB", False): 0.98,
}
"""Step time of `auto` over that of TorchRec's best plan, by size and prefetching."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What TorchRec's planner did with one of its proposers."""

    proposer: str
    seconds: float
    step_time_s: float | None = None
    fits: bool = False
    claimed_s: float | None = None
    peak_bytes: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our step time over that of TorchRec's best plan, and what our bound over it is."""

    ratio: float | None
    least: float | None


@dataclass(frozen=True, slots=True)
class Ours:
    """Our runs, and where TorchRec says something else of their plans than our cost model."""

    measured: Measured
    differences: tuple[str, ...]


def run(
    options: argparse.Namespace, solvers: Sequence[str], save: Save
) -> tuple[list[dict[str, object]], list[Claim]]:
    """Run the part, each problem without and with TorchRec's prefetching pipeline."""
    if find_spec("torchrec") is None:
        print("left out: TorchRec is not installed; docs/torchrec.md says how to")
        return [], []
    records: list[dict[str, object]] = []
    claims: list[Claim] = []
    ratios: dict[tuple[str, bool], list[Ratio]] = {}
    for case in pick(TORCHREC, options.only, options.quick):
        problem = case.problem()
        size = case.name.partition("@")[0]
        first = not any(known == size for known, _ in ratios)
        for prefetch in (False, True):
            title = f"{case.name}, prefetching" if prefetch else case.name
            print(f"\n{describe(case, problem).replace(case.name, title, 1)}", flush=True)
            few = len(problem.profile) <= MOST_TABLES and not prefetch
            every = first and (few or len(problem.profile) <= FEW_TABLES)
            proposers = PROPOSERS if every else (BEST_ON_RANDOM,)
            planned = [_planned(case, proposer, prefetch) for proposer in proposers]
            sound = [one for one in planned if one.fits and one.step_time_s is not None]
            best = min(sound, key=lambda one: one.step_time_s or 0.0, default=None)
            limit_s = options.time_limit or case.time_limit_s
            if best is not None:
                limit_s = min(limit_s, max(LEAST_S, best.seconds))
            effort = Effort(LIMIT_SHARE * limit_s, threads=options.threads)
            ours = [
                _measured(case, problem, prefetch, solver, effort, options.runs)
                for solver in (CONTENDER, *ALSO)
                if solver in solvers
            ]
            _print(planned, ours, best)
            of_size = ratios.setdefault((size, prefetch), [])
            for one in ours:
                if one.measured.solver == CONTENDER:
                    of_size.append(_ratio(one.measured, best))
                    claims += _claims(title, one, best)
            records.append(
                case_record(case, problem)
                | {
                    "prefetch": prefetch,
                    "torchrec": [asdict(one) for one in planned],
                    "placer": [
                        one.measured.to_json() | {"differences": one.differences} for one in ours
                    ],
                }
            )
            save(records)
    quality = [_quality(*key, found) for key, found in ratios.items() if found]
    return records, quality + claims


def _planned(case: Case, proposer: str, prefetch: bool) -> Planned:
    """TorchRec's planner, in a process of its own."""
    job = {"case": asdict(case), "prefetch": prefetch, "proposer": proposer}
    child = talk("_torchrec_child.py", job, PATIENCE_S)
    if not child.answers:
        message = "killed" if child.killed else child.errors
        return Planned(proposer, child.seconds, message=message)
    (answer,) = child.answers
    rating: dict[str, Any] = answer["rating"] or {}
    return Planned(
        proposer,
        answer["seconds"],
        rating.get("step_time_s"),
        rating.get("fits", False),
        answer["claimed_s"],
        answer["peak_bytes"],
        answer["message"],
    )


def _measured(
    case: Case, problem: Problem, prefetch: bool, solver: str, effort: Effort, runs: int
) -> Ours:
    """Our plans, and TorchRec's rating of each."""
    done: list[Run] = []
    differences = []
    model = "torchrec-prefetch" if prefetch else "torchrec"
    for seed in range(runs):
        with tempfile.TemporaryDirectory(prefix="planners-") as folder:
            seeded = replace(effort, seed=seed)
            (one,) = solve_apart(case, problem, [solver], seeded, model, Path(folder))
            done.append(one)
            if one.step_time_s is None:
                continue
            plan = str(Path(folder) / f"{solver}.json")
            job = {"case": asdict(case), "prefetch": prefetch, "plan": plan}
            child = talk("_torchrec_child.py", job, PATIENCE_S)
        if not child.answers:
            differences.append(f"seed {seed}: no rating: {child.errors}")
            continue
        rating: dict[str, Any] = child.answers[0]["rating"]
        if abs(rating["step_time_s"] - one.step_time_s) > AGREES * one.step_time_s:
            differences.append(f"seed {seed}: rated {rating['step_time_s']!r} s")
        if not rating["fits"]:
            differences.append(f"seed {seed}: does not fit")
    return Ours(Measured(solver, tuple(done)), tuple(differences))


def _print(planned: Sequence[Planned], ours: Sequence[Ours], best: Planned | None) -> None:
    rows = []
    least = best.step_time_s if best is not None else None
    for one in planned:
        ratio = one.step_time_s / least if one.step_time_s and least else None
        rows.append(
            (
                f"TorchRec, {one.proposer}",
                shown_s(one.step_time_s),
                "-" if ratio is None else f"{ratio:.3f}",
                "-",
                f"{one.seconds:.2f} s",
                shown_bytes(one.peak_bytes),
                (one.message.splitlines() or [""])[-1][:60]
                or ("yes" if one.fits else "does not fit"),
            )
        )
    for measured in (placed.measured for placed in ours):
        own = measured.step_time_s
        rows.append(
            (
                f"placer, {measured.solver}",
                shown_s(own),
                "-" if own is None or least is None else f"{own / least:.3f}",
                shown_percent(measured.gap),
                f"{measured.seconds:.2f} s",
                shown_bytes(measured.peak_bytes),
                measured.last.fault[:60] or measured.last.reason,
            )
        )
    headers = ("planner", "slowest rank", "to its best", "gap", "planned in", "peak", "plan")
    print_table(headers, rows)


def _ratio(measured: Measured, best: Planned | None) -> Ratio:
    theirs = best.step_time_s if best is not None else None
    if theirs is None or measured.step_time_s is None:
        return Ratio(None, None)
    bound_s = measured.bound_s
    return Ratio(measured.step_time_s / theirs, None if bound_s is None else bound_s / theirs)


def _quality(size: str, prefetch: bool, ratios: Sequence[Ratio]) -> Claim:
    """The target of a size; without one, the ratio is only told."""
    target = TARGETS.get((size, prefetch))
    text = f"{size}{', prefetching' if prefetch else ''}: slowest rank over that of TorchRec's best"
    if target is not None:
        text += f" at most {target:g}"
    known = [one.ratio for one in ratios if one.ratio is not None]
    if len(known) < len(ratios):
        return Claim(text, False, "no plan")
    mean = statistics.geometric_mean(known)
    figures = f"{mean:.3f}"
    if len(known) > 1:
        figures += f" in the mean of {', '.join(f'{ratio:.3f}' for ratio in known)}"
    least = [one.least for one in ratios if one.least]
    if len(least) == len(ratios):
        # A target below what any plan can reach says more of the problem than of the solver.
        figures += f"; proven to be at least {statistics.geometric_mean(least):.3f}"
    return Claim(text, None if target is None else mean <= target, figures)


def _claims(title: str, ours: Ours, best: Planned | None) -> list[Claim]:
    """The time taken, and that TorchRec agrees on the plan."""
    solved = ours.measured.solved
    agrees = Claim(
        f"{title}: TorchRec takes our plan and rates it as our cost model does",
        solved and not ours.differences,
        "; ".join(ours.differences) or ("to 1e-6, and it fits every rank" if solved else "no plan"),
    )
    if best is None:
        return [agrees]
    seconds = ours.measured.seconds
    return [
        Claim(
            f"{title}: in no more time than TorchRec's planner takes ({best.proposer})",
            solved and seconds <= best.seconds,
            f"{seconds:.1f} s, TorchRec {best.seconds:.1f} s" if solved else "no plan",
        ),
        agrees,
    ]
