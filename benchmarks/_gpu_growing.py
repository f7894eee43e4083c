"""Steps of tables that grow beside fixed ones on a GPU, for `gpu.py --growing`."""

import gc
from dataclasses import replace

import torch
from _gpu_contenders import PlacedSteps
from _gpu_measure import time_steps
from _gpu_model import Model, draw, gradients, make_plan

from placer.executor import BagBatch, PlacedEmbeddings
from placer.growing import Growing
from placer.profile.cdf import AccessCdf
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, Table

SPREAD = 1_000_003 * 1_000_003
"""Ids are multiplied by it, so that keys are any int64."""


def compare(device: torch.device, tiny: bool) -> None:
    """Print the step of 10 tables × 128 with Adam: 1,048,570 lookups by Zipf's law, exponent 1.05.

    Tables have a row for each id, or in the last case for all but a twentieth, so that keys that
    are read seldom take rows from one another. Batches are in HBM, or in pinned host memory.
    """
    tables, rows, dim, samples = (2, 20, 8, 30) if tiny else (10, 1_000_000, 128, 104_857)
    law = AccessCdf.zipf(rows, 1.05, 0.0)
    drawn = draw(_model(law, tables, rows, dim), samples, 4 if tiny else 24, device, seed=0)
    first = 0.0
    for name, capacity, on_host, ahead in (
        ("fixed, batches in HBM", 0, False, False),
        ("fixed, batches on the host, look-ahead", 0, True, True),
        ("growing, batches in HBM", rows, False, False),
        ("growing, batches in HBM, look-ahead", rows, False, True),
        ("growing, batches on the host, look-ahead", rows, True, True),
        ("growing, 5% fewer rows, host, look-ahead", rows * 19 // 20, True, True),
    ):
        model = _model(law, tables, capacity + 1 if capacity else rows, dim)
        growing = {table.name: Growing(capacity) for table in model.tables if capacity}
        placed = PlacedEmbeddings(
            make_plan(model, "device", 1.0, samples),
            device=device, backend="triton", seed=None, growing=growing,
        )  # fmt: skip
        for own in placed.keys.maps.values():  # All rows have keys, the most frequent ones.
            own.read(torch.arange(capacity).mul(SPREAD).numpy())
            getattr(own, "push", int)()
        batches = [_given(batch, bool(capacity), on_host) for batch in drawn.batches]
        step = PlacedSteps(placed, tuple(batches), gradients(model, samples, device), ahead)
        found = time_steps(step, device, 3.0)
        first = first or found.median_s
        misses = sum(counts.misses for counts in placed.key_counts().values())
        given = f", {misses - capacity * tables:,} misses" if capacity else ""
        share = f"{found.median_s / first:.2f} × fixed, longest {max(found.seconds) * 1e3:.2f}"
        print(f"{name:<42}{found.median_s * 1e3:9.3f} ms  {share}{given}", flush=True)
        del placed, step
        gc.collect()


def _model(law: AccessCdf, tables: int, rows: int, dim: int) -> Model:
    named = [
        Table(f"t{i}", rows, dim, "float32", "adam", (Feature(f"t{i}"),)) for i in range(tables)
    ]
    if law.rows != rows:
        law = AccessCdf.zipf(rows, 1.05, 0.0)
    return Model("zipf-1.05", tuple(TableProfile(table, law) for table in named))


def _given(batch: BagBatch, has_keys: bool, on_host: bool) -> BagBatch:
    batch = replace(batch, ids=batch.ids * SPREAD) if has_keys else batch
    return batch.to("cpu").pin_memory() if on_host and batch.ids.is_cuda else batch
