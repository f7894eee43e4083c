"""NVIDIA's published setting of embedding tables on a GPU, beside the figures of its report.

recsys-examples, corelib/dynamicemb/benchmark/benchmark_results.json (May 2026), one H100: ten
tables of 128 float32 columns, 104,857 samples with one id for each table, drawn from a power law
with exponent 1.05; forward, backward and update of a step, waited for before the next begins. Its
large tables have 26.8 million rows each, of which a step reads 433,723 in all. Hosts with less
memory have fewer rows here, and the exponent with which as many are read.

Tables that grow, beside fixed ones, have the same setting with Adam (`print_growing`).
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from _gpu_contenders import HostMemory, PlacedSteps, placed
from _gpu_measure import why
from _gpu_model import Model, draw, gradients, make_plan

from placer.executor import BagBatch, PlacedEmbeddings
from placer.growing import Growing
from placer.plan.plan import Plan
from placer.profile.cdf import AccessCdf
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, OptimizerName, Table

TABLES, SAMPLES, WIDTH = 10, 104_857, 128
SMALL_ROWS, SMALL_READ, READ = 1_677_721, 350_280, 433_723
CACHE = 0.8
STEPS = 20

PUBLISHED_MS = {  # Of FBGEMM and of dynamicemb.
    ("sgd", "hbm"): (0.96, 1.92),
    ("adam", "hbm"): (1.35, 2.19),
    ("sgd", "cache"): (4.77, 20.8),
    ("adam", "cache"): (15.0, 24.3),
    ("sgd", "host"): (13.6, 35.5),
    ("adam", "host"): (24.1, 43.5),
}


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """A step of the setting: `alone_s` as the report times it, `behind_s` without waiting.

    `entry_bytes` is HBM of rows, their state included, beside batches and buffers.
    """

    optimizer: str
    memory: str
    kind: str
    alone_s: float | None
    behind_s: float | None
    entry_bytes: int
    published_ms: tuple[float, float]
    note: str = ""


def tables(optimizer: OptimizerName, rows: int, read: float, samples: int) -> Model:
    """The ten tables, with the exponent of Zipf's law with which a step reads so many rows."""
    low, high = 0.3, 1.6
    for _ in range(20):
        exponent = (low + high) / 2
        if AccessCdf.zipf(rows, exponent, 0.0).unique(samples) * TABLES > read:
            low = exponent
        else:
            high = exponent
    profiles = []
    for index in range(TABLES):
        feature = Feature(f"t{index}", 1, pooling="none")
        table = Table(f"t{index}", rows, WIDTH, "float32", optimizer, features=(feature,))
        profiles.append(TableProfile(table, AccessCdf.zipf(rows, exponent, 0.0)))
    return Model("zipf-1.05", tuple(profiles))


def measure(device: torch.device, host_bytes: float, tiny: bool) -> list[PublishedStep]:
    """Time all of it; about ten seconds for each optimizer on a server."""
    samples = 6 if tiny else SAMPLES
    found = []
    optimizers: tuple[OptimizerName, ...] = ("sgd", "adam")
    for optimizer in optimizers:
        rows = 40 if tiny else SMALL_ROWS
        small = tables(optimizer, rows, TABLES * samples * SMALL_READ / 1_048_570, samples)
        found.append(_step(small, "hbm", False, HostMemory(0, device), device, samples))
        rows = 80 if tiny else min(26_843_545, int(host_bytes / small.row_bytes / TABLES))
        large = tables(optimizer, rows, TABLES * samples * READ / 1_048_570, samples)
        memory = HostMemory(rows * TABLES * small.row_bytes // 4 + (1 << 20), device)
        for kind in ("host", "cache"):
            for ahead in (False, True):
                found.append(_step(large, kind, ahead, memory, device, samples))
        del memory
    return found


def _plan(model: Model, memory: str, samples: int) -> Plan:
    if memory != "cache":
        return make_plan(model, "device" if memory == "hbm" else "staged", memory == "hbm", samples)
    plan = make_plan(model, "staged", 0.0, samples)
    entries = round(CACHE * model.profiles[0].unique(samples))
    shards = (
        replace(shard, lookup="cached", cache_rows=entries, staging_rows=0) for shard in plan.shards
    )
    return replace(plan, shards=tuple(shards))


def _step(
    model: Model,
    memory: str,
    ahead: bool,
    block: HostMemory,
    device: torch.device,
    samples: int,
) -> PublishedStep:
    optimizer = model.tables[0].optimizer
    kind = {"hbm": "device", "host": "staged", "cache": "cached"}[memory]
    name = f"{kind} + look-ahead" if ahead else kind
    entry_bytes, alone, behind, note = 0, None, None, ""
    try:
        placed_model = placed(_plan(model, memory, samples), block, device)
        entry_bytes = sum(
            rows.hbm.nbytes
            for arena in placed_model._runtime.arenas
            for rows in (arena.weights, arena.state)
            if rows is not None
        )
        drawn = draw(model, samples, 2 if samples < SAMPLES else STEPS, device, seed=3)
        # One gradient of all rows, as theirs.
        whole = torch.cat(gradients(model, samples, device)).split(samples)
        steps = PlacedSteps(placed_model, drawn.batches, list(whole), ahead)
        alone = None if ahead else _seconds(steps, device, waits=True)
        behind = _seconds(steps, device, waits=False)
    except Exception as error:
        alone, behind, note = None, None, why(error)
    known = optimizer, memory, name, alone, behind, entry_bytes
    return PublishedStep(*known, PUBLISHED_MS[optimizer, memory], note)


def _seconds(step: Callable[[], None], device: torch.device, waits: bool) -> float:
    """Mean seconds of a step, by the device's clock; after as many that are not timed."""
    if device.type != "cuda":
        step()
        return float("nan")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def took_ms(steps: int) -> float:
        first.record()
        for _ in range(steps):
            step()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)

    took_ms(STEPS)
    return sum(map(took_ms, [1] * STEPS if waits else [STEPS])) / STEPS / 1e3


def lines(found: list[PublishedStep]) -> list[str]:
    """The steps as rows of a table."""
    rows = [
        f"{'optimizer':<10}{'rows in':<8}{'kind':<22}{'HBM GB':>8}{'alone ms':>10}{'behind ms':>11}"
        f"{'FBGEMM':>8}{'dynamicemb':>12}"
    ]
    for step in found:
        alone, behind = (
            "–" if s is None else f"{s * 1e3:.2f}" for s in (step.alone_s, step.behind_s)
        )
        fbgemm, dynamicemb = step.published_ms
        rows.append(
            f"{step.optimizer:<10}{step.memory:<8}{step.kind:<22}{step.entry_bytes / 1e9:>8.2f}"
            f"{alone:>10}{behind:>11}{fbgemm:>8}{dynamicemb:>12}  {step.note}"
        )
    return rows


SPREAD = 1_000_003 * 1_000_003
"""Ids are multiplied by it, so that keys are any int64."""


def print_growing(device: torch.device, tiny: bool) -> None:
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
        batches = tuple(_with_keys(batch, SPREAD if capacity else 1, on_host) for batch in drawn)
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


def _with_keys(batch: BagBatch, times: int, on_host: int) -> BagBatch:
    batch = replace(batch, ids=batch.ids * times)
    return batch.to("cpu").pin_memory() if on_host and batch.ids.is_cuda else batch
