"""Arenas: the memory that holds weights and optimizer state, one row a slot."""

from dataclasses import dataclass
from math import prod

import torch

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


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Weights ``[rows, width]`` and optimizer state of one arena.

    State is float32 whatever the weights are: ``[rows]`` for row-wise Adagrad, ``[rows,
    width]`` for Adagrad, ``[rows, 2 · width]`` for Adam, None for SGD. Both share `row_cache`.
    """

    spec: ArenaSpec
    weights: TieredRows
    state: TieredRows | None
    row_cache: RowCache | None = None

    @property
    def row_bytes(self) -> int:
        """Weights and state of one row."""
        held = [rows.hbm for rows in (self.weights, self.state) if rows is not None]
        return sum(data.element_size() * prod(data.shape[1:]) for data in held)

    def range_bytes(self, part: SlotRange) -> int:
        """Bytes of weights and state in a range of slots."""
        return (part.stop - part.start) * self.row_bytes


def state_shape(optimizer: OptimizerName, width: int) -> tuple[int, ...] | None:
    """Shape of the state of one row that is `width` columns wide; None without state."""
    names = OPTIMIZER_STATE[optimizer]
    if not names:
        return None
    return () if optimizer == "rowwise_adagrad" else (len(names) * width,)


def allocate(spec: ArenaSpec, device: torch.device, policy: Policy | None) -> Arena:
    """Zeroed memory for an arena: its HBM rows and row cache on a device, its others on the host.

    Parameters
    ----------
    spec : ArenaSpec
    device : torch.device
        Where rows are read and updated.
    policy : {"lfu", "rank"} or None
        Which cached rows are evicted first. None gives all rows one memory, the host's.
    """
    key, row_cache = spec.key, None
    home = spec.rows if policy is None else spec.home
    if policy is not None and spec.cache_shares:
        row_cache = RowCache([share.part for share in spec.cache_shares], home, device, policy)
    entries = 0 if row_cache is None else row_cache.entries

    def rows(shape: tuple[int, ...], dtype: torch.dtype) -> TieredRows:
        if policy is None:
            hbm = host_rows((home, *shape), dtype, device)
        else:
            hbm = torch.zeros((home + entries, *shape), dtype=dtype, device=device)
        dram = host_rows((spec.rows - home, *shape), dtype, device)
        return TieredRows(hbm, dram, home, row_cache)

    weights = rows((key.width,), TORCH_DTYPES[key.dtype])
    shape = state_shape(key.optimizer, key.width)
    return Arena(spec, weights, None if shape is None else rows(shape, torch.float32), row_cache)
