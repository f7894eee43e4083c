"""Arrays of many megabytes come from memory that was freed before."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from placer.executor import keep_freed_memory

told = keep_freed_memory() if sys.argv[1] == "keep" else False
for _ in range(12):  # Small blocks between the first ones keep them apart.
    torch.ones(16 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(16 << 20)
print(int(told), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(how: str) -> tuple[bool, int]:
    """What `keep_freed_memory` said, and pages that five arrays of 64 MiB took from the system."""
    run = subprocess.run(
        [sys.executable, "-c", STEPS, how], check=True, capture_output=True, text=True
    )
    told, pages = run.stdout.split()
    return bool(int(told)), int(pages)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_used_again() -> None:
    told, kept = new_pages("keep")
    assert told
    assert kept < 100
    assert new_pages("default")[1] > 10 * 100
