"""Encode a row's weights, perhaps narrower, and its optimizer state as bytes: a record.

A record has two parts:

- The weights: float32, float16 or bfloat16 values; or for ``int8`` one unsigned byte per column,
  then the row's float32 `scale` and `offset`. A weight is ``byte · scale + offset``. This is the
  layout of FBGEMM's ``FloatToFused8BitRowwiseQuantized``, so FBGEMM can read these rows.
- The optimizer state, float32.

A scale is a power of two, and the offset is a multiple of it. That loses less than one bit of
precision, and encoding a decoded row gives the same record. So results do not depend on when and
how often a row moves between the store and the row cache.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from placer.executor.optimizers.rounding import random_bits, stochastic_round
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
    >>> held = records.encode(torch.tensor([[0.0, 0.5]]), torch.tensor([7.0]))
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

    def encode(self, weights: Tensor, state: Tensor | None) -> Tensor:
        """Return the records of weights and state on the host: uint8, shape (rows, nbytes).

        Weights are rounded to the nearest value that fits. State None means zeros.
        """
        held = torch.zeros((len(weights), self.nbytes), dtype=torch.uint8)
        held[:, : self.weight_bytes] = self.encode_weights(weights)
        if state is not None:
            held[:, self.weight_bytes :] = self.encode_state(state)
        return held

    def encode_weights(self, weights: Tensor) -> Tensor:
        """Return the part of records with weights."""
        if self.dtype != "int8":
            return _bytes(weights.to(self._torch_dtype))
        levels, scale, offset = _quantized(weights.float(), None)
        return torch.cat([levels.to(torch.uint8), _bytes(scale), _bytes(offset)], 1)

    def encode_state(self, state: Tensor) -> Tensor:
        """Return the part of records with optimizer state."""
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

        `weights`, float32, shape (rows, width). `updates`, int64, shape (): number of the update,
        which seeds the random bits; see `placer.executor.optimizers.rounding`.
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
