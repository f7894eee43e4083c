"""NeuroShard's search (Zha et al. 2023, arXiv:2305.01868) from a checkout of it, unchanged.

Its networks, which predict what tables take on its authors' GPUs, are replaced by the library's
step equation: `predict` of lookups and updates, and of the exchange of pooled rows each way.
"""

import sys
from typing import Any

import numpy as np
import torch
from expand import catalogue, document
from others import Shards, Task, fitting, need_all_in_hbm, need_equal_gpus, shard_json
from step_time import StepTime

COMMIT = "ec7ca747004e"
GIB = 1024.0**3


class Compute:
    """What tables, whole or column slices of them, take of one GPU, in seconds."""

    def __init__(self, instance: dict[str, Any], names: list[str]) -> None:
        self._instance, self._names = instance, names
        self._known: dict[tuple[int, int], float] = {}
        self._launch_s = instance["gpus"][0]["launch_s"]

    def predict(self, combinations: list[list[int]], features: torch.Tensor) -> Any:
        """Seconds of each combination of rows of `features`."""
        of_tables = features.to(torch.int64).tolist()
        return np.array([self._of([of_tables[i] for i in each]) for each in combinations])

    def _of(self, tables: list[list[int]]) -> float:
        widths = {table[0] for table in tables}
        return (
            sum(self._table_s(number, dim) for dim, number, _ in tables)
            + 11 * len(widths) * self._launch_s
        )

    def _table_s(self, number: int, dim: int) -> float:
        if (number, dim) not in self._known:
            work = StepTime(self._instance)
            table = work.tables[self._names[number]]
            gpu = self._instance["gpus"][0]["id"]
            work.seconds([shard_json(table.name, (0, table.rows, 1), (0, dim), gpu)])
            launches_s = 11 * self._launch_s
            seconds = work.phase_s["lookup"][0] + work.phase_s["update"][0] - launches_s
            self._known[number, dim] = float(seconds)
        return self._known[number, dim]


class Exchange:
    """What pooled rows, or their gradients, take to be exchanged, in seconds."""

    def __init__(self, samples: int, byte_s: float, gpus: int) -> None:
        self._column_s, self._gpus = 4 * samples * byte_s, gpus

    def predict(self, columns: torch.Tensor) -> torch.Tensor:
        """Seconds of each GPU, of the columns that it returns; waits are left to barriers."""
        return columns[:, : self._gpus] * self._column_s


def run(task: Task) -> tuple[Shards | None, dict[str, Any]]:
    """Its beam search with its own widths."""
    sys.path.insert(0, str(task.need_checkout("neuroshard").parent))
    from neuroshard.neurosharder import NeurSharder

    problem = task.problem
    need_all_in_hbm(problem)
    need_equal_gpus(problem)
    instance = document(task.recipe.name, problem, catalogue()["constants"])
    tables = [profile.table for profile in problem.profile]
    gpus, work = problem.topology.gpus, StepTime(instance)
    exchange = Exchange(problem.global_batch_size, work.machine.exchange_byte_s[0], len(gpus))
    compute = Compute(instance, [table.name for table in tables])

    def plan_with(share: float) -> Shards | str:
        configs = [
            {"dim": table.dim, "number": number, "row": table.rows}
            for number, table in enumerate(tables)
        ]
        memory = gpus[0].memory_bytes * share / GIB
        sharder = NeurSharder(compute, exchange, exchange, configs, len(gpus), memory)
        try:
            steps, devices = sharder.shard()
        except TypeError:  # Where no table-wise plan fits, its first cost is none.
            return "no plan: none of its plans fits"
        if devices is None:
            return "no plan: none of its plans fits"
        # Each step halves a table's columns: the new half is listed at the end.
        slices = [(number, 0, table.dim) for number, table in enumerate(tables)]
        for index in steps:
            number, first, last = slices[index]
            middle = (first + last) // 2
            slices[index] = (number, first, middle)
            slices.append((number, middle, last))
        return [
            shard_json(tables[n].name, (0, tables[n].rows, 1), (first, last), gpus[at].id)
            for at, held in enumerate(devices)
            for n, first, last in (slices[index] for index in held)
        ]

    shards, options = fitting(problem, plan_with)
    return shards, options | {"version": COMMIT}
