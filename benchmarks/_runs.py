"""Solves in processes of their own, and recounts the plans that come back."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _problems import Case

from cost_models import cost_model as named_cost_model
from placer import PlacerError, Plan, Problem
from placer.plan.verify import verify
from placer.units import format_bytes, format_seconds

CLASSIC = ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim")

Save = Callable[[list[dict[str, object]]], None]
"""Writes the records that there are so far, so that an interrupted part leaves them."""

LIMIT_SHARE = 0.9
"""Share of a target's seconds that a solver is given: what it does after its limit counts too."""

KILL_AFTER, START_S = 3.0, 30.0
"""A solver is killed after so many times its limit, and so long to start and save."""

SAME = 1e-9
"""Relative difference at which a solver's step time is that of its plan."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how a solver may search."""

    time_limit_s: float
    gap: float = 1e-4
    seed: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What a solver said of its plan in one process, and what its plan file says.

    `told_s` is the step time that the solver reported, `step_time_s` that of the file as it
    was read, verified and evaluated here. A plan that is unsound or not what the solver
    said has a `fault`, and no step time.

    `lookups_s` is the step time without exchanges and launches, `in_place_s` the step time
    if rows in DRAM were read over the link one by one instead of staged: RecShard compares
    the one, and its rivals do the other. Both under `roofline` only.
    """

    solver: str
    reason: str
    seconds: float
    seed: int = 0
    limit: str | None = None
    detail: str = ""
    told_s: float | None = None
    step_time_s: float | None = None
    bound_s: float | None = None
    peak_bytes: int | None = None
    binds: str = ""
    lookups_s: float | None = None
    in_place_s: float | None = None
    all_in_hbm: bool | None = None
    search_space: str = ""
    fault: str = ""

    @property
    def gap(self) -> float | None:
        """To the solver's own bound."""
        return gap_to(self.step_time_s, self.bound_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """A solver on a problem: the medians over its runs."""

    solver: str
    runs: tuple[Run, ...]

    @property
    def solved(self) -> bool:
        """Whether every run has a sound plan."""
        return all(run.step_time_s is not None for run in self.runs)

    @property
    def step_time_s(self) -> float | None:
        """Median step time; None unless every run found a plan."""
        return self._median([run.step_time_s for run in self.runs])

    @property
    def bound_s(self) -> float | None:
        """Median of the solver's own bounds."""
        return self._median([run.bound_s for run in self.runs])

    @property
    def gap(self) -> float | None:
        """Median gap to the solver's own bound."""
        return self._median([run.gap for run in self.runs])

    @property
    def seconds(self) -> float:
        """Median wall-clock seconds of the call."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> int | None:
        """Largest peak memory of a run; None where one could not tell."""
        peaks = [run.peak_bytes for run in self.runs]
        return None if None in peaks else max(p for p in peaks if p is not None)

    @property
    def last(self) -> Run:
        """The last run, for what is no number; a broken one if there is any."""
        return next((run for run in self.runs if run.fault), self.runs[-1])

    def to_json(self) -> dict[str, object]:
        """What is written of it."""
        medians = {
            "step_time_s": self.step_time_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }
        return {"solver": self.solver, **medians, "runs": [asdict(run) for run in self.runs]}

    @staticmethod
    def _median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A target, the figures it is held against, and whether they meet it.

    None where the figures were not measured.
    """

    text: str
    holds: bool | None
    figures: str

    def show(self) -> str:
        """One line."""
        mark = {True: "yes", False: "NO ", None: " - "}[self.holds]
        return f"  {mark}  {self.text}: {self.figures}"


def solve_apart(
    case: Case,
    problem: Problem,
    solvers: Sequence[str],
    effort: Effort,
    cost_model: str = "roofline",
    folder: Path | None = None,
) -> list[Run]:
    """Run solvers one after the other in a fresh process, and recount their plans here.

    Parameters
    ----------
    problem : Problem
        That of `case`, made once for all runs.
    folder : Path, optional
        Where plans are kept, each as `SOLVER.json`; by default they go when they are read.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="planners-") as temporary:
            return solve_apart(case, problem, solvers, effort, cost_model, Path(temporary))
    runs: list[Run] = []
    while len(runs) < len(solvers):
        # Whoever is killed or dies takes the process along; the others get a new one.
        runs += _one_process(case, problem, solvers[len(runs) :], effort, cost_model, folder)
    return runs


def _one_process(
    case: Case,
    problem: Problem,
    solvers: Sequence[str],
    effort: Effort,
    cost_model: str,
    folder: Path,
) -> list[Run]:
    """Runs of the first of these solvers, or of more: as far as the process gets."""
    job = {
        "case": asdict(case),
        "solvers": list(solvers),
        "cost_model": cost_model,
        "limits": asdict(effort),
        "folder": str(folder),
    }
    patience = KILL_AFTER * effort.time_limit_s * len(solvers) + START_S
    child = talk("_child.py", job, patience)
    runs = [_recounted(answer, problem, effort, cost_model) for answer in child.answers]
    if child.killed:
        runs.append(Run(solvers[len(runs)], "killed", child.seconds, effort.seed))
    elif len(runs) < len(solvers):
        fault = child.errors or "it ended without an answer"
        runs.append(Run(solvers[len(runs)], "broken", child.seconds, effort.seed, fault=fault))
    return runs


@dataclass(frozen=True, slots=True)
class Child:
    """What a process answered, line by line, and how it ended."""

    answers: list[dict[str, Any]]
    seconds: float
    killed: bool
    errors: str


def talk(script: str, job: dict[str, Any], patience_s: float) -> Child:
    """Run one of the scripts beside this one on a job, and read what it answers."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed = False
    try:
        output, errors = process.communicate(json.dumps(job), timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        killed = True
    # A killed child may leave half a line.
    answers = [json.loads(line) for line in output.splitlines(True) if line.endswith("\n")]
    seconds = time.perf_counter() - started
    last = errors.strip().splitlines()[-1:]  # Of a traceback, the error itself.
    return Child(answers, seconds, killed, "".join(last))


def _recounted(told: dict[str, Any], problem: Problem, effort: Effort, cost_model: str) -> Run:
    """The run that a child reported, its plan read from its file, verified and evaluated."""
    solver = told["solver"]
    if "error" in told:
        return Run(solver, "broken", 0.0, effort.seed, fault=told["error"])
    run = Run(
        solver,
        told["reason"],
        told["seconds"],
        effort.seed,
        told["limit"],
        told["detail"],
        told["step_time_s"],
        bound_s=told["bound_s"],
        peak_bytes=told["peak_bytes"],
        search_space=told["search_space"],
    )
    if told["plan"] is None:
        return run
    try:
        plan = Plan.load(told["plan"])
        verify(plan)
        # The file proves nothing of a machine or tables that are not the problem's.
        asked, planned = problem.topology, plan.topology
        tables = tuple(profile.table for profile in problem.profile)
        if (planned.gpus, planned.hosts, plan.tables) != (asked.gpus, asked.hosts, tables):
            return replace(run, fault="its plan is for other tables or another machine")
        model = named_cost_model(cost_model)
        report = model.evaluate(problem, plan)
    except PlacerError as error:
        return replace(run, fault=f"{type(error).__name__}: {error}")
    if abs(report.step_time_s - told["step_time_s"]) > SAME * told["step_time_s"]:
        fault = f"says {told['step_time_s']!r} s, but its plan takes {report.step_time_s!r} s"
        return replace(run, fault=fault)
    run = replace(
        run,
        step_time_s=report.step_time_s,
        binds=report.bottleneck,
        all_in_hbm=all(shard.memory == "hbm" for shard in plan.shards),
    )
    if cost_model != "roofline":
        return run
    in_place = tuple(
        replace(shard, lookup="uva") if shard.lookup == "staged" else shard for shard in plan.shards
    )
    return replace(
        run,
        lookups_s=max(gpu.hbm_s + gpu.link_s for gpu in report.gpus),
        in_place_s=model.evaluate(problem, replace(plan, shards=in_place)).step_time_s,
    )


def gap_to(step_time_s: float | None, bound_s: float | None) -> float | None:
    """(step time − bound) / bound; None where one of them is missing."""
    return None if step_time_s is None or not bound_s else max(0.0, step_time_s / bound_s - 1)


def best_bound_s(measured: Iterable[Measured], of: Measured) -> float | None:
    """The tightest bound that any solver has for the space that a solver searched."""
    space = of.last.search_space
    bounds = [
        run.bound_s
        for one in measured
        for run in one.runs
        if run.bound_s and run.search_space == space and not run.fault
    ]
    return max(bounds, default=None)


def beaten_bounds(measured: Iterable[Measured]) -> list[str]:
    """Bounds that a plan of the same search space is below: one solver proves another wrong."""
    runs = [run for one in measured for run in one.runs if not run.fault]
    return [
        f"{fast.solver}'s plan of {fast.step_time_s!r} s is below {bound.solver}'s bound of "
        f"{bound.bound_s!r} s"
        for bound in runs
        for fast in runs
        if bound.bound_s is not None
        and fast.step_time_s is not None
        and fast.search_space == bound.search_space
        and fast.step_time_s < bound.bound_s * (1 - SAME)
    ]


def case_record(case: Case, problem: Problem) -> dict[str, object]:
    """What is written of a problem."""
    topology = problem.topology
    return {
        **asdict(case),
        "problem_sha256": problem.sha256,
        "tables": len(problem.profile),
        "gpus": len(topology.gpus),
        "table_bytes": problem.profile.total_bytes,
        "hbm_bytes": sum(gpu.memory_bytes for gpu in topology.gpus),
        "dram_bytes": sum(host.memory_bytes for host in topology.hosts),
    }


def describe(case: Case, problem: Problem) -> str:
    """A problem in one line."""
    topology = problem.topology
    hbm = sum(gpu.memory_bytes for gpu in topology.gpus)
    return (
        f"{case.name}: {len(problem.profile):,} tables of "
        f"{format_bytes(problem.profile.total_bytes)} on {case.topology} with "
        f"{format_bytes(topology.gpus[0].memory_bytes)} of HBM a GPU "
        f"({hbm / problem.profile.total_bytes:.0%} of the tables), "
        f"{problem.global_batch_size:,} samples a step"
    )


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(headers))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def shown_s(seconds: float | None) -> str:
    """A time, or a dash."""
    return "-" if seconds is None else format_seconds(seconds)


def shown_percent(share: float | None) -> str:
    """A share in percent, or a dash."""
    return "-" if share is None else f"{share:.2%}"


def shown_bytes(count: float | None) -> str:
    """A size, or a dash."""
    return "-" if count is None else format_bytes(count)
