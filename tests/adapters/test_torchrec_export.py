"""From plans to TorchRec's and back, and what is refused on the way."""

import sys
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from dmp_cases import Model
from plan_cases import machine
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner.planners import (
    validate_modules_inclusion_in_sharding_plan,
    validate_rank_assignment,
)
from torchrec.distributed.planner.types import Topology as TorchRecTopology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec_cases import plan_of_all, shard, table

from placer import AccessCdf, Plan, Profile, Shard, Table, TableProfile, Topology
from placer.adapters.torchrec import (
    document,
    from_sharding_plan,
    parts_of,
    split_tables,
    to_sharding_plan,
)
from placer.adapters.torchrec.read import topology_of
from placer.errors import BackendError, PlanError, PlanMismatchError
from placer.plan.verify import violations
from placer.topology.devices import Gpu, Host

META = torch.device("meta")


def model_for(*tables: Table) -> Any:
    return Model(tables, META)


def env_of(ranks: int) -> ShardingEnv:
    return ShardingEnv.from_local(ranks, 0)


def plan_for(own: Table, *shards: Shard, gpus: int = 2, hosts: int = 1) -> Plan:
    servers = sum("host:1" in shard.devices for shard in shards)
    return Plan((own,), machine(gpus, hosts, servers=servers), shards)


def of_t(start: int, stop: int, *gpus: str, **more: Any) -> Shard:
    """Rows of table t with all of its columns."""
    return shard("t", (start, stop), (0, 8), *gpus, **more)


def converted(plan: Plan, ranks: int = 2, **more: Any) -> Any:
    return to_sharding_plan(plan, model_for(*plan.tables), env_of(ranks), **more)


def exported(plan: Plan, **more: Any) -> Any:
    model = split_tables(model_for(*plan.tables), plan, staged_as=more.get("staged_as"))
    return to_sharding_plan(plan, model, env_of(len(plan.topology.gpus)), **more)


