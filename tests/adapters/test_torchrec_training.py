"""Exported plans train in TorchRec on two processes; and what TorchRec does to other plans."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist
from dmp_cases import (
    apply_optimizers,
    model_of,
    on_ranks,
    reference,
    replicated_tables,
    sharded,
    train,
)
from plan_cases import machine
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from torchrec_cases import plan_of_all, shard, table

from placer import Plan, Table
from placer.adapters.torchrec import (
    load_optimizer_state_dict,
    load_state_dict,
    merge_optimizer_state_dict,
    merge_state_dict,
    split_tables,
    to_sharding_plan,
)

STEPS = 50

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


PLAN = plan_of_all()


def placed_model() -> Any:
    """The model of the plan's tables, split and sharded."""
    model: Any = split_tables(model_of(PLAN.tables), PLAN)
    apply_optimizers(model, PLAN.tables, replicated_tables(PLAN))
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    return sharded(model, to_sharding_plan(PLAN, model, env))


def trained_by_plan(rank: int) -> dict[str, Any]:
    """Logits, the folded states, offsets of local shards; logits of going on, and of a resume."""
    model, replicated = placed_model(), replicated_tables(PLAN)
    load_state_dict(model, model_of(PLAN.tables).state_dict())
    found: dict[str, Any] = {"logits": train(model, PLAN.tables, rank, STEPS, replicated)}
    state = merge_state_dict(model.state_dict(), model)
    found["state"] = {key: value.clone() for key, value in state.items()}
    found["optimizer"] = merge_optimizer_state_dict(model.fused_optimizer.state_dict(), model)
    found["offsets"] = offsets_of(model)
    found["on"] = train(model, PLAN.tables, rank, 3, replicated)
    saved = [found["state"], found["optimizer"]]
    dist.broadcast_object_list(saved)  # As all ranks read one file.
    resumed = placed_model()
    load_state_dict(resumed, saved[0])
    load_optimizer_state_dict(resumed, saved[1])
    found["resumed"] = train(resumed, PLAN.tables, rank, 3, replicated)
    return found


def offsets_of(model: Any) -> dict[str, Any]:
    return {
        key.split(".")[-2]: [shard.metadata.shard_offsets for shard in value.local_shards()]
        for key, value in model.state_dict().items()
        if hasattr(value, "local_shards")
    }


def test_a_plan_of_every_kind_trains_like_the_unsharded_model(tmp_path: Path) -> None:
    first, second = on_ranks(2, trained_by_plan, tmp_path)
    logits, model = reference(PLAN.tables, 2, STEPS)
    for a, b, expected in zip(first["logits"], second["logits"], logits, strict=True):
        torch.testing.assert_close(torch.cat([a, b]), expected, atol=1e-5, rtol=0)
    # The checkpoint is that of the model before the split, and only rank 0 holds it.
    assert second["state"] == {}
    expected_state = model.state_dict()
    assert first["state"].keys() == expected_state.keys()
    for key, value in first["state"].items():
        torch.testing.assert_close(value, expected_state[key], atol=1e-5, rtol=0)
    shapes = {
        name: tuple(value.shape)
        for slots in first["optimizer"]["state"].values()
        for name, value in slots.items()
    }
    assert shapes == {
        f"{own.name}.momentum1": (own.rows,)
        for own in PLAN.tables
        if own.optimizer == "rowwise_adagrad"
    }
    # Going on from it is as if nothing had been saved.
    for rank in (first, second):
        for a, b in zip(rank["on"], rank["resumed"], strict=True):
            assert a.equal(b)
    # Each part is where the plan says.
    assert first["offsets"] == {
        "whole": [],
        "rows": [[0, 0]],
        "columns": [[0, 8]],
        "split__hot": [[0, 0]],
        "split__cold": [[0, 0]],
        "ranked__ranked": [[0, 0]],
        "grid": [[0, 0], [0, 8]],
    }
    assert second["offsets"]["whole"] == [[0, 0]]
    assert second["offsets"]["columns"] == [[0, 0]]
    assert second["offsets"]["rows"] == [[21, 0]]


Block = tuple[list[int], list[int], int]


def sharding(kind: str, *blocks: Block) -> ShardingPlan:
    spec = None
    if blocks:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=offset, shard_sizes=size, placement=f"rank:{rank}/cpu")
                for offset, size, rank in blocks
            ]
        )
    own = ParameterSharding(
        sharding_type=kind,
        compute_kernel="fused" if blocks else "dense",
        ranks=[rank for _, _, rank in blocks] or [0, 1],
        sharding_spec=spec,
    )
    return ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"t": own})})


