"""Warns where a model's state dict is taken alone, and training goes on."""

import warnings


class SaveWatch:
    """What of a table has been saved since its last update.

    A table's weight is in the state dict of the model, its optimizer's state is not: updates come
    in the backward pass, and no `torch.optim` optimizer has it. A state dict that is taken when
    training is over needs none, so the warning waits for the next update.
    """

    def __init__(self) -> None:
        self._weights = self._state = False

    def weights_saved(self) -> None:
        """A state dict of the model got the weight."""
        self._weights = True

    def state_saved(self) -> None:
        """The optimizer's state was saved, or loaded."""
        self._state = True

    def before_update(self, is_stateful: bool) -> None:
        """Warn where only the weights were saved, of a table whose optimizer has a state."""
        lacks_state = self._weights and not self._state
        self._weights = self._state = False
        if lacks_state and is_stateful:
            warnings.warn(
                "a state dict of the model was taken without the state of its tables' optimizer, "
                "which updates rows in the backward pass: training that goes on from it starts "
                "that state anew. Save and load what apply_plan returns beside the model: it has "
                "state_dict and load_state_dict (docs/pytorch.md has the lines for each trainer)",
                stacklevel=2,
            )
