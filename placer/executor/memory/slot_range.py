"""The ranges of slots that the shards of an arena have."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.plan.shard import Lookup, Memory
from placer.tables import ColdDType


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``start..stop`` of a shard; if it is staged or cached, the hottest first.

    Attributes
    ----------
    start, stop : int
    staging_rows, cache_rows : int
        Entries that the shard adds to the row cache. A shard with `cache_rows` is cached.
    warm : int64 array, or None
        Rows of the range that the cache begins with, hottest first, counted from `start`; by
        default the first ones.
    is_ordered : bool
        Whether the plan says which rows are hot, so that the first ones are.
    device : str
        Who reads the rows: its HBM has the entries.
    memory : {"hbm", "dram", "ssd"}
        Where the rows are at home.
    dtype : {"float32", "float16", "bfloat16", "int8"} or None
        Their type there; None is the table's.
    lookup : {"device", "uva", "staged", "cached", "host"}
    home : str
        The device in whose memory the rows are: the host for ``dram`` and ``ssd``.
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
    """Return slots of a cached shard that begin with an entry, hottest first."""
    if part.warm is None:
        return torch.arange(part.start, min(part.start + part.cache_rows, part.stop))
    return torch.from_numpy(part.start + part.warm[: part.cache_rows])
