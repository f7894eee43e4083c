"""Store an arena's cold rows as records, in host memory or on a drive.

No kernel reads records. The row cache has copies of the rows that steps read. The host decodes and
encodes rows when they move between the two. A record has two parts:

- The weights: float32, float16 or bfloat16 values; or for ``int8`` one unsigned byte per column,
  then the row's float32 `scale` and `offset`. A weight is ``byte · scale + offset``. This is the
  layout of FBGEMM's ``FloatToFused8BitRowwiseQuantized``, so FBGEMM can read these rows.
- The optimizer state, float32.

A scale is a power of two, and the offset is a multiple of it. That loses less than one bit of
precision, and encoding a decoded row gives the same record. So results do not depend on when and
how often a row moves between the store and the row cache.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from placer.executor.drive import DriveRecords
from placer.executor.optimizers import random_bits, stochastic_round
from placer.tables import ColdDType

_LEVELS = 255
_INT8_PARAMETERS = 8
"""Bytes of a row's scale and offset."""


@dataclass(frozen=True, slots=True)
class Records:
    """The format of records, with conversions from and to rows.

    >>> records = Records("int8", torch.float32, width=2, state_shape=())
    >>> records.weight_bytes, records.nbytes
    (10, 14)
    >>> weights, state = torch.tensor([[0.0, 0.5]]), torch.tensor([7.0])
    >>> held = torch.cat([records.encode_weights(weights), records.encode_state(state)], 1)
    >>> records.weights(held), records.state(held)
    (tensor([[0.0000, 0.5000]]), tensor([7.]))
    """

    dtype: ColdDType  # Dtype of weights in a record.
    weights_dtype: torch.dtype  # Dtype of weights outside of records.
    width: int  # Number of columns.
    state_shape: tuple[int, ...] | None  # Shape of a row's optimizer state; None without state.

    @property
    def weight_bytes(self) -> int:
        """Bytes of a record's weights."""
        if self.dtype == "int8":
            return self.width + _INT8_PARAMETERS
        return self.width * self._torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return self.weight_bytes + (0 if self.state_shape is None else 4 * prod(self.state_shape))

    @property
    def is_narrow(self) -> bool:
        """Whether weights must be rounded to fit into a record."""
        return self.dtype == "int8" or self._torch_dtype != self.weights_dtype

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def encode_weights(self, weights: Tensor) -> Tensor:
        """Return the part of records with weights, rounded to the nearest that fits, uint8."""
        if self.dtype != "int8":
            return _bytes(weights.to(self._torch_dtype))
        levels, scale, offset = _quantized(weights.float(), None)
        return torch.cat([levels.to(torch.uint8), _bytes(scale), _bytes(offset)], 1)

    def encode_state(self, state: Tensor) -> Tensor:
        """Return the part of records with optimizer state, uint8."""
        return _bytes(state.float().reshape(len(state), -1))

    def weights(self, records: Tensor) -> Tensor:
        """Return the weights of records, shape (rows, width)."""
        held = records[:, : self.weight_bytes]
        if self.dtype != "int8":
            return _values(held, self._torch_dtype).to(self.weights_dtype)
        affine = _values(held[:, self.width :], torch.float32)
        scale, offset = affine[:, :1], affine[:, 1:]
        return (held[:, : self.width] * scale + offset).to(self.weights_dtype)

    def state(self, records: Tensor) -> Tensor | None:
        """Return the optimizer state of records, float32; None without state."""
        if self.state_shape is None:
            return None
        held = _values(records[:, self.weight_bytes :], torch.float32)
        return held.reshape(len(records), *self.state_shape)

    def rounded(self, weights: Tensor, updates: Tensor) -> Tensor:
        """Round weights stochastically to values that fit into a record; works on any device.

        `updates` is the number of the update: see `placer.executor.optimizers.random_bits`.
        """
        if self.dtype != "int8":
            return stochastic_round(weights.contiguous(), self._torch_dtype, updates).float()
        levels, scale, offset = _quantized(weights.contiguous(), updates)
        return levels * scale + offset


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _values(held: Tensor, dtype: torch.dtype) -> Tensor:
    # A slice of a single row is contiguous, but may be unaligned.
    return held.clone(memory_format=torch.contiguous_format).view(dtype)


def _quantized(weights: Tensor, updates: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels from 0 to 255, float32, and scale and offset of each row, shape (rows, 1).

    Round to the nearest level, or stochastically if `updates` is given. A row with infinity or NaN
    becomes NaN.
    """
    finite = weights.isfinite().all(1, keepdim=True)
    values = torch.where(finite, weights, 0.0)
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    # The least power of two with which 255 levels span the row, and large enough for offsets that
    # are exact in 24 bits.
    power = torch.maximum(
        _ceil_log2((high - low) / _LEVELS), _ceil_log2(torch.maximum(-low, high)) - 24
    ).clamp_(-126, 126)
    scale = _power_of_two(power)
    too_wide = (high / scale).ceil() - (low / scale).floor() > _LEVELS
    scale = _power_of_two(power + too_wide)
    base = (low / scale).floor()
    level = values / scale - base
    lower = level.floor()
    part = level - lower
    threshold: float | Tensor = 0.5
    if updates is not None:
        threshold = (random_bits(weights, updates) & 0xFFFFFF).float() * 2.0**-24
    levels = (lower + (part > threshold)).clamp_(0, _LEVELS)
    return levels, torch.where(finite, scale, torch.nan), base * scale


def _ceil_log2(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(values)
    power = exponent - (mantissa == 0.5).int()
    return torch.where(values > 0, power, -126)


def _power_of_two(power: Tensor) -> Tensor:
    """Return 2**power in float32, made from bits, as `exp2` is not exact on every device."""
    return ((power + 127) << 23).int().view(torch.float32)


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
                held = torch.zeros((len(own), codec.nbytes), dtype=torch.uint8)
            else:
                held = part.medium.read(own)
            if weights is not None:
                held[:, : codec.weight_bytes] = codec.encode_weights(weights[here])
            if state is not None:
                held[:, codec.weight_bytes :] = codec.encode_state(state[here])
            part.medium.write(own, held)

    def rounded(self, rows: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
        """Round weights as `Records.rounded`. Rows outside of the store stay unchanged."""
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
