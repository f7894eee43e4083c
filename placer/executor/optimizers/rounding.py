"""Stochastic rounding of half-precision weights.

Rounding to the nearest loses every update of a bfloat16 weight below 1/512 of it. Stochastic
rounding rounds up with a probability equal to the relative distance from the lower neighbour, so
the weight is right on average. Gupta et al. 2015, "Deep learning with limited numerical
precision", ICML (arXiv:1502.02551); Zamirai et al. 2020, arXiv:2010.06192, for bfloat16.

A hash of the weight's float32 value and of the number of the update decides. So there is no
generator state to save, and rounding does not depend on the row's place, on the order of updates,
or on a restart.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from placer.tables import Table

Rounding = Literal["nearest", "stochastic"]

_SMALLEST_NORMAL = 2.0**-14
"""Smallest normal float16. Below it, neighbours have a constant distance."""


def rounding_of(tables: Iterable[Table], rounding: Rounding = "stochastic") -> Rounding:
    """Return `rounding` if a table has 16-bit weights, otherwise "nearest"."""
    halves = any(table.dtype != "float32" for table in tables)
    return rounding if halves else "nearest"


def random_bits(values: Tensor, updates: Tensor) -> Tensor:
    """Return 32 random bits for each value.

    ``mix(bits of the value XOR mix(updates + 1))``, with `mix` the 32-bit finalizer
    "lowbias32" of C. Wellons' hash prospector (https://github.com/skeeto/hash-prospector).

    `values` are float32. `updates`, int64, shape (), or one for each value: number of the update,
    of which only the lowest 32 bits matter.

    The result is int32, of the values' shape.
    """
    # Conversion to int32 keeps the lower half of an int64 on every device.
    key = _mix((updates + 1).to(torch.int32))
    return _mix(values.view(torch.int32) ^ key)


def _mix(x: Tensor) -> Tensor:
    # Multiplication wraps around. `>>` copies the sign bit, so masks remove the copies.
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def stochastic_round(values: Tensor, dtype: torch.dtype, updates: Tensor) -> Tensor:
    """Round up or down at random, so that the mean is the value. It never waits for the device.

    Random bits are added to the mantissa bits that `dtype` lacks, and the sum is truncated, so that
    a carry rounds up. Values of `dtype`, infinity and NaN stay unchanged.

    `values` are float32, contiguous; they stay unchanged if that is `dtype`. `updates`, int64, of
    shape () or one for each value, is the number of the update, which seeds the random bits; it is
    on the values' device.

    The result is of `dtype`, of the values' shape.
    """
    if dtype == torch.float32:
        return values
    lost = 16 if dtype == torch.bfloat16 else 13  # Bits of the mantissa that dtype lacks.
    bits = random_bits(values, updates) & ((1 << lost) - 1)
    magnitude = values.abs()
    if dtype == torch.bfloat16:
        rounded = _truncated(magnitude, bits, lost)
    else:
        # Add the smallest normal number to tiny values, so that their neighbours have the same
        # distance as in float16.
        lift = (magnitude < _SMALLEST_NORMAL).to(values.dtype) * _SMALLEST_NORMAL
        rounded = _truncated(magnitude + lift, bits, lost) - lift
    rounded = torch.where(values.isfinite(), rounded.copysign(values), values)
    return rounded.to(dtype)


def _truncated(magnitude: Tensor, bits: Tensor, lost: int) -> Tensor:
    """Add bits to the lowest `lost` bits, then set these bits to zero."""
    return ((magnitude.view(torch.int32) + bits) & -(1 << lost)).view(torch.float32)
