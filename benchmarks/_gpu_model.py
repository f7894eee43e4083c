"""What `gpu.py` trains: DLRM-DCNv2's tables, batches drawn on the device, plans made by hand.

Ids are ranks, the hottest row first, so that the hot rows of a table are its first ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from placer.executor import BagBatch
from placer.plan.fields import Lookup, Memory, Pipeline, Shard
from placer.plan.memory import with_buffers
from placer.plan.plan import Plan
from placer.profile.cdf import AccessCdf
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology
from placer.workloads import named_workload

Skew = Literal["zipf-1.05", "criteo"]
SKEWS: tuple[Skew, ...] = ("zipf-1.05", "criteo")

ROOFLINE_BYTES = 492_800
"""HBM bytes of a sample's step without reuse, DESIGN.md section 5: 124.8 KB forward and 368 KB
backward, for 214 lookups of 128 float32."""
_ROOFLINE_LOOKUP_BYTES = 214 * 128 * 4

_SCALED_FROM_ROWS = 1_000_000


@dataclass(frozen=True)
class Model:
    """Tables, and how their lookups spread over their rows."""

    skew: Skew
    profiles: tuple[TableProfile, ...]

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables, of one width."""
        return tuple(profile.table for profile in self.profiles)

    @cached_property
    def lookups(self) -> tuple[int, ...]:
        """Lookups of a sample of each table: bags have a fixed size."""
        return tuple(round(table.lookups_per_sample) for table in self.tables)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def width(self) -> int:
        """Columns of every table."""
        return self.tables[0].dim

    @property
    def row_bytes(self) -> int:
        """Weights and optimizer state of a row."""
        return self.tables[0].bytes_per_row()

    @property
    def roofline_bytes(self) -> float:
        """`ROOFLINE_BYTES`, in proportion where the model is a smaller one."""
        lookup_bytes = sum(self.lookups) * self.tables[0].weight_bytes_per_row()
        return ROOFLINE_BYTES * lookup_bytes / _ROOFLINE_LOOKUP_BYTES

    def hottest(self, share: float) -> tuple[int, ...]:
        """How many rows of each table are among the `share` of all rows that are read most."""
        rates = [p.cdf.row_share * p.table.lookups_per_sample for p in self.profiles]
        widths = np.concatenate([np.diff(p.cdf.ranks) for p in self.profiles])
        owner = np.repeat(np.arange(len(rates)), [rate.size for rate in rates])
        order = np.argsort(-np.concatenate(rates), kind="stable")
        width = widths[order]
        taken = np.clip(round(share * self.rows) - (np.cumsum(width) - width), 0, width)
        counts = np.bincount(owner[order], weights=taken, minlength=len(rates))
        return tuple(int(count) for count in counts)


def dcnv2(skew: Skew, scale: float) -> Model:
    """MLPerf DLRM-DCNv2 (Criteo 1TB, multi-hot) with `scale` of the rows of its large tables.

    Each lookup is drawn by itself. ``zipf-1.05`` is Zipf's law for every table. ``criteo``
    takes the Zipf–Mandelbrot laws fitted to the columns of the Criteo Kaggle log, which has
    the same 26 features in another order: the table with the n-th most rows gets the law of the
    column with the n-th most values.
    """
    published = named_workload("mlperf-dcnv2").tables
    laws = [(1.05, 0.0)] * len(published)
    if skew == "criteo":
        from placer.workloads.synthetic_log import CATEGORICAL  # Needs pyarrow.

        columns = sorted(CATEGORICAL.values(), key=lambda column: -column.rows)
        by_rows = sorted(range(len(published)), key=lambda i: -published[i].table.rows)
        for index, column in zip(by_rows, columns, strict=True):
            laws[index] = column.exponent, column.shift
    profiles = []
    for profile, law in zip(published, laws, strict=True):
        table = profile.table
        rows = table.rows if table.rows < _SCALED_FROM_ROWS else round(table.rows * scale)
        profiles.append(_profile(table, rows, table.dim, law))
    return Model(skew, tuple(profiles))


def shrunk(model: Model, rows_cap: int, lookups_cap: int, width: int, tables: int) -> Model:
    """The model's largest tables, made so small that Triton's interpreter runs them."""
    largest = sorted(model.profiles, key=lambda p: -p.table.rows)[:tables]
    profiles = []
    for profile in largest:
        table = profile.table
        feature = Feature(table.name, min(lookups_cap, table.lookups_per_sample))
        small = Table(table.name, table.rows, table.dim, features=(feature,))
        law = (profile.zipf_exponent or 1.05, 0.0)
        profiles.append(_profile(small, min(rows_cap, table.rows), width, law))
    return Model(model.skew, tuple(profiles))


