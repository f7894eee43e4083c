"""Initial weights: drawn by seed and table name alone, so that no plan changes them."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.tables import Table

CHUNK_ROWS = 65536
"""Rows that are handled at a time: bounds the temporary memory. Part of what a seed means."""


def initial_weights(table: Table, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of ids and of their weights: float32, uniform in ±1/√rows."""
    generator = torch.Generator().manual_seed(_number(f"{seed}/{table.name}"))
    bound = _bound(table)
    for start in range(0, table.rows, CHUNK_ROWS):
        ids = torch.arange(start, min(table.rows, start + CHUNK_ROWS))
        weights = torch.empty(ids.numel(), table.dim, dtype=torch.float32)
        yield ids, weights.uniform_(-bound, bound, generator=generator)


def weights_of_keys(table: Table, seed: int, keys: npt.NDArray[np.int64]) -> Tensor:
    """Draw weights by the same law for rows that begin again, by seed, table name and key alone."""
    from placer.growing import kernels  # Numba is there where tables grow.

    values = np.empty((keys.size, table.dim), np.float32)
    kernels.draw(keys, np.uint64(_number(f"{seed}/{table.name}/keys")), _bound(table), values)
    return torch.from_numpy(values)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def _bound(table: Table) -> float:
    return float(max(table.rows, 1) ** -0.5)
