"""Clicks for the examples, from a log or generated, and what they print."""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from placer import Plan, Problem, Profile, Topology
from placer.data import open_log
from placer.workloads.synthetic_log import write_synthetic_log
from solvers import solve

BATCH_SIZE = 64
STEPS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Clicks:
    """A log in memory.

    `rows` are of each table; `ids` have one row of it for each sample, shape (samples,);
    `dense` is float32, shape (samples, columns), and `labels` float32, shape (samples,).
    """

    rows: dict[str, int]
    ids: dict[str, Tensor]
    dense: Tensor
    labels: Tensor

    def batch(self, step: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Ids, numbers and labels of a step."""
        samples = self.labels.numel() // BATCH_SIZE * BATCH_SIZE
        start = step * BATCH_SIZE % samples
        part = slice(start, start + BATCH_SIZE)
        ids = {name: column[part] for name, column in self.ids.items()}
        return ids, self.dense[part], self.labels[part]


def read_clicks(path: str | None, samples: int = BATCH_SIZE * STEPS) -> Clicks:
    """The first samples of a log in Criteo's format or in Parquet; without a path, generated."""
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = str(Path(folder) / "clicks.tsv")
            write_synthetic_log(path, samples=samples, scale=0.0005)
        log = open_log(path)
        (chunk,) = [chunk for _, chunk in zip(range(1), log.chunks(samples), strict=False)]
    if chunk.labels is None:
        raise SystemExit(f"{path} has no labels")
    labelled = ~np.isnan(chunk.labels)
    dense = np.log1p(np.nan_to_num(chunk.dense).clip(min=0))
    return Clicks(
        dict(log.tables),
        {name: torch.from_numpy(bags.ids[labelled]) for name, bags in chunk.features.items()},
        torch.from_numpy(dense[labelled]),
        torch.from_numpy(chunk.labels[labelled]),
    )


def plan_for(profile: Profile, gpus: int = 1) -> Plan:
    """A plan for GPUs that hold a third of the tables beside the buffers of a step."""
    hbm_bytes = profile.total_bytes // 3 // gpus + 600_000
    topology = Topology.parse(f"{gpus}xh100", hbm=hbm_bytes)
    result = solve(Problem(profile, topology, BATCH_SIZE), solver="greedy-cost")
    if result.plan is None:
        raise SystemExit(result.termination.detail)
    tiers = {"hbm": 0, "dram": 0}
    for shard in result.plan.shards:
        tiers[shard.memory] += shard.row_count * shard.width * 4
    print(f"plan: {tiers['hbm']:,} bytes of weights in HBM, {tiers['dram']:,} in DRAM")
    return result.plan


def report(name: str, placed: list[float], unplaced: list[float]) -> None:
    """Print how far two loss curves are apart."""
    if len(placed) != len(unplaced):
        raise SystemExit(f"{name}: {len(placed)} steps with the plan, {len(unplaced)} without")
    difference = float(np.abs(np.subtract(placed, unplaced)).max())  # NaN if any is.
    print(
        f"{name}: {len(placed)} steps, loss {unplaced[0]:.4f} -> {unplaced[-1]:.4f}, "
        f"largest difference with the plan {difference:.1e}"
    )


def arguments(description: str | None) -> argparse.Namespace:
    """``--data``, for a log of your own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", help="a log in Criteo's format or in Parquet")
    return parser.parse_args()
