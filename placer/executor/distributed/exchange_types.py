"""Pooled rows and their gradients in the type in which they travel between ranks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from placer.executor.distributed.collectives import Communicator, Kind
from placer.tables import DType

_LARGEST_EXPONENT = 15
"""Numbers of float16 reach just below 2¹⁶: what is sent is scaled to below 2¹⁵."""


def exchange_as(
    dtype: DType,
    comm: Communicator,
    kind: Kind,
    values: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
) -> Tensor:
    """Exchange float32 numbers in another type; what stays on the rank is rounded like the rest.

    float16 has few exponents, and gradients of large batches are small: each rank multiplies its
    numbers by the power of two that makes the largest of them fit, and says which at the end of
    each message.
    """
    if dtype != "float16":
        return comm.exchange(kind, values.to(getattr(torch, dtype)), sent, received).float()
    device, one = values.device, torch.ones(1, device=values.device)
    wire = torch.empty(values.numel() + comm.world, dtype=torch.float16, device=device)
    if values.numel():
        least, most = values.aminmax()
        exponent = torch.frexp(torch.maximum(-least, most)).exponent.clamp(min=-100).reshape(1)
    else:
        exponent = torch.zeros(1, dtype=torch.int32, device=device)
    scale = torch.ldexp(one, _LARGEST_EXPONENT - exponent)
    parts = torch.split(values, list(sent))
    for part, (numbers, said) in zip(parts, _messages(wire, sent), strict=True):
        torch.mul(part, scale, out=numbers)
        said.copy_(exponent)
    came = comm.exchange(kind, wire, [n + 1 for n in sent], [n + 1 for n in received])
    result = torch.empty(sum(received), device=device)
    parts = torch.split(result, list(received))
    for part, (numbers, said) in zip(parts, _messages(came, received), strict=True):
        torch.mul(numbers, torch.ldexp(one, said.float() - _LARGEST_EXPONENT), out=part)
    return result


def _messages(wire: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the numbers for or from each rank, and the exponent behind them."""
    each = torch.split(wire, [size for n in sizes for size in (n, 1)])
    return zip(each[::2], each[1::2], strict=True)
