"""A rank that is lost in training ends the job, with its name, and harms nothing.

The whole matrix of phases and faults is `lost_ranks_run.py`, by ``make lost-ranks``; here are
the cells that differ most from one another.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from placer.training.distributed import name_of_start

CELLS = (
    "ids/error",
    "gradients/stopped",
    "update/error",
    "rows of a checkpoint/error",
    "publishing/killed",
)
SCRIPT = Path(__file__).with_name("lost_ranks_run.py")


@pytest.mark.slow
def test_a_lost_rank_ends_the_job_and_its_checkpoint_goes_on() -> None:
    """In a process of its own, whose ranks are forked: a start takes seconds.

    Last, torchrun starts the ranks again by itself.
    """
    cells = [word for cell in CELLS for word in ("--cell", cell)]
    result = subprocess.run(
        [sys.executable, SCRIPT, *cells, "--elastic", "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": as promised") == len(CELLS) + 1


def test_ranks_of_one_start_have_one_name_whatever_lost_ones_left_in_the_store() -> None:
    """The second and third start find the words and answers of those before."""
    store = dist.HashStore()
    store.set("placer rank 2", "of a rank that died before it was answered")
    names = []
    with ThreadPoolExecutor(3) as ranks:
        for _ in range(3):
            said = ranks.map(lambda rank: name_of_start(store, rank, 3, 30.0), range(3))
            names.append(set(said))
    assert [len(each) for each in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    """A dead rank's word does not pass for it."""
    store = dist.HashStore()
    store.set("placer rank 1", "of a rank that died")
    with pytest.raises(RuntimeError, match=r"^rank 1 did not come within 0\.05 s$"):
        name_of_start(store, 0, 2, 0.05)
