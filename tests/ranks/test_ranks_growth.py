"""The Python work of a step grows with the tables and no faster, however they are placed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from plan_cases import calls_of, machine
from ranks_launcher import run

from placer import Feature, Plan, Shard, Table
from placer.executor import BagBatch, Embeddings, make_embeddings
from placer.plan.fields import RowOrder

ROWS, DIM, SAMPLES = 40, 8, 4
KINDS = ("device", "replicated", "rows", "columns", "staged", "cached", "uva", "host")


def plan_of(kind: str, count: int) -> Plan:
    """So many tables, all placed alike."""
    shards: list[Shard] = []
    hot = {}
    optimizer = "rowwise_adagrad" if kind == "columns" else "adagrad"
    tables = tuple(
        Table(f"t{i}", ROWS, DIM, optimizer=optimizer, features=(Feature(f"t{i}"),))
        for i in range(count)
    )
    for i, table in enumerate(tables):
        whole = Shard(table.name, (0, ROWS, 1), (0, DIM), (f"gpu:{i % 2}",), "hbm", "device")
        if kind == "device":
            shards.append(whole)
        elif kind == "replicated":
            shards.append(replace(whole, devices=("gpu:0", "gpu:1")))
        elif kind == "rows":
            shards += [replace(whole, rows=(g, ROWS, 2), devices=(f"gpu:{g}",)) for g in range(2)]
        elif kind == "columns":
            shards += [
                replace(whole, cols=(4 * g, 4 * g + 4), devices=(f"gpu:{g}",)) for g in range(2)
            ]
        else:
            pooled = kind in ("staged", "cached")
            pool = {"staging_rows": 6 * pooled, "cache_rows": 3 * (kind == "cached")}
            cold = replace(whole, rows=(10, ROWS, 1), memory="dram", lookup=kind, **pool)
            shards += [replace(whole, rows=(0, 10, 1)), cold]
            hot[table.name] = np.random.default_rng(i).permutation(ROWS)[:10]
    order = {name: RowOrder("profile") for name in hot}
    return Plan(tables, machine(), tuple(shards), order, hot, SAMPLES)


def step(embeddings: Embeddings, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lookups = count * SAMPLES * 2
    ids = torch.randint(ROWS, (lookups,), generator=generator)
    outputs = embeddings(BagBatch(ids, torch.arange(0, lookups + 1, 2), SAMPLES))
    torch.autograd.backward([output.sum() for output in outputs.values()])


def calls(kind: str, count: int) -> int:
    """Calls of Python and of its built-in functions in a step."""
    tiered = kind in ("staged", "cached", "uva", "host")
    embeddings = make_embeddings(plan_of(kind, count), backend="tiered" if tiered else "torch")
    step(embeddings, count, 0)
    seen = calls_of(lambda: step(embeddings, count, 1))
    embeddings.close()
    return seen


def calls_of_kinds(rank: int, world: int) -> dict[str, list[int]]:
    return {kind: [calls(kind, count) for count in (20, 40)] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_one_process(kind: str) -> None:
    assert calls(kind, 40) <= 2 * calls(kind, 20)


def test_a_step_on_two_ranks() -> None:
    for found in run(2, [("calls", calls_of_kinds, ())]).of("calls"):
        for kind, (few, many) in found.items():
            assert many <= 2 * few, kind
