"""Tables that grow in other trainers: TorchRec's MPZCH and NVIDIA's dynamicemb."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cli_cases import fail, succeed
from plan_cases import machine

from placer import Feature, Plan, Shard, Table
from placer.adapters import document_for
from placer.adapters.torchrec import document, managed_collisions, to_sharding_plan
from placer.errors import CapacityError, PlanMismatchError
from placer.growing import Growing

HOW = Growing(capacity=10, eviction="lru")


def _plan(gpus: int = 2, how: Growing = HOW, **shard: Any) -> Plan:
    """A table that grows, in strides over all GPUs, beside a fixed one."""
    item = Table("item", how.rows, 4, features=(Feature("item"), Feature("last")))
    city = Table("city", 5, 4, features=(Feature("city"),))
    placed = {"memory": "hbm", "lookup": "device", **shard}
    strides = tuple(
        Shard("item", (rank, how.rows, gpus), (0, 4), (f"gpu:{rank}",), **placed)
        for rank in range(gpus)
    )
    whole = Shard("city", (0, 5, 1), (0, 4), ("gpu:0",), "hbm", "device")
    return Plan((item, city), machine(gpus), (*strides, whole), growing={"item": how})


def test_torchrecs_arguments() -> None:
    found = document(_plan(), module="m")
    assert found["managed_collisions"] == {
        "item": {
            "name": "item",
            "zch_size": 12,  # Of 11 rows each GPU has up to 6.
            "total_num_buckets": 2,
            "eviction_policy_name": "LRU_EVICTION",
            "eviction_config": {"features": ["item", "last"], "single_ttl": 0},
        }
    }
    own = found["plan"]["m"]["item"]
    assert (own["sharding_type"], own["ranks"]) == ("row_wise", [0, 1])
    assert [s["shard_offsets"] + s["shard_sizes"] for s in own["shards"]] == [
        [0, 0, 6, 4],
        [6, 0, 6, 4],
    ]
    assert "managed_collisions" not in document(_plan().of_tables(["city"]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"eviction": "lfu"}, "grows with eviction lfu, which TorchRec's MPZCH does not have; set"),
        ({"admission": 2}, "grows with admission 2, which TorchRec's MPZCH"),
        ({"ttl": 5}, "grows with ttl 5, which TorchRec's MPZCH"),
    ],
)
def test_rules_that_torchrec_lacks_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanMismatchError, match=message):
        document(_plan(how=replace(HOW, **how)))


def _moved(plan: Plan, *shards: tuple[tuple[int, int, int], tuple[int, int], str]) -> Plan:
    moved = tuple(Shard("item", rows, cols, (gpu,), "hbm", "device") for rows, cols, gpu in shards)
    return replace(plan, shards=(*moved, plan.shards[-1]))


@pytest.mark.parametrize("trainer", ["torchrec", "dynamicemb"])
@pytest.mark.parametrize(
    "shards",
    [
        [((0, 11, 1), (0, 4), "gpu:0")],
        [((0, 11, 1), (0, 2), "gpu:0"), ((0, 11, 1), (2, 4), "gpu:1")],
        [((0, 7, 1), (0, 4), "gpu:0"), ((7, 11, 1), (0, 4), "gpu:1")],
        [
            ((0, 5, 1), (0, 4), "gpu:0"),
            ((5, 10, 1), (0, 4), "gpu:1"),
            ((10, 11, 1), (0, 4), "gpu:1"),
        ],
    ],
)
def test_rows_are_spread_evenly(trainer: str, shards: list[Any]) -> None:
    with pytest.warns(UserWarning, match="growing item are spread evenly over 2 GPUs"):
        found = document_for(trainer, _moved(_plan(), *shards))
    told = [((i, 11, 2), (0, 4), f"gpu:{i}") for i in range(2)]
    assert found == document_for(trainer, _moved(_plan(), *told))
    document_for(
        trainer, _moved(_plan(), ((0, 5, 1), (0, 4), "gpu:1"), ((5, 11, 1), (0, 4), "gpu:0"))
    )
    blocks = [((4 * i, min(29, 4 * i + 4), 1), (0, 4), f"gpu:{i}") for i in range(8)]
    document_for(trainer, _moved(_plan(8, replace(HOW, capacity=28)), *blocks))


@pytest.mark.parametrize("trainer", ["torchrec", "dynamicemb"])
def test_rows_that_cannot_be_spread_are_refused(trainer: str) -> None:
    plan = _moved(_plan(), ((0, 11, 1), (0, 4), "gpu:0"))
    hot, city = replace(plan.shards[0], rows=(0, 3, 1)), plan.shards[1]
    cold = replace(hot, rows=(3, 11, 1), memory="dram", lookup="uva")
    with pytest.raises(PlanMismatchError, match=r"make its shards' rows \[i, 11, 2\] on the i-th"):
        document_for(trainer, replace(plan, shards=(hot, cold, city)))
    full = replace(plan.topology.gpus[1], memory_bytes=90)
    machine_of = replace(plan.topology, gpus=(plan.topology.gpus[0], full))
    with pytest.warns(UserWarning, match="item"), pytest.raises(CapacityError, match="gpu:1 would"):
        document_for(trainer, replace(plan, topology=machine_of))


def test_who_has_no_managed_collisions_refuses() -> None:
    pytest.importorskip("torchrec")
    with pytest.raises(PlanMismatchError, match=r"'item' grows: .*`to_sharding_plan` does not hav"):
        to_sharding_plan(_plan(), torch.nn.Module(), None)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gpus", [1, 2])
def test_torchrec_takes_the_arguments(alone: None, gpus: int) -> None:
    pytest.importorskip("torchrec")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed import types as sharded
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

    cpu = torch.device("cpu")
    found = json.loads(json.dumps(document(_plan(gpus), device="cpu", module="m")))
    options, own = found["managed_collisions"], found["plan"]["m"]["item"]
    rows = options["item"]["zch_size"]
    config = EmbeddingBagConfig(
        name="item", num_embeddings=rows, embedding_dim=4, feature_names=["item", "last"]
    )
    keys = managed_collisions(options, [config], cpu)
    (each,) = keys._managed_collision_modules.values()
    assert keys.table_to_number_buckets() == {"item": gpus}
    shards = [sharded.ShardMetadata(**shard) for shard in own.pop("shards")]
    for shard in shards:  # As TorchRec's sharding does; fails where blocks are not buckets.
        start, size = shard.shard_offsets[0], shard.shard_sizes[0]
        each.rebuild_with_output_id_range((start, start + size), device=cpu)
    if gpus > 1:
        return
    each.reset_inference_mode()  # On CPUs FBGEMM's kernel finds keys, and gives no rows to them.
    bags = EmbeddingBagCollection([config], device=cpu)
    model = torch.nn.ModuleDict({"m": ManagedCollisionEmbeddingBagCollection(bags, keys)})
    batch = KeyedJaggedTensor.from_lengths_sync(
        ["item", "last"], torch.tensor([7, 2**60, 7, 9]), torch.ones(4, dtype=torch.int64)
    )
    before = model["m"](batch)[0].values()
    spec = sharded.EnumerableShardingSpec(shards)
    placed = sharded.EmbeddingModuleShardingPlan(
        item=sharded.ParameterSharding(**own, sharding_spec=spec)
    )
    weight = bags.embedding_bags["item"].weight.detach().clone()
    model = DistributedModelParallel(
        model,
        device=cpu,
        plan=sharded.ShardingPlan({"m": placed}),
        sharders=[ManagedCollisionEmbeddingBagCollectionSharder()],
    )
    (held,) = (v for name, v in model.state_dict().items() if name.endswith("item.weight"))
    held.local_shards()[0].tensor.copy_(weight)
    assert torch.equal(model.module.m(batch)[0].wait().values(), before)


@pytest.mark.parametrize(
    ("shard", "hbm_rows", "caching"),
    [
        ({}, 11, False),
        ({"memory": "dram", "lookup": "uva"}, 0, False),
        ({"memory": "dram", "lookup": "cached", "cache_rows": 2}, 4, True),
    ],
)
def test_dynamicembs_options(shard: dict[str, Any], hbm_rows: int, caching: bool) -> None:
    how = Growing(10, admission=3)
    plan = _plan(how=how, **shard)
    found = document_for("dynamicemb", plan, module="m")
    row_bytes = plan.tables_by_name["item"].bytes_per_row()
    assert found["dynamicemb"] == {
        "item": {
            "num_embeddings": 10,
            "embedding_dim": 4,
            "feature_names": ["item", "last"],
            "options": {
                "index_type": "int64",
                "embedding_dtype": "float32",
                "score_strategy": "LFU",
                "global_hbm_for_values": hbm_rows * row_bytes,
                "caching": caching,
                "admit_strategy": {"FrequencyAdmissionStrategy": {"threshold": 3}},
            },
        }
    }
    assert found["torchrec"] == document(plan.of_tables(["city"]), module="m")
    options = document_for("dynamicemb", _plan())["dynamicemb"]["item"]["options"]
    assert options["score_strategy"] == "STEP"
    assert "admit_strategy" not in options
    # A cache of one of two shards: its two rows, and all five rows of the other.
    item, other, city = _plan(memory="dram", lookup="cached", cache_rows=2).shards
    in_hbm = replace(other, memory="hbm", lookup="device", cache_rows=0)
    mixed = replace(_plan(), shards=(item, in_hbm, city))
    options = document_for("dynamicemb", mixed)["dynamicemb"]["item"]["options"]
    assert (options["caching"], options["global_hbm_for_values"]) == (True, (2 + 5) * row_bytes)


def test_what_dynamicemb_lacks_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="grows with ttl 4, which dynamicemb does not have"):
        document_for("dynamicemb", _plan(how=Growing(10, ttl=4)))
    with pytest.raises(PlanMismatchError, match="no table of the plan grows; export it to torchre"):
        document_for("dynamicemb", _plan().of_tables(["city"]))
    with pytest.raises(PlanMismatchError, match="has its rows in HBM or the host's memory, read"):
        document_for("dynamicemb", _plan(memory="dram", lookup="host"))
    narrow = _plan(memory="dram", lookup="cached", cache_rows=2, dtype="int8")
    for trainer in ("dynamicemb", "torchrec"):
        with pytest.raises(PlanMismatchError, match=r"'item'.*int8.*; plan without --widths"):
            document_for(trainer, narrow)


def test_the_command(tmp_path: Path) -> None:
    _plan().save(tmp_path / "plan.json")
    for trainer in ("torchrec", "dynamicemb"):
        file = tmp_path / f"{trainer}.json"
        succeed("export", str(tmp_path / "plan.json"), "--to", trainer, "-o", str(file))
        assert json.loads(file.read_text()) == document_for(trainer, _plan())
    said = fail("export", str(tmp_path / "plan.json"), "--to", "hugectr", "-o", str(file))
    assert "table 'item' grows" in said
