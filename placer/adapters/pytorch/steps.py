"""Warns where backward passes update tables more often than an optimizer steps.

Gradients of parameters add up until a step. Tables that are updated in each backward pass do not
wait for it, which a loop that accumulates gradients has to know.
"""

import functools
import warnings
import weakref
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from placer.adapters.pytorch.table import PlacedTable


_watched: "weakref.WeakSet[PlacedTable]" = weakref.WeakSet()


def watch_steps(table: "PlacedTable") -> None:
    """Look at a table's updates whenever any optimizer has stepped."""
    _register()
    _watched.add(table)


@functools.cache
def _register() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: object) -> None:
    is_faster = False
    for table in _watched:
        is_faster |= table.updates_since_step > 1 and not table.waits
        table.updates_since_step = 0
    if is_faster:
        warnings.warn(
            "several backward passes came before one step of the optimizer: gradients of "
            "parameters add up until the step, and placed tables were updated in each pass. To "
            "accumulate theirs too, call update_with(optimizer) of what apply_plan returns",
            stacklevel=2,
        )
