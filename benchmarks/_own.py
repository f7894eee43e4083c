"""Every solver on every problem of `OWN`, under the cost model `roofline`."""

import argparse
from collections.abc import Sequence

from _problems import DCNV2, OWN, RECSHARD, Case, pick
from _runs import (
    CLASSIC,
    LIMIT_SHARE,
    Claim,
    Effort,
    Measured,
    Save,
    beaten_bounds,
    best_bound_s,
    case_record,
    describe,
    gap_to,
    print_table,
    shown_bytes,
    shown_percent,
    shown_s,
    solve_apart,
)

from placer.units import format_bytes

REPEATED_BELOW_S = 5.0
DCNV2_GAP, RECSHARD_GAP = 0.005, 0.01
RECSHARD_SPEEDUP = 5.0
LARGE = {
    "meta-t856-128": (0.02, None),
    "random-856-128": (0.02, None),
    "random-856-128-2x": (0.02, None),
    "colossal": (0.05, 4 * 2**30),
    "random-10000-1024": (0.05, 4 * 2**30),
    "random-10000-1024-2x": (0.05, 4 * 2**30),
}
"""Gap and peak memory that `auto` should end with."""

Results = dict[str, dict[str, Measured]]


def run(
    options: argparse.Namespace, solvers: Sequence[str], save: Save
) -> tuple[list[dict[str, object]], list[Claim]]:
    """Run the part, smallest problems first; records of the problems, and what was claimed."""
    cases = pick(OWN, options.only, options.quick)
    problems = {case.name: case.problem() for case in cases}
    sizes = {
        name: len(problem.profile) * len(problem.topology.gpus)
        for name, problem in problems.items()
    }
    hopeless: dict[str, int] = {}
    results: Results = {}
    records: list[dict[str, object]] = []
    for case in sorted(cases, key=lambda case: sizes[case.name]):
        problem = problems.pop(case.name)
        print(f"\n{describe(case, problem)}", flush=True)
        size = sizes[case.name]
        left_out = [solver for solver in solvers if hopeless.get(solver, size + 1) <= size]
        measured = {}
        for solver in solvers:
            if solver in left_out:
                continue
            limit_s = LIMIT_SHARE * (options.time_limit or case.time_limit_s)
            runs = solve_apart(case, problem, [solver], Effort(limit_s, threads=options.threads))
            if runs[0].reason == "killed":
                hopeless[solver] = size
            repeated = solver == "auto" or runs[0].seconds < REPEATED_BELOW_S
            for seed in range(1, options.runs if repeated and runs[0].step_time_s else 1):
                effort = Effort(limit_s, seed=seed, threads=options.threads)
                runs += solve_apart(case, problem, [solver], effort)
            measured[solver] = Measured(solver, tuple(runs))
        results[case.name] = measured
        _print(measured, left_out)
        bounds = {name: best_bound_s(measured.values(), one) for name, one in measured.items()}
        records.append(
            case_record(case, problem)
            | {
                "left_out": left_out,
                "solvers": [
                    one.to_json() | {"best_bound_s": bounds[name]} for name, one in measured.items()
                ],
            }
        )
        save(records)
    return records, _claims(results, options)


def _print(measured: dict[str, Measured], left_out: Sequence[str]) -> None:
    classic = _best_classic(measured)
    rows = []
    for one in measured.values():
        last = one.last
        ratio = classic / one.step_time_s if classic and one.step_time_s else None
        rows.append(
            (
                one.solver,
                shown_s(one.step_time_s),
                shown_s(one.bound_s),
                shown_percent(one.gap),
                shown_percent(gap_to(one.step_time_s, best_bound_s(measured.values(), one))),
                f"{one.seconds:.2f} s",
                shown_bytes(one.peak_bytes),
                "-" if ratio is None else f"{ratio:.2f}x",
                str(len(one.runs)),
                last.binds or last.reason,
            )
        )
    headers = ("solver", "step time", "bound", "gap", "to best", "solved in", "peak", "speed-up")
    print_table((*headers, "runs", "waits for"), rows)
    for one in measured.values():
        if one.last.fault:
            print(f"  {one.solver}: {one.last.fault}")
    if left_out:
        print(f"  left out, killed on a smaller problem: {', '.join(left_out)}")


