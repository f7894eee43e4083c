"""How many lookups were served from where."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import RowCache
from placer.executor.memory.row_cache_stats import RowCacheStats


@dataclass(frozen=True, slots=True)
class HitRates:
    """Lookups since the model was made, or since they were last reset.

    Attributes
    ----------
    lookups : int
        All; a row with several column slices counts once for each.
    home_lookups : int
        Of rows that the plan keeps in HBM.
    row_cache : RowCacheStats
        Of staged and cached rows. Other rows are read in place or pooled by the host.
    """

    lookups: int
    home_lookups: int
    row_cache: RowCacheStats

    @property
    def hbm_hit_rate(self) -> float:
        """Share of lookups whose row was in HBM before the step read it; 1 without any."""
        if not self.lookups:
            return 1.0
        return (self.home_lookups + self.row_cache.hit_lookups) / self.lookups


class LookupCounts:
    """Counts on the device, which nobody waits for before they are read."""

    def __init__(self, device: torch.device) -> None:
        self._lookups = 0
        self._home = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, slots: Tensor, spec: ArenaSpec) -> None:
        """Count the lookups of a step."""
        self._lookups += slots.numel()
        if spec.home == spec.rows:
            self._home += slots.numel()
        elif spec.home:
            self._home += ((slots >= 0) & (slots < spec.home)).sum()

    def read(self, row_caches: Sequence[RowCache]) -> HitRates:
        """The counts so far, with those of row caches; waits for the device."""
        row_cache = sum((cache.stats() for cache in row_caches), RowCacheStats())
        return HitRates(self._lookups, int(self._home), row_cache)

    def reset(self) -> None:
        """Count from zero."""
        self._lookups = 0
        self._home.zero_()
