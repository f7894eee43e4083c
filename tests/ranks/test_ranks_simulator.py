"""The simulator counts what two ranks send each other, and what each of them finds in HBM."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from executor_cases import machine
from fast_and_full import fewer
from ranks_cases import every_placement
from ranks_launcher import Outcomes, run
from simulator_cases import random_chunk, replay, simulated_rates
from test_ranks_servers import on_servers

from placer.data.log import Chunk, slice_chunk
from placer.executor import BagBatch, look_ahead
from placer.executor.distributed import ShardedEmbeddings, serve_tables
from placer.executor.local.hit_rates import HitRates
from placer.growing import Growing, KeyCounts
from placer.plan.plan import Plan
from placer.simulator.counts import EXCHANGE_KINDS
from placer.simulator.replay import ReplayOptions, Simulator
from placer.tables import OPTIMIZERS
from placer.topology.topology import Topology

Counted = tuple[dict[str, tuple[int, int]], HitRates | None]


def two_gpus(plan: Plan) -> Plan:
    """The same plan on two GPUs, which are the two ranks: where it used others, on one of them."""
    topology: Topology = machine(2)
    shards = []
    for shard in plan.shards:
        devices = [
            device if device.startswith("host") else f"gpu:{int(device[4:]) % 2}"
            for device in shard.devices
        ]
        shards.append(replace(shard, devices=tuple(dict.fromkeys(devices))))
    return replace(plan, topology=topology, shards=tuple(shards))


def counts_of(model: ShardedEmbeddings) -> Counted:
    """Bytes to others and to itself of each kind, and lookups by where their rows were."""
    volumes = model.comm_stats()
    sent = {kind: (v.to_others_bytes, v.to_self_bytes) for kind, v in volumes.items()}
    return sent, model.hit_rates()


def counted(
    rank: int, world: int, plan: Plan, batches: list[Chunk], backend: str, ahead: bool
) -> Counted:
    """What this rank sends and finds while it trains on its part of each batch."""
    model = ShardedEmbeddings(plan, backend=backend)
    model.reset_comm_stats()
    parts = [
        slice_chunk(chunk, chunk.samples * rank // world, chunk.samples * (rank + 1) // world)
        for chunk in batches
    ]
    bags = (BagBatch.from_chunk(part, model.feature_names) for part in parts)
    for batch in look_ahead(bags, model) if ahead else bags:
        outputs = model(batch)
        torch.autograd.backward([output.sum() for output in outputs.values()])
    counts = counts_of(model)
    model.close()
    return counts


class Kept(ShardedEmbeddings):
    """What a server had sent and found when it closed its tables."""

    counts: Counted

    def close(self) -> None:
        Kept.counts = counts_of(self)
        super().close()


def counted_with_servers(rank: int, world: int, trainers: int, plan: Plan, *more: Any) -> Counted:
    """The same with servers, whose tables nobody else gets to see."""
    if rank < trainers:
        return counted(rank, trainers, plan, *more)
    module = importlib.import_module(serve_tables.__module__)
    with mock.patch.object(module, "ShardedEmbeddings", Kept):
        serve_tables(plan, backend=more[1])
    return Kept.counts


def results_of(outcomes: Outcomes) -> dict[str, list[Any]]:
    """What each job gave on each rank."""
    return {name: outcomes.of(name) for name in outcomes}


def agree(
    outcomes: Mapping[str, Sequence[Counted]],
    cases: Mapping[str, tuple[Plan, list[Chunk], str, bool]],
    processes: int | None,
) -> None:
    """Check what each rank sends, to itself too, and how many lookups it finds in HBM."""
    for name, (plan, batches, backend, ahead) in cases.items():
        found, totals = replay(plan, batches, ReplayOptions(processes, look_ahead=ahead))
        for rank, (sent, rates) in enumerate(outcomes[name]):
            for kind in EXCHANGE_KINDS:
                if backend == "tiered" and kind == "rows":
                    continue  # It sends a number for each lookup.
                own = totals.sent[kind][rank]
                expected = int(own.sum() - own[rank]), int(own[rank])
                assert sent.get(kind, (0, 0)) == expected, f"{name}, rank {rank}: {kind}"
            if rates is not None:
                assert simulated_rates(found, totals, rank) == rates, f"{name}, rank {rank}"


def cases_of(
    seed: int, dtypes: Sequence[str], placed: Callable[[Plan], Plan]
) -> dict[str, tuple[Plan, list[Chunk], str, bool]]:
    """Every placement with each optimizer, its backend, look-ahead and types by turns."""
    rng = np.random.default_rng(seed)
    cases = {}
    for number, optimizer in enumerate(OPTIMIZERS[: fewer(len(OPTIMIZERS), 1)]):
        plan = placed(every_placement(optimizer))
        plan = replace(plan, exchange_dtype=dtypes[number % 3])
        batches = [random_chunk(plan, rng, most_samples=9) for _ in range(5)]
        backend = ("torch", "tiered")[(number + seed) % 2]
        cases[f"{optimizer} {backend}"] = plan, batches, backend, number < 2
    return cases


@pytest.mark.parametrize(
    ("trainers", "servers"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_servers_send_and_pool_what_the_simulator_counts(trainers: int, servers: int) -> None:
    dtypes = "float32", "float16", "bfloat16"
    cases = cases_of(9, dtypes, lambda plan: on_servers(plan, trainers, servers))
    jobs = [(name, counted_with_servers, (trainers, *case)) for name, case in cases.items()]
    agree(results_of(run(trainers + servers, jobs)), cases, None)


def test_two_ranks_send_and_find_what_the_simulator_counts() -> None:
    cases = cases_of(8, ("float16", "bfloat16", "float32"), two_gpus)
    jobs = [(name, counted, case) for name, case in cases.items()]
    agree(results_of(run(2, jobs)), cases, 2)


def keyed(chunk: Chunk, rng: np.random.Generator, distinct: int) -> Chunk:
    """The same bags with keys of any int64, some of which come often."""
    features = {
        name: replace(bags, ids=_scattered((distinct * rng.random(bags.ids.size) ** 2).astype(int)))
        for name, bags in chunk.features.items()
    }
    return replace(chunk, features=features)


def _scattered(numbers: np.ndarray) -> np.ndarray:
    known = np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 1000)
    known[:3] = -(2**63), 2**63 - 1, 0
    return known[numbers]


def counted_with_keys(
    rank: int, world: int, plan: Plan, batches: list[Chunk], backend: str, ahead: bool
) -> tuple[Counted, dict[str, KeyCounts]]:
    """The same of tables that grow, and what their keys did."""
    found: dict[str, KeyCounts] = {}

    class Kept(ShardedEmbeddings):
        def close(self) -> None:
            found.update(self.key_counts())
            super().close()

    with mock.patch.object(sys.modules[__name__], "ShardedEmbeddings", Kept):
        return counted(rank, world, plan, batches, backend, ahead), found


@pytest.mark.slow
def test_two_ranks_give_rows_to_keys_as_the_simulator_does() -> None:
    rng = np.random.default_rng(7)
    hows = [
        Growing(60),
        Growing(60, eviction="lru"),
        Growing(60, ttl=2),
        Growing(60, admission=2),
        Growing(60, 3, "lru", 4),
    ]
    cases = {}
    for number, optimizer in enumerate(("rowwise_adagrad", "adam")):
        plan = two_gpus(every_placement(optimizer))
        growing = {
            table.name: hows[(number + place) % len(hows)]
            for place, table in enumerate(plan.tables)
        }
        plan = replace(plan, growing=growing)
        drawn = (random_chunk(plan, rng, most_samples=9) for _ in range(16))
        batches = [keyed(chunk, rng, 400) for chunk in drawn]
        ahead = number % 2 == 0
        cases[optimizer] = plan, batches, "torch", ahead
    outcomes = run(2, [(name, counted_with_keys, case) for name, case in cases.items()])
    for name, (plan, batches, _, ahead) in cases.items():
        simulator = Simulator(plan, ReplayOptions(2, look_ahead=ahead))
        for _ in simulator.run(batches):
            pass
        expected = simulator.key_counts()
        assert min(one.evicted + one.expired for one in expected.values()) > 20
        for _, counts in outcomes.of(name):
            assert counts == expected
    agree({name: [own for own, _ in outcomes.of(name)] for name in cases}, cases, 2)
