"""The most memory that a whole training step takes, beside what the plan's phases say.

    python benchmarks/step_memory.py

Three models are trained on 1 and on 2 gloo ranks of this CPU, by `placer.training.Trainer` with
look-ahead: a DLRM whose lookups take most, one whose dense layers do, and one whose cold rows are
staged. Triton's kernels run in its interpreter, so that the tiers of memory are apart as on a GPU.
What PyTorch's allocator gave out at a time, from the first weight on, is compared with
`placer.plan.peak_memory`. Batches are made before, and are not counted: they are the data loader's.

Results go to benchmarks/results/ with the machine.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _machine import write_results
from torch.profiler import ProfilerActivity, profile, record_function

from placer import Feature, Plan, Profile, Table
from placer.dense import DenseLayers
from placer.executor import BagBatch, look_ahead, make_embeddings
from placer.executor.backends.triton.triton_backend import TritonBackend
from placer.executor.distributed import input_exchange
from placer.executor.memory import host_memory
from placer.executor.memory.arena import TieredRows
from placer.plan.fields import Shard
from placer.plan.memory import with_buffers
from placer.plan.peak_memory import peak_memory
from placer.profile.cdf import AccessCdf
from placer.profile.table_profile import TableProfile
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology
from placer.training.config import TrainConfig
from placer.training.trainer import Trainer

STEPS = 2
WINDOW = "measured steps"


@dataclass(frozen=True, slots=True)
class Model:
    """A DLRM whose tables are alike, and the share of each one's rows that is in HBM."""

    name: str
    tables: int
    rows: int
    dim: int
    pooling: int
    batch_size: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    hot_rows: int

    def profile(self) -> Profile:
        """Its tables, of which every row is as hot as any other."""
        tables = [
            Table(f"t{n}", self.rows, self.dim, features=(Feature(f"f{n}", self.pooling),))
            for n in range(self.tables)
        ]
        cdf = AccessCdf.zipf(self.rows, 0.0)
        return Profile(tuple(TableProfile(table, cdf, None) for table in tables), samples=1)

    def plan(self, gpus: int) -> Plan:
        """Whole tables dealt out over the GPUs; cold rows staged."""
        devices = tuple(Gpu(f"gpu:{n}", "host:0", 2**33, 1e12) for n in range(gpus))
        links = tuple(Link(gpu.id, "host:0", "pcie", 1e10) for gpu in devices)
        topology = Topology("cpu", devices, (Host("host:0", 2**34, 1e11),), links)
        shards = []
        for number, table in enumerate(self.profile()):
            device = (f"gpu:{number % gpus}",)
            hot = Shard(table.name, (0, self.hot_rows, 1), (0, self.dim), device, "hbm", "device")
            cold = Shard(
                table.name, (self.hot_rows, self.rows, 1), (0, self.dim), device, "dram", "staged"
            )
            for place, part in enumerate(part for part in (hot, cold) if part.row_count):
                samples = self.batch_size * gpus
                shards.append(with_buffers(table, part, samples=samples, returns_bags=place == 0))
        tables = tuple(profile.table for profile in self.profile())
        layers = DenseLayers((*self.top, 1), (*self.bottom, self.dim), 13, optimizer="adagrad")
        return Plan(tables, topology, tuple(shards), {}, {}, self.batch_size, dense=layers)

    def batch(self, seed: int) -> tuple[BagBatch, torch.Tensor, torch.Tensor]:
        """A rank's samples."""
        generator = torch.Generator().manual_seed(seed)
        lookups = self.tables * self.batch_size * self.pooling
        ids = torch.randint(self.rows, (lookups,), generator=generator)
        offsets = torch.arange(0, lookups + 1, self.pooling)
        labels = torch.randint(2, (self.batch_size,), generator=generator).float()
        numbers = torch.rand((self.batch_size, 13), generator=generator)
        return BagBatch(ids, offsets, self.batch_size), numbers, labels


MODELS = (
    Model("lookups", 4, 500, 16, 50, 64, (32,), (32,), 500),
    Model("dense", 4, 2_000, 32, 1, 192, (256, 128), (512, 256), 2_000),
    Model("staged", 4, 8_000, 32, 8, 64, (64,), (64, 32), 1_000),
)


class _AtOnce:
    """Does at once what a thread would do: the profiler sees the memory of its own thread alone."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: object) -> "Future[Any]":
        """The result of the work, which is done."""
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done

    def shutdown(self) -> None:
        """Nothing is left to do."""


def _collect_after_kernels() -> None:
    """Triton's interpreter keeps the arguments of a kernel until garbage is collected."""
    launch = TritonBackend.run

    def collecting(self: Any, *arguments: Any, **options: Any) -> None:
        launch(self, *arguments, **options)
        gc.collect()

    TritonBackend.run = collecting  # type: ignore[method-assign]


