"""Stochastic rounding of half-precision weights.

Rounded to the nearest, a weight of bfloat16 stays where it is for ever under updates smaller
than 1/512 of it. Rounded up with a chance equal to how far it is from the lower neighbour, it
moves as it should on average. Gupta et al. 2015, "Deep learning with limited numerical
precision", ICML (arXiv:1502.02551); Zamirai et al. 2020, arXiv:2010.06192, for bfloat16.

The chance is drawn from the weight's own float32 value and the number of the update, by a
hash. So there is no generator whose state would have to be kept, and the same weight is
rounded alike wherever its row lies, in whatever order rows are updated, and after a restart.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from placer.tables import Table

Rounding = Literal["nearest", "stochastic"]

_SMALLEST_NORMAL = 2.0**-14
"""float16's. Below it the distance between neighbours shrinks no more."""


def rounding_of(tables: Iterable[Table], rounding: Rounding = "stochastic") -> Rounding:
    """Return how the weights of tables are rounded; those of float32 are not."""
    halves = any(table.dtype != "float32" for table in tables)
    return rounding if halves else "nearest"


def random_bits(values: Tensor, updates: Tensor) -> Tensor:
    """32 random bits for each value.

    ``mix(bits of the value XOR mix(updates + 1))``, with `mix` the 32-bit finalizer
    "lowbias32" of C. Wellons' hash prospector (https://github.com/skeeto/hash-prospector).

    Parameters
    ----------
    values : float32
    updates : int64, shape (), or one for each value
        Another number gives other bits; the lowest 32 bits count.

    Returns
    -------
    int32, of the values' shape
    """
    # An int64 that is narrowed keeps its lower half on every device.
    key = _mix((updates + 1).to(torch.int32))
    return _mix(values.view(torch.int32) ^ key)


def _mix(x: Tensor) -> Tensor:
    # Multiplication wraps around; `>>` repeats the sign, so its copies are masked away.
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def stochastic_round(values: Tensor, dtype: torch.dtype, updates: Tensor) -> Tensor:
    """Round up or down at random, so that the mean is the value. Waits for no device.

    Random bits are added to those that the shorter type lacks, and the sum is truncated: the
    carry is the chance to round up. Values that `dtype` has are kept, infinity and NaN too.

    Parameters
    ----------
    values : float32, contiguous
    dtype : float32, float16 or bfloat16
        With float32 there is nothing to round.
    updates : int64, shape (), or one for each value
        The number of the update, of which the chance is drawn; on the values' device.

    Returns
    -------
    dtype, of the values' shape
    """
    if dtype == torch.float32:
        return values
    lost = 16 if dtype == torch.bfloat16 else 13  # Bits of the mantissa that dtype lacks.
    bits = random_bits(values, updates) & ((1 << lost) - 1)
    magnitude = values.abs()
    if dtype == torch.bfloat16:
        rounded = _truncated(magnitude, bits, lost)
    else:
        # Lifted above the smallest normal number, tiny values have their neighbours at the
        # distance that float16 has there.
        lift = (magnitude < _SMALLEST_NORMAL).to(values.dtype) * _SMALLEST_NORMAL
        rounded = _truncated(magnitude + lift, bits, lost) - lift
    rounded = torch.where(values.isfinite(), rounded.copysign(values), values)
    return rounded.to(dtype)


def _truncated(magnitude: Tensor, bits: Tensor, lost: int) -> Tensor:
    """Add bits below the mantissa that stays, then drop all that is below it."""
    return ((magnitude.view(torch.int32) + bits) & -(1 << lost)).view(torch.float32)
