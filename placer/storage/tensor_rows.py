"""Tensors that are read a number of rows at a time, wherever they are."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.memory.initial_weights import CHUNK_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """A tensor that is somewhere else, and read a number of rows at a time.

    Attributes
    ----------
    shape : tuple of int
    dtype : torch.dtype
    read : callable
        Rows ``start..stop`` on the host; with no dimension, the whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorRows":
        """Those of a tensor that is here."""

        def read(start: int, stop: int) -> Tensor:
            return (tensor[start:stop] if tensor.dim() else tensor).detach().cpu()

        return cls(tuple(tensor.shape), tensor.dtype, read)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[Tensor]:
        """All rows, a bounded number at a time."""
        if not self.shape:
            yield self.read(0, 1)
            return
        for start in range(0, self.shape[0], CHUNK_ROWS):
            yield self.read(start, min(start + CHUNK_ROWS, self.shape[0]))

    def whole(self) -> Tensor:
        """The tensor."""
        return self.read(0, self.shape[0] if self.shape else 1)


AnyTensor = Tensor | TensorRows
"""A tensor that is in memory, or comes in rows."""


def in_rows(tensor: AnyTensor) -> TensorRows:
    """Either kind as rows."""
    return tensor if isinstance(tensor, TensorRows) else TensorRows.of(tensor)