def _profile(table: Table, rows: int, width: int, law: tuple[float, float]) -> TableProfile:
    resized = Table(table.name, rows, width, "float32", "rowwise_adagrad", features=table.features)
    return TableProfile(resized, AccessCdf.zipf(rows, *law), zipf_exponent=law[0])


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches on the device, each a draw of its own.

    `distinct` has sorted distinct ids by batch and table, of the first batches alone.
    """

    batches: tuple[BagBatch, ...]
    distinct: tuple[tuple[Tensor, ...], ...]

    def distinct_rows(self, hot: Sequence[int] | None = None) -> float:
        """Mean number of distinct rows of a batch, but for the first `hot` of each table."""
        counts = [
            sum(
                ids.numel() if hot is None else int((ids >= first).sum())
                for ids, first in zip(parts, hot or [0] * len(parts), strict=True)
            )
            for parts in self.distinct
        ]
        return sum(counts) / len(counts)


_COUNTED = 2


def draw(model: Model, batch_size: int, number: int, device: torch.device, seed: int) -> Batches:
    """Batches of independent lookups, drawn on the device.

    The access CDF is inverted: a lookup is uniform within the segment of ranks that a uniform
    random number falls into.
    """
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [batch_size * lookups for lookups in model.lookups]
    bounds = tuple(accumulate(sizes, initial=0))
    per_bag = torch.tensor(model.lookups).repeat_interleave(batch_size)
    offsets = torch.nn.functional.pad(per_bag.cumsum(0), (1, 0)).to(device)
    cdfs = [
        (
            torch.from_numpy(profile.cdf.ranks).to(device),
            torch.from_numpy(profile.cdf.shares).to(device),
        )
        for profile in model.profiles
    ]
    batches, distinct = [], []
    for index in range(number):
        parts = []
        for (ranks, shares), size in zip(cdfs, sizes, strict=True):
            quantiles = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
            last = ranks.numel() - 2
            segment = (torch.searchsorted(shares, quantiles, right=True) - 1).clamp_(0, last)
            start, stop = ranks[segment], ranks[segment + 1]
            low, high = shares[segment], shares[segment + 1]
            inside = (quantiles - low) / (high - low) * (stop - start)
            parts.append(torch.minimum(start + inside.long(), stop - 1))
        if index < _COUNTED:
            distinct.append(tuple(torch.unique(part) for part in parts))
        batches.append(BagBatch(torch.cat(parts), offsets, batch_size, bounds=bounds))
    return Batches(tuple(batches), tuple(distinct))


def gradients(model: Model, batch_size: int, device: torch.device) -> list[Tensor]:
    """A gradient of each feature's pooled rows, a tensor each as a model's backward gives."""
    return [
        torch.randn(batch_size, model.width, device=device).div_(batch_size) for _ in model.tables
    ]


def make_plan(
    model: Model, lookup: Lookup, share: float, batch_size: int, pipeline: Pipeline = "look-ahead"
) -> Plan:
    """The hottest `share` of the rows in HBM, and how the others are read.

    ``cached`` keeps no row in HBM for good, tables that fit as a whole aside: the same number of
    rows is its cache. The staged rows of two steps have room in HBM beside that budget.
    """
    shards: list[Shard] = []
    for profile, hot in zip(model.profiles, model.hottest(share), strict=True):
        table = profile.table
        parts: list[Shard] = []
        cached = lookup == "cached" and 0 < hot < table.rows
        split = 0 if cached else hot
        if split:
            parts.append(_shard(table, "device", (0, split)))
        if split < table.rows:
            # Without an entry of its own a cache is but a place to stage rows.
            kind = "staged" if lookup == "cached" and not cached else lookup
            parts.append(_shard(table, kind, (split, table.rows), hot if cached else 0))
        shards += [
            with_buffers(
                profile,
                part,
                samples=batch_size,
                returns_bags=index == 0,
                ahead=pipeline == "look-ahead",
            )
            for index, part in enumerate(parts)
        ]
    gpu = Gpu("gpu:0", "host:0", 2**40, 4e12)
    host = Host("host:0", 2**42, 4e11)
    topology = Topology("1", (gpu,), (host,), (Link("gpu:0", "host:0", "pcie", 5e10),), True)
    return Plan(model.tables, topology, tuple(shards), batch_size=batch_size, pipeline=pipeline)


def _shard(table: Table, lookup: Lookup, rows: tuple[int, int], cache_rows: int = 0) -> Shard:
    memory: Memory = "hbm" if lookup == "device" else "dram"
    return Shard(
        table.name, (*rows, 1), (0, table.dim), ("gpu:0",), memory, lookup, cache_rows=cache_rows
    )


def bags_of(batch: BagBatch, table: int) -> tuple[Tensor, Tensor]:
    """Ids and offsets (the last one included) of one table's bags, for one `nn.EmbeddingBag`."""
    assert batch.bounds is not None
    start, stop = list(pairwise(batch.bounds))[table]
    size = batch.batch_size
    return batch.ids[start:stop], batch.offsets[table * size : (table + 1) * size + 1] - start
