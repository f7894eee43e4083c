"""What ranks do in the tests of checkpoints in torch.distributed.checkpoint's format."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from executor_cases import contents, placements, plan_of, shard
from ranks_cases import batches_of, plan_of_plans, sharded, table_with, train_step
from torch import Tensor, nn

from placer import apply_plan
from placer.adapters.pytorch import applied_plan
from placer.errors import CheckpointError
from placer.executor import PlacedEmbeddings
from placer.executor.distributed import distributed_id_order
from placer.plan.plan import Plan
from placer.storage import tensor_rows
from placer.storage.checkpoint import load_model, save_model
from placer.tables import OPTIMIZERS, Feature, Table

BLOCK_BYTES = 600
"""So small that tables of 61 rows of 8 numbers become four blocks."""

PLACEMENTS = (
    *("hbm", "host", "split 50%", "row-wise", "hot, then row-wise", "column-wise", "grid"),
    *("crossing cuts", "replicas", "cold rows staged"),
)


@contextmanager
def small_blocks() -> Iterator[None]:
    with patch.object(tensor_rows, "BLOCK_BYTES", BLOCK_BYTES):
        yield


def turned(plan: Plan, by: int) -> Plan:
    """The same tables, each placed as another one was."""
    plans = [
        placements(table)[PLACEMENTS[(number + by) % len(PLACEMENTS)]]
        for number, table in enumerate(plan.tables)
    ]
    return plan_of_plans(plans)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def every_optimizer(first: int) -> Plan:
    """A table for each placement, each with the optimizer after that of the one before."""
    tables = [
        table_with(OPTIMIZERS[(first + number) % 4], ("sum", "mean"), name=name)
        for number, name in enumerate(PLACEMENTS)
    ]
    return turned(plan_of(tables), 0)


def through_files(rank: int, world: int, first: int, folder: Path) -> dict[str, Tensor] | None:
    """Saved by four ranks, by two and by one; loaded by all of these under other plans."""
    plan = every_optimizer(first)
    model = sharded(plan)
    train_step(model, rank, batches_of(plan.tables, world, 0), 0)
    expected = contents(model)
    others = {"seed": 8}
    fours = sharded(turned(plan, 5), **others)
    group = torch.distributed.new_group([0, 1])
    with small_blocks():
        save_model(folder / "4", model, {"epoch": torch.tensor(3)})
        assert load_model(folder / "4", fours)["epoch"] == 3
        same(contents(fours), expected)
        if rank < 2:
            twos = sharded(turned(plan, 3), process_group=group, **others)
            load_model(folder / "4", twos)
            same(contents(twos), expected)
            save_model(folder / "2", twos)
        if rank == 0:
            one = PlacedEmbeddings(turned(plan, 1), **others)
            load_model(folder / "2", one)
            same(contents(one), expected)
            save_model(folder / "1", one)
        torch.distributed.barrier()
        again = sharded(turned(plan, 7), **others)
        load_model(folder / "1", again)
        same(contents(again), expected)
    return expected if rank == 0 else None


def half_precision(rank: int, world: int, folder: Path) -> None:
    """The bits of float16 and bfloat16 arrive as they are."""
    tables = [
        replace(table_with("adagrad", ("sum",), name=f"{dtype} {how}"), dtype=dtype)
        for dtype in ("float16", "bfloat16")
        for how in ("cut", "copied")
    ]
    shards = [
        shard(table, (i, 61, 3), (c, c + 4), on=f"gpu:{(i + c) % 4}")
        for table in tables[::2]
        for i in range(3)
        for c in (0, 4)
    ]
    everywhere = tuple(f"gpu:{i}" for i in range(4))
    plan = plan_of(tables, shards + [shard(table, on=everywhere) for table in tables[1::2]])
    model = sharded(plan, rounding="stochastic")
    train_step(model, rank, batches_of(tables, world, 0), 0)
    other = sharded(plan_of(tables), seed=7, rounding="stochastic")
    with small_blocks():
        save_model(folder, model)
        load_model(folder, other)
    same(contents(other), contents(model))
    assert contents(model)["updates"] == 1


def applied(rank: int, world: int, folder: Path) -> dict[str, Tensor]:
    """A plain model whose tables `apply_plan` spread over the ranks."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.EmbeddingBag(61, 8, mode="sum"), nn.Linear(8, 2))
    table = Table("0", 61, 8, optimizer="adam", features=(Feature("f"),))
    apply_plan(model, plan_of([table], [shard(table, (i, 61, 4), on=f"gpu:{i}") for i in range(4)]))
    model(torch.arange(12).view(4, 3) + rank).sum().backward()
    with small_blocks():
        save_model(folder, model)
        expected = {**model.state_dict(), **applied_plan(model).optimizer_state_dict()}
        model(torch.arange(6).view(2, 3)).sum().backward()
        load_model(folder, model)
    same({**model.state_dict(), **applied_plan(model).optimizer_state_dict()}, expected)
    return expected


def bounded(rank: int, world: int, folder: Path) -> dict[str, int]:
    """No rank has more than a block of a table beside its own rows, and little is sent."""
    plan = every_optimizer(0)
    model, whole = sharded(plan), sharded(plan_of(plan.tables))
    fetched: list[int] = []
    read: list[int] = []
    id_order = distributed_id_order.DistributedIdOrder
    fetch, read_rows = id_order.fetch, distributed_id_order.read_rows

    def counted_fetch(self, requests):  # type: ignore[no-untyped-def]
        found = fetch(self, requests)
        fetched.append(0 if found is None else found.nbytes)
        return found

    def counted_read(*arguments):  # type: ignore[no-untyped-def]
        found = read_rows(*arguments)
        read.append(found.nbytes)
        return found

    with (
        small_blocks(),
        patch.object(id_order, "fetch", counted_fetch),
        patch.object(distributed_id_order, "read_rows", counted_read),
    ):
        model.reset_comm_stats()
        save_model(folder / "cut", model)
        sent = model.comm_stats()["state"].to_others_bytes
        whole.reset_comm_stats()
        save_model(folder / "whole", whole)
        stays = whole.comm_stats()["state"].to_others_bytes
    return {
        "largest block": max(fetched),
        "largest read": max(read),
        "blocks": sum(size > 0 for size in fetched),
        "sent": sent,
        "sent of whole tables": stays,
    }


def full_disk(rank: int, world: int, folder: Path) -> str:
    """One rank cannot write; nobody hangs, all are told, and the next save works."""
    plan = every_optimizer(1)
    model = sharded(plan)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with small_blocks():
        if rank == world - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        with pytest.raises(CheckpointError) as error:
            save_model(folder, model)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        torch.distributed.barrier()
        assert not folder.exists()
        save_model(folder, model)
        with pytest.raises(CheckpointError, match="is there already"):
            save_model(folder, model)
    return str(error.value)


def failing_rows(rank: int, world: int, folder: Path) -> str:
    """A rank that fails for another reason goes on bringing rows to the others."""
    plan = every_optimizer(2)
    model = sharded(plan)
    broken = patch.object(torch, "save", side_effect=MemoryError("no memory"))
    here = broken if rank == 1 else nullcontext()
    with small_blocks(), here, pytest.raises(MemoryError) as error:
        save_model(folder, model)
    assert not folder.exists()
    return str(error.value)
