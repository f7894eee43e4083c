"""One process that solves one problem, for planners.py: its peak memory is the solver's own.

Reads a job (JSON) from stdin: a case, solvers, limits, and the folder that the plans go to.
Prints one line of JSON for each solver.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _problems import Case

from solvers import solve


def peak_bytes() -> int | None:
    """Peak resident memory of this program; None where the system does not tell.

    Not `resource.getrusage`: its peak includes the parent's memory at the time of the fork.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def run(job: dict[str, Any], solver: str) -> dict[str, object]:
    """Solve, save the plan, and say what the solver says of it."""
    problem = Case(**job["case"]).problem()
    started = time.perf_counter()
    try:
        result = solve(problem, solver, job["cost_model"], **job["limits"])
    except Exception as error:  # A broken solver is a result of its own; the others go on.
        return {"solver": solver, "error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - started
    peak = peak_bytes()
    plan = None
    if result.plan is not None:
        plan = str(Path(job["folder"]) / f"{solver}.json")
        result.plan.save(plan)
    return {
        "solver": solver,
        "plan": plan,
        "reason": result.termination.reason,
        "limit": result.termination.limit,
        "detail": result.termination.detail,
        "step_time_s": result.step_time_s,
        "bound_s": result.bound_s,
        "seconds": seconds,
        "peak_bytes": peak,
        "search_space": result.stats.get("search_space", ""),
    }


def main() -> None:
    """Run the job."""
    # What a backend prints goes to stderr; stdout is for the results alone.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    if job["cost_model"].startswith("torchrec"):
        # TorchRec's planner is timed without its import, so we are too.
        importlib.import_module("torchrec.distributed.planner.shard_estimators")
    for solver in job["solvers"]:
        print(json.dumps(run(job, solver)), file=results, flush=True)


if __name__ == "__main__":
    main()
