"""A plan with a host without a GPU in a model of one's own: two ranks train it, a third serves."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from apply_plan_cases import (
    EPS,
    LR,
    TABLES,
    assert_equal_models,
    batch,
    clicks,
    loss_of,
    optimizers,
    plan_for,
    trained_whole,
)
from plan_cases import machine
from ranks_launcher import Job, Outcomes, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from placer import Feature, Plan, Shard, Table, apply_plan, remove_plan
from placer.errors import BackendError, DataError, PlanMismatchError
from placer.executor import serve_tables
from placer.growing import Growing
from placer.storage.checkpoint import load_tables, save_tables

TRAINERS, WORLD, STEPS = 2, 3, 6
PLANNED = {"rowwise_adagrad": "rowwise_adagrad", "adagrad": "sgd", "adam": "adam"}
"""Optimizers, and those of their plans."""

pytestmark = pytest.mark.slow


def served_plan(optimizer: str) -> Plan:
    """Hot rows on both GPUs, cold ones on the server; one table is there alone, one has none there.

    Shards are not in the order of tables.
    """
    plan = plan_for("host", optimizer=optimizer)
    shards = []
    for shard in plan.shards:
        if shard.table == "query":
            shard = replace(shard, devices=("host:1",), memory="dram", lookup="host")
        elif shard.memory == "hbm":
            start, stop, _ = shard.rows
            shards.append(replace(shard, rows=(start + 1, stop, 2), devices=("gpu:1",)))
            shard = replace(shard, rows=(start, stop, 2))
        elif shard.table != "last":
            shard = replace(shard, devices=("host:1",))
        shards.append(shard)
    return replace(plan, topology=machine(servers=1), shards=tuple(reversed(shards)))


def trains(rank: int, world: int, optimizer: str, planned: str, folder: Path) -> Any:
    """What a model, and then a second one that resumes, has learned.

    The server's plan has the optimizer that was planned with.
    """
    trainers = dist.new_group(list(range(TRAINERS)))
    plan = served_plan(planned)
    if rank >= TRAINERS:
        serve_tables(plan)
        return serve_tables(plan)
    model = clicks()
    if rank:  # The first rank's weights are those of all.
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    chosen: Any = None if planned == optimizer else optimizer
    applied = apply_plan(model, plan, chosen, lr=LR, eps=EPS)
    with pytest.raises(PlanMismatchError, match="host:1, without a GPU, serve the tables of one"):
        copy.deepcopy(model)(batch(0))
    wrapped = DistributedDataParallel(model, process_group=trainers)
    dense = torch.optim.SGD(wrapped.parameters(), lr=LR)
    for step in range(STEPS):
        if step == STEPS // 2:
            save_tables(folder, applied)
            applied.close()
            model, old = clicks(), model
            model.scale, model.out = old.scale, old.out
            applied = apply_plan(model, plan, chosen, lr=9.0, eps=EPS)
            load_tables(folder, applied)
            wrapped = DistributedDataParallel(model, process_group=trainers)
            dense = torch.optim.SGD(wrapped.parameters(), lr=LR)
        dense.zero_grad()
        loss_of(wrapped, step * TRAINERS + rank).backward()
        dense.step()
        with torch.no_grad():
            loss_of(wrapped, rank)
        bad = batch(0)
        bad["item"][-1] = 40 if rank else 0
        with pytest.raises(DataError, match=r"id 40|refused their batches"):
            model(bad)
    state = model.state_dict()
    trained = remove_plan(model)
    with pytest.raises(BackendError, match="connections to other ranks are closed"):
        applied.state_dict()
    return state, model.state_dict(), trained


def accumulates(rank: int, world: int) -> Any:
    """Updates of tables with an optimizer's step, after two backward passes each."""
    plan = served_plan("adagrad")
    if rank >= TRAINERS:
        return serve_tables(plan)
    model = clicks()
    applied = apply_plan(model, plan, lr=LR, eps=EPS)
    dense = torch.optim.SGD(model.parameters(), lr=0.0)
    applied.update_with(dense)
    for step in range(4):
        loss_of(model, step * TRAINERS + rank).backward()
        if step % 2:
            dense.step()
            dense.zero_grad()
    weights = {name: applied.tables[name].weight() for name in applied.tables}
    applied.close()
    return weights


def grows(rank: int, world: int, with_server: bool) -> Any:
    """Keys of a module's table, whose rows are on the server, or on the first GPU's host."""
    how = {"items": Growing(11)}
    tables = (Table("items", 12, 4, features=(Feature("items"),), optimizer="adagrad"),
              Table("out", 9, 4, features=(Feature("out"),), optimizer="adagrad"))  # fmt: skip
    home = "host:1" if with_server else "gpu:0"
    cold = Shard("items", (0, 12, 1), (0, 4), (home,), "dram", "host")
    hot = Shard("out", (0, 9, 1), (0, 4), ("gpu:1",), "hbm", "device")
    plan = Plan(tables, machine(servers=1), (cold, hot), growing=how)
    if rank >= TRAINERS:
        return serve_tables(plan, backend="torch") if with_server else None

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.items, self.out = (nn.EmbeddingBag(n, 4, mode="sum") for n in (12, 9))

        def forward(self, keys: Tensor) -> Tensor:
            return self.items(keys) * self.out(keys % 9) + self.items(keys + 1)

    model = Sums()
    applied = apply_plan(model, plan, lr=LR, backend="torch")
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(2 * step + rank)
        keys = torch.randint(30, (5, 2), generator=generator) * 10**12
        model(keys).sum().backward()
    counts = applied.key_counts()["items"]
    assert counts.evicted > 0
    keys, rows = applied.live_keys("items")
    found = counts, keys, rows, remove_plan(model), model.state_dict()
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("servers")
    jobs: list[Job] = [(kind, trains, (kind, PLANNED[kind], folder / kind)) for kind in PLANNED]
    jobs += [("accumulates", accumulates, ()), ("grows", grows, (True,))]
    return run(WORLD, jobs)


@pytest.mark.parametrize("kind", PLANNED)
def test_a_model_of_ones_own_trains_with_a_server_as_in_one_process(
    kind: str, outcomes: Outcomes
) -> None:
    whole = trained_whole(kind, STEPS, TRAINERS)
    first, second, _ = outcomes.of(kind)
    for state, after, optimizer in (first, second):
        for found in (state, after):
            model = clicks()
            model.load_state_dict(found)
            assert_equal_models(model, whole)
        assert optimizer["pages.exp_avg" if kind == "adam" else "pages.sum"].shape[0] == 30
    for name, value in first[2].items():
        assert torch.equal(second[2][name], value)


def test_gradients_accumulate(outcomes: Outcomes) -> None:
    whole = clicks()
    _, tables = optimizers(whole, "adagrad")
    for step in range(4):
        (sum(loss_of(whole, step * TRAINERS + rank) for rank in range(TRAINERS)) / 2).backward()
        if step % 2:
            tables.step()
            tables.zero_grad()
    first, second, _ = outcomes.of("accumulates")
    assert first.keys() == {table.name for table in TABLES}
    for name, weight in first.items():
        assert torch.equal(second[name], weight)
        torch.testing.assert_close(weight, getattr(whole, name).weight.detach(), atol=1e-5, rtol=0)


def test_tables_that_grow_keep_the_bits_that_they_have_without_a_server(
    outcomes: Outcomes,
) -> None:
    alone = run(TRAINERS, [("grows", grows, (False,))]).of("grows")
    for found, expected in zip(outcomes.of("grows")[:TRAINERS], alone, strict=True):
        for one, other in zip(found[3:], expected[3:], strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])
