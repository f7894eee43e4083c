"""The range of slots of each shard in an arena."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.plan.shard import Lookup, Memory
from placer.tables import ColdDType


@dataclass(frozen=True, slots=True)
class SlotRange:
    """The slots ``start..stop`` of a shard; hottest first if it is staged or cached.

    Attributes
    ----------
    start, stop : int
    staging_rows, cache_rows : int
        Entries that the shard adds to the row cache. A shard with `cache_rows` is cached.
    warm : int64 array, or None
        Initial rows of the cache, hottest first, counted from `start`; by default the first rows
        of the range.
    is_ordered : bool
        Whether the plan has a row order, so that the first rows are the hottest.
    device : str
        The device that reads the rows and has the cache entries in its HBM.
    memory : {"hbm", "dram", "ssd"}
        The memory of the rows themselves.
    dtype : {"float32", "float16", "bfloat16", "int8"} or None
        Their dtype there; None is the table's dtype.
    lookup : {"device", "uva", "staged", "cached", "host"}
    home : str
        The device with this memory: the host for ``dram`` and ``ssd``.
    """

    start: int
    stop: int
    staging_rows: int
    cache_rows: int
    warm: npt.NDArray[np.int64] | None = field(default=None, compare=False)
    is_ordered: bool = True
    device: str = ""
    memory: Memory = "dram"
    dtype: ColdDType | None = None
    lookup: Lookup = "staged"
    home: str = ""


def warm_slots(part: SlotRange) -> Tensor:
    """Return the slots of a cached shard that start in the cache, hottest first."""
    if part.warm is None:
        return torch.arange(part.start, min(part.start + part.cache_rows, part.stop))
    return torch.from_numpy(part.start + part.warm[: part.cache_rows])
