"""HugeCTR's planner (EMBark, Liu et al. 2024, doi:10.1145/3640457.3688111) from a checkout of it.

Its `Planner` is driven as its `generate_plan.py` does for ``auto``, and for ``hier_auto`` where
there are several hosts; the plan that takes less time by the library's equation counts. What its
user has to say of a system is said of the instance: the ratio of a GPU's memory bandwidth and that
of exchanges, and bytes of a row with its state. The other ratio is its default.
"""

import contextlib
import io
import sys
from collections import defaultdict
from typing import Any

import numpy as np
from expand import catalogue, document
from others import Shards, Task, fitting, need_all_in_hbm, need_equal_gpus, shard_json
from step_time import StepTime

COMMIT = "2f2016fa8979"
WHERE = "benchmarks/embedding_collection/hugectr"
WORK_RATIO, DENSE_RATIO = 8 / 2, 4 / 2
"""`--mem_comm_work_ratio` and `--dense_comm_work_ratio` of its `train.py`."""


def run(task: Task) -> tuple[Shards | None, dict[str, Any]]:
    """Plan without and, on several hosts, with its hierarchy."""
    sys.path.insert(0, str(task.need_checkout(WHERE)))
    problem = task.problem
    need_all_in_hbm(problem)
    local = need_equal_gpus(problem)
    instance = document(task.recipe.name, problem, catalogue()["constants"])
    best: Shards | None = None
    best_s, best_options = float("inf"), {"reason": "none"}
    for hierarchical in (False, True)[: 1 + (len(problem.topology.hosts) > 1)]:

        def plan_with(share: float, hierarchical: bool = hierarchical) -> Shards | str:
            return _plan(task, local, share, hierarchical)

        shards, options = fitting(problem, plan_with)
        if shards is None:
            best_options = options if best is None else best_options
            continue
        seconds = StepTime(instance).seconds(shards)
        if seconds < best_s:
            best, best_s = shards, seconds
            best_options = options | {"plan": "hier_auto" if hierarchical else "auto"}
    return best, best_options | {"version": COMMIT}


def _plan(task: Task, local: int, share: float, hierarchical: bool) -> Shards | str:
    from sharding.planner import CostModel, Planner

    problem = task.problem
    tables = [profile.table for profile in problem.profile]
    gpu, hosts = problem.topology.gpus[0], len(problem.topology.hosts)
    ratio = gpu.hbm_bytes_per_s * problem.topology.exchange_s(gpu.id, 1.0)
    widths = np.array([table.dim for table in tables])
    gib = 1024.0**3
    capacity = gpu.memory_bytes * share / gib * (local if hierarchical else 1)
    cost = CostModel(
        1, ratio, WORK_RATIO, DENSE_RATIO, problem.global_batch_size,
        np.array([table.bytes_per_row() / gib for table in tables]),
        widths, capacity, [table.rows for table in tables],
    )  # fmt: skip
    hotness = [table.lookups_per_sample for table in tables]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            planner = Planner(
                hotness, widths, hosts, local, problem.global_batch_size, hierarchical, cost
            )
            _, matrix, columns = planner.plan()
        except Exception as error:  # It raises no narrower one when memory is short.
            return f"no plan: {error}"
    buckets = defaultdict(list)
    for bucket, held in enumerate(matrix):
        for table in held:
            buckets[int(table)].append(bucket)
    shards: Shards = []
    for number, table in enumerate(tables):
        slices = int(columns[number])
        rows = len(buckets[number]) // slices
        width = table.dim // slices
        for at, bucket in enumerate(buckets[number]):
            cols = (at // rows * width, at // rows * width + width)
            gpus = problem.topology.gpus[bucket : bucket + 1]
            if hierarchical:
                gpus = problem.topology.gpus_of(problem.topology.hosts[bucket].id)
            step = rows * len(gpus)
            for place, one in enumerate(gpus):
                first = min(at % rows * len(gpus) + place, table.rows)
                shards.append(shard_json(table.name, (first, table.rows, step), cols, one.id))
    return shards