class TestExport:
    def test_every_kind_in_torchrecs_words(self) -> None:
        plan = plan_of_all()
        found = exported(plan).plan["ebc.placed_tables"]
        kinds = {name: (own.sharding_type, own.compute_kernel) for name, own in found.items()}
        assert kinds == {
            "whole": ("table_wise", "fused"),
            "rows": ("row_wise", "fused"),
            "columns": ("column_wise", "fused"),
            "replicated": ("data_parallel", "dense"),
            "split__hot": ("table_wise", "fused"),
            "split__cold": ("row_wise", "fused_uvm"),
            "ranked__ranked": ("row_wise", "fused_uvm_caching"),
            "grid": ("grid_shard", "fused"),
        }
        assert found["columns"].ranks == [1, 0]
        assert found["replicated"].sharding_spec is None
        assert found["grid"].ranks == [0, 1, 0, 1]
        assert found["ranked__ranked"].cache_params.load_factor == 4 / 17
        rows = found["rows"].sharding_spec.shards
        assert [own.shard_sizes for own in rows] == [[21, 8], [20, 8]]
        assert [str(own.placement) for own in rows] == ["rank:0/cpu", "rank:1/cpu"]

    def test_hot_rows_of_several_gpus_are_one_table(self) -> None:
        own = table("t", 12)
        hot_rows = (of_t(0, 2, "gpu:0"), of_t(2, 4, "gpu:1"))
        cold_rows = of_t(4, 12, "gpu:1", lookup="uva")
        hot, cold = parts_of(plan_for(own, *hot_rows, cold_rows), own)
        assert (hot.name, hot.start, hot.stop, hot.sharding.kind) == ("t__hot", 0, 4, "row_wise")
        assert (cold.name, cold.start, cold.stop) == ("t__cold", 4, 12)
        assert cold.sharding.kind == "table_wise"

    def test_a_stride_that_takes_one_row_is_a_block(self) -> None:
        own = table("t", 2)
        parts = [of_t(row, row + 1, f"gpu:{row}") for row in range(2)]
        strided = [replace(part, rows=(row, 2, 2)) for row, part in enumerate(parts)]
        plans = (exported(plan_for(own, *cut)).plan for cut in (strided, parts))
        found, expected = (plan["ebc"]["t"] for plan in plans)
        assert found.sharding_type == expected.sharding_type == "row_wise"
        assert found.sharding_spec == expected.sharding_spec

    def test_torchrecs_own_checks_pass(self) -> None:
        plan = plan_of_all()
        model = split_tables(model_for(*plan.tables), plan)
        found = to_sharding_plan(plan, model, env_of(2), device="cuda")
        validate_modules_inclusion_in_sharding_plan(found, model, get_default_sharders())
        validate_rank_assignment(found, TorchRecTopology(world_size=2, compute_device="cuda"))

    def test_devices_are_numbered_on_their_host(self) -> None:
        own = table("t", 10)
        plan = plan_for(own, of_t(0, 10, "gpu:3"), hosts=2)
        found = converted(plan, 4, device="cuda")
        (only,) = found.plan["ebc"]["t"].sharding_spec.shards
        assert str(only.placement) == "rank:3/cuda:1"

    def test_the_prefetching_pipeline_is_passed_on(self) -> None:
        found = exported(plan_of_all(), prefetch_pipeline=True).plan["ebc.placed_tables"]
        assert found["ranked__ranked"].cache_params.prefetch_pipeline is True

    def test_a_document_is_the_same_for_a_trainer_without_placer(self) -> None:
        plan = plan_of_all()
        found = document(plan, module="ebc.placed_tables", device="cpu")
        # TorchRec's own serializer knows no caches.
        serialized = exported(plan)._serialize()["plan"]["ebc.placed_tables"]
        for name, own in found["plan"]["ebc.placed_tables"].items():
            own.pop("cache_params", None)
            assert own == serialized[name]
        assert found["remapped"] == {
            "split__hot": {"table": "split", "ranks": [0, 6]},
            "split__cold": {"table": "split", "ranks": [6, 50]},
            "ranked__ranked": {"table": "ranked", "ranks": [0, 33]},
        }

    @pytest.mark.parametrize(("staged_as", "kernel"), [("uva", "fused_uvm"), ("cached", None)])
    def test_staged_rows_are_read_as_one_says(self, staged_as: Any, kernel: str | None) -> None:
        own = table("t", 10)
        plan = plan_for(own, of_t(0, 2), of_t(2, 10, lookup="staged", staging_rows=4))
        found = exported(plan, staged_as=staged_as).plan["ebc.placed_tables"]
        cold = found["t__cold"]
        assert cold.compute_kernel == (kernel or "fused_uvm_caching")
        if staged_as == "cached":
            assert cold.cache_params.load_factor == 0.5

    def test_an_empty_table_is_one_of_a_row(self) -> None:
        own = table("t", 0)
        plan = plan_for(own, of_t(0, 0))
        model = model_for(replace(own, rows=1))
        (only,) = to_sharding_plan(plan, model, env_of(2)).plan["ebc"]["t"].sharding_spec.shards
        assert only.shard_sizes == [1, 8]


OWN = table("t", 10)
WHOLE = of_t(0, 10)
REFUSED = {
    "row blocks of 7, 3 rows": [of_t(0, 7, "gpu:0"), of_t(7, 10, "gpu:1")],
    "the i-th on the i-th GPU": [of_t(0, 5, "gpu:1"), of_t(5, 10, "gpu:0")],
    # On a part of the ranks.
    "row blocks of 5, 5 rows": [of_t(0, 5, "gpu:0"), of_t(5, 10, "gpu:0")],
    r"rows \[0, 10, 2\] are strided": [
        replace(of_t(0, 10, f"gpu:{n}"), rows=(n, 10, 2)) for n in range(2)
    ],
    "say staged_as='uva'": [of_t(0, 10, lookup="staged")],
    "served by host:1": [of_t(0, 10, "host:1", lookup="host")],
    r"rows \[2, 10, 1\] are int8, and in TorchRec all rows are float32": [
        of_t(0, 2),
        replace(of_t(2, 10, lookup="cached", cache_rows=1), dtype="int8"),
    ],
    "different ways": [
        of_t(0, 2),
        of_t(2, 5, lookup="uva"),
        of_t(5, 10, lookup="cached", cache_rows=1),
    ],
    "column slices of 2, 6": [shard("t", (0, 10), (0, 2)), shard("t", (0, 10), (2, 8), "gpu:1")],
}


