"""Read and write tables in id order, in blocks of rows, for checkpoints."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from placer.executor.memory.arena import CHUNK_ROWS, TORCH_DTYPES, TieredRows, initial_weights
from placer.executor.memory.layout import ArenaSlice, Layout
from placer.executor.streams import sent
from placer.executor.tensor_names import tensor_shape
from placer.plan.plan import Int, Plan
from placer.tables import OPTIMIZER_STATE, OptimizerName, Table

if TYPE_CHECKING:
    from placer.executor.embeddings import Embeddings
    from placer.executor.local.fused_lookup import Runtime

ReadRows = Callable[[int, int], Tensor]
"""A function of start and stop that returns rows ``start..stop`` of a tensor, on the host."""

_NEAR = 4
"""Read rows with the gaps between them if that multiplies the number of rows by at most this."""


@dataclass(frozen=True, slots=True)
class TableTensor:
    """A table's ``weight``, or one of its optimizer's tensors."""

    table: Table
    name: str  # ``weight``, or one of `placer.tables.OPTIMIZER_STATE`.
    shape: tuple[int, ...]  # (rows, dim), or (rows,) for state with one number per row.
    dtype: torch.dtype

    @property
    def is_per_row(self) -> bool:
        """Whether the tensor has one number per row, which every column slice copies."""
        return len(self.shape) == 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        return self.width_bytes(self.table.dim)

    def width_bytes(self, width: int) -> int:
        """Return the bytes of `width` columns of a row."""
        return self.dtype.itemsize * (1 if self.is_per_row else width)


@dataclass(frozen=True, slots=True)
class IdRange:
    """The rows of a tensor with ids ``start..stop``."""

    tensor: TableTensor
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows."""
        return (self.stop - self.start, *self.tensor.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return (self.stop - self.start) * self.tensor.row_bytes

    @property
    def ids(self) -> Tensor:
        """Ids of these rows, int64."""
        return torch.arange(self.start, self.stop)


class IdOrder(ABC):
    """Reads and writes tables by id, under any plan, in one process or in many.

    - `counts_updates`: whether results depend on the number of updates.
    - `rank`, `world`: this process's number, and the number of processes that share the tables.
    - `group`: the processes that share the tables; None for one process.
    """

    rank, world = 0, 1
    group: "dist.ProcessGroup | None" = None

    def __init__(
        self, plan: Plan, optimizers: Mapping[str, OptimizerName], counts_updates: bool
    ) -> None:
        self.plan, self.optimizers, self.counts_updates = plan, optimizers, counts_updates

    def tensors(self) -> Iterator[TableTensor]:
        """Yield all tensors, a table's weight before its state."""
        for table in self.plan.tables:
            yield from tensors_of(table, self.optimizers[table.name])

    def weights(self) -> Iterator[TableTensor]:
        """Return the weight of each table."""
        return (tensor for tensor in self.tensors() if tensor.name == "weight")

    def states(self) -> Iterator[TableTensor]:
        """Return the tensors of all optimizer states."""
        return (tensor for tensor in self.tensors() if tensor.name != "weight")

    def read(self, tensor: TableTensor) -> Tensor:
        """Return a whole tensor in id order, on the host; all processes must call this."""
        self.synchronize()
        result = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for block in blocks_of(tensor):
            rows = self.fetch([block] * self.world)
            assert rows is not None, "this process requests them"
            result[block.start : block.stop] = rows
        return result

    def overwrite(self, tensor: TableTensor, values: Tensor) -> None:
        """Overwrite this process's part of a tensor from the whole tensor in id order."""
        self.synchronize()
        for block in blocks_of(tensor):
            self.write(block, values[block.start : block.stop])

    def draw(self, weight: TableTensor, seed: int) -> None:
        """Set a table's initial weights, drawn at random from a seed and the table's name."""
        drawn = initial_weights(weight.table, seed)
        for block, (_, values) in zip(blocks_of(weight), drawn, strict=True):
            self.write(block, values)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until no kernel moves rows. Call this before rows are read or written."""

    @abstractmethod
    def shares(self, table: Table) -> list[float]:
        """Return each process's share of a table. Shares add up to 1, and copies divide a share."""

    @abstractmethod
    def fetch(self, requests: Sequence[IdRange | None]) -> Tensor | None:
        """Return the rows that this process requests, on the host. All processes must call this.

        Every process must pass the same `requests`, one for each process.
        """

    @abstractmethod
    def holds(self, block: IdRange) -> bool:
        """Return whether this process holds any of these rows."""

    @abstractmethod
    def write(self, block: IdRange, values: Tensor) -> None:
        """Overwrite this process's part of a block from the block's whole values."""

    @abstractmethod
    def start_rows(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Overwrite this process's part of some rows, and set their optimizer state to zero.

        `weights`: distinct ids, shape (rows,), and weights, shape (rows, dim), by table; on the
        host.
        """

    @abstractmethod
    def update_count(self) -> int:
        """Return the number of updates so far; all processes must call this."""

    @abstractmethod
    def set_update_count(self, updates: int) -> None:
        """Set the number of updates in this process."""


def tensors_of(table: Table, optimizer: OptimizerName) -> Iterator[TableTensor]:
    """Yield a table's tensors, the weight first."""
    for name in ("weight", *OPTIMIZER_STATE[optimizer]):
        dtype = TORCH_DTYPES[table.dtype] if name == "weight" else torch.float32
        yield TableTensor(table, name, tensor_shape(table, name, optimizer), dtype)


def blocks_of(tensor: TableTensor) -> Iterator[IdRange]:
    """Yield the blocks of a tensor in id order, each with a limited number of rows."""
    rows = tensor.table.rows
    for start in range(0, rows, CHUNK_ROWS):
        yield IdRange(tensor, start, min(rows, start + CHUNK_ROWS))


def rows_from(
    tensor: TableTensor, before: ReadRows | None, earlier: Int, seed: int | None
) -> ReadRows:
    """Return a function that reads a tensor whose rows come from an earlier tensor or are new.

    - `before`: reads the earlier tensor; None if there was none.
    - `earlier`: the earlier row of each row, negative for new rows.
    - `seed`: draws the weights of new rows, as for a new table. None leaves them zero.
    """
    place_of_new = np.cumsum(earlier < 0) - 1

    @cache
    def drawn() -> Tensor:
        assert seed is not None, "nothing is drawn without a seed"
        new = [
            values[torch.from_numpy(earlier[ids.numpy()] < 0)]
            for ids, values in initial_weights(tensor.table, seed)
        ]
        return torch.cat(new).to(tensor.dtype)

    @cache
    def whole() -> Tensor:
        assert before is not None, "rows that were are of a tensor"
        return before(0, int(earlier.max()) + 1)

    def read(start: int, stop: int) -> Tensor:
        own = earlier[start:stop]
        result = torch.zeros((stop - start, *tensor.shape[1:]), dtype=tensor.dtype)
        new, known = np.flatnonzero(own < 0), np.flatnonzero(own >= 0)
        if new.size and tensor.name == "weight" and seed is not None:
            result[new] = drawn()[place_of_new[start:stop][new]]
        if known.size and before is not None:
            low, high = int(own[known].min()), int(own[known].max()) + 1
            is_near = high - low <= _NEAR * known.size
            rows = before(low, high) if is_near else whole()[low:high]
            result[known] = rows[own[known] - low].to(tensor.dtype)
        return result

    return read


class LocalIdOrder(IdOrder):
    """Access by id to tables that one process holds; collects rows on their device."""

    def __init__(self, embeddings: "Embeddings", layout: Layout, runtime: "Runtime") -> None:
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

    def holds(self, block: IdRange) -> bool:
        return block.stop > block.start

    def write(self, block: IdRange, values: Tensor) -> None:
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
        """Overwrite some rows of a tensor; ids are distinct. Call `synchronize` before."""
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
