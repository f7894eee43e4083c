"""Read and write weights and optimizer state of this process by id, under any plan."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from placer.executor.embeddings import Embeddings
from placer.executor.id_order import IdOrder, IdRange
from placer.executor.local.fused_lookup import Runtime
from placer.executor.memory.arena import TieredRows
from placer.executor.memory.layout import ArenaSlice, Layout
from placer.executor.streams import sent
from placer.tables import OPTIMIZER_STATE, Table


class LocalIdOrder(IdOrder):
    """Access by id to tables that one process holds; collects rows on their device."""

    def __init__(self, embeddings: Embeddings, layout: Layout, runtime: Runtime) -> None:
        super().__init__(embeddings.plan, embeddings.optimizers, embeddings.counts_updates)
        self._layout, self._arenas, self._updates = layout, runtime.arenas, runtime.updates
        self._device = embeddings.device

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for arena in self._arenas:
            if arena.store is not None:
                arena.store.wait()

    def shares(self, table: Table) -> list[float]:
        return [1.0]

    def fetch(self, requests: Sequence[IdRange | None]) -> Tensor | None:
        (block,) = requests
        if block is None:
            return None
        return self.read_rows(block.tensor.table, block.tensor.name, block.ids)

    def held(
        self, block: IdRange
    ) -> Iterator[tuple[Tensor, tuple[int, int], Callable[[Tensor], None]]]:
        places = torch.arange(block.stop - block.start)
        yield places, (0, block.tensor.table.dim), partial(self.write, block)

    def write(self, block: IdRange, values: Tensor) -> None:
        if block.stop > block.start:
            self.write_rows(block.tensor.table, block.tensor.name, block.ids, values)

    def update_count(self) -> int:
        return int(self._updates)

    def set_update_count(self, updates: int) -> None:
        self._updates.fill_(updates)

    def read_rows(self, table: Table, name: str, ids: Tensor) -> Tensor:
        """Return some rows of a tensor, on the host; call `synchronize` before."""
        result: Tensor | None = None
        for columns, rows, cols, held in self._column_slices(table, name):
            values = rows.read(columns.slots_of(ids.to(self._device))).cpu()
            if values.dim() == 1:  # Every column slice has the same value per row.
                return values
            if result is None:
                result = torch.empty((ids.numel(), table.dim), dtype=values.dtype)
            result[:, cols] = values[:, held]
        assert result is not None, "every table has a column slice"
        return result

    def write_rows(self, table: Table, name: str, ids: Tensor, values: Tensor) -> None:
        values = values.to(self._device)
        for columns, rows, cols, held in self._column_slices(table, name):
            slots = columns.slots_of(ids.to(self._device))
            own = values if values.dim() == 1 else values[:, cols]
            if name != "weight" and len(OPTIMIZER_STATE[self.optimizers[table.name]]) > 1:
                whole = rows.read(slots)  # Keep the rows' other state tensors.
                whole[:, held] = own
                own = whole
            rows.write(slots, own)

    def start_rows(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        if any(arena.row_cache is not None or arena.store is not None for arena in self._arenas):
            self.synchronize()
        parts: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, (ids, values) in weights.items():
            there = sent(ids, self._device)
            for columns in self._layout.column_slices[name]:
                own = columns.slots_of(there), values[:, slice(*columns.cols)]
                parts[columns.arena].append(own)
        for number, held in parts.items():
            slots, rows = (torch.cat(list(part)) for part in zip(*held, strict=True))
            arena = self._arenas[number]
            arena.weights.write(slots, sent(rows, self._device))
            if arena.state is not None:
                shape = slots.numel(), *arena.state.hbm.shape[1:]
                arena.state.write(
                    slots, torch.zeros(shape, dtype=torch.float32, device=self._device)
                )

    def _column_slices(
        self, table: Table, name: str
    ) -> Iterator[tuple[ArenaSlice, TieredRows, slice, slice]]:
        """Yield column slices, their rows, and their columns in the table and in these rows."""
        for columns in self._layout.column_slices[table.name]:
            arena = self._arenas[columns.arena]
            rows = arena.weights if name == "weight" else arena.state
            assert rows is not None, "SGD's state has no names to ask for"
            width = columns.cols[1] - columns.cols[0]
            states = OPTIMIZER_STATE[self.optimizers[table.name]]
            first = 0 if name == "weight" else states.index(name) * width
            yield columns, rows, slice(*columns.cols), slice(first, first + width)