def held_bytes(trainer: Trainer, data: Sequence[Any], world: int) -> int:
    """Bytes of all tensors between two steps, but those of the batches and of the host's rows."""
    gc.collect()
    sizes = {}
    others: set[int] = set()
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, TieredRows):
            others.add(value.dram.untyped_storage().data_ptr())
    given = [(batch.ids, batch.offsets, *more) for batch, *more in data]
    others |= {tensor.untyped_storage().data_ptr() for all in given for tensor in all}
    parameters = list(trainer.model.parameters())
    for one in parameters:
        if one.grad is not None:
            sizes[one.grad.untyped_storage().data_ptr()] = one.grad.untyped_storage().nbytes()
    # Buckets of DistributedDataParallel are as large as the parameters, and no tensors of Python.
    buckets = sum(one.nbytes for one in parameters) if world > 1 else 0
    return buckets + sum(size for place, size in sizes.items() if place not in others)


def _wait_for_gloo() -> None:
    """A collective's tensors end in this thread, where the profiler sees it."""
    exchange = dist.all_to_all_single

    def waiting(*arguments: Any, **options: Any) -> Any:
        done = exchange(*arguments, **options)
        time.sleep(0.02)
        return done

    dist.all_to_all_single = waiting


def most_bytes(rank: int, world: int, model: Model) -> tuple[int, list[Any]]:
    """What PyTorch's allocator had given out on this rank when it was most during a step."""
    plan = model.plan(world)
    data = [model.batch(7 * step + rank) for step in range(STEPS + 2)]
    config = TrainConfig(bottom_mlp=model.bottom, top_mlp=model.top, backend="triton")
    input_exchange.ThreadPoolExecutor = _AtOnce  # type: ignore[misc,assignment]
    host_memory.HUGE_PAGE_BYTES = 1  # So that no row of the host's is PyTorch's.
    _collect_after_kernels()
    _wait_for_gloo()
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as recorded:
        embeddings = make_embeddings(plan, optimizer="rowwise_adagrad", backend="triton")
        trainer = Trainer(embeddings, plan, 13, config, world=world)
        samples = model.batch_size * world
        steps = look_ahead(data, embeddings)
        trainer.step(*next(steps), samples)
        # What gloo's threads let go of is not seen to end: begin with what there is.
        begun = held_bytes(trainer, data, world)
        with record_function(WINDOW):
            for step in steps:
                trainer.step(*step, samples)
    del embeddings, trainer
    events = sorted(
        recorded.profiler.kineto_results.events(),  # type: ignore[union-attr]
        key=lambda event: event.start_ns(),
    )
    start = next(event.start_ns() for event in events if event.name() == WINDOW)
    before = [e.nbytes() for e in events if e.name() == "[memory]" and e.start_ns() < start]
    size, most = begun - sum(before), 0
    trace = []
    for event in events:
        if event.name() == "[memory]":
            size += event.nbytes()
            trace.append((event.start_ns() - start, size, event.nbytes()))
            if event.start_ns() >= start:
                most = max(most, size)
    if os.environ.get("TRACE"):
        ops = [(e.start_ns() - start, e.duration_ns(), e.name()) for e in events
               if e.name() != "[memory]"]  # fmt: skip
        return most, [trace, ops]
    return most, []


def _rank(rank: int, world: int, folder: str, model: Model) -> None:
    torch.set_num_threads(1)
    if world > 1:
        meet = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    torch.save(most_bytes(rank, world, model), f"{folder}/{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


def measure(model: Model, world: int) -> list[int]:
    """Most bytes by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, folder, model), nprocs=world, start_method="spawn")
        return [torch.load(f"{folder}/{rank}.pt")[0] for rank in range(world)]


def main() -> None:
    """Measure all models and write what came out."""
    rows = []
    for model in MODELS:
        for world in (1, 2):
            peaks = peak_memory(model.plan(world), model.profile(), device_kind="cpu")
            for peak, measured in zip(peaks, measure(model, world), strict=False):
                rows.append(
                    {
                        "model": model.name,
                        "ranks": world,
                        "device": peak.device,
                        "phase": peak.fullest.name,
                        "predicted_bytes": peak.peak_bytes,
                        "measured_bytes": measured,
                        "error": peak.peak_bytes / measured - 1,
                    }
                )
                print(rows[-1], flush=True)
    write_results("step_memory", (), {"rows": rows})


if __name__ == "__main__":
    main()
