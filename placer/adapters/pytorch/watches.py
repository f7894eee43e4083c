"""Warns where training loses what tables have learned.

That is where a checkpoint lacks it, when training goes on or ends, and where backward passes update
tables more often than an optimizer steps: gradients of parameters add up until a step, and tables
that are updated in each backward pass do not wait for it.
"""

import atexit
import sys
import warnings
import weakref
from functools import cache
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_post_hook

from placer.units import listed

if TYPE_CHECKING:
    from placer.adapters.pytorch.table import PlacedTable

_lacking: "set[SaveWatch]" = set()
"""Of tables whose last update is in a state dict of the model without all that belongs to it.

They stay when the model is gone: what a process has saved is looked at when it ends.
"""


class SaveWatch:
    """What of a table has been saved since its last update.

    A table's weight is in the state dict of the model, unless the model leaves it to a folder. Its
    optimizer's state is not: updates come in the backward pass, and no `torch.optim` optimizer has
    it.
    """

    def __init__(self, table: str) -> None:
        self._table, self._lost = table, ""
        self.model: object = self
        """The same for all tables of a model."""
        self.is_ahead = False
        """Whether it was updated since all of it was saved or loaded."""

    def model_saved(self, *, with_rows: bool, is_stateful: bool) -> None:
        """A state dict of the model was taken."""
        if self.is_ahead and (is_stateful or not with_rows):
            state = "the optimizer's state" if is_stateful else ""
            self._lost = state if with_rows else " and ".join(filter(None, ("the rows", state)))
            _lacking.add(self)
            _watch_exit()

    def all_saved(self) -> None:
        """Rows and state were saved, or loaded, or are what the model has without a plan."""
        self.is_ahead = False
        _lacking.discard(self)

    def before_update(self) -> None:
        """Warn where the model was saved without all of the table, and training goes on."""
        if self in _lacking:
            _warn({each for each in _lacking if each.model is self.model}, "training goes on")
        self.is_ahead = True


@cache
def _watch_exit() -> None:
    atexit.register(_at_exit)


def _at_exit() -> None:
    # An error or Ctrl-C ends a run before it could save.
    if _lacking and not hasattr(sys, "last_value"):
        _warn(set(_lacking), "the process ends")


def _warn(watches: set[SaveWatch], when: str) -> None:
    """Say what is lost, once for all tables: those of a model were saved by one call."""
    lost = max((each._lost for each in watches), key=len)
    tables = sorted({each._table for each in watches})
    saves = "save_tables(folder, applied) of placer.storage.checkpoint"
    if "the rows" not in lost:
        saves = "torch.save(applied.state_dict(), file)"
    _lacking.difference_update(watches)
    warnings.warn(
        f"{when}, and the last state dict of the model is without {lost} of placed tables: "
        f"{listed(tables, 3)}. Who goes on from it starts with new ones. Save them beside it "
        f"(`applied` is what apply_plan returned): {saves}; docs/pytorch.md has the lines for each "
        "trainer",
        stacklevel=4,
    )


_watched: "weakref.WeakSet[PlacedTable]" = weakref.WeakSet()


def watch_steps(table: "PlacedTable") -> None:
    """Look at a table's updates whenever any optimizer has stepped."""
    _register()
    _watched.add(table)


@cache
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
