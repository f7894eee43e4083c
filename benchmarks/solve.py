"""Solvers side by side: step time, proven bound, gap and solve time on published tables.

    python benchmarks/solve.py [--quick] [--time-limit 60] [--threads 2]

Problems: the 26 tables of MLPerf DLRM-DCNv2 on 8 H100 with 4 to 80 GiB of HBM each, those
of Criteo Terabyte on the same server with 4 GiB, and those of Criteo Kaggle on four T4 that
hold a quarter of them, which is the shape of the demo. All solvers run in this one process
on the same problems; greedies three times each, of which the median counts, the integer
program once. Its bound, the tightest, is what every solver's gap is measured against.

Two things are claimed and checked at the end: at 8 GiB the integer program ends within 1%
of its bound, and the cost greedy within 5% of the same bound in a second. Results go to
benchmarks/results/ with the machine and the raw numbers; --quick runs two problems with
5 seconds for the integer program and writes nothing unless told to.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from placer import Problem, Topology
from placer.files import write_text
from placer.units import format_bytes, format_seconds
from placer.workloads import named_workload
from solvers import SOLVERS, SolveResult, solve

GREEDIES = ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim", "greedy-cost")
RUNS = 3
CLAIM = "mlperf-dcnv2, 8xh100, 8GiB"
ILP_GAP, GREEDY_GAP, GREEDY_SECONDS = 0.01, 0.05, 1.0


def server(workload: str, hbm: str) -> Problem:
    """A published workload on 8 H100, 8,192 samples per GPU and step."""
    return Problem(named_workload(workload), Topology.parse("8xh100", hbm=hbm), 8192)


def demo() -> Problem:
    """Criteo Kaggle at dim 64 on four T4 that hold a quarter of it, 128 samples per GPU."""
    profile = named_workload("criteo-kaggle").with_tables(dim=64)
    return Problem(profile, Topology.parse("4xt4", hbm=profile.total_bytes // 16), 128)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlperf-dcnv2, 8xh100, 4GiB": lambda: server("mlperf-dcnv2", "4GiB"),
    CLAIM: lambda: server("mlperf-dcnv2", "8GiB"),
    "mlperf-dcnv2, 8xh100, 16GiB": lambda: server("mlperf-dcnv2", "16GiB"),
    "mlperf-dcnv2, 8xh100, 80GiB": lambda: server("mlperf-dcnv2", "80GiB"),
    "criteo-terabyte, 8xh100, 4GiB": lambda: server("criteo-terabyte", "4GiB"),
    "criteo-kaggle, 4xt4, a quarter": demo,
}
QUICK = (CLAIM, "criteo-kaggle, 4xt4, a quarter")


@dataclass(frozen=True, slots=True)
class Run:
    """One solver on one problem: its result, and the wall-clock seconds of each repetition."""

    solver: str
    result: SolveResult
    seconds: tuple[float, ...]

    def gap(self, bound_s: float | None) -> float | None:
        """Relative distance of the step time from a bound, which may be another solver's."""
        time_s = self.result.step_time_s
        return None if time_s is None or not bound_s else time_s / bound_s - 1

    def to_json(self, bound_s: float | None) -> dict[str, object]:
        """What is written of it."""
        return {
            "solver": self.solver,
            "reason": self.result.termination.reason,
            "limit": self.result.termination.limit,
            "step_time_s": self.result.step_time_s,
            "bound_s": self.result.bound_s,
            "own_gap": self.result.gap,
            "gap_to_best_bound": self.gap(bound_s),
            "seconds": list(self.seconds),
            "median_seconds": statistics.median(self.seconds),
        }


def measure(problem: Problem, solver: str, options: argparse.Namespace) -> Run:
    """Run a solver as often as it counts."""
    seconds = []
    for _ in range(RUNS if solver in GREEDIES else 1):
        started = time.perf_counter()
        result = solve(
            problem, solver, time_limit_s=options.time_limit, gap=1e-4, threads=options.threads
        )
        seconds.append(time.perf_counter() - started)
    return Run(solver, result, tuple(seconds))


