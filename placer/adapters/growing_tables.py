"""Tables that grow, in trainers that have key maps of their own: what a plan may ask of them."""

from typing import Any

from placer.errors import PlanMismatchError
from placer.plan.plan import Plan
from placer.plan.shard import Shard


def row_wise_shards(plan: Plan, table: str, trainer: str, **has: Any) -> list[Shard]:
    """The shards of a table that grows, one a GPU, each with the same number of rows or one less.

    No row is of one id for good, so that any slices of so many rows are alike.

    Parameters
    ----------
    trainer : str
        Who gives rows to keys, for the message.
    **has
        What `Growing` must say, where the trainer has one way alone.
    """
    how, gpus = plan.growing[table], [gpu.id for gpu in plan.topology.gpus]
    for name, value in has.items():
        if getattr(how, name) != value:
            raise PlanMismatchError(
                f"table {table!r} grows with {name} {getattr(how, name)}, which {trainer} does not "
                f"have; set it to {value} in the plan, and run `placer verify --seal`"
            )
    dim, most = plan.tables_by_name[table].dim, -(-how.rows // len(gpus))
    held = [shard for shard in plan.shards_by_table[table] if shard.row_count]
    own = {shard.devices: shard for shard in held if shard.width == dim}
    is_even = all(shard.row_count in (most, most - 1) for shard in held)
    if not is_even or len(held) != len(gpus) or set(own) != {(gpu,) for gpu in gpus}:
        raise PlanMismatchError(
            f"table {table!r} grows, and {trainer} has such tables in slices of as many rows on "
            f"each of the {len(gpus)} GPUs; make its shards' rows [i, {how.rows}, {len(gpus)}] on "
            "the i-th, from 0, in the plan, and run `placer verify --seal`"
        )
    return [own[(gpu,)] for gpu in gpus]
