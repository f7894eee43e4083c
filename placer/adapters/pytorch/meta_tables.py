"""Weights of tables on the meta device: drawn a block of rows at a time, where the rows are."""

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from placer.executor.id_order import IdOrder, IdRange
from placer.executor.memory.initial_weights import CHUNK_ROWS

_PROBE_ROWS, _SPARE_ROWS = 16, 16
"""Rows that are drawn to see whether blocks may be, and rows behind each block, of which the last
is the padding: draws of normal numbers are alike where their number is a multiple of 16."""


class DrawnRows:
    """The first weights of a table, by the `reset_parameters` of its module.

    Each block of `CHUNK_ROWS` rows is drawn by itself, from a seed, the table's name and where it
    begins: no plan and no number of ranks changes it, and nobody holds the whole. Padding is zero.
    A module whose law depends on the number of rows at hand, or on which rows they are, cannot be
    drawn so. Its weights are uniform in ±1/√rows, and a warning says so.
    """

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, name: str, seed: int) -> None:
        self._module, self._name, self.seed = module, name, seed
        self._is_by_block = _is_by_block(module)
        if not self._is_by_block:
            warnings.warn(
                f"the reset_parameters of {type(module).__name__} is not the same law for each row "
                f"of table {name!r}, which is on the meta device: its weights are drawn uniform in "
                "1 / sqrt(rows) around 0; load a checkpoint, or give it a weight on the CPU",
                stacklevel=5,
            )

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows of the ids ``start..stop``, which are one block."""
        module = self._module
        digest = hashlib.sha256(f"{self.seed}/{self._name}/{start}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        if self._is_by_block:
            block = _drawn(module, stop - start, seed)
        else:
            generator = torch.Generator().manual_seed(seed)
            bound = module.num_embeddings**-0.5
            shape = stop - start, module.embedding_dim
            block = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        if module.padding_idx is not None and start <= module.padding_idx < stop:
            block[module.padding_idx - start] = 0
        return block

    def write(self, order: IdOrder) -> None:
        """Draw the blocks of which this process holds some rows of its only table."""
        (tensor, *_) = order.tensors()
        for start in range(0, tensor.table.rows, CHUNK_ROWS):
            block = IdRange(tensor, start, min(start + CHUNK_ROWS, tensor.table.rows))
            if order.holds(block):
                order.write(block, self.rows(block.start, block.stop))


def _is_by_block(module: nn.Embedding | nn.EmbeddingBag) -> bool:
    """Return whether a module draws rows alike wherever they are and however many there are."""
    try:
        few, many = (_drawn(module, rows, 0) for rows in (_PROBE_ROWS, 2 * _PROBE_ROWS))
        other = _drawn(module, _PROBE_ROWS, 1)
    except Exception:
        return False
    fixed = (few == other).all(1)
    is_alike = bool((few == few[0]).all()) if bool(fixed.all()) else not bool(fixed.any())
    return is_alike and torch.equal(few, many[:_PROBE_ROWS])


@torch.no_grad()
def _drawn(module: nn.Embedding | nn.EmbeddingBag, rows: int, seed: int) -> Tensor:
    """So many rows as the module draws them, which it takes for all of its own."""
    shell: Any = type(module).__new__(type(module))
    shell.__dict__.update(module.__dict__)
    whole = rows + _SPARE_ROWS
    weight = torch.empty(whole, module.embedding_dim, dtype=module.weight.dtype, device="cpu")
    shell._parameters = {"weight": nn.Parameter(weight)}
    if module.padding_idx is not None:
        shell.padding_idx = whole - 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shell.reset_parameters()
    drawn: Tensor = shell.weight.detach()[:rows]
    return drawn