class TestRefusals:
    @pytest.mark.parametrize("words", REFUSED)
    def test_what_torchrec_cannot_run(self, words: str) -> None:
        plan = plan_for(OWN, *REFUSED[words])
        assert violations(plan) == []
        with pytest.raises(PlanMismatchError, match=f"table 't'.*{words}"):
            converted(plan)
        with pytest.raises(PlanMismatchError, match=f"table 't'.*{words}"):
            document(plan)

    def test_rows_on_a_drive(self) -> None:
        """Even where staged rows may be read in another way, as a host may lack their memory."""
        hot, cold = of_t(0, 2), of_t(2, 10, lookup="staged")
        cold = replace(cold, memory="ssd", staging_rows=4)
        plan = plan_for(OWN, hot, cold)
        plan = replace(plan, topology=plan.topology.with_memory(ssd="1MiB"))
        assert violations(plan) == []
        with pytest.raises(PlanMismatchError, match=r"'t': rows \[2, 10, 1\] are on a drive"):
            document(plan, staged_as="uva")

    def test_ranks_without_rows(self) -> None:
        own = table("t", 5)
        blocks = [of_t(2 * n, min(5, 2 * n + 2), f"gpu:{n}") for n in range(3)]
        plan = plan_for(own, *blocks, gpus=4)
        with pytest.raises(PlanMismatchError, match="'t': of blocks of 2 of its 5 rows rank 3"):
            converted(plan, 4)
        # A narrower table is served with it, unless both are fetched ahead.
        tables, cached = (own, table("w", 8, 4)), {"lookup": "cached", "cache_rows": 1}
        shards = [replace(block, memory="dram", **cached) for block in blocks]
        shards += [shard("w", (2 * n, 2 * n + 2), (0, 4), f"gpu:{n}", **cached) for n in range(4)]
        plan = Plan(tables, machine(4), tuple(shards))
        assert converted(plan, 4).plan
        with pytest.raises(PlanMismatchError, match="'t': of blocks of 2 of its 5 rows rank 3"):
            converted(plan, 4, prefetch_pipeline=True)

    def test_plans_that_are_not_the_models_or_not_sound(self) -> None:
        half, every = replace(OWN, dtype="float16"), plan_of_all()
        by_other = model_for(OWN)
        _apply_optimizer_in_backward(RowWiseAdagrad, by_other.ebc.parameters(), {"lr": 0.1})
        twice = nn.ModuleDict({"a": model_for(OWN), "b": model_for(OWN)})
        ranks = env_of(2)
        for plan, model, env, message in (
            (plan_for(OWN, WHOLE), by_other, ranks, r"'t' is updated by sgd .* by RowWiseAdagrad"),
            (plan_for(OWN, WHOLE), twice, ranks, "two tables of the model are called 't'"),
            (plan_for(half, WHOLE), model_for(half), ranks, "'t' is float16 in the plan"),
            (every, model_for(*every.tables), ranks, r"'split__hot'.*call split_tables"),
            (every, model_for(OWN), env_of(4), "for 2 GPUs, but there are 4 ranks"),
        ):
            with pytest.raises(PlanMismatchError, match=message):
                to_sharding_plan(plan, model, env)
        with pytest.raises(PlanError, match="rank 9 is covered 0 times"):
            converted(plan_for(OWN, of_t(0, 9)))

    def test_row_wise_adagrad_by_strips_unless_one_says_so(self) -> None:
        own = table("t", 10, 8, "rowwise_adagrad")
        plan = plan_for(own, shard("t", (0, 10), (0, 4)), shard("t", (0, 10), (4, 8), "gpu:1"))
        with pytest.raises(PlanMismatchError, match="'t' is column-wise"):
            converted(plan)
        assert converted(plan, state_by_column_slice=True).plan

    def test_replicas_with_their_optimizer_in_the_backward_pass(self) -> None:
        plan = plan_for(OWN, of_t(0, 10, "gpu:0", "gpu:1"))
        model = model_for(OWN)
        assert to_sharding_plan(plan, model, env_of(2)).plan
        _apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})
        with pytest.raises(PlanMismatchError, match=r"'t' is replicated .* would not be trained"):
            to_sharding_plan(plan, model, env_of(2))

    def test_tables_that_differ_are_all_named(self) -> None:
        tables = tuple(table(name, 10) for name in "abc")
        plan = Plan(tables, machine(2), tuple(shard(name, (0, 10), (0, 8)) for name in "abc"))
        model = model_for(table("a", 10), table("b", 11), table("d", 10))
        with pytest.raises(PlanMismatchError) as caught:
            to_sharding_plan(plan, model, env_of(2))
        message = str(caught.value)
        assert "'b' is 10 × 8 in the plan but 11 × 8 in the model" in message
        assert "'c' is in the plan but not in the model" in message
        assert "'d' is in the model but not in the plan" in message

    def test_hosts_of_other_sizes_than_the_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        blocks = [of_t(5 * n, 5 * n + 5, f"gpu:{n}") for n in range(2)]
        plan = Plan((OWN,), machine(2, 2, servers=1), tuple(blocks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert converted(plan, 4).plan["ebc"]["t"].sharding_type == "table_row_wise"
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with pytest.raises(PlanMismatchError, match="takes to be 4 ranks in a row"):
            converted(plan, 4)

    def test_without_torchrec_it_says_how_to_install_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "torchrec", None)
        with pytest.raises(BackendError, match=r"pip install 'embedding-placer\[torchrec\]'"):
            to_sharding_plan(plan_of_all(), None, None)

    def test_a_library_of_another_torch_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken:
            @staticmethod
            def find_spec(name: str, path: object = None, target: object = None) -> None:
                if name == "torchrec":
                    raise OSError("fbgemm_gpu_py.so: undefined symbol: _ZN3c10")

        monkeypatch.delitem(sys.modules, "torchrec")
        monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
        with pytest.raises(BackendError, match=r"undefined symbol.*install it with: pip install"):
            to_sharding_plan(plan_of_all(), None, None)


class TestReading:
    def test_a_plan_comes_back(self) -> None:
        plan = plan_of_all()
        model = split_tables(model_for(*plan.tables), plan)
        sharding_plan = to_sharding_plan(plan, model, env_of(2))
        back = from_sharding_plan(sharding_plan, model, plan.topology, 8, optimizer="sgd")
        assert sorted(back.shards, key=str) == sorted(plan.shards, key=str)
        found, expected = ({t.name: (t.rows, t.dim) for t in one.tables} for one in (back, plan))
        assert found == expected
        assert back.hot_ids["split"].tolist() == plan.hot_ids["split"].tolist()
        assert back.batch_size == 8
        assert violations(back) == []

    def test_with_a_profile_it_has_buffers(self) -> None:
        plan, model = plan_for(OWN, WHOLE), model_for(OWN)
        profile = Profile((TableProfile(OWN, AccessCdf.zipf(10, 1.0)),))
        found = to_sharding_plan(plan, model, env_of(2))
        back = from_sharding_plan(found, model, plan.topology, 64, profile=profile)
        (only,) = back.shards
        assert only.buffer_bytes > 0
        assert back.tables == (OWN,)
        other = Profile((TableProfile(replace(OWN, rows=9), AccessCdf.zipf(9, 1.0)),))
        with pytest.raises(PlanMismatchError, match="10 × 8 in the model but 9 × 8"):
            from_sharding_plan(found, model, plan.topology, profile=other)

    def test_the_machine_may_be_torchrecs(self) -> None:
        plan = plan_for(OWN, of_t(0, 10, "gpu:1"))
        model = model_for(OWN)
        theirs = TorchRecTopology(world_size=2, hbm_cap=1 << 20, compute_device="cuda")
        back = from_sharding_plan(to_sharding_plan(plan, model, env_of(2)), model, theirs)
        assert isinstance(back.topology, Topology)
        assert [gpu.memory_bytes for gpu in back.topology.gpus] == [1 << 20] * 2
        assert back.shards == plan.shards

    @pytest.mark.parametrize("compute_device", ["cuda", "cpu"])
    def test_a_machine_of_torchrecs_is_measured_per_second(self, compute_device: str) -> None:
        per_ms = ("hbm_mem_bw", "ddr_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw", "inter_host_bw")
        speeds = dict(zip(per_ms, range(1, 6), strict=True))
        made = topology_of(TorchRecTopology(4, compute_device, 1 << 20, 1 << 21, 0, 2, **speeds))
        on_cpu = compute_device == "cpu"
        memory, speed = (1 << 21, 2e3) if on_cpu else (1 << 20, 1e3)
        assert made.gpus == tuple(
            Gpu(f"gpu:{rank}", f"host:{rank // 2}", memory, speed, 0.0) for rank in range(4)
        )
        host_memory = 0 if on_cpu else 2 << 21
        assert made.hosts == tuple(Host(f"host:{host}", host_memory, 2e3) for host in range(2))
        of_links = {"pcie": 3e3, "nvlink": 4e3, "network": 2 * 5e3}
        assert [link.bytes_per_s for link in made.links] == [of_links[k.kind] for k in made.links]
        assert (len(made.links), made.emulated) == (10, on_cpu)

    def test_plans_that_torchrec_would_train_wrong(self) -> None:
        plan = plan_for(OWN, of_t(0, 5, "gpu:0"), of_t(5, 10, "gpu:1"))
        model = model_for(OWN)
        found = to_sharding_plan(plan, model, env_of(2))
        blocks = found.plan["ebc"]["t"].sharding_spec.shards
        blocks[0].placement, blocks[1].placement = blocks[1].placement, blocks[0].placement
        with pytest.raises(PlanMismatchError, match="the i-th on the i-th GPU"):
            from_sharding_plan(found, model, plan.topology)
        blocks[0].placement, blocks[1].placement = blocks[1].placement, blocks[0].placement
        blocks[0].shard_sizes, blocks[1].shard_sizes = [7, 8], [3, 8]
        blocks[1].shard_offsets = [7, 0]
        with pytest.raises(PlanMismatchError, match="row blocks of 7, 3"):
            from_sharding_plan(found, model, plan.topology)

    def test_what_no_plan_can_say(self) -> None:
        plan = plan_for(OWN, of_t(0, 10))
        model = model_for(OWN)
        found = to_sharding_plan(plan, model, env_of(2))
        found.plan["ebc"]["t"].compute_kernel = "key_value"
        with pytest.raises(PlanMismatchError, match="kernel 'key_value'"):
            from_sharding_plan(found, model, plan.topology)
        with pytest.raises(PlanMismatchError, match="'u' of 'ebc' is not in the sharding plan"):
            from_sharding_plan(found, model_for(table("u", 3)), plan.topology)
        found.plan["ebc"]["t"].compute_kernel = "fused"
        on_one = replace(plan.topology, gpus=plan.topology.gpus[1:], links=plan.topology.links[1:2])
        moved = to_sharding_plan(plan_for(OWN, of_t(0, 10, "gpu:1")), model, env_of(2))
        with pytest.raises(PlanMismatchError, match="on rank 1, but"):
            from_sharding_plan(moved, model, on_one)
        model.ebc.embedding_bag_configs()[0].data_type = DataType.INT8
        with pytest.raises(PlanMismatchError, match="'t' is of INT8; plans know float32"):
            from_sharding_plan(found, model, plan.topology)

    def test_unpooled_tables(self) -> None:
        own = table("t", 10, pooling="none")
        plan = plan_for(own, of_t(0, 10, "gpu:1"))
        sizes = {"num_embeddings": 10, "embedding_dim": 8}
        config = EmbeddingConfig(name="t", feature_names=["t_0"], **sizes)
        model = EmbeddingCollection(tables=[config], device=META)
        found = to_sharding_plan(plan, model, env_of(2))
        assert list(found.plan) == [""]
        told = {"optimizer": "sgd", "pooling_factors": {"t_0": 3.0}}
        back = from_sharding_plan(found, model, plan.topology, **told)
        assert back.shards == plan.shards
        (feature,) = back.tables[0].features
        assert (feature.pooling, feature.pooling_factor) == ("none", 3.0)


def test_parts_of_a_table_that_is_not_cut_are_the_table() -> None:
    own = table("t", 10)
    (part,) = parts_of(plan_for(own, of_t(0, 10)), own)
    assert (part.name, part.remapped, part.start, part.stop) == ("t", False, 0, 10)
