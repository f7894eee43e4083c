"""Runs functions on several processes that talk over gloo."""

import gc
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Job = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, and what to call on each rank with (rank, world, ...)."""


class Failed(str):
    """A traceback."""


class Outcomes(dict[str, list[Any]]):
    """What each job gave on each rank, by its name."""

    def of(self, name: str) -> list[Any]:
        """A job's results by rank; raises what was raised there."""
        failures = [result for result in self[name] if isinstance(result, Failed)]
        if failures:
            raise AssertionError("\n\n".join(failures))
        if None in self[name]:
            raise AssertionError(f"{name} was not run: a job before it failed")
        return [result[0] for result in self[name]]


def run(world: int, jobs: Sequence[Job], timeout_s: float = 60) -> Outcomes:
    """Run jobs one after the other in one set of processes, for a start takes seconds.

    After a failure ranks may be out of step, so that the rest is not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, (world, folder, list(jobs), timeout_s), nprocs=world, start_method="forkserver"
        )
        results = [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)
        ]
    return Outcomes({name: [theirs.get(name) for theirs in results] for name, _, _ in jobs})


def join_group(rank: int, world: int, folder: str, timeout_s: float) -> None:
    """Meet the other ranks in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def leave_group() -> None:
    """Part from the other ranks; called where no model lives any more.

    A model holds the process group, and with it gloo's threads. One that lets go of the last
    tensor that it sent when Python ends aborts the process ("terminate called without an active
    exception"): it asks for the interpreter's lock, which then ends the thread.
    """
    gc.collect()
    dist.destroy_process_group()


def _rank(rank: int, world: int, folder: str, jobs: Sequence[Job], timeout_s: float) -> None:
    gc.freeze()  # So that collections of garbage leave alone what was imported before the fork.
    join_group(rank, world, folder, timeout_s)
    results: dict[str, Any] = {}
    for name, job, arguments in jobs:
        try:
            results[name] = (job(rank, world, *arguments),)
        except Exception:
            results[name] = Failed(traceback.format_exc())
            break
    torch.save(results, Path(folder) / f"{rank}.pt")
    del results
    leave_group()
