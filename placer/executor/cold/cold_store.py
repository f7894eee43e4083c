"""The home of an arena's cold rows where these are records: in host memory, or on a drive.

No kernel addresses such rows. The row cache's entries have copies of those that steps read,
which the host decodes and encodes as they move.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from placer.executor.cold.drive import DriveRecords
from placer.executor.cold.records import Records

Result = TypeVar("Result")

_BLOCK_ROWS = 8192
"""Rows that are encoded or decoded at a time: bounds the temporary memory."""


@dataclass(frozen=True, slots=True, eq=False)
class HostRecords:
    """Records in host memory, uint8 of shape (rows, bytes of a record), all zero at first."""

    records: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """Return records of distinct rows, int64 on the host."""
        return self.records.index_select(0, rows)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Overwrite records of distinct rows."""
        self.records.index_copy_(0, rows, records)


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows ``start..stop`` of a store, all in records of one form."""

    start: int
    stop: int
    records: Records
    medium: HostRecords | DriveRecords


class ColdStore:
    """Cold rows of an arena by number, from the first of them on.

    Parameters
    ----------
    parts : sequence of StoredRows
        One after the other from row 0 on.

    Attributes
    ----------
    rows : int
    is_narrow : bool
        Whether weights have to be rounded to fit.
    is_read_in_place : bool
        Whether an open step reads rows that have no copy elsewhere.

    Examples
    --------
    >>> records = Records("bfloat16", torch.float32, width=2, state_shape=None)
    >>> memory = HostRecords(torch.zeros(5, records.nbytes, dtype=torch.uint8))
    >>> store = ColdStore([StoredRows(0, 5, records, memory)])
    >>> store.write(torch.tensor([3]), torch.tensor([[0.5, 1.0]]))
    >>> store.read(torch.tensor([3, 1]))
    (tensor([[0.5000, 1.0000],
            [0.0000, 0.0000]]), None)
    """

    def __init__(self, parts: Sequence[StoredRows]) -> None:
        self._parts = tuple(parts)
        self.rows = self._parts[-1].stop if self._parts else 0
        self.is_narrow = any(part.records.is_narrow for part in self._parts)
        self.is_read_in_place = False
        self._has_state = False
        self._writes = 0  # Those that have begun, and those that have ended.
        self._beside: tuple[int, Tensor, Tensor] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def start(self, work: Callable[[], Result]) -> "Future[Result]":
        """Move rows in a thread of the store, once all earlier moves have succeeded."""
        before = self._last
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="placer-cold-rows")

        def run() -> Result:
            if before is not None:
                before.result()
            return work()

        self._last = future = self._thread.submit(run)
        return future

    def wait(self) -> None:
        """Wait until all that was started is done; raises what was raised there."""
        if self._last is not None:
            self._last.result()

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weights and state of distinct rows, int64; all on the host."""
        first = self._parts[0].records
        weights = torch.empty((rows.numel(), first.width), dtype=first.weights_dtype)
        state = None
        if first.state_shape is not None:
            state = torch.empty((rows.numel(), *first.state_shape), dtype=torch.float32)
        for part, here in self._blocks(rows):
            held = part.medium.read(rows[here] - part.start)
            weights[here] = part.records.weights(held)
            own = part.records.state(held)
            if state is not None and own is not None:
                state[here] = own
        return weights, state

    def read_weights(self, rows: Tensor) -> Tensor:
        """Read weights of distinct rows; who reads their state next needs no second read."""
        writes = self._writes
        weights, state = self.read(rows)
        self._beside = None if state is None else (writes, rows, state)
        return weights

    def read_state(self, rows: Tensor) -> Tensor:
        """Read state of distinct rows, of which there is some."""
        beside = self._beside
        # A write since then, or beside the read, may have changed it.
        if beside is not None and beside[0] == self._writes and torch.equal(beside[1], rows):
            return beside[2]
        state = self.read(rows)[1]
        assert state is not None, "SGD has no state to read"
        return state

    def write(
        self, rows: Tensor, weights: Tensor | None = None, state: Tensor | None = None
    ) -> None:
        """Overwrite distinct rows, or only one of what they hold; all on the host."""
        self._writes, self._beside = self._writes + 1, None
        try:
            self._write(rows, weights, state)
        finally:
            self._writes += 1

    def _write(self, rows: Tensor, weights: Tensor | None, state: Tensor | None) -> None:
        self._has_state |= state is not None
        for part, here in self._blocks(rows):
            own, codec = rows[here] - part.start, part.records
            if weights is not None and (state is not None or not self._has_state):
                held = codec.encode(weights[here], None if state is None else state[here])
            else:
                held = part.medium.read(own)
                if weights is not None:
                    held[:, : codec.weight_bytes] = codec.encode_weights(weights[here])
                if state is not None:
                    held[:, codec.weight_bytes :] = codec.encode_state(state[here])
            part.medium.write(own, held)

    def rounded(self, rows: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
        """Return weights such as the store holds; those of rows that are not here stay as they are.

        Works on the weights' device; see `Records.rounded`.
        """
        for part in self._parts:
            if part.records.is_narrow:
                here = _within(rows, part)
                own = part.records.rounded(weights.index_select(0, here), updates)
                weights = weights.index_copy(0, here, own)
        return weights

    def _blocks(self, rows: Tensor) -> Iterator[tuple[StoredRows, Tensor]]:
        """Yield each part, and which of the rows are in it, a bounded number at a time."""
        for part in self._parts:
            for here in torch.split(_within(rows, part), _BLOCK_ROWS):
                if here.numel():
                    yield part, here


def _within(rows: Tensor, part: StoredRows) -> Tensor:
    return torch.nonzero((rows >= part.start) & (rows < part.stop)).squeeze(1)
