"""Random batches, and what the executor itself counts, for the simulator's tests."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

import numpy as np
import torch
from hypothesis import strategies as st

from placer.data.log import Bags, Chunk
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.executor.local.hit_rates import HitRates
from placer.executor.memory.row_cache import RowCacheStats
from placer.plan.plan import Plan
from placer.simulator.counts import StepCounts
from placer.simulator.parts import Arrangement
from placer.simulator.replay import ReplayOptions, Simulator


def random_chunk(
    plan: Plan, rng: np.random.Generator, *, most_samples: int = 6, longest: int = 4
) -> Chunk:
    """A batch whose bags may be empty, with more of the first rows than of the others."""
    samples = int(rng.integers(0, most_samples + 1))
    features = {}
    for table in plan.tables:
        for feature in table.features:
            lengths = (
                rng.integers(0, longest + 1, samples) if table.rows else np.zeros(samples, int)
            )
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
            ids = (table.rows * rng.random(offsets[-1]) ** rng.choice([1, 3])).astype(np.int64)
            features[feature.name] = Bags(ids, offsets)
    return Chunk(samples, features, np.zeros((samples, 0), np.float32))


def one_id_chunk(ids: np.ndarray, feature: str = "f") -> Chunk:
    """A batch of one feature with one id a sample."""
    return Chunk(ids.size, {feature: Bags(ids)}, np.zeros((ids.size, 0), np.float32))


@st.composite
def chunks(draw: st.DrawFn, plan: Plan, *, most: int = 8) -> list[Chunk]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [random_chunk(plan, rng) for _ in range(draw(st.integers(1, most)))]


def replay(
    plan: Plan, batches: Iterable[Chunk], options: ReplayOptions | None = None
) -> tuple[Arrangement, StepCounts]:
    """Who holds which part of a plan, and what the simulator counts of all batches together."""
    simulator = Simulator(plan, options)
    return simulator.arrangement, reduce(add, simulator.run(batches))


def executor_rates(
    plan: Plan, batches: Sequence[Chunk], *, policy: str, ahead: bool, optimizer: str | None = None
) -> HitRates:
    """What `PlacedEmbeddings` counts while it trains on these batches."""
    model = PlacedEmbeddings(
        plan, backend="tiered", cache_policy=policy, lr=0.01, optimizer=optimizer
    )  # type: ignore[arg-type]
    model.count_by_table()
    bags = (BagBatch.from_chunk(chunk, model.feature_names) for chunk in batches)
    for batch in look_ahead(bags, model) if ahead else bags:
        outputs = model(batch)
        if outputs:
            torch.autograd.backward([output.sum() for output in outputs.values()])
    rates = model.hit_rates()
    assert rates is not None
    return rates


def simulated_shares(found: Arrangement, totals: StepCounts) -> dict[str, float]:
    """The share of each table's lookups that HBM served, from what the simulator counted."""
    read: dict[str, int] = defaultdict(int)
    in_hbm: dict[str, int] = defaultdict(int)
    for at, part in enumerate(found.parts):
        table, width = found.plan.tables[part.table].name, part.cols[1] - part.cols[0]
        hits = totals.parts.lookups if part.lookup == "device" else totals.parts.hit_lookups
        read[table] += width * int(totals.parts.lookups[at])
        in_hbm[table] += width * int(hits[at])
    return {table: in_hbm[table] / columns for table, columns in read.items() if columns}


def simulated_rates(found: Arrangement, totals: StepCounts, process: int | None = None) -> HitRates:
    """The same from what the simulator counted, of one process or of all."""
    counts, parts = totals.parts, found.parts
    mine = np.array([process is None or part.process == process for part in parts], dtype=bool)
    home = mine & np.array([part.lookup == "device" for part in parts], dtype=bool)
    pooled = mine & np.array([part.uses_row_cache for part in parts], dtype=bool)
    both = counts.lookups + counts.update_rows
    return HitRates(
        int(both[mine].sum()),
        int(both[home].sum()),
        RowCacheStats(
            int(both[pooled].sum()),
            int((counts.hit_lookups + counts.update_hit_rows)[pooled].sum()),
            int((counts.rows + counts.update_rows)[pooled].sum()),
            int((counts.hit_rows + counts.update_hit_rows)[pooled].sum()),
            int(counts.in_place_rows[pooled].sum()),
            int(counts.written_back_rows[pooled].sum()),
        ),
    )
