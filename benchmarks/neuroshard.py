"""NeuroShard's tasks by its own generator: its own search against `auto`, with one step equation.

    python benchmarks/neuroshard.py --checkout FOLDER [--tasks 100] [--time-limit 5] [--hbm 4GiB]
                                    [--workers 1] [--output FILE]

FOLDER has NeuroShard's repository as `neuroshard` (Zha et al. 2023, arXiv:2305.01868); nothing of
it is here. Tasks are what its `tools/gen_tasks.py` draws with its own defaults: 10 to 59 of Meta's
856 tables, with repetition, each of a width of its own, 15 GiB of weights at most. The search is
`NeurSharder` unchanged; `predict` of its networks, which its repository does not have, is the
instance library's equation (benchmarks/instances/other_neuroshard.py). The machine is four T4 in
place of its four RTX 2080 Ti, with 16,384 samples each. Both plans are timed by `evaluate`.

NeuroShard knows no host memory, optimizer state or buffers. It is told that it has all of a GPU's
memory, then less and less, and its first plan that fits counts; where none does, there is no ratio.
Each worker has one thread.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "instances"))

import numpy as np
import other_neuroshard
import ours
from _machine import RESULTS, machine, slug, versions
from expand import Recipe
from others import Task
from plans import plan_of

from placer import Problem, Profile, Topology
from placer.files.atomic import write_text
from placer.workloads.drawn import meta_workload, resized_meta_tables
from solvers import solve

MACHINE, BATCH_SIZE = "4xt4", 16384
FEWEST, MOST, WEIGHTS_GIB, DIMS = 10, 60, 15, (128, 64, 32, 16, 8, 4)
"""Defaults of the generator's options; a task has fewer than `MOST` tables."""

LEAST_ROWS = 100
EQUAL = 1e-6

Shapes = Sequence[tuple[int, int]]


def drawn_tasks(checkout: Path, count: int, seed: int = 0) -> list[Shapes]:
    """Numbers and widths of the tables of each task, by NeuroShard's generator."""
    sys.path.insert(0, str(checkout / "neuroshard"))
    from tools.gen_tasks import gen_task

    configs = [{"row": max(t.table.rows, LEAST_ROWS)} for t in meta_workload().tables]
    np.random.seed(seed)  # noqa: NPY002  (its generator draws from the global state)
    tasks = []
    for _ in range(count):
        tables = np.random.randint(FEWEST, MOST)  # noqa: NPY002
        numbers, dims = gen_task(configs, tables, WEIGHTS_GIB, list(DIMS))
        tasks.append([(int(n), int(dim)) for n, dim in zip(numbers, dims, strict=True)])
    return tasks


def compared(
    numbered: tuple[int, Shapes], checkout: Path, hbm: str, limit_s: float
) -> dict[str, Any]:
    """Both plans of a task."""
    number, shapes = numbered
    profile = Profile(resized_meta_tables(shapes), source=f"NeuroShard's task {number}")
    problem = Problem(profile, Topology.parse(MACHINE, hbm=hbm), BATCH_SIZE)
    model = ours.cost_model()
    record: dict[str, Any] = {"task": number, "tables": len(shapes), "shapes": shapes}

    started = time.process_time()
    result = solve(problem, "auto", model, time_limit_s=limit_s, threads=1)
    record["auto"] = {
        "seconds": time.process_time() - started,
        "step_time_s": result.step_time_s if result.plan is not None else None,
        "bound_s": result.bound_s,
    }

    started = time.process_time()
    recipe = Recipe(f"task-{number}", "", MACHINE)
    shards, facts = other_neuroshard.run(Task(recipe, problem, "", limit_s, checkout))
    record["neuroshard"] = {
        "seconds": time.process_time() - started,
        "step_time_s": None
        if shards is None
        else model.evaluate(problem, plan_of(problem, shards)).step_time_s,
        **{key: facts[key] for key in ("memory_share", "reason") if key in facts},
    }
    return record


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How `auto`'s plans compare where NeuroShard has one."""
    both = [one for one in records if one["neuroshard"]["step_time_s"]]
    ratios = [
        (one["auto"]["step_time_s"] or math.inf) / one["neuroshard"]["step_time_s"] for one in both
    ]
    planned = [one["auto"] for one in records if one["auto"]["step_time_s"]]
    gaps = [auto["step_time_s"] / auto["bound_s"] - 1 for auto in planned]
    return {
        "tasks": len(records),
        "neuroshard_without_plan": len(records) - len(both),
        "auto_worse": sum(ratio > 1 + EQUAL for ratio in ratios),
        "ratio_mean": statistics.geometric_mean(ratios),
        "ratio_greatest": max(ratios),
        "ratio_least": min(ratios),
        "gap_median": statistics.median(gaps),
        "seconds": {
            who: statistics.median(one[who]["seconds"] for one in both)
            for who in ("auto", "neuroshard")
        },
    }


def main() -> None:
    """Draw the tasks, solve them, print the summary, write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--time-limit", type=float, default=5.0)
    parser.add_argument("--hbm", default="4GiB", help="of each GPU")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tasks = drawn_tasks(options.checkout, options.tasks)
    one = partial(compared, checkout=options.checkout, hbm=options.hbm, limit_s=options.time_limit)
    records = []
    with ProcessPoolExecutor(options.workers) as pool:
        for record in pool.map(one, enumerate(tasks)):
            records.append(record)
            times = [record[who]["step_time_s"] or math.nan for who in ("auto", "neuroshard")]
            print(
                f"task {record['task']}, {record['tables']} tables: auto {times[0] * 1e3:.3f} ms, "
                f"neuroshard {times[1] * 1e3:.3f} ms",
                flush=True,
            )
    found = summary(records)
    print(json.dumps(found, indent=1))
    path = options.output or RESULTS / f"neuroshard-{slug()}-{options.hbm}.json"
    report = {
        "benchmark": "NeuroShard's tasks: its search against auto",
        "machine": machine(),
        "versions": versions("embedding-placer", "numpy", "torch", "ortools")
        | {"neuroshard": other_neuroshard.COMMIT},
        "options": {
            "time_limit_s": options.time_limit,
            "hbm": options.hbm,
            "threads": 1,
            "workers": options.workers,
        },
        "summary": found,
        "tasks": records,
    }
    write_text(path, json.dumps(report) + "\n")
    print(f"raw numbers: {path}")


if __name__ == "__main__":
    main()
