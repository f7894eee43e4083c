"""Draw initial weights from seed and table name only, so that they do not depend on the plan."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.tables import Table

CHUNK_ROWS = 65536
"""Rows to process at a time, which limits temporary memory. A change changes drawn weights."""


def initial_weights(table: Table, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of ids and their weights: float32, uniform in ±1/√rows."""
    generator = torch.Generator().manual_seed(_number(f"{seed}/{table.name}"))
    bound = _bound(table)
    for start in range(0, table.rows, CHUNK_ROWS):
        ids = torch.arange(start, min(table.rows, start + CHUNK_ROWS))
        weights = torch.empty(ids.numel(), table.dim, dtype=torch.float32)
        yield ids, weights.uniform_(-bound, bound, generator=generator)


def weights_of_keys(table: Table, seed: int, keys: npt.NDArray[np.int64]) -> Tensor:
    """Draw the weights of reset rows, uniform in ±1/√rows, from seed, table name and key only."""
    from placer.growing import kernels  # Needs Numba, which growing tables require.

    values = np.empty((keys.size, table.dim), np.float32)
    kernels.draw(keys, np.uint64(_number(f"{seed}/{table.name}/keys")), _bound(table), values)
    return torch.from_numpy(values)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def _bound(table: Table) -> float:
    return float(max(table.rows, 1) ** -0.5)
