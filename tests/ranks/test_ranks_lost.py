"""A rank that is lost in training ends the job, with its name, and harms nothing.

The whole matrix of phases and faults is `lost_ranks_run.py`, by ``make lost-ranks``; here are
the cells that differ most from one another.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CELLS = ("ids/error", "gradients/stopped", "rows of a checkpoint/killed", "publishing/killed")
SCRIPT = Path(__file__).with_name("lost_ranks_run.py")


@pytest.mark.slow
def test_a_lost_rank_ends_the_job_and_its_checkpoint_goes_on() -> None:
    """In a process of its own, whose ranks are forked: a start takes seconds."""
    cells = [word for cell in CELLS for word in ("--cell", cell)]
    result = subprocess.run(
        [sys.executable, SCRIPT, *cells],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": as promised") == len(CELLS)
