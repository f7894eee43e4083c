"""Tables in the order of their ids, some rows at a time: what checkpoints read and write."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.memory.arena import TORCH_DTYPES
from placer.executor.optimizers.rule import STATE
from placer.executor.tensor_names import tensor_shape
from placer.plan.plan import Plan
from placer.tables import OptimizerName, Table


@dataclass(frozen=True, slots=True)
class TableTensor:
    """A table's ``weight``, or one of its optimizer's tensors.

    Attributes
    ----------
    table : Table
    name : str
        ``weight``, or one of `placer.executor.optimizers.rule.STATE`.
    shape : tuple of int
        (rows, dim), or (rows,) for state that is one number a row.
    dtype : torch.dtype
    """

    table: Table
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * (self.shape[1] if len(self.shape) > 1 else 1)


@dataclass(frozen=True, slots=True)
class Span:
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


class IdOrder(Protocol):
    """Tables that one process or many hold, read and written by id whatever the plan."""

    @property
    def plan(self) -> Plan:
        """Which tables there are."""
        ...

    @property
    def optimizers(self) -> Mapping[str, OptimizerName]:
        """What trains each table."""
        ...

    @property
    def rank(self) -> int:
        """This process among those that share the tables."""
        ...

    @property
    def world(self) -> int:
        """How many share them."""
        ...

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """Those who share them; None for one process alone."""
        ...

    @property
    def counts_updates(self) -> bool:
        """Whether it matters how many updates there have been."""
        ...

    def settle(self) -> None:
        """Wait until no kernel moves rows; to be called before rows are read or written."""
        ...

    def shares(self, table: Table) -> list[float]:
        """Which part of a table each rank holds; they add up to 1, copies shared out evenly."""
        ...

    def bring(self, asked: Sequence[Span | None]) -> Tensor | None:
        """The span that this rank asks for, on the host; all ranks must be here.

        Parameters
        ----------
        asked : sequence of Span or None, length world
            What each rank asks for, the same on all of them.

        Raises
        ------
        BackendError
            If a rank is lost.
        """
        ...

    def has_some(self, span: Span) -> bool:
        """Whether this rank holds some of these rows."""
        ...

    def put(self, span: Span, values: Tensor) -> None:
        """Overwrite what this rank holds of a span."""
        ...

    def update_count(self) -> int:
        """Updates so far; all ranks must ask."""
        ...

    def set_update_count(self, updates: int) -> None:
        """Go on counting from here, on this rank."""
        ...


def tensors_of(tables: IdOrder) -> Iterator[TableTensor]:
    """All tensors, a table's weight before its state."""
    for table in tables.plan.tables:
        optimizer = tables.optimizers[table.name]
        for name in ("weight", *STATE[optimizer]):
            dtype = TORCH_DTYPES[table.dtype] if name == "weight" else torch.float32
            yield TableTensor(table, name, tensor_shape(table, name, optimizer), dtype)


class OwnTables:
    """Tables that this process has alone."""

    rank, world = 0, 1
    group: "dist.ProcessGroup | None" = None

    def __init__(self, embeddings: PlacedEmbeddings) -> None:
        self._embeddings = embeddings
        self.plan = embeddings.plan
        self.optimizers: Mapping[str, OptimizerName] = embeddings.optimizers

    @property
    def counts_updates(self) -> bool:
        """See `IdOrder`."""
        return self._embeddings.counts_updates

    def settle(self) -> None:
        """See `IdOrder`."""
        self._embeddings.rows.settle()

    def shares(self, table: Table) -> list[float]:
        """See `IdOrder`."""
        return [1.0]

    def bring(self, asked: Sequence[Span | None]) -> Tensor | None:
        """See `IdOrder`."""
        (span,) = asked
        if span is None:
            return None
        rows = self._embeddings.rows.read_rows(span.tensor.table, span.tensor.name, span.ids)
        return rows.to(span.tensor.dtype)

    def has_some(self, span: Span) -> bool:
        """See `IdOrder`."""
        return span.stop > span.start

    def put(self, span: Span, values: Tensor) -> None:
        """See `IdOrder`."""
        if self.has_some(span):
            rows = self._embeddings.rows
            rows.write_rows(span.tensor.table, span.tensor.name, span.ids, values)

    def update_count(self) -> int:
        """See `IdOrder`."""
        return self._embeddings.update_count()

    def set_update_count(self, updates: int) -> None:
        """See `IdOrder`."""
        self._embeddings.set_update_count(updates)
