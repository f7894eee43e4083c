"""Warn if training would lose what tables have learned, updates them too often, or averages them.

The first happens if training goes on or ends after a checkpoint without all of a table. The second
happens if several backward passes come before an optimizer's step: gradients of parameters add up
until the step, but tables are updated in each backward pass. Averages of weights are of parameters,
which tables are not.
"""

import atexit
import sys
import warnings
import weakref
from functools import cache
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from placer.units import listed

if TYPE_CHECKING:
    from placer.adapters.pytorch.table import PlacedTable

_lacking: "set[SaveWatch]" = set()
"""Watches of tables of which the model's last state dict lacks a part.

They outlive the model, because the process looks at them when it ends.
"""


class SaveWatch:
    """Tracks which parts of a table are saved since its last update.

    The model's state dict has the table's weight, unless `AppliedPlan.leave_state_dict` was called.
    It never has the optimizer's state: the backward pass updates tables, so no `torch.optim`
    optimizer has that state either.
    """

    def __init__(self, table: str) -> None:
        self._table, self._lost = table, ""
        self.model: object = self
        """Object that all tables of a model have in common."""
        self.is_ahead = False
        """Whether the table was updated since it was last saved or loaded in full."""

    def model_saved(self, *, with_rows: bool, is_stateful: bool) -> None:
        """Note that a state dict of the model was taken."""
        if self.is_ahead and (is_stateful or not with_rows):
            state = "the optimizer's state" if is_stateful else ""
            self._lost = state if with_rows else " and ".join(filter(None, ("the rows", state)))
            _lacking.add(self)

    def all_saved(self) -> None:
        """Note that rows and optimizer state were saved or loaded, or the plan was removed."""
        self.is_ahead = False
        _lacking.discard(self)

    def before_update(self) -> None:
        """Warn if the model was last saved without all of the table, as training goes on now."""
        if self in _lacking:
            _warn({each for each in _lacking if each.model is self.model}, "training goes on")
        self.is_ahead = True


@atexit.register
def _at_exit() -> None:
    # After an error or Ctrl-C, a run had no chance to save.
    if _lacking and not hasattr(sys, "last_value"):
        _warn(set(_lacking), "the process ends")


def _warn(watches: set[SaveWatch], when: str) -> None:
    """Warn what is lost, once for all these tables."""
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
    """Check the number of a table's updates whenever any optimizer steps."""
    _register()
    _watched.add(table)


@cache
def _register() -> None:
    register_optimizer_step_post_hook(_after_step)
    register_module_module_registration_hook(_after_registration)


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


def _after_registration(parent: nn.Module, _: str, child: nn.Module | None) -> None:
    if not isinstance(parent, AveragedModel) or child is None:
        return
    tables = {id(table) for table in _watched}
    if any(id(vars(module).get("table")) in tables for module in child.modules()):
        warnings.warn(
            "AveragedModel averages parameters, and placed tables are none: its copy keeps their "
            "rows as they are now. Before you use the average, give it the trained rows: "
            "save_tables(folder, applied), load_tables(folder, applied_plan(average.module))",
            stacklevel=4,
        )
