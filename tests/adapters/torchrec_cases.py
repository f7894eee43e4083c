"""Tables, and a plan that has something of all that TorchRec can run."""

from typing import Any

import numpy as np
from plan_cases import machine

from placer import Feature, Plan, Shard, Table
from placer.plan.fields import RowOrder


def table(
    name: str,
    rows: int,
    dim: int = 8,
    optimizer: Any = "sgd",
    pooling: Any = "sum",
    features: int = 1,
) -> Table:
    names = [f"{name}_{number}" for number in range(features)]
    return Table(
        name,
        rows,
        dim,
        "float32",
        optimizer,
        tuple(Feature(feature, pooling=pooling) for feature in names),
    )


def shard(
    name: str,
    rows: tuple[int, int],
    cols: tuple[int, int],
    *devices: str,
    lookup: Any = "device",
    **more: Any,
) -> Shard:
    memory: Any = "hbm" if lookup == "device" else "dram"
    return Shard(name, (*rows, 1), cols, devices or ("gpu:0",), memory, lookup, **more)


def plan_of_all() -> Plan:
    """On two GPUs: whole, by rows, by columns, in a grid, replicated, and hot and cold rows."""
    tables = (
        table("whole", 40, 8, "rowwise_adagrad", "mean"),
        table("rows", 41, 8, "rowwise_adagrad", features=2),
        table("columns", 30, 16),
        table("replicated", 12),
        table("split", 50, 8, "rowwise_adagrad", "mean"),
        table("ranked", 33, 8, "rowwise_adagrad"),
        table("grid", 20, 16),
    )
    shards = (
        shard("whole", (0, 40), (0, 8), "gpu:1"),
        shard("rows", (0, 21), (0, 8), "gpu:0"),
        shard("rows", (21, 41), (0, 8), "gpu:1"),
        shard("columns", (0, 30), (0, 8), "gpu:1"),
        shard("columns", (0, 30), (8, 16), "gpu:0"),
        shard("replicated", (0, 12), (0, 8), "gpu:0", "gpu:1"),
        shard("split", (0, 6), (0, 8), "gpu:0"),
        shard("split", (6, 28), (0, 8), "gpu:0", lookup="uva"),
        shard("split", (28, 50), (0, 8), "gpu:1", lookup="uva"),
        shard("ranked", (0, 17), (0, 8), "gpu:0", lookup="cached", cache_rows=4),
        shard("ranked", (17, 33), (0, 8), "gpu:1", lookup="cached", cache_rows=4),
        *(
            shard("grid", (10 * row, 10 * row + 10), (8 * col, 8 * col + 8), f"gpu:{row}")
            for col in range(2)
            for row in range(2)
        ),
    )
    return Plan(
        tables,
        machine(2),
        shards,
        {"split": RowOrder("profile"), "ranked": RowOrder("profile")},
        {"split": np.array([7, 3, 49, 0, 11, 12, 13, 44]), "ranked": np.array([30, 2, 1])},
    )
