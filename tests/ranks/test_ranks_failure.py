"""A rank that dies ends the job: the others say so, and nobody waits for ever."""

import multiprocessing
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from executor_cases import plan_of, shard
from fast_and_full import mostly_slow
from ranks_cases import batches_of, sharded, table_with
from ranks_launcher import join_group

from placer.errors import BackendError
from placer.growing import Growing

TIMEOUT_S = 5.0


def _train(rank: int, world: int, folder: str, dies: str) -> None:
    join_group(rank, world, folder, 60)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    table = table_with("adagrad")
    plan = plan_of([table], [shard(table, (i, 61, 4), on=f"gpu:{i}") for i in range(4)])
    dist.barrier()  # The start of a process may take longer than the timeout.
    growing = {"t": Growing(60)} if dies == "killed in keys" else None
    model = sharded(plan, process_group=group, backend="torch", growing=growing)
    for step in range(4):
        batch = batches_of(plan.tables, world, step)[rank]
        try:
            if growing and (rank, step) == (1, 2):
                model.keys.maps["t"].read = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            outputs = model(batch)
            if (rank, step) == (1, 2):
                if dies == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if dies == "stuck":
                    time.sleep(3 * TIMEOUT_S)
                return
            torch.autograd.backward([output.sum() for output in outputs.values()])
        except BackendError as error:
            (Path(folder) / f"said by {rank}").write_text(f"step {step}: {error}")
            return


@pytest.mark.parametrize(
    "dies", mostly_slow(["killed", "stuck", "ended", "killed in keys"], "killed")
)
def test_a_lost_rank_ends_the_job_within_the_timeout(dies: str) -> None:
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_train, args=(r, 3, folder, dies)) for r in range(3)]
        for process in ranks:
            process.start()
        try:
            ranks[0].join(60)
            assert not ranks[0].is_alive()
            said = (Path(folder) / "said by 0").read_text()
        finally:
            for process in ranks:
                process.kill()
                process.join()
    what = "keys of growing tables" if dies == "killed in keys" else "gradients"
    assert said.startswith(f"step 2: rank 0 of 3: exchanging {what} failed: ")
    assert f"Rank 1 died, or did not come within {TIMEOUT_S:g} s" in said
    assert "or ended earlier: are the loaders equally long? Do all ranks evaluate and save?" in said
