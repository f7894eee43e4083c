"""Jobs for processes of their own, which import this and little else."""

import os
import time
from collections.abc import Callable

from placer.errors import ProblemError


def work(job: str, stop: Callable[[], bool]) -> tuple[str, int]:
    """What a process does for a job of this name; the name, and the process's number."""
    if job == "raise":
        raise ProblemError("no such machine")
    if job == "die":
        os._exit(3)
    while job == "wait" and not stop():
        time.sleep(0.01)
    return job, os.getpid()
