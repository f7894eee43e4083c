"""Initial weights: drawn by seed and table name alone, so that no plan changes them."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from placer.tables import Table

CHUNK_ROWS = 65536
"""Rows that are handled at a time: bounds the temporary memory. Part of what a seed means."""


def initial_weights(table: Table, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of ids and of their weights: float32, uniform in ±1/√rows."""
    digest = hashlib.sha256(f"{seed}/{table.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = max(table.rows, 1) ** -0.5
    for start in range(0, table.rows, CHUNK_ROWS):
        ids = torch.arange(start, min(table.rows, start + CHUNK_ROWS))
        values = torch.empty(ids.numel(), table.dim)
        yield ids, values.uniform_(-bound, bound, generator=generator)