def compare(
    name: str, options: argparse.Namespace
) -> tuple[dict[str, Run], float | None, dict[str, object]]:
    """All solvers on one problem, printed as they end; runs, the best bound, and the record."""
    problem = PROBLEMS[name]()
    hbm = sum(gpu.memory_bytes for gpu in problem.topology.gpus)
    print(
        f"\n{name}: {len(problem.profile)} tables of {format_bytes(problem.profile.total_bytes)}, "
        f"{format_bytes(hbm)} of HBM"
    )
    runs = {solver: measure(problem, solver, options) for solver in (*GREEDIES, "ilp")}
    bound_s = max((r.result.bound_s for r in runs.values() if r.result.bound_s), default=None)
    print(f"  {'solver':<20}{'step time':>12}{'bound':>12}{'gap':>10}{'solved in':>12}  status")
    for run in runs.values():
        gap = run.gap(bound_s)
        print(
            f"  {run.solver:<20}"
            + f"{_time(run.result.step_time_s):>12}{_time(run.result.bound_s):>12}"
            + f"{'-' if gap is None else f'{gap:.2%}':>10}"
            + f"{format_seconds(statistics.median(run.seconds)):>12}"
            + f"  {run.result.termination.reason}"
        )
    record: dict[str, object] = {
        "problem": name,
        "problem_sha256": problem.sha256,
        "table_bytes": problem.profile.total_bytes,
        "hbm_bytes": hbm,
        "best_bound_s": bound_s,
        "solvers": [run.to_json(bound_s) for run in runs.values()],
    }
    return runs, bound_s, record


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def check(runs: dict[str, Run], bound_s: float | None, time_limit_s: float) -> dict[str, bool]:
    """The two claims, printed with the figures that they rest on."""
    exact, greedy = runs["ilp"], runs["greedy-cost"]
    exact_gap, greedy_gap = exact.gap(bound_s), greedy.gap(bound_s)
    seconds = statistics.median(greedy.seconds)
    claims = {
        f"ilp within {ILP_GAP:.0%} of its bound in {time_limit_s:g} s": (
            exact_gap is not None and exact_gap <= ILP_GAP
        ),
        f"greedy-cost within {GREEDY_GAP:.0%} of the same bound": (
            greedy_gap is not None and greedy_gap <= GREEDY_GAP
        ),
        f"greedy-cost in {GREEDY_SECONDS:g} s (median {seconds:.2f} s)": seconds <= GREEDY_SECONDS,
    }
    print(f"\n{CLAIM}:")
    for claim, holds in claims.items():
        print(f"  {'yes' if holds else 'NO '}  {claim}")
    return claims


def cpu_model() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Parse the command line, run the problems, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two problems, 5 s, no file")
    parser.add_argument("--time-limit", type=float, help="seconds for each solver (60)")
    parser.add_argument("--threads", type=int, default=0, help="of CP-SAT; 0: all cores")
    parser.add_argument("--output", type=Path, help="where the raw numbers go")
    options = parser.parse_args()
    if options.time_limit is None:
        options.time_limit = 5.0 if options.quick else 60.0
    records, claims = [], {}
    for name in QUICK if options.quick else PROBLEMS:
        runs, bound_s, record = compare(name, options)
        records.append(record)
        if name == CLAIM:
            claims = check(runs, bound_s, options.time_limit)
    cpu, cores = cpu_model(), os.cpu_count()
    output = options.output
    if output is None and not options.quick:
        slug = "-".join(cpu.lower().split())
        output = Path(__file__).parent / "results" / f"solvers-{slug}-{cores}-cores.json"
    if output is None:
        return
    report = {
        "benchmark": "solvers side by side",
        "machine": {
            "cpu": cpu,
            "cores": cores,
            "system": f"{platform.system()} {platform.machine()}",
            "load_average": os.getloadavg(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("embedding-placer", "ortools", "numpy")},
        },
        "options": {"time_limit_s": options.time_limit, "threads": options.threads, "gap": 1e-4},
        "registered_solvers": list(SOLVERS),
        "claims": claims,
        "problems": records,
    }
    write_text(output, json.dumps(report, indent=1) + "\n")
    print(f"\nraw numbers: {output}")


if __name__ == "__main__":
    main()
