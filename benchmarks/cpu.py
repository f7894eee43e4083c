"""One training step of 26 embedding tables on a CPU: placer beside PyTorch and FBGEMM.

    python benchmarks/cpu.py [--steps 30] [--shapes 1024x64,256x64,...] [--rows-cap 400000]

The first shape (samples of a batch × columns of the tables) is run with three optimizers, the
others with row-wise Adagrad. FBGEMM's CPU kernels have no Adam.

The tables are those of MLPerf DLRM-DCNv2 with their rows capped; every sample looks up as
many ids of each table as the MLPerf data set has (214 in all), drawn from a Zipf law and
scattered over the table. A step is forward, backward and update; the gradients of the
pooled rows are given, so that nothing but the embedding work is timed. The placed model
keeps the hottest 10% of each table's rows in (emulated) HBM and the rest in DRAM.

All contenders start from the same weights, are compared with each other first, and then
take turns of ten steps in one process, so that each is timed with its own threads awake and
nobody else's; what counts is the median of the ratios of steps of the same number. Results
go to benchmarks/results/ with the machine and the raw times.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _machine import RESULTS, machine, slug, versions
from torch import Tensor, nn

from placer.executor import BagBatch, PlacedEmbeddings, RowWiseAdagrad
from placer.files.atomic import write_text
from placer.plan.fields import RowOrder, whole_table_shard
from placer.plan.plan import Plan
from placer.tables import Feature, OptimizerName, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology
from placer.workloads import named_workload

# Of MLPerf DLRM-DCNv2: rows and lookups per sample of each table.
MLPERF = [one.table for one in named_workload("mlperf-dcnv2")]
ROWS = [table.rows for table in MLPERF]
LOOKUPS = [int(table.lookups_per_sample) for table in MLPERF]

OPTIMIZERS: tuple[OptimizerName, ...] = ("rowwise_adagrad", "adagrad", "adam")
SHAPES = "1024x64,256x64,4096x64,1024x16,1024x128"

LR, EPS = 0.01, 1e-8
TURN, SETTLING, PAUSE_S = 10, 3, 0.05
HBM_SHARE = 0.1
BATCHES = 8
"""Batches that the steps cycle through: enough that a step does not find its rows in cache."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train the tables: a step, and the tables' weights as they are."""

    name: str
    step: Callable[[BagBatch, list[Tensor]], None]
    weights: Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Task:
    """Tables, the ids that are hot in them, and batches of lookups."""

    tables: tuple[Table, ...]
    hot_ids: dict[str, npt.NDArray[np.int64]]
    batches: tuple[BagBatch, ...]
    gradients: list[Tensor]
    weights: dict[str, Tensor]


def make_task(batch_size: int, dim: int, rows_cap: int, zipf: float, seed: int = 0) -> Task:
    """Draw ids by a Zipf law over ranks, and scatter ranks over ids."""
    rng = np.random.default_rng(seed)
    tables, hot_ids = [], {}
    ids: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(BATCHES)]
    for index, (all_rows, lookups) in enumerate(zip(ROWS, LOOKUPS, strict=True)):
        rows = min(all_rows, rows_cap)
        name = f"C{index + 1}"
        tables.append(Table(name, rows, dim, "float32", features=(Feature(name, lookups),)))
        id_of_rank = rng.permutation(rows)
        hot_ids[name] = id_of_rank[: max(1, round(rows * HBM_SHARE))]
        cdf = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -zipf)
        for batch in ids:
            ranks = np.searchsorted(cdf, rng.random(batch_size * lookups) * cdf[-1])
            batch.append(id_of_rank[np.minimum(ranks, rows - 1)])
    lengths = np.repeat(np.array(LOOKUPS), batch_size)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    torch.manual_seed(seed)
    return Task(
        tuple(tables),
        hot_ids,
        tuple(
            BagBatch(torch.from_numpy(np.concatenate(batch)), offsets, batch_size) for batch in ids
        ),
        [torch.randn(batch_size, dim) / batch_size for _ in tables],
        {table.name: torch.randn(table.rows, dim) * 0.05 for table in tables},
    )


