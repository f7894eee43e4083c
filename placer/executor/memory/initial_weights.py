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
    generator = _generator(f"{seed}/{table.name}")
    for start in range(0, table.rows, CHUNK_ROWS):
        ids = torch.arange(start, min(table.rows, start + CHUNK_ROWS))
        yield ids, _drawn(table, ids.numel(), generator)


def weights_again(table: Table, seed: int, rows: int, before: int) -> Tensor:
    """Draw weights by the same law for rows that are reset, after `before` rows got keys."""
    return _drawn(table, rows, _generator(f"{seed}/{table.name}/{before}"))


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _drawn(table: Table, rows: int, generator: torch.Generator) -> Tensor:
    bound = max(table.rows, 1) ** -0.5
    return torch.empty(rows, table.dim).uniform_(-bound, bound, generator=generator)
