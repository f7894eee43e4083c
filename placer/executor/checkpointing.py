"""What a model's tensors are called in a checkpoint, and what shapes they have."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from placer.errors import CheckpointError
from placer.executor.rule import STATE
from placer.tables import OptimizerName, Table

UPDATES = "updates"
"""Key of the number of updates: Adam corrects its averages by it, stochastic rounding draws by
it."""


class Shaped(Protocol):
    """A tensor, or what stands for one that is still in a file."""

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""
        ...


def tensor_shape(table: Table, name: str, optimizer: OptimizerName) -> tuple[int, ...]:
    """Shape of a table's ``weight``, or of one of its optimizer's tensors, in id order."""
    per_row = name != "weight" and optimizer == "rowwise_adagrad"
    return (table.rows,) if per_row else (table.rows, table.dim)


def state_shapes(
    tables: Sequence[Table], optimizers: Mapping[str, OptimizerName], *, counted: bool
) -> dict[str, tuple[int, ...]]:
    """Shapes of the optimizer's state by ``<table>.<name>``.

    `counted` says that the number of updates is part of it; under Adam it always is.
    """
    shapes = {
        f"{table.name}.{name}": tensor_shape(table, name, optimizers[table.name])
        for table in tables
        for name in STATE[optimizers[table.name]]
    }
    return {**shapes, UPDATES: ()} if counted or "adam" in optimizers.values() else shapes


def check_shapes(
    what: str, found: Mapping[str, Shaped], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check tensors before any is loaded.

    Raises
    ------
    CheckpointError
        Names all that are missing, of no table, or of another shape.
    """
    faults = [f"{key} is missing" for key in shapes if key not in found]
    faults += [f"{key} is of no table of the plan" for key in found if key not in shapes]
    faults += [
        f"{key} has shape {tuple(found[key].shape)}, not {shape}"
        for key, shape in shapes.items()
        if key in found and tuple(found[key].shape) != shape
    ]
    if faults:
        raise CheckpointError(f"{what}: {'; '.join(faults)}")
