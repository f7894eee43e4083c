"""A step of a table that grows beside a fixed one, and its key map beside TorchRec's.

    python benchmarks/growing.py
    python benchmarks/growing.py --rows 100000 --steps 20

One table of float32 rows with Adagrad, one id a sample, ids by a power law, on one thread. The
fixed table reads ids that are rows already. Sides take turns, step by step, in one process; its
processor time counts, which others on the machine disturb little. The first half of the steps, in
which tables fill, does not count. Writes results/growing-*.json.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from _machine import markdown, write_results

from placer import Feature, Plan, Shard, Table, Topology
from placer.executor import BagBatch, Embeddings, make_embeddings
from placer.growing import Growing, KeyMap

SPREAD = 1_000_003 * 1_000_003
"""Ids are multiplied by it, modulo 2^63: any 64-bit keys."""


def embeddings_of(rows: int, dim: int, growing: Growing | None) -> Embeddings:
    """A table on one GPU, which is this process."""
    table = Table("item", rows, dim, "float32", "adagrad", (Feature("item"),))
    whole = Shard("item", (0, rows, 1), (0, dim), ("gpu:0",), "hbm", "device")
    plan = Plan((table,), Topology.parse("1xh100"), (whole,))
    return make_embeddings(plan, growing=None if growing is None else {"item": growing})


def step_of(embeddings: Embeddings) -> Callable[[torch.Tensor], None]:
    """A step of training: forward, backward and update."""

    def step(ids: torch.Tensor) -> None:
        batch = BagBatch.from_features({"item": (ids, None, None)}, ("item",))
        embeddings(batch)["item"].sum().backward()

    return step


def torchrec_of(rows: int) -> Callable[[torch.Tensor], None]:
    """TorchRec's map of ids to rows in training; on CPUs it has this one alone."""
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    module = MCHManagedCollisionModule(
        zch_size=rows,
        device=torch.device("cpu"),
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=1,
        input_hash_size=2**62,
    )
    module.train()

    def remap(ids: torch.Tensor) -> None:
        features = {"item": JaggedTensor(ids, lengths=torch.ones(ids.numel(), dtype=torch.int64))}
        features = module.preprocess(features)
        module.profile(features)
        module.remap(features)

    return remap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_001)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=120)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    random, capacity = np.random.default_rng(0), asked.rows - 1
    growing = Growing(capacity)
    fixed = step_of(embeddings_of(asked.rows, asked.dim, None))
    grown = step_of(embeddings_of(asked.rows, asked.dim, growing))
    small = step_of(embeddings_of(asked.rows // 10, asked.dim, Growing(asked.rows // 10 - 1)))
    keys = KeyMap(growing)
    sides: dict[str, Callable[[torch.Tensor], object]] = {
        "fixed table": fixed,
        "table that grows, all ids fit": grown,
        "table that grows, a tenth fits": small,
        "key map alone": lambda ids: keys.read(ids.numpy()),
        "TorchRec's managed collisions alone": torchrec_of(capacity),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(asked.steps):
        drawn = torch.from_numpy((capacity * random.random(asked.samples) ** 3).astype(np.int64))
        spread = drawn * SPREAD % (2**63 - 1)
        for name, run in sides.items():
            began = time.process_time()
            run(drawn if run is fixed else spread)
            seconds[name].append(time.process_time() - began)
    counted = {name: of[len(of) // 2 :] for name, of in seconds.items()}
    first = median(counted["fixed table"])
    print(
        markdown(
            ["side", "ms a step", "times the fixed table", "longest, times the median"],
            [
                [
                    name,
                    f"{median(of) * 1e3:.2f}",
                    f"{median(of) / first:.2f}",
                    f"{max(of) / median(of):.1f}",
                ]
                for name, of in counted.items()
            ],
        )
    )
    results = {"asked": vars(asked), "hit_rate": keys.counts.hit_rate, "seconds": counted}
    write_results("growing", ("torch", "numba", "torchrec", "fbgemm-gpu-cpu"), results)


if __name__ == "__main__":
    main()
