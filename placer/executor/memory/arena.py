"""Arenas: the memory that holds weights and optimizer state, one row a slot."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from placer.executor.memory.host_memory import host_rows
from placer.executor.memory.layout import ArenaSpec, SlotRange
from placer.executor.memory.row_cache import RowCache
from placer.executor.memory.tiers import TieredRows
from placer.executor.names import Policy
from placer.tables import OPTIMIZER_STATE, OptimizerName

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Rows(Protocol):
    """A matrix (or vector) over slots, wherever its parts are."""

    def read(self, slots: Tensor) -> Tensor:
        """A copy of the rows at `slots`, in that order."""
        ...

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Overwrite the rows at `slots`, which are distinct."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FlatRows:
    """All slots in one tensor."""

    data: Tensor

    def read(self, slots: Tensor) -> Tensor:
        return self.data.index_select(0, slots)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self.data.index_copy_(0, slots, rows.to(self.data.dtype))


AnyRows = FlatRows | TieredRows


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Weights ``[rows, width]`` and optimizer state of one arena.

    State is float32 whatever the weights are: ``[rows]`` for row-wise Adagrad, ``[rows,
    width]`` for Adagrad, ``[rows, 2 · width]`` for Adam, None for SGD. Both are flat, or both
    are in tiers and share `row_cache`.
    """

    spec: ArenaSpec
    weights: AnyRows
    state: AnyRows | None
    row_cache: RowCache | None = None

    @property
    def row_bytes(self) -> int:
        """Weights and state of one row."""
        return sum(_row_bytes(rows) for rows in (self.weights, self.state) if rows is not None)

    def range_bytes(self, part: SlotRange) -> int:
        """Bytes of weights and state in a range of slots."""
        return (part.stop - part.start) * self.row_bytes


def state_shape(optimizer: OptimizerName, width: int) -> tuple[int, ...] | None:
    """Shape of the state of one row that is `width` columns wide; None without state."""
    names = OPTIMIZER_STATE[optimizer]
    if not names:
        return None
    return () if optimizer == "rowwise_adagrad" else (len(names) * width,)


def flat_arena(spec: ArenaSpec) -> Arena:
    """Zeroed memory for an arena, all of it the host's."""
    host = torch.device("cpu")
    key = spec.key
    weights = FlatRows(host_rows((spec.rows, key.width), TORCH_DTYPES[key.dtype], host))
    shape = state_shape(key.optimizer, key.width)
    if shape is None:
        return Arena(spec, weights, None)
    return Arena(spec, weights, FlatRows(host_rows((spec.rows, *shape), torch.float32, host)))


def tiered_arena(spec: ArenaSpec, device: torch.device, policy: Policy) -> Arena:
    """Zeroed memory for an arena: its HBM rows and row cache on a device, its others on the host.

    Parameters
    ----------
    spec : ArenaSpec
    device : torch.device
        Where rows are read and updated.
    policy : {"lfu", "rank"}
        Which cached rows are evicted first.
    """
    key, home = spec.key, spec.home
    row_cache = None
    if spec.cache_shares:
        row_cache = RowCache([share.part for share in spec.cache_shares], home, device, policy)
    entries = 0 if row_cache is None else row_cache.entries

    def rows(shape: tuple[int, ...], dtype: torch.dtype) -> TieredRows:
        hbm = torch.zeros((home + entries, *shape), dtype=dtype, device=device)
        return TieredRows(
            hbm, host_rows((spec.rows - home, *shape), dtype, device), home, row_cache
        )

    weights = rows((key.width,), TORCH_DTYPES[key.dtype])
    shape = state_shape(key.optimizer, key.width)
    return Arena(spec, weights, None if shape is None else rows(shape, torch.float32), row_cache)


def _row_bytes(rows: AnyRows) -> int:
    data = rows.data if isinstance(rows, FlatRows) else rows.hbm
    return data.element_size() * prod(data.shape[1:])
