"""Store an arena's cold rows as records, in host memory or on a drive.

No kernel reads records. The row cache has copies of the rows that steps read. The host decodes and
encodes rows when they move between the two.
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
"""Rows that are encoded or decoded at a time, which limits temporary memory."""


@dataclass(frozen=True, slots=True, eq=False)
class HostRecords:
    """Records in host memory: uint8, shape (rows, bytes of a record)."""

    records: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """Return the records of distinct rows; `rows` is int64 on the host."""
        return self.records.index_select(0, rows)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Overwrite records of distinct rows."""
        self.records.index_copy_(0, rows, records)


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows ``start..stop`` of a store, with records of one format."""

    start: int
    stop: int
    records: Records
    medium: HostRecords | DriveRecords


class ColdStore:
    """The staged and cached rows of an arena as records, numbered from 0.

    `parts`: contiguous from row 0 on.

    `is_narrow`: whether a part's weights must be rounded to fit into records. `is_read_in_place`:
    whether an open step reads rows without a cache entry.

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
        self._writes = 0  # Number of writes begun plus writes ended.
        self._beside: tuple[int, Tensor, Tensor] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def start(self, work: Callable[[], Result]) -> "Future[Result]":
        """Run `work` in the store's thread, after all earlier work has succeeded."""
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
        """Wait for all started work, and raise its errors."""
        if self._last is not None:
            self._last.result()

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weights and state of distinct rows, on the host; `rows` is int64 there."""
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
        """Read the weights of distinct rows, and keep their state for `read_state`."""
        writes = self._writes
        weights, state = self.read(rows)
        self._beside = None if state is None else (writes, rows, state)
        return weights

    def read_state(self, rows: Tensor) -> Tensor:
        """Read the optimizer state of distinct rows; the store must have state."""
        beside = self._beside
        # A write during or after that read may have changed the state.
        if beside is not None and beside[0] == self._writes and torch.equal(beside[1], rows):
            return beside[2]
        state = self.read(rows)[1]
        assert state is not None, "SGD has no state to read"
        return state

    def write(
        self, rows: Tensor, weights: Tensor | None = None, state: Tensor | None = None
    ) -> None:
        """Overwrite weights, state or both of distinct rows, on the host."""
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
        """Round weights to values that fit into records. Rows outside of the store stay unchanged.

        It runs on the weights' device; see `Records.rounded`.
        """
        for part in self._parts:
            if part.records.is_narrow:
                here = _within(rows, part)
                own = part.records.rounded(weights.index_select(0, here), updates)
                weights = weights.index_copy(0, here, own)
        return weights

    def _blocks(self, rows: Tensor) -> Iterator[tuple[StoredRows, Tensor]]:
        """Yield each part and the positions of its rows, up to `_BLOCK_ROWS` at a time."""
        for part in self._parts:
            for here in torch.split(_within(rows, part), _BLOCK_ROWS):
                if here.numel():
                    yield part, here


def _within(rows: Tensor, part: StoredRows) -> Tensor:
    return torch.nonzero((rows >= part.start) & (rows < part.stop)).squeeze(1)
