"""One training step of 26 embedding tables on 1 and 2 gloo ranks of one CPU.

    python benchmarks/ranks.py [--steps 30] [--batch-size 1024] [--rows-cap 400000]

The tables and batches are those of benchmarks/cpu.py; a step is forward, backward and update, with
the gradients of the pooled rows given.

* Overhead at one rank: `PlacedEmbeddings`, and `ShardedEmbeddings` in a process group of one rank,
  take turns in one process; what counts is the median of the ratios of steps of the same number.
* Ranks: 1 and 2 processes share the same global batch and a plan for two GPUs, whose tables are
  whole, by rows on both, by columns on both, or replicated, in turn. Each process has the same
  number of threads. With and without `look_ahead`, whose exchange runs beside the step.

Processes of one machine share its memory and cores: the times say what ranks cost here, not what
more machines gain. Results go to benchmarks/results/ with the machine and the raw times.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _machine import RESULTS, machine, slug, versions
from cpu import EPS, LR, SETTLING, TURN, Task, make_plan, make_task
from torch import Tensor

from placer.executor import (
    BagBatch,
    PlacedEmbeddings,
    ShardedEmbeddings,
    look_ahead,
    make_embeddings,
)
from placer.files import write_text
from placer.plan.plan import Plan
from placer.plan.shard import Shard, whole_table_shard
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

WORLDS = (1, 2)


def join(rank: int, world: int, folder: str) -> None:
    """Meet the other ranks in a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),
    )


def two_gpu_plan(task: Task) -> Plan:
    """Every cut there is, one table after the other."""
    gpus = tuple(Gpu(f"gpu:{i}", "host:0", 2**36, 1e12) for i in range(2))
    host = Host("host:0", 2**38, 1e11)
    links = tuple(Link(gpu.id, host.id, "pcie", 1e10) for gpu in gpus)
    shards: list[Shard] = []
    for number, table in enumerate(task.tables):
        ways: tuple[tuple[Shard, ...], ...] = (
            (whole_table_shard(table, f"gpu:{number // 4 % 2}", "hbm", "device"),),
            tuple(
                whole_table_shard(table, gpu.id, "hbm", "device", (i, table.rows, 2))
                for i, gpu in enumerate(gpus)
            ),
            tuple(
                Shard(
                    table.name,
                    (0, table.rows, 1),
                    (i * table.dim // 2, (i + 1) * table.dim // 2),
                    (gpu.id,),
                    "hbm",
                    "device",
                )
                for i, gpu in enumerate(gpus)
            ),
            (
                Shard(
                    table.name,
                    (0, table.rows, 1),
                    (0, table.dim),
                    tuple(gpu.id for gpu in gpus),
                    "hbm",
                    "device",
                ),
            ),
        )
        shards += ways[number % len(ways)]
    return Plan(task.tables, Topology("2", gpus, (host,), links, True), tuple(shards), {}, {})


def own_samples(batch: BagBatch, start: int, stop: int) -> BagBatch:
    """Some samples of a batch."""
    size = batch.batch_size
    ids, lengths = [], []
    for first in range(0, batch.offsets.numel() - 1, size):
        low, high = batch.offsets[first + start], batch.offsets[first + stop]
        ids.append(batch.ids[low:high])
        lengths.append(batch.offsets[first + start : first + stop + 1].diff())
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    return BagBatch(torch.cat(ids), offsets, stop - start)


def train(model: Any, batch: Any, gradients: Sequence[Tensor]) -> None:
    """One step."""
    torch.autograd.backward(list(model(batch).values()), list(gradients))


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """`ShardedEmbeddings` of one rank beside `PlacedEmbeddings`, in turns."""
    task = make_task(options.batch_size, options.dim, options.rows_cap, options.zipf)
    plan = make_plan(task)
    models = {
        "PlacedEmbeddings": PlacedEmbeddings(plan, lr=LR, eps=EPS, weights=task.weights),
        "ShardedEmbeddings": make_embeddings(plan, lr=LR, eps=EPS, weights=task.weights),
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(0, options.steps, TURN):
        for name, model in models.items():
            for step in range(-SETTLING, min(TURN, options.steps - turn)):
                batch = task.batches[(turn + step) % len(task.batches)]
                started = time.perf_counter()
                train(model, batch, task.gradients)
                if step >= 0:
                    times[name].append(time.perf_counter() - started)
    ratios = [
        ranks / single
        for single, ranks in zip(times["PlacedEmbeddings"], times["ShardedEmbeddings"], strict=True)
    ]
    return {"ratio": statistics.median(ratios), "step_s": times}


def ranks_steps(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's steps; rank 0 writes how long they took."""
    torch.set_num_threads(options.threads)
    join(rank, world, folder)
    task = make_task(options.batch_size, options.dim, options.rows_cap, options.zipf)
    plan = two_gpu_plan(task)
    start = options.batch_size * rank // world
    stop = options.batch_size * (rank + 1) // world
    batches = [own_samples(batch, start, stop) for batch in task.batches]
    gradients = [gradient[start:stop] for gradient in task.gradients]
    result: dict[str, Any] = {}
    for name in ("in turn", "look_ahead"):
        model = ShardedEmbeddings(plan, lr=LR, eps=EPS, weights=task.weights)
        steps = [batches[i % len(batches)] for i in range(options.steps + SETTLING)]
        stream = look_ahead(steps, model) if name == "look_ahead" else iter(steps)
        times: list[float] = []
        while True:  # A step's time is from one batch to the next: what is ahead counts too.
            started = time.perf_counter()
            batch = next(stream, None)
            if batch is None:
                break
            train(model, batch, gradients)
            times.append(time.perf_counter() - started)
        sent = {kind: volume.to_others_bytes for kind, volume in model.comm_stats().items()}
        result[name] = {
            "median_step_s": statistics.median(times[SETTLING:]),
            "step_s": times[SETTLING:],
            "bytes_sent_by_rank_0_a_step": {
                kind: size / len(times) for kind, size in sorted(sent.items())
            },
        }
        dist.barrier()
        model.close()
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    """Run all, print a table, write JSON."""
    parser = argparse.ArgumentParser(description="embedding steps on 1 and 2 ranks of a CPU")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=1024, help="samples of all ranks")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows-cap", type=int, default=400_000)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of each process"
    )
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        join(0, 1, folder)
        at_one = overhead(options)
        dist.destroy_process_group()
    print(f"one rank: ShardedEmbeddings / PlacedEmbeddings {at_one['ratio']:.3f}")
    by_world: dict[str, Any] = {}
    print(f"{'ranks':<8}{'loop':<14}{'step ms':>9}")
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(
                ranks_steps, (world, folder, options), nprocs=world, start_method="spawn"
            )
            by_world[str(world)] = json.loads((Path(folder) / "result.json").read_text())
        for name, row in by_world[str(world)].items():
            print(f"{world:<8}{name:<14}{row['median_step_s'] * 1e3:>9.1f}")
    report = {
        "benchmark": "embedding step on gloo ranks of one CPU: forward, backward, update",
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "machine": machine(),
        "versions": versions("torch", "numpy", "numba"),
        "one_rank": at_one,
        "ranks": by_world,
    }
    path = options.output or RESULTS / f"ranks-{slug()}.json"
    write_text(path, json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
