"""Random small models, machines and constraints, to plan by TorchRec's planner and by ours."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from problem_cases import zipf_table
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import CustomTopologyData
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from cost_models.torchrec.estimates import ProfileCacheStatistics

SHARDERS: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
OPTIMIZERS = (
    None,
    torch.optim.SGD,
    torch.optim.Adagrad,
    RowWiseAdagrad,
    torch.optim.Adam,
)
TYPES = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise",
         "grid_shard", "data_parallel")  # fmt: skip
BYTES = {DataType.FP32: 4, DataType.FP16: 2, DataType.BF16: 2}


@dataclass(frozen=True, slots=True)
class RandomCase:
    """A model on the meta device, a machine, constraints and a batch size."""

    model: nn.Module
    topology: Any
    constraints: dict[str, Any]
    batch_size: int
    prefetch: bool

    def planner(self, kind: Any, **more: Any) -> Any:
        """A planner of a kind for this case, with no memory reserved."""
        return kind(
            topology=self.topology,
            batch_size=self.batch_size,
            constraints=self.constraints,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=[],
            debug=False,
            **more,
        )

    def own_planner(self, proposals: int = 500) -> Any:
        """TorchRec's planner with its default proposers, of which the grid search has a limit."""
        proposers = [
            GridSearchProposer(max_proposals=proposals),
            GreedyProposer(),
            GreedyProposer(use_depth=False),
            UniformProposer(),
        ]
        return self.planner(EmbeddingShardingPlanner, proposer=proposers)


def random_case(seed: int) -> RandomCase:
    """The case of a seed."""
    draw = random.Random(seed)
    ranks = draw.randint(1, 8)
    local = ranks // 2 if ranks % 2 == 0 and draw.random() < 0.3 else ranks
    optimizer = draw.choice(OPTIMIZERS)
    batch_size = draw.choice((1, 64, 512, 4096))
    prefetch = draw.random() < 0.3
    tables = [_table(draw, number) for number in range(draw.randint(1, 8))]
    model = nn.ModuleDict()
    pooled = [own for own in tables if own["pooled"]]
    others = [own for own in tables if not own["pooled"]]
    for own in others:
        # Tables of a collection without pooling have one dimension.
        own["config"]["embedding_dim"] = others[0]["config"]["embedding_dim"]
    if pooled:
        model["bags"] = EmbeddingBagCollection(
            [EmbeddingBagConfig(**own["config"]) for own in pooled], device=torch.device("meta")
        )
    if others:
        model["rows"] = EmbeddingCollection(
            [EmbeddingConfig(**own["config"]) for own in others], device=torch.device("meta")
        )
    if optimizer is not None:
        for parameter in model.parameters():
            parameter._optimizer_classes = [optimizer]  # type: ignore[attr-defined]
    constraints = {}
    for own in tables:
        constraint = _constraint(draw, own, batch_size * ranks, prefetch)
        if constraint is not None:
            constraints[own["config"]["name"]] = constraint
    total = sum(own["bytes"] for own in tables)
    return RandomCase(model, _machine(draw, ranks, local, total), constraints, batch_size, prefetch)


def _table(draw: random.Random, number: int) -> dict[str, Any]:
    rows, dim = int(10 ** draw.uniform(0, 6.3)), 4 * draw.randint(1, 64)
    kind = draw.choice(list(BYTES))
    features = draw.choice((1, 1, 1, 2, 3))
    return {
        "pooled": draw.random() < 0.8,
        "bytes": rows * dim * BYTES[kind],
        "config": {
            "name": f"t{number}",
            "num_embeddings": rows,
            "embedding_dim": dim,
            "feature_names": [f"f{number}_{feature}" for feature in range(features)],
            "data_type": kind,
        },
    }


def _constraint(draw: random.Random, own: dict[str, Any], samples: int, prefetch: bool) -> Any:
    config = own["config"]
    factors = [draw.choice((0.5, 1.0, 10.0, 50.0)) for _ in config["feature_names"]]
    more: dict[str, Any] = {}
    if draw.random() < 0.15:
        more["sharding_types"] = draw.sample(TYPES[:-1], draw.randint(1, 3))
        if not own["pooled"]:
            more["sharding_types"].append("table_wise")
    if draw.random() < 0.15:
        more["min_partition"] = draw.choice([n for n in (4, 16, 32, 64) if n <= 4 or n <= 64])
    if draw.random() < 0.5:
        stats = None
        if draw.random() < 0.7:
            profile = zipf_table(
                config["name"], config["num_embeddings"], config["embedding_dim"], exponent=1.05
            )
            stats = ProfileCacheStatistics(profile, samples)
        factor = draw.choice((None, None, 0.1, 0.5))
        more["cache_params"] = CacheParams(
            load_factor=factor, stats=stats, prefetch_pipeline=prefetch
        )
        if draw.random() < 0.3:
            more["compute_kernels"] = ["fused_uvm_caching"]
    elif draw.random() < 0.3:
        more["compute_kernels"] = draw.sample(["fused", "fused_uvm", "dense"], 2)
    if not more and draw.random() < 0.5:
        return None
    return ParameterConstraints(pooling_factors=factors, **more)


def _machine(draw: random.Random, ranks: int, local: int, total: int) -> Any:
    hbm = int(total / ranks * 10 ** draw.uniform(-1, 0.7)) + (1 << 22)
    ddr = int(total / ranks * 10 ** draw.uniform(-0.2, 1.5)) + (1 << 20)
    custom = None
    if draw.random() < 0.2:
        caps = [max(1 << 20, int(hbm * draw.uniform(0.5, 1.5))) for _ in range(ranks)]
        custom = CustomTopologyData({"hbm_cap": caps, "ddr_cap": [ddr] * ranks}, ranks)
    return Topology(
        world_size=ranks,
        local_world_size=local,
        compute_device="cuda",
        hbm_cap=hbm,
        ddr_cap=ddr,
        custom_topology_data=custom,
    )


def rated(planner: Any, plan: Sequence[Any] | None = None) -> float:
    """Time of the slowest rank of a planner's best plan, in ms, by TorchRec's estimates."""
    options = planner._best_plan if plan is None else plan
    return float(NoopPerfModel(planner._topology).rate(options))
