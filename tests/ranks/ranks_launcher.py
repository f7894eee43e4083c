"""Runs functions on several processes that talk over gloo."""

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Job = Callable[..., Any]


def run(world: int, jobs: Sequence[tuple[str, Job, tuple[Any, ...]]], timeout_s: float = 60) -> Any:
    """Each job's result on each rank, by name; a failed job's is its traceback, as `Failed`.

    All jobs run one after the other in one set of processes, for a start takes seconds. After
    the first failure ranks may be out of step, so that the rest is not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(
            _rank, (world, folder, list(jobs), timeout_s), nprocs=world, join=False, start_method="spawn"
        )
        while not context.join():
            pass
        results = [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)
        ]
    return {name: [theirs.get(name) for theirs in results] for name, _, _ in jobs}


class Failed(str):
    """A traceback."""


def _rank(rank: int, world: int, folder: str, jobs: list[Any], timeout_s: float) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    results: dict[str, Any] = {}
    for name, job, arguments in jobs:
        try:
            results[name] = job(rank, world, *arguments)
        except Exception:
            results[name] = Failed(traceback.format_exc())
            break
    torch.save(results, Path(folder) / f"{rank}.pt")
    if all(not isinstance(result, Failed) for result in results.values()):
        dist.destroy_process_group()
