"""Count the lookups that HBM, row caches and other memories serve."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from placer.executor.lookups.batch_reads import ArenaReads
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import RowCache, RowCacheStats

ALL_STEPS, EVERY = 64, 8
"""Count lookups by table in the first `ALL_STEPS` steps, then in one step of `EVERY`."""


@dataclass(frozen=True, slots=True)
class HitRates:
    """Counts of lookups since the model was made, or since the last reset."""

    lookups: int  # A row with several column slices counts once per slice.
    home_lookups: int  # Of rows that the plan keeps in HBM.
    # Of staged and cached rows. Other rows are read in place or pooled by the host.
    row_cache: RowCacheStats
    # HBM's share of each table's lookups, weighted by columns if a table has several column slices.
    # Counted in the first `ALL_STEPS` steps, then in one step of `EVERY`. Tables without counted
    # lookups are absent. Empty before `Embeddings.count_by_table`, and if processes share tables.
    tables: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def hbm_hit_rate(self) -> float:
        """Share of lookups whose row was in HBM before the step; 1 without lookups."""
        if not self.lookups:
            return 1.0
        return (self.home_lookups + self.row_cache.hit_lookups) / self.lookups


class LookupCounts:
    """Counts of lookups that stay on the device until `read`."""

    def __init__(self, device: torch.device) -> None:
        self._lookups = 0
        self.home = torch.zeros((), dtype=torch.int64, device=device)
        self.by_table = False
        self._step = 0
        # Columns read by each table's lookups, and how many of these were in HBM.
        self._read: Counter[str] = Counter()
        self._in_hbm: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._step += 1

    def add(
        self, slots: Tensor, spec: ArenaSpec, reads: ArenaReads, row_cache: RowCache | None
    ) -> None:
        """Count a step's lookups in an arena, before rows are copied to HBM for the step."""
        stands_for = 1 if self._step <= ALL_STEPS else EVERY
        is_captured = slots.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.by_table and self._step % stands_for == 0 and not is_captured and slots.numel():
            columns = stands_for * spec.key.width
            here = (slots >= 0) & (slots < spec.home)
            if row_cache is not None:
                here |= row_cache.find(slots) >= 0
            for segment in reads.segments:
                start, stop = segment.lookups
                table, hits = segment.columns.table, here[start:stop].sum() * columns
                self._read[table] += (stop - start) * columns
                self._in_hbm[table] = self._in_hbm[table] + hits if table in self._in_hbm else hits
        self._lookups += slots.numel()
        if spec.home == spec.rows:
            self.home += slots.numel()
        elif row_cache is None and spec.home:  # With a row cache, `Backend.stage` counts.
            self.home += ((slots >= 0) & (slots < spec.home)).sum()

    def add_captured(self, lookups: int) -> None:
        """Count a step of a CUDA graph on the host; the graph counts on the device."""
        self._step += 1
        self._lookups += lookups

    def read(self, row_caches: Sequence[RowCache]) -> HitRates:
        """Return the counts so far, including row caches; waits for the device."""
        row_cache = sum((cache.stats() for cache in row_caches), RowCacheStats())
        read = {table: columns for table, columns in self._read.items() if columns}
        tables = {table: int(self._in_hbm[table]) / columns for table, columns in read.items()}
        return HitRates(self._lookups, int(self.home), row_cache, tables)

    def reset(self) -> None:
        """Set all counts to zero."""
        self._lookups = 0
        self.home.zero_()
        self._step = 0
        self._read.clear()
        self._in_hbm.clear()
