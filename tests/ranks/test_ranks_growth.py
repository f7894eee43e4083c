"""The Python work of a step grows with the tables and no faster, however they are placed."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plan_cases import machine
from ranks_launcher import leave_group

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
    seen = 0

    def count_call(_: object, event: str, __: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        step(embeddings, count, 1)
    finally:
        sys.setprofile(None)
    embeddings.close()
    return seen


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/m", rank=rank, world_size=2)
    torch.save(
        {kind: [calls(kind, count) for count in (20, 40)] for kind in KINDS}, f"{folder}/{rank}.pt"
    )
    leave_group()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_one_process(kind: str) -> None:
    assert calls(kind, 40) <= 2 * calls(kind, 20)


def test_a_step_on_two_ranks(tmp_path: Path) -> None:
    mp.start_processes(_rank, (str(tmp_path),), 2, start_method="forkserver")
    for rank in range(2):
        for kind, (few, many) in torch.load(tmp_path / f"{rank}.pt").items():
            assert many <= 2 * few, kind
