"""What an explanation of a table's placement consists of."""

from dataclasses import dataclass
from typing import Literal

from placer.plan.plan import Plan

Constraint = Literal[
    "hbm", "dram", "hottest row", "pin", "tier", "forbidden", "together", "work"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardMargin:
    """What HBM is worth to one shard of the table at its hot/cold split, beside the price of HBM.

    Attributes
    ----------
    device : str
        The GPU that serves the shard.
    rows, hot_rows : int
        Rows of the shard, and those of them in HBM.
    last_s_per_byte, next_s_per_byte : float or None
        Seconds per byte that the coldest rows in HBM save, and that the hottest rows in DRAM
        would save; None where there are none.
    gpu_price_s_per_byte : float or None
        Seconds that one more byte of this GPU's HBM would save, with the best use of it for all
        shards on the GPU; None if the GPU serves a placement that solvers do not search.
    """

    device: str
    rows: int
    hot_rows: int
    last_s_per_byte: float | None
    next_s_per_byte: float | None
    gpu_price_s_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another placement of the table; all other tables stay as they are.

    Attributes
    ----------
    name : str
        For people.
    step_time_s : float
        Of the whole plan, whether it fits or not.
    table_s : float
        Time of the table by itself, summed over GPUs.
    short_bytes : dict of device to int
        Memory that the plan lacks; empty if it fits.
    plan : Plan
    """

    name: str
    step_time_s: float
    table_s: float
    short_bytes: dict[str, int]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Binding:
    """A constraint that keeps the table from a better placement, and how."""

    constraint: Constraint
    device: str
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What decided the placement of one table.

    Attributes
    ----------
    current : Alternative
        The placement as it is.
    pooled_price_s_per_byte : float
        GPU seconds that one more byte of HBM would save if the GPUs shared all of it.
    margins : tuple of ShardMargin
    alternatives : tuple of Alternative
        All rows in HBM and none; then other GPUs and sharding options: those that fit first,
        fastest first. The constraints allow them all.
    bindings : tuple of Binding
    """

    table: str
    current: Alternative
    pooled_price_s_per_byte: float
    margins: tuple[ShardMargin, ...]
    alternatives: tuple[Alternative, ...]
    bindings: tuple[Binding, ...]
