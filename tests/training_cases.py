"""A small log in memory and plans for it, for the tests of training."""

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from checkpoint_cases import load

from placer.data.log import Bags, Chunk, Log, slice_chunk
from placer.plan.fields import RowOrder, Shard
from placer.plan.plan import Plan
from placer.tables import Feature, OptimizerName, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology
from placer.training.config import TrainConfig
from placer.training.loop import TrainResult
from placer.training.run import Progress

Placement = Literal["hbm", "dram", "split", "strided", "staged", "cached"]

QUICK = TrainConfig(batch_size=32, lr=0.05, bottom_mlp=(8,), top_mlp=(8,), report_every=4)

TOPOLOGY = Topology(
    "two small GPUs",
    (Gpu("gpu:0", "host:0", 2**30, 1e12), Gpu("gpu:1", "host:0", 2**30, 1e12)),
    (Host("host:0", 2**32, 1e11),),
    (Link("gpu:0", "host:0", "pcie", 1e10), Link("gpu:1", "host:0", "pcie", 1e10)),
    emulated=True,
)


@dataclass(frozen=True)
class ArrayLog:
    """A log that is one chunk in memory, handed out in pieces."""

    chunk: Chunk
    tables: Mapping[str, int]
    feature_tables: Mapping[str, str]
    dense_names: tuple[str, ...]

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        for start in range(skip, self.chunk.samples, samples):
            yield slice_chunk(self.chunk, start, min(start + samples, self.chunk.samples))


def small_log(samples: int = 640, seed: int = 0, dense_columns: int = 2) -> ArrayLog:
    """Clicks that the ids explain: one-hot ``a``, multi-hot ``b`` and ``c`` of one table."""
    rng = np.random.default_rng(seed)
    rows = {"a": 50, "bc": 40}
    effects = {name: np.random.default_rng(99).normal(0, 1.5, size) for name, size in rows.items()}
    a = rng.integers(0, 50, samples)
    lengths = rng.integers(0, 4, samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    b = rng.integers(0, 40, offsets[-1])
    c = rng.zipf(1.5, samples) % 40
    logits = effects["a"][a] + effects["bc"][c]
    np.add.at(logits, np.repeat(np.arange(samples), lengths), 0.5 * effects["bc"][b])
    dense = rng.lognormal(1, 1, (samples, dense_columns)).astype(np.float32)
    dense[rng.random(dense.shape) < 0.2] = np.nan
    labels = (rng.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    features = {"a": Bags(a), "b": Bags(b, offsets), "c": Bags(c)}
    return ArrayLog(
        Chunk(samples, features, dense, labels),
        rows,
        {"a": "a", "b": "bc", "c": "bc"},
        tuple(f"I{column + 1}" for column in range(dense_columns)),
    )


def plan_for(
    log: Log,
    placement: Placement = "hbm",
    *,
    dim: int = 4,
    optimizer: OptimizerName = "rowwise_adagrad",
) -> Plan:
    """All tables of a log placed one way, or their hottest third split from the rest."""
    tables, shards, orders, hot_ids = [], [], {}, {}
    for name, rows in log.tables.items():
        features = tuple(Feature(f) for f, table in log.feature_tables.items() if table == name)
        tables.append(Table(name, rows, dim, optimizer=optimizer, features=features))
        whole = Shard(name, (0, rows, 1), (0, dim), ("gpu:0",), "hbm", "device")
        dram = replace(whole, memory="dram", lookup="uva")
        match placement:
            case "hbm":
                shards.append(whole)
            case "dram":
                shards.append(dram)
            case "split" | "staged" | "cached":
                hot = max(rows // 3, 1)
                cold = replace(dram, rows=(hot, rows, 1))
                if placement == "staged":  # Fewer rows than a step may read, so that some wait.
                    cold = replace(cold, lookup="staged", staging_rows=8)
                if placement == "cached":
                    cold = replace(cold, lookup="cached", staging_rows=6, cache_rows=4)
                shards += [replace(whole, rows=(0, hot, 1), devices=("gpu:1",)), cold]
                orders[name] = RowOrder("profile")
                hot_ids[name] = np.random.default_rng(rows).permutation(rows)[:hot]
            case "strided":
                shards += [
                    replace(whole, rows=(0, rows, 2)),
                    replace(dram, rows=(1, rows, 2), devices=("gpu:1",)),
                ]
    return Plan(tuple(tables), TOPOLOGY, tuple(shards), orders, hot_ids, batch_size=32)


def losses_of(result: TrainResult) -> list[float]:
    """Of each step."""
    return [loss for _, loss in result.losses]


def ctrl_c_after(step: int) -> Callable[[Progress], None]:
    """What is told of progress, and interrupts at a step."""

    def interrupt(progress: Progress) -> None:
        if progress.step == step:
            signal.raise_signal(signal.SIGINT)

    return interrupt


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, or the newest one of a folder, by ``group/name``."""
    return {
        f"{group}/{name}": tensor
        for group, held in load(folder).tensors.items()
        for name, tensor in held.items()
    }


def assert_same_tensors(one: Path, two: Path) -> None:
    """Two checkpoints hold the same bits."""
    held, other = tensors_of(one), tensors_of(two)
    assert held.keys() == other.keys()
    assert [name for name in held if not torch.equal(held[name], other[name])] == []
