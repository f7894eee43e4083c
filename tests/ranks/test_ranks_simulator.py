"""The simulator counts what two ranks send each other, and what each of them finds in HBM."""

from dataclasses import replace

import numpy as np
import torch
from executor_cases import machine
from fast_and_full import fewer
from ranks_cases import every_placement
from ranks_launcher import run
from simulator_cases import random_chunk, replay, simulated_rates

from placer.data.log import Chunk
from placer.executor import BagBatch, look_ahead
from placer.executor.distributed import ShardedEmbeddings
from placer.executor.local.hit_rates import HitRates
from placer.plan.plan import Plan
from placer.simulator.counts import EXCHANGE_KINDS
from placer.simulator.replay import ReplayOptions
from placer.tables import OPTIMIZERS
from placer.topology.topology import Topology
from placer.training.batches import slice_chunk

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
    volumes = model.comm_stats()
    rates = model.hit_rates()
    model.close()
    sent = {kind: (v.to_others_bytes, v.to_self_bytes) for kind, v in volumes.items()}
    return sent, rates


def test_two_ranks_send_and_find_what_the_simulator_counts() -> None:
    rng = np.random.default_rng(8)
    cases = {}
    for number, optimizer in enumerate(OPTIMIZERS[: fewer(len(OPTIMIZERS), 2)]):
        plan = two_gpus(every_placement(optimizer))
        plan = replace(plan, exchange_dtype=("float16", "bfloat16", "float32")[number % 3])
        batches = [random_chunk(plan, rng, most_samples=9) for _ in range(5)]
        for backend in ("torch", "tiered"):
            ahead = (number + (backend == "torch")) % 2 == 0
            cases[f"{optimizer} {backend}"] = plan, batches, backend, ahead
    jobs = [(name, counted, case) for name, case in cases.items()]
    outcomes = run(2, jobs)
    for name, (plan, batches, backend, ahead) in cases.items():
        found, totals = replay(plan, batches, ReplayOptions(2, look_ahead=ahead))
        for rank, (sent, rates) in enumerate(outcomes.of(name)):
            for kind in EXCHANGE_KINDS:
                if backend == "tiered" and kind == "rows":
                    continue  # It sends a number for each lookup.
                own = totals.sent[kind][rank]
                expected = int(own.sum() - own[rank]), int(own[rank])
                assert sent.get(kind, (0, 0)) == expected, f"{name}, rank {rank}: {kind}"
            if rates is not None:
                assert simulated_rates(found, totals, rank) == rates, f"{name}, rank {rank}"
