"""Tables in the order of their ids, some rows at a time: what checkpoints read and write."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from placer.executor.memory.arena import TORCH_DTYPES
from placer.executor.memory.initial_weights import CHUNK_ROWS, initial_weights
from placer.executor.tensor_names import tensor_shape
from placer.plan.order import Int
from placer.plan.plan import Plan
from placer.tables import OPTIMIZER_STATE, OptimizerName, Table

ReadRows = Callable[[int, int], Tensor]
"""Rows ``start..stop`` of a tensor, on the host."""

_NEAR = 4
"""Rows are read with the gaps between them if that reads at most this many times as many rows."""


@dataclass(frozen=True, slots=True)
class TableTensor:
    """A table's ``weight``, or one of its optimizer's tensors.

    Attributes
    ----------
    table : Table
    name : str
        ``weight``, or one of `placer.tables.OPTIMIZER_STATE`.
    shape : tuple of int
        (rows, dim), or (rows,) for state that is one number a row.
    dtype : torch.dtype
    """

    table: Table
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_per_row(self) -> bool:
        """Whether it is one number a row, of which every column slice has a copy."""
        return len(self.shape) == 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width_bytes(self.table.dim)

    def width_bytes(self, width: int) -> int:
        """Return bytes of so many columns of a row."""
        return self.dtype.itemsize * (1 if self.is_per_row else width)


@dataclass(frozen=True, slots=True)
class IdRange:
    """Rows of the ids ``start..stop`` of a tensor."""

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
    """Tables that one process or many hold, read and written by id whatever the plan.

    Attributes
    ----------
    plan : Plan
    optimizers : mapping of table name to optimizer
    counts_updates : bool
        Whether it matters how many updates there have been.
    rank, world : int
        This process among those that share the tables, and how many there are.
    group : torch.distributed.ProcessGroup or None
        Those that share the tables; None for one process alone.
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
        """Return the tensors of the optimizers."""
        return (tensor for tensor in self.tensors() if tensor.name != "weight")

    def read(self, tensor: TableTensor) -> Tensor:
        """Return a whole tensor in id order, on the host; all processes must call it."""
        self.synchronize()
        result = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for block in blocks_of(tensor):
            rows = self.fetch([block] * self.world)
            assert rows is not None, "this process requests them"
            result[block.start : block.stop] = rows
        return result

    def overwrite(self, tensor: TableTensor, values: Tensor) -> None:
        """Overwrite what this process holds of a tensor by whole values in id order."""
        self.synchronize()
        for block in blocks_of(tensor):
            self.write(block, values[block.start : block.stop])

    def draw(self, weight: TableTensor, seed: int) -> None:
        """Set a table's initial weights, drawn by a seed and the table's name."""
        drawn = initial_weights(weight.table, seed)
        for block, (_, values) in zip(blocks_of(weight), drawn, strict=True):
            self.write(block, values)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until no kernel moves rows; to be called before rows are read or written."""

    @abstractmethod
    def shares(self, table: Table) -> list[float]:
        """Which part of a table each process holds; they add up to 1, copies count evenly."""

    @abstractmethod
    def fetch(self, requests: Sequence[IdRange | None]) -> Tensor | None:
        """Return the rows that this process requests, on the host; all processes must call it.

        Parameters
        ----------
        requests : sequence of IdRange or None, length world
            What each process requests, the same on all of them.
        """

    @abstractmethod
    def held(
        self, block: IdRange
    ) -> Iterator[tuple[Tensor, tuple[int, int], Callable[[Tensor], None]]]:
        """Yield what this process holds of some rows: their places, columns, and what writes them.

        Places are those in the block, ascending.
        """

    def holds(self, block: IdRange) -> bool:
        """Return whether this process holds some of these rows."""
        return any(places.numel() for places, *_ in self.held(block))

    def write(self, block: IdRange, values: Tensor) -> None:
        """Overwrite what this process holds of some rows."""
        for places, cols, write in self.held(block):
            own = values[places]
            write(own if block.tensor.is_per_row else own[:, slice(*cols)])

    @abstractmethod
    def write_rows(self, table: Table, name: str, ids: Tensor, values: Tensor) -> None:
        """Overwrite what this process holds of rows of a tensor, whose ids are distinct.

        Call `synchronize` before.
        """

    def start_rows(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Overwrite the weights of some rows of tables, and set their optimizer state to zero.

        Parameters
        ----------
        weights : mapping of table name to (ids, weights)
            Distinct ids, shape (rows,), and weights, shape (rows, dim), on the host.
        """
        self.synchronize()
        for name, (ids, values) in weights.items():
            table = self.plan.tables_by_name[name]
            for tensor in tensors_of(table, self.optimizers[name]):
                own = torch.zeros(ids.numel(), *tensor.shape[1:], dtype=torch.float32)
                self.write_rows(table, tensor.name, ids, values if tensor.name == "weight" else own)

    @abstractmethod
    def update_count(self) -> int:
        """Updates so far; all processes must call it."""

    @abstractmethod
    def set_update_count(self, updates: int) -> None:
        """Go on counting from here, on this process."""


def tensors_of(table: Table, optimizer: OptimizerName) -> Iterator[TableTensor]:
    """Yield a table's tensors, the weight first."""
    for name in ("weight", *OPTIMIZER_STATE[optimizer]):
        dtype = TORCH_DTYPES[table.dtype] if name == "weight" else torch.float32
        yield TableTensor(table, name, tensor_shape(table, name, optimizer), dtype)


def blocks_of(tensor: TableTensor) -> Iterator[IdRange]:
    """Yield all rows of a tensor in id order, a bounded number at a time."""
    rows = tensor.table.rows
    for start in range(0, rows, CHUNK_ROWS):
        yield IdRange(tensor, start, min(rows, start + CHUNK_ROWS))


def rows_from(
    tensor: TableTensor, before: ReadRows | None, earlier: Int, seed: int | None
) -> ReadRows:
    """Return what reads a tensor of a table whose rows are those of an earlier one, or new.

    Parameters
    ----------
    before : callable or None
        Reads rows ``start..stop`` of the earlier one, if there was one.
    earlier : int64 array, shape (rows,)
        The row that each row was, negative for new ones.
    seed : int or None
        New rows have the weights of a new table; None: zeros, as their optimizer's state.
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
