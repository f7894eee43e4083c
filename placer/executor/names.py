"""Names that the executor takes, in a file whose import needs no torch."""

from typing import Literal

BACKENDS: tuple[str, ...] = ("auto", "numba", "torch", "triton", "tiered")

Policy = Literal["lfu", "rank"]
"""Which cached rows make room for others: those least looked up, or those last in the plan's
order."""
