"""Plans that TorchRec's own planner made, imported and replayed by the simulator."""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import simulator_reference
import torch
from simulator_cases import random_chunk, replay
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.types import TopologyFactory, TrainerConfig
from torchrec.distributed.types import CacheParams
from torchrec.optim import RowWiseAdagrad

from placer import Plan
from placer.adapters.torchrec import from_sharding_plan
from placer.simulator.replay import ReplayOptions

pytestmark = pytest.mark.filterwarnings("ignore")

LOAD_FACTOR = 0.1
SIZES = {"cached": (3_000, 16), "in_place": (400, 16), "in_hbm": (300, 8), "cut": (900, 8)}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # TorchRec's planner logs pages.
    yield
    logging.disable(logging.NOTSET)


def imported(gpus: int) -> Plan:
    """What TorchRec's planner says of a cached, an unmanaged, a fused and a row-wise table."""
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name]
            )
            for name, (rows, dim) in SIZES.items()
        ],
        device=torch.device("meta"),
    )
    for parameter in ebc.parameters():
        parameter._optimizer_classes = [RowWiseAdagrad]
    model = torch.nn.ModuleDict({"ebc": ebc})
    cache = CacheParams(load_factor=LOAD_FACTOR)
    kinds: dict[str, tuple[str, str, Any]] = {
        "cached": ("table_wise", "fused_uvm_caching", cache),
        "in_place": ("table_wise", "fused_uvm", None),
        "in_hbm": ("table_wise", "fused", None),
        "cut": ("row_wise", "fused_uvm_caching", cache),
    }
    machine = TopologyFactory.create_topology(
        TrainerConfig(world_size=gpus, local_world_size=gpus, hbm_cap_bytes=1 << 26)
    )
    planner = EmbeddingShardingPlanner(
        topology=machine,
        batch_size=64,
        constraints={
            name: ParameterConstraints(
                sharding_types=[sharding], compute_kernels=[kernel], cache_params=params
            )
            for name, (sharding, kernel, params) in kinds.items()
        },
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    made = planner.plan(model, sharders)
    return from_sharding_plan(made, model, machine, 64)


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_gpu_reads_what_torchrec_put_there(gpus: int) -> None:
    plan = imported(gpus)
    chunk = random_chunk(plan, np.random.default_rng(gpus), most_samples=200)
    found, totals = replay(plan, [chunk], ReplayOptions())
    expected = simulator_reference.lookups_by_device(plan, chunk)
    seen: Counter[tuple[int, tuple[int, int], str]] = Counter()
    for at, part in enumerate(found.parts):
        seen[part.shard, part.cols, part.device] += int(totals.parts.lookups[at])
    assert seen == {key: sum(reads.values()) for key, reads in expected.items()}


@pytest.mark.parametrize("policy", ["lfu", "rank"])
def test_hits_are_those_of_a_plain_reference(policy: Any) -> None:
    plan = imported(1)
    rng = np.random.default_rng(3)
    batches = [random_chunk(plan, rng, most_samples=100) for _ in range(6)]
    found, totals = replay(plan, batches, ReplayOptions(1, policy))
    expected = simulator_reference.count(plan, batches, policy, plan.pipeline == "look-ahead")
    cached = [at for at, part in enumerate(found.parts) if part.uses_row_cache]
    assert len(cached) == 2
    for at in cached:
        part = found.parts[at]
        key = plan.tables[part.table].name, part.shard, part.cols
        assert expected[key]["hit_lookups"] > 0
        for word in ("lookups", "hit_lookups", "hit_rows", "staged_rows", "in_place_rows"):
            assert getattr(totals.parts, word)[at] == expected[key][word], (key, word)