def make_plan(task: Task) -> Plan:
    """The hottest rows of each table in HBM, the rest in DRAM of the same GPU's host."""
    gpu = Gpu("gpu:0", "host:0", 2**36, 1e12)
    host = Host("host:0", 2**38, 1e11)
    topology = Topology("1", (gpu,), (host,), (Link("gpu:0", "host:0", "pcie", 1e10),), True)
    shards = []
    for table in task.tables:
        hot = task.hot_ids[table.name].size
        shards += [
            whole_table_shard(table, "gpu:0", "hbm", "device", (0, hot, 1)),
            whole_table_shard(table, "gpu:0", "dram", "uva", (hot, table.rows, 1)),
        ]
    order = {table.name: RowOrder("profile") for table in task.tables}
    return Plan(task.tables, topology, tuple(shards), order, task.hot_ids)


def placed(task: Task, backend: str, optimizer: OptimizerName) -> Contender:
    """placer."""
    model = PlacedEmbeddings(
        make_plan(task), lr=LR, eps=EPS, optimizer=optimizer, weights=task.weights, backend=backend
    )

    def step(batch: BagBatch, gradients: list[Tensor]) -> None:
        torch.autograd.backward(list(model(batch).values()), gradients)

    return Contender(f"placer ({backend})", step, lambda: list(model.state_dict().values()))


def embedding_bags(task: Task, optimizer: OptimizerName) -> Contender:
    """One `nn.EmbeddingBag` a table with sparse gradients."""
    bags = [
        nn.EmbeddingBag.from_pretrained(
            task.weights[table.name].clone(),
            freeze=False,
            mode="sum",
            sparse=True,
            include_last_offset=True,
        )
        for table in task.tables
    ]
    weights = [bag.weight for bag in bags]
    trainer: torch.optim.Optimizer
    if optimizer == "adagrad":
        trainer = torch.optim.Adagrad(weights, lr=LR, eps=EPS)
    elif optimizer == "adam":
        trainer = torch.optim.SparseAdam(weights, lr=LR, eps=EPS)
    else:
        trainer = RowWiseAdagrad(weights, lr=LR, eps=EPS)

    def step(batch: BagBatch, gradients: list[Tensor]) -> None:
        size = batch.batch_size
        starts = batch.offsets[::size].tolist()
        outputs = [
            bag(
                batch.ids[starts[t] : starts[t + 1]],
                batch.offsets[t * size : (t + 1) * size + 1] - starts[t],
            )
            for t, bag in enumerate(bags)
        ]
        trainer.zero_grad()
        torch.autograd.backward(outputs, gradients)
        trainer.step()

    return Contender("nn.EmbeddingBag(sparse)", step, lambda: [bag.weight.detach() for bag in bags])