TRAPS = {
    "even blocks": sharding("row_wise", ([0, 0], [5, 8], 0), ([5, 0], [5, 8], 1)),
    "uneven blocks": sharding("row_wise", ([0, 0], [7, 8], 0), ([7, 0], [3, 8], 1)),
    "swapped blocks": sharding("row_wise", ([0, 0], [5, 8], 1), ([5, 0], [5, 8], 0)),
    "a subset of ranks": sharding("row_wise", ([0, 0], [10, 8], 0)),
    "an omitted table": sharding("table_wise", ([0, 0], [10, 8], 0)),
    "a replica with its optimizer in the backward pass": sharding("data_parallel"),
    "strips with row-wise Adagrad": sharding(
        "column_wise", ([0, 0], [10, 4], 0), ([0, 4], [10, 4], 1)
    ),
}
"""Plans that no adapter of ours made."""


def tables_of(trap: str) -> list[Table]:
    optimizer = "rowwise_adagrad" if "Adagrad" in trap else "sgd"
    tables = [table("t", 10, 8, optimizer)]
    return [*tables, table("u", 5)] if trap == "an omitted table" else tables


def sprung(rank: int) -> dict[str, Any]:
    """What becomes of each: the error's name, or logits, offsets and whether weights changed."""
    found: dict[str, Any] = {}
    for trap, plan in TRAPS.items():
        tables = tables_of(trap)
        model: Any = model_of(tables)
        whole = {key: value.clone() for key, value in model.state_dict().items()}
        apply_optimizers(model, tables, [])
        try:
            model = sharded(model, plan)
        except Exception as error:
            found[trap] = type(error).__name__
            continue
        load_state_dict(model, whole)
        logits = train(model, tables, rank, 3)
        after = merge_state_dict(model.state_dict(), model)
        name = "ebc.embedding_bags.t.weight"
        found[trap] = logits, offsets_of(model), name in after and after[name].equal(whole[name])
    return found


def test_the_traps_that_the_exporter_guards_are_there(tmp_path: Path) -> None:
    first, second = on_ranks(2, sprung, tmp_path)

    def error_of(trap: str) -> float:
        expected, _ = reference(tables_of(trap), 2, 3)
        both = zip(first[trap][0], second[trap][0], expected, strict=True)
        return max(float((torch.cat([a, b]) - c).abs().max()) for a, b, c in both)

    assert error_of("even blocks") < 1e-6
    # Ids beyond the smaller block read its row 0.
    assert error_of("uneven blocks") > 1e-2
    # The placement is ignored: block i is on rank i.
    assert first["swapped blocks"][1] == {"t": [[0, 0]]}
    assert second["swapped blocks"][1] == {"t": [[5, 0]]}
    assert first["a subset of ranks"] == second["a subset of ranks"] == "IndexError"
    assert first["an omitted table"] == second["an omitted table"] == "KeyError"
    # The table is not trained at all.
    replica = "a replica with its optimizer in the backward pass"
    assert error_of(replica) > 1e-2
    assert first[replica][2]
    assert error_of("strips with row-wise Adagrad") > 1e-2


FEW = [table("few", 4, 8), table("many", 41, 8)]


def with_empty_block(rank: int) -> list[torch.Tensor]:
    """Logits of two tables over three ranks, of one of which the last rank has no rows."""
    shards = [
        shard(name, (start, stop), (0, 8), f"gpu:{number}")
        for name, edges in (("few", (0, 2, 4)), ("many", (0, 14, 28, 41)))
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    plan = Plan(tuple(FEW), machine(3), tuple(shards))
    model: Any = model_of(FEW)
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    apply_optimizers(model, FEW, [])
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    model = sharded(model, to_sharding_plan(plan, model, env))
    load_state_dict(model, whole)
    return train(model, FEW, rank, 3)


def test_a_block_of_no_rows_trains_beside_another_table(tmp_path: Path) -> None:
    logits = on_ranks(3, with_empty_block, tmp_path)
    expected, _ = reference(FEW, 3, 3)
    for step, whole in enumerate(expected):
        together = torch.cat([own[step] for own in logits])
        torch.testing.assert_close(together, whole, atol=1e-6, rtol=0)
