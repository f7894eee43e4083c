"""Describe the rules that constraints may set for one table."""

from dataclasses import dataclass
from typing import Literal, get_args

from placer.errors import ProblemError
from placer.plan.fields import Memory

Kind = Literal[
    "row-wise", "column-wise", "replicated", "split", "staged", "uva", "host", "cached",
    "ssd", "narrow",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

_DRAM_LOOKUPS = frozenset[Kind](("staged", "uva", "host", "cached"))


@dataclass(frozen=True, slots=True)
class TableRule:
    """A rule for one table. By default, it allows everything.

    Attributes
    ----------
    devices : tuple of str, or None
        Only these devices may serve the table. A host stands for itself and all its GPUs.
    tier : {"hbm", "dram", "ssd"} or None
        Tier of all rows. Rows with copies in a cache count as rows in DRAM.
    forbid : frozenset of str
        Kinds of placement that are forbidden: see `KINDS` and docs/constraints.md.

    Examples
    --------
    >>> TableRule(devices=("gpu:0",), forbid=frozenset({"row-wise"})).tier is None
    True
    """

    devices: tuple[str, ...] | None = None
    tier: Memory | None = None
    forbid: frozenset[Kind] = frozenset()

    def __post_init__(self) -> None:
        if self.devices is not None and not self.devices:
            raise ProblemError("a table's devices name no GPU that may serve it; name one")
        if self.tier not in (None, *get_args(Memory)):
            raise ProblemError(f"tier {self.tier!r} is none of {', '.join(get_args(Memory))}")
        for kind in self.forbid:
            if kind not in KINDS:
                raise ProblemError(f"cannot forbid {kind!r}; there are {', '.join(KINDS)}")
        if self.tier == "dram" and self.forbid >= _DRAM_LOOKUPS:
            raise ProblemError(
                "tier dram with staged, uva, host and cached forbidden leaves no way to read "
                "the rows; forbid fewer, or ask for tier hbm"
            )
