"""Records: a row's weights, narrow or not, and its optimizer state, as bytes.

A record is, one after the other:

- the weights: of float32, float16 or bfloat16 as they are; of ``int8`` one unsigned byte a column,
  then float32 `scale` and float32 `offset` of the row, so that a weight is
  ``byte · scale + offset``: the layout of FBGEMM's ``FloatToFused8BitRowwiseQuantized``, so that
  rows can be handed over as they are;
- the optimizer state, float32.

A scale is a power of two and the offset a multiple of it. That costs less than one bit, and
decoding is exact: a row that was decoded is encoded to the same weights again. So it does not
matter how often a row goes home and comes back, nor when.
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
    """How rows become records and back.

    Attributes
    ----------
    dtype : {"float32", "float16", "bfloat16", "int8"}
        Of the weights in the record.
    weights_dtype : torch.dtype
        Of the weights outside of it.
    width : int
        Columns.
    state_shape : tuple of int, or None
        Shape of a row's optimizer state; None without any.

    Examples
    --------
    >>> records = Records("int8", torch.float32, width=2, state_shape=())
    >>> records.weight_bytes, records.nbytes
    (10, 14)
    >>> held = records.encode(torch.tensor([[0.0, 0.5]]), torch.tensor([7.0]))
    >>> records.weights(held), records.state(held)
    (tensor([[0.0000, 0.5000]]), tensor([7.]))
    """

    dtype: ColdDType
    weights_dtype: torch.dtype
    width: int
    state_shape: tuple[int, ...] | None

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
        """Whether weights have to be rounded to fit."""
        return self.dtype == "int8" or self._torch_dtype != self.weights_dtype

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def encode(self, weights: Tensor, state: Tensor | None) -> Tensor:
        """Return records, uint8 of shape (rows, nbytes), of weights and state on the host.

        Weights that do not fit are rounded to the nearest that do. State that is None is zero.
        """
        held = torch.zeros((len(weights), self.nbytes), dtype=torch.uint8)
        held[:, : self.weight_bytes] = self.encode_weights(weights)
        if state is not None:
            held[:, self.weight_bytes :] = self.encode_state(state)
        return held

    def encode_weights(self, weights: Tensor) -> Tensor:
        """Return the weights' part of records."""
        if self.dtype != "int8":
            return _bytes(weights.to(self._torch_dtype))
        levels, scale, offset = _quantized(weights.float(), None)
        return torch.cat([levels.to(torch.uint8), _bytes(scale), _bytes(offset)], 1)

    def encode_state(self, state: Tensor) -> Tensor:
        """Return the other part of records."""
        return _bytes(state.float().reshape(len(state), -1))

    def weights(self, records: Tensor) -> Tensor:
        """Return weights of records, shape (rows, width)."""
        held = records[:, : self.weight_bytes]
        if self.dtype != "int8":
            return _values(held, self._torch_dtype).to(self.weights_dtype)
        affine = _values(held[:, self.width :], torch.float32)
        scale, offset = affine[:, :1], affine[:, 1:]
        return (held[:, : self.width] * scale + offset).to(self.weights_dtype)

    def state(self, records: Tensor) -> Tensor | None:
        """Return optimizer state of records, float32; None without any."""
        if self.state_shape is None:
            return None
        held = _values(records[:, self.weight_bytes :], torch.float32)
        return held.reshape(len(records), *self.state_shape)

    def rounded(self, weights: Tensor, updates: Tensor) -> Tensor:
        """Return weights that a record holds exactly, up or down at random, on any device.

        Parameters
        ----------
        weights : float32, shape (rows, width)
        updates : int64, shape ()
            The number of the update, of which and of the weight the chance is drawn; see
            `placer.executor.optimizers.rounding`.
        """
        if self.dtype != "int8":
            return stochastic_round(weights.contiguous(), self._torch_dtype, updates).float()
        levels, scale, offset = _quantized(weights.contiguous(), updates)
        return levels * scale + offset


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _values(held: Tensor, dtype: torch.dtype) -> Tensor:
    # A slice of a single row is contiguous and yet not aligned.
    return held.clone(memory_format=torch.contiguous_format).view(dtype)


def _quantized(weights: Tensor, updates: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Levels from 0 to 255, float32, and scale and offset of each row, shape (rows, 1).

    Rounded to the nearest level, or at random where there is a number of the update. A row that
    is not finite becomes NaN.
    """
    finite = weights.isfinite().all(1, keepdim=True)
    values = torch.where(finite, weights, 0.0)
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    # The least power of two that has room for the row; and not so small that its multiples
    # would not be exact in 24 bits.
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
    """float32, put together from its bits: `exp2` is not exact on every device."""
    return ((power + 127) << 23).int().view(torch.float32)
