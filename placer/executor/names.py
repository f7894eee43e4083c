"""Names of the executor's options, importable without torch."""

from typing import Literal

BACKENDS: tuple[str, ...] = ("auto", "numba", "torch", "triton", "tiered")

Policy = Literal["lfu", "rank"]
"""Which cached rows are evicted: the least often looked up, or the last ones in the plan's row
order."""

MOST_THREADS = 1024
"""Most threads to allow, because OpenMP ends the process if it cannot start them."""
