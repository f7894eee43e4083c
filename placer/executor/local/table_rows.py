"""Weights and optimizer state by id, wherever a plan keeps their rows."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from placer.executor.memory.arena import TORCH_DTYPES, Arena
from placer.executor.memory.initial_weights import id_chunks
from placer.executor.memory.layout import ArenaSlice, Layout
from placer.executor.memory.tiers import TieredRows
from placer.executor.tensor_names import tensor_shape
from placer.tables import OPTIMIZER_STATE, OptimizerName, Table


class TableRows:
    """Reads and writes rows of tables for checkpoints and initial weights.

    A tensor is a table's ``weight`` or one of its optimizer's, by the names of
    `placer.executor.optimizers.rule.STATE`. Waits for the device.

    Parameters
    ----------
    layout : Layout
    arenas : tuple of Arena
    optimizers : mapping of table name to optimizer
    device : torch.device
        Where rows are collected.
    """

    def __init__(
        self,
        layout: Layout,
        arenas: tuple[Arena, ...],
        optimizers: Mapping[str, OptimizerName],
        device: torch.device,
    ) -> None:
        self._layout, self._arenas, self._optimizers = layout, arenas, optimizers
        self._device = device

    def settle(self) -> None:
        """Wait until no kernel moves rows any more, so that the host may read and write them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def read(self, table: Table, name: str) -> Tensor:
        """A whole tensor in id order, on the host."""
        self.settle()
        dtype = TORCH_DTYPES[table.dtype] if name == "weight" else torch.float32
        result = torch.empty(tensor_shape(table, name, self._optimizers[table.name]), dtype=dtype)
        for ids in id_chunks(table.rows):
            result[_span(ids)] = self.read_rows(table, name, ids)
        return result

    def write(self, table: Table, name: str, values: Tensor) -> None:
        """Overwrite a whole tensor by values in id order."""
        self.settle()
        for ids in id_chunks(table.rows):
            self.write_rows(table, name, ids, values[_span(ids)])

    def read_rows(self, table: Table, name: str, ids: Tensor) -> Tensor:
        """Some rows of a tensor, on the host; call `settle` before."""
        result: Tensor | None = None
        for columns, rows, cols, held in self._column_slices(table, name):
            values = rows.read(columns.slots_of(ids.to(self._device))).cpu()
            if values.dim() == 1:  # All have equal copies of one number a row.
                return values
            if result is None:
                result = torch.empty((ids.numel(), table.dim), dtype=values.dtype)
            result[:, cols] = values[:, held]
        assert result is not None, "every table has a column slice"
        return result

    def write_rows(self, table: Table, name: str, ids: Tensor, values: Tensor) -> None:
        """Overwrite rows of a tensor, whose ids are distinct; call `settle` before."""
        values = values.to(self._device)
        for columns, rows, cols, held in self._column_slices(table, name):
            slots = columns.slots_of(ids.to(self._device))
            own = values if values.dim() == 1 else values[:, cols]
            if name != "weight" and len(OPTIMIZER_STATE[self._optimizers[table.name]]) > 1:
                whole = rows.read(slots)  # The other tensors of the same rows stay.
                whole[:, held] = own
                own = whole
            rows.write(slots, own)

    def _column_slices(
        self, table: Table, name: str
    ) -> Iterator[tuple[ArenaSlice, TieredRows, slice, slice]]:
        """Column slices, the rows that hold the tensor, its columns in the table and in these."""
        for columns in self._layout.column_slices[table.name]:
            arena = self._arenas[columns.arena]
            rows = arena.weights if name == "weight" else arena.state
            assert rows is not None, "SGD's state has no names to ask for"
            width = columns.cols[1] - columns.cols[0]
            names = (
                ("weight",) if name == "weight" else OPTIMIZER_STATE[self._optimizers[table.name]]
            )
            first = names.index(name) * width
            yield columns, rows, slice(*columns.cols), slice(first, first + width)


def _span(ids: Tensor) -> slice:
    """Consecutive ids as a slice."""
    return slice(int(ids[0]), int(ids[-1]) + 1)