def fbgemm(task: Task, optimizer: OptimizerName) -> Contender:
    """FBGEMM's table-batched embedding on the CPU."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kind = {
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }[optimizer]
    model = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.rows, t.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in task.tables],
        optimizer=kind,
        learning_rate=LR,
        eps=EPS,
        pooling_mode=PoolingMode.SUM,
        device=torch.device("cpu"),
    )
    for table, weight in zip(task.tables, model.split_embedding_weights(), strict=True):
        weight.data.copy_(task.weights[table.name])
    joined: dict[int, Tensor] = {}

    def step(batch: BagBatch, gradients: list[Tensor]) -> None:
        # FBGEMM's output is one matrix; its gradient is joined once, outside of the clock.
        joined.setdefault(0, torch.cat(gradients, 1))
        model(batch.ids, batch.offsets).backward(joined[0])

    return Contender("FBGEMM", step, model.split_embedding_weights)


def check_equal(contenders: list[Contender], task: Task) -> float:
    """Take one step each; the largest difference between the first's weights and another's."""
    for contender in contenders:
        contender.step(task.batches[0], task.gradients)
    expected = contenders[0].weights()
    worst = 0.0
    for contender in contenders[1:]:
        for table, weight, other in zip(task.tables, expected, contender.weights(), strict=True):
            worst = max(worst, float((other - weight).abs().max()))
            if not torch.allclose(other, weight, rtol=1e-4, atol=1e-5):
                raise SystemExit(
                    f"table {table.name}: {contenders[0].name} and {contender.name} "
                    f"differ by {worst}"
                )
    return worst


@dataclass(frozen=True, slots=True)
class Timing:
    """One step: time on the clock, and time of all processors together."""

    wall_s: float
    cpu_s: float


def race(contenders: list[Contender], task: Task, steps: int) -> dict[str, list[Timing]]:
    """Times of each step of each contender, who take turns, several steps at a time.

    The first steps of a turn are not counted: caches and threads are then still the last
    contender's. OpenMP's threads spin for a while after their work, on cores that are no longer
    theirs, so everyone waits until those of the one before sleep.
    """
    timings: dict[str, list[Timing]] = {contender.name: [] for contender in contenders}
    for number in range(-1, -(-steps // TURN)):
        # The order rotates, so that nobody always runs behind the same neighbour.
        turn = number % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            time.sleep(PAUSE_S)
            for step in range(-SETTLING, TURN):
                batch = task.batches[step % len(task.batches)]
                start, start_cpu = time.perf_counter(), time.process_time()
                contender.step(batch, task.gradients)
                timing = Timing(time.perf_counter() - start, time.process_time() - start_cpu)
                if number >= 0 and step >= 0:
                    timings[contender.name].append(timing)
    return timings


def compare(
    task: Task, makers: Sequence[Callable[[Task], Contender]], steps: int, label: str
) -> dict[str, Any]:
    """Make the contenders, check and race them; print a row of each."""
    contenders = []
    for maker in makers:
        try:
            contenders.append(maker(task))
        except ImportError as error:
            print(f"left out, not installed: {error}", file=sys.stderr)
    difference = check_equal(contenders, task)
    timings = race(contenders, task, steps)
    own = timings[contenders[0].name]
    rows = {}
    for name, times in timings.items():
        median_s = statistics.median(t.wall_s for t in times)
        median_cpu_s = statistics.median(t.cpu_s for t in times)
        ratio = statistics.median(t.wall_s / p.wall_s for t, p in zip(times, own, strict=True))
        rows[name] = {
            "median_s": median_s,
            "median_cpu_s": median_cpu_s,
            "ratio_to_placer": ratio,
            "seconds": [t.wall_s for t in times],
            "cpu_seconds": [t.cpu_s for t in times],
        }
        print(
            f"{label}{name:<26}{median_s * 1e3:>9.2f}{median_cpu_s * 1e3:>9.2f}"
            f"{task.batches[0].batch_size / median_s:>12,.0f}{ratio:>15.2f}",
            flush=True,
        )
    return {"largest_weight_difference": difference, "contenders": rows}


def main() -> None:
    """Run all shapes and optimizers, print a table, write JSON."""
    parser = argparse.ArgumentParser(description="embedding step on a CPU, placer and others")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--shapes", default=SHAPES, help="samples x columns, ...")
    parser.add_argument("--rows-cap", type=int, default=400_000)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shapes.split(",")]
    print(
        f"{'optimizer':<17}{'shape':<10}{'contender':<26}{'step ms':>9}{'CPU ms':>9}"
        f"{'samples/s':>12}{'time / placer':>15}"
    )
    results: list[dict[str, object]] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for number, (batch_size, dim) in enumerate(shapes):
        task = make_task(batch_size, dim, options.rows_cap, options.zipf)
        for optimizer in OPTIMIZERS if number == 0 else OPTIMIZERS[:1]:
            makers = [
                partial(placed, backend="numba", optimizer=optimizer),
                partial(placed, backend="torch", optimizer=optimizer),
                partial(embedding_bags, optimizer=optimizer),
            ]
            if optimizer != "adam":
                makers.append(partial(fbgemm, optimizer=optimizer))
            label = f"{optimizer:<17}{f'{batch_size}x{dim}':<10}"
            result = compare(task, makers, options.steps, label)
            for name, row in result["contenders"].items():
                ratios.setdefault((optimizer, name), []).append(row["ratio_to_placer"])
            results.append({"optimizer": optimizer, "batch_size": batch_size, "dim": dim, **result})
            gc.collect()
    print("\nmedian over the shapes of time / placer's:")
    medians = {}
    for (kind, name), found in ratios.items():
        medians[f"{kind}, {name}"] = statistics.median(found)
        print(f"  {kind:<17}{name:<26}{statistics.median(found):>8.2f}")
    report = {
        "benchmark": "embedding step on a CPU: forward, backward, update",
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "tables": len(ROWS),
        "rows": sum(min(rows, options.rows_cap) for rows in ROWS),
        "lookups_per_sample": sum(LOOKUPS),
        "hbm_row_share": HBM_SHARE,
        "machine": {
            **machine(),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
        },
        "versions": versions("torch", "numba", "numpy", "fbgemm-gpu-cpu"),
        "medians": medians,
        "results": results,
    }
    output = options.output or RESULTS / f"cpu-{slug()}.json"
    write_text(output, json.dumps(report, indent=1) + "\n")
    print(f"\nraw numbers: {output}")


if __name__ == "__main__":
    main()
