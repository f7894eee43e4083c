"""Why each table of a plan is split where it is, in a sentence: cheap enough for thousands."""

from placer.errors import PlacerError
from placer.plan.plan import Plan
from placer.report import section as form
from solvers.analysis.explain import split_margin
from solvers.analysis.explanation import ShardMargin
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.instance import Instance
from solvers.model.read_plan import placements_of


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
    """Slopes beside one another: a slope times a GiB would be a saving that nobody has solved."""
    if not price:
        return "Another byte of HBM is worth nothing to this plan's tables."
    last, after = (_times(one, price) for one in (margin.last_s_per_byte, margin.next_s_per_byte))
    beside = "what the last byte of HBM saves this plan's tables"
    if margin.hot_rows == 0:
        return f"A byte of HBM would save its hottest rows {after} {beside}."
    if margin.hot_rows == margin.rows:
        return f"A byte of HBM saves its coldest rows {last} {beside}."
    return (
        f"At its split, a byte of HBM saves the coldest rows there {last}, and would save the "
        f"hottest rows in DRAM {after} {beside}."
    )


def _times(value: float | None, price: float) -> str:
    """Seconds per byte beside a price; rows that take no HBM save theirs for free."""
    if value is None:
        return "0 times"
    return "any number of times" if value == float("inf") else f"{form.number(value / price)} times"
