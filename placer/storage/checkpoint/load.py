"""Puts what a checkpoint holds into tables, a block of rows at a time."""

from collections.abc import Mapping, Sequence

import torch

from placer.errors import CheckpointError
from placer.executor.tensor_names import check_shapes
from placer.storage.checkpoint.table_blocks import NamedTables, spans_of
from placer.storage.tensor_rows import TensorRows


def check_tensors(
    what: str,
    found: Mapping[str, TensorRows],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Check names, shapes and types of tensors before any is loaded.

    Raises
    ------
    CheckpointError
        Names all that are missing, of no table, of another shape or of another type.
    """
    check_shapes(what, found, shapes)
    faults = [
        f"{key} is {found[key].dtype}, not {dtype}"
        for key, dtype in dtypes.items()
        if found[key].dtype != dtype
    ]
    if faults:
        raise CheckpointError(f"{what}: {'; '.join(faults)}")


def fill(named: Sequence[NamedTables], found: Mapping[str, TensorRows]) -> None:
    """Overwrite weights and optimizer state; each rank reads the rows that it holds.

    Parameters
    ----------
    named : sequence of NamedTables
    found : mapping of name to TensorRows
        All of the tables' tensors, checked before.

    Raises
    ------
    CheckpointError
        If a file is damaged; rows before it are changed then.
    """
    for each in named:
        each.tables.settle()
        for name, tensor in each.tensors.items():
            rows = found[".".join(name)]
            for span in spans_of(tensor):
                if each.tables.has_some(span):
                    each.tables.put(span, rows.read(span.start, span.stop))
