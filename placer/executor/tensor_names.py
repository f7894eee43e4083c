"""Name a model's tensors in checkpoints, and check their shapes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from placer.errors import CheckpointError, PlanMismatchError
from placer.tables import OPTIMIZER_STATE, OptimizerName, Table

UPDATES = "updates"
"""Key of the number of updates. Adam corrects its averages with it, and stochastic rounding draws
its random numbers from it."""


def tensor_shape(table: Table, name: str, optimizer: OptimizerName) -> tuple[int, ...]:
    """Return the shape of a table's ``weight`` or of a tensor of its optimizer state."""
    per_row = name != "weight" and optimizer == "rowwise_adagrad"
    return (table.rows,) if per_row else (table.rows, table.dim)


def state_shapes(
    tables: Sequence[Table], optimizers: Mapping[str, OptimizerName], *, counted: bool
) -> dict[str, tuple[int, ...]]:
    """Return shapes of the optimizer state by ``<table>.<name>``.

    `counted` adds the number of updates; with Adam it is always there.
    """
    shapes = {
        f"{table.name}.{name}": tensor_shape(table, name, optimizers[table.name])
        for table in tables
        for name in OPTIMIZER_STATE[optimizers[table.name]]
    }
    return {**shapes, UPDATES: ()} if counted or "adam" in optimizers.values() else shapes


def check_shapes(
    what: str,
    held: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Raise CheckpointError if tensors are missing, unknown, or of another shape or dtype.

    `held`: tensors in memory, or descriptions of tensors in a file, with shape and dtype.
    """
    faults = [f"{key} is missing" for key in shapes if key not in held]
    faults += [
        f"{key} is of no table and optimizer of the plan" for key in held if key not in shapes
    ]
    faults += [
        f"{key} has shape {tuple(held[key].shape)}, not {shape}"
        for key, shape in shapes.items()
        if key in held and tuple(held[key].shape) != shape
    ]
    faults = faults or [
        f"{key} is {held[key].dtype}, not {dtype}"
        for key, dtype in dtypes.items()
        if held[key].dtype != dtype
    ]
    if faults:
        raise CheckpointError(f"{what}: {'; '.join(faults)}")


def check_weights(what: str, weights: Mapping[str, Tensor], tables: Sequence[Table]) -> None:
    """Raise PlanMismatchError for an unknown table or a wrong shape; tables may be left out."""
    shapes = {table.name: (table.rows, table.dim) for table in tables}
    faults = [f"{name!r} is no table of the plan" for name in weights if name not in shapes]
    faults += [
        f"table {name!r} has shape {tuple(tensor.shape)}, the plan says {shapes[name]}"
        for name, tensor in weights.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if faults:
        raise PlanMismatchError(f"{what}: {'; '.join(faults)}")
