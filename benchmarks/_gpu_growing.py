"""Tables that grow beside fixed ones: NVIDIA's published setting (`_gpu_published`) with Adam."""

import gc
from dataclasses import replace

import torch
from _gpu_contenders import PlacedSteps
from _gpu_model import draw, gradients, make_plan
from _gpu_published import SAMPLES, SMALL_READ, SMALL_ROWS, STEPS, TABLES, _seconds, tables

from placer.executor import BagBatch, PlacedEmbeddings
from placer.growing import Growing

SPREAD = 1_000_003 * 1_000_003
"""Ids are multiplied by it, so that keys are any int64."""


def print_steps(device: torch.device, tiny: bool) -> None:
    """Print milliseconds of a step, waited for and not, and how many times those of fixed tables.

    All ids have rows, but in the last line: there a twentieth of the ids, those that are read
    least, take rows from others. Batches are in HBM, or in pinned host memory.
    """
    samples, rows = (6, 40) if tiny else (SAMPLES, SMALL_ROWS)
    read = TABLES * samples * SMALL_READ / 1_048_570
    drawn = draw(tables("adam", rows, read, samples), samples, STEPS, device, seed=3).batches
    print(f"{'tables, batches in':<36}{'alone ms':>10}{'behind ms':>11}{'times':>7}{'misses':>9}")
    fixed_s, few = 0.0, rows * 19 // 20
    cases = ((0, 0, 0), (0, 1, 1), (rows, 0, 0), (rows, 0, 1), (rows, 1, 0), (rows, 1, 1))
    for capacity, on_host, ahead in (*cases, (few, 1, 1)):
        model = tables("adam", capacity + 1 if capacity else rows, read, samples)
        growing = {table.name: Growing(capacity) for table in model.tables if capacity}
        plan = make_plan(model, "device", 1.0, samples)
        placed = PlacedEmbeddings(plan, device=device, backend="triton", seed=None, growing=growing)
        for keys in placed.keys.maps.values():
            keys.read(torch.arange(capacity).mul(SPREAD).numpy())
        placed.keys.load_state(placed.keys.state())
        batches = tuple(_given(batch, SPREAD if capacity else 1, on_host) for batch in drawn)
        step = PlacedSteps(placed, batches, gradients(model, samples, device), bool(ahead))
        alone_s, behind_s = (_seconds(step, device, waits) for waits in (True, False))
        fixed_s = fixed_s or behind_s
        misses = sum(counts.misses for counts in placed.key_counts().values())
        name = f"{'growing' if capacity else 'fixed'}, {'host' if on_host else 'HBM'}"
        name += ", look-ahead" * ahead + ", a twentieth less" * (capacity == few)
        new = max(0, misses - TABLES * capacity) / max(1, step.taken)
        times = f"{alone_s * 1e3:>10.3f}{behind_s * 1e3:>11.3f}{behind_s / fixed_s:>7.2f}"
        print(f"{name:<36}{times}{new:>9.1f}", flush=True)
        del placed, step
        gc.collect()


def _given(batch: BagBatch, times: int, on_host: int) -> BagBatch:
    batch = replace(batch, ids=batch.ids * times)
    return batch.to("cpu").pin_memory() if on_host and batch.ids.is_cuda else batch
