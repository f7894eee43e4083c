"""Speed and memory of the simulator: batches of 65,536 samples × 26 tables through plans.

The tables are those of a published workload, whose lookups are drawn from its skew. Each case runs
in a process of its own: a hot/cold plan with staged rows, and one whose cold rows are cached, on
eight GPUs and on one. Drawing is part of what is measured, in a thread beside the counting, as
reading a log is; its own time is told apart. Written to
``benchmarks/results/simulator-<machine>.json``::

    nice python benchmarks/simulator.py [--batches 1000] [--case staged-8]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from _machine import RESULTS, machine, slug, versions

from cost_models import Roofline
from cost_models.replay import StepTimer
from cost_models.simulation import TimeSummary, replayed
from placer import Plan, Problem, Topology
from placer.plan.fields import Shard
from placer.plan.memory import with_buffers
from placer.simulator.replay import ReplayOptions, Simulator
from placer.training.reading import in_background
from placer.workloads import named_workload
from placer.workloads.batches import drawn_batches

SAMPLES = 65536
WORKLOAD = "criteo-kaggle"
HOT_SHARE = 0.05
"""Share of the rows of each table of more than a thousand rows that is in HBM, or cached."""

CASES = {
    "staged-8": (8, "staged"),
    "staged-1": (1, "staged"),
    "cached-8": (8, "cached"),
    "cached-1": (1, "cached"),
}


def hot_and_cold(gpus: int, cold: str) -> tuple[Problem, Plan]:
    """Tables dealt out over GPUs; of the large ones, the hottest rows in HBM or in a cache."""
    topology = Topology.parse(f"{gpus}xh100")
    problem = Problem(named_workload(WORKLOAD), topology, SAMPLES // gpus)
    shards: list[Shard] = []
    for number, profile in enumerate(problem.profile):
        table, device = profile.table, topology.gpus[number % gpus].id
        hot = table.rows if table.rows <= 1000 else int(HOT_SHARE * table.rows)
        whole = (0, table.dim)
        if cold == "cached" and hot < table.rows:
            shard = Shard(table.name, (0, table.rows, 1), whole, (device,), "dram", "cached", hot)
            shards.append(with_buffers(profile, shard, samples=SAMPLES, returns_bags=True))
            continue
        home = Shard(table.name, (0, hot, 1), whole, (device,), "hbm", "device")
        shards.append(with_buffers(profile, home, samples=SAMPLES, returns_bags=True))
        if hot < table.rows:
            rest = replace(home, rows=(hot, table.rows, 1), memory="dram", lookup="staged")
            shards.append(with_buffers(profile, rest, samples=SAMPLES, returns_bags=False))
    tables = tuple(profile.table for profile in problem.profile)
    return problem, Plan(tables, topology, tuple(shards), batch_size=problem.batch_size)


def measure(case: str, batches: int) -> dict[str, Any]:
    """One case in this process."""
    gpus, cold = CASES[case]
    problem, plan = hot_and_cold(gpus, cold)
    started = time.perf_counter()
    for _ in drawn_batches(problem.profile, SAMPLES, min(batches, 20)):
        pass
    draw_s = (time.perf_counter() - started) / min(batches, 20)
    started = time.perf_counter()
    simulator = Simulator(plan, ReplayOptions())
    timer = StepTimer(simulator.arrangement, Roofline(), problem.profile)
    made_s = time.perf_counter() - started
    started = time.perf_counter()
    found = replayed(
        simulator,
        timer,
        in_background(lambda: (b for b in drawn_batches(problem.profile, SAMPLES, batches))),
    )
    seconds = time.perf_counter() - started
    lookups = int(found.totals.parts.lookups.sum())
    summary = TimeSummary.of([one.step_s for one in found.records])
    return {
        "case": case,
        "batches": batches,
        "seconds": seconds,
        "seconds_per_batch": seconds / batches,
        "draw_seconds_per_batch_alone": draw_s,
        "construction_seconds": made_s,
        "lookups_per_s": lookups / seconds,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "pool_entries": int(simulator.cache_entries.sum()),
        "lookups": lookups,
        "hbm_lookups": sum(one.hbm_lookups for one in found.records),
        "step_mean_s": summary.mean_s,
        "step_p99_s": summary.p99_s,
    }


def main() -> None:
    """Measure every case, one process each, and write the results as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.case[0], options.batches)))
        return
    output = options.output or RESULTS / f"simulator-{slug()}.json"
    before = json.loads(output.read_text())["cases"] if output.exists() else {}
    for case in options.case or list(CASES):
        command = [sys.executable, __file__, "--worker", "--case", case]
        done = subprocess.run(
            [*command, "--batches", str(options.batches)],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        before[case] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(before[case]), file=sys.stderr)
        result = {
            "machine": machine(),
            "versions": versions("numpy", "torch", "embedding-placer"),
            "workload": WORKLOAD,
            "samples": SAMPLES,
            "hot_share": HOT_SHARE,
            "cases": before,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