def _best_classic(measured: dict[str, Measured]) -> float | None:
    times = [one.step_time_s for name, one in measured.items() if name in CLASSIC]
    return min((time for time in times if time is not None), default=None)


def _claims(results: Results, options: argparse.Namespace) -> list[Claim]:
    """Soundness, and the targets of the problems that were run with `auto`."""
    beaten = [line for measured in results.values() for line in beaten_bounds(measured.values())]
    faults = [
        f"{name}, {one.solver}"
        for name, measured in results.items()
        for one in measured.values()
        if one.last.fault
    ]
    claims = [
        Claim(
            "every plan is sound and as fast as its solver says",
            not faults,
            "; ".join(faults)
            or f"{sum(len(one.runs) for m in results.values() for one in m.values())} runs",
        ),
        Claim(
            "no plan is faster than a bound for its search space",
            not beaten,
            "; ".join(beaten) or "none is",
        ),
    ]
    for case in OWN:
        measured = results.get(case.name, {})
        if "auto" not in measured:
            continue
        auto = measured["auto"]
        limit_s = options.time_limit or case.time_limit_s
        if case in DCNV2:
            claims.append(_gap_claim(case, auto, DCNV2_GAP, limit_s))
        elif case in RECSHARD:
            claims.append(_gap_claim(case, auto, RECSHARD_GAP, limit_s))
            if case.hbm == "half":
                claims.append(_speedup_claim(case, measured))
        elif case.name in LARGE:
            gap, most_bytes = LARGE[case.name]
            claims.append(_gap_claim(case, auto, gap, limit_s, most_bytes))
    return claims


def _gap_claim(
    case: Case, auto: Measured, gap: float, limit_s: float, most_bytes: int | None = None
) -> Claim:
    text = f"{case.name}: auto within {gap:.1%} of its bound in {limit_s:g} s"
    figures = f"{shown_percent(auto.gap)} in {auto.seconds:.1f} s"
    holds = auto.gap is not None and auto.gap <= gap and auto.seconds <= limit_s
    if most_bytes is not None:
        text += f" with {format_bytes(most_bytes)}"
        figures += f" with {shown_bytes(auto.peak_bytes)}"
        holds = holds and auto.peak_bytes is not None and auto.peak_bytes <= most_bytes
    return Claim(text, holds, figures)


def _speedup_claim(case: Case, measured: dict[str, Measured]) -> Claim:
    classic, auto_s = _best_classic(measured), measured["auto"].step_time_s
    text = f"{case.name}: auto at least {RECSHARD_SPEEDUP:g}x as fast as the best classic greedy"
    if classic is None:
        return Claim(text, None, "no classic greedy has a plan")
    if auto_s is None:
        return Claim(text, False, "auto has no plan")
    figures = f"{classic / auto_s:.2f}x"
    rivals = [run for name in CLASSIC if name in measured for run in measured[name].runs]
    lookups = min((run.lookups_s for run in rivals if run.lookups_s), default=None)
    in_place = min((run.in_place_s for run in rivals if run.in_place_s), default=None)
    own_lookups = measured["auto"].last.lookups_s
    if lookups and in_place and own_lookups:
        figures += (
            f"; {in_place / auto_s:.2f}x if they read DRAM in place, as RecShard's rivals do; "
            f"{lookups / own_lookups:.2f}x without exchanges"
        )
    split = measured.get("greedy-cost")
    if split is not None and split.step_time_s is not None:
        figures += f"; {split.step_time_s / auto_s:.2f}x greedy-cost, which splits tables"
    return Claim(text, classic / auto_s >= RECSHARD_SPEEDUP, figures)
