"""Why each table of a plan is split where it is, in a sentence: cheap enough for thousands."""

from placer.errors import PlacerError
from placer.plan.plan import Plan
from placer.units import format_seconds
from solvers.analysis.explain import split_margin
from solvers.analysis.explanation import ShardMargin
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.instance import Instance
from solvers.model.read_plan import placements_of

_GIB = 2**30


def reasons(instance: Instance, plan: Plan, bound: LagrangianBound) -> dict[str, str]:
    """A sentence for each table that is placed in a way that solvers search.

    Of a table with several shards, it is about the one with the most to gain.

    Parameters
    ----------
    instance : Instance
    plan : Plan
    bound : LagrangianBound
        Its price is what HBM is worth if GPUs shared all of it.
    """
    told: dict[str, str] = {}
    for table in plan.tables:
        try:
            placed = placements_of(instance, plan, table.name)
        except PlacerError:
            continue
        if placed is None or not placed.placements:
            continue
        margins = [split_margin(instance, one) for one in placed.placements]
        most = max(margins, key=lambda margin: margin.next_s_per_byte or 0.0)
        told[table.name] = _sentence(most, bound.price_s_per_byte)
    return told


def _sentence(margin: ShardMargin, price: float) -> str:
    worth = f"A GiB of HBM is worth {_per_gib(price)} of GPU time to this plan's tables"
    if margin.hot_rows == 0:
        return f"{worth}; its hottest rows in DRAM would save {_per_gib(margin.next_s_per_byte)}."
    if margin.hot_rows == margin.rows:
        return f"{worth}; its coldest rows in HBM save {_per_gib(margin.last_s_per_byte)}."
    return (
        f"{worth}; at its split, the coldest rows in HBM save {_per_gib(margin.last_s_per_byte)} "
        f"and the hottest rows in DRAM would save {_per_gib(margin.next_s_per_byte)}."
    )


def _per_gib(value: float | None) -> str:
    """Seconds per byte as a duration per GiB; rows that take no HBM save it for free."""
    if value is None:
        return "nothing"
    return "time for no HBM at all" if value == float("inf") else format_seconds(value * _GIB)
