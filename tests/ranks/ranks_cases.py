"""Plans, batches and comparisons for tests of many ranks."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from executor_cases import (
    EPS,
    LR,
    DoubleModel,
    contents,
    machine,
    placed,
    placements,
    plan_of,
    random_batch,
    shard,
)
from torch import Tensor

from placer.errors import PlacerError
from placer.executor import BagBatch, UnplacedEmbeddings
from placer.executor.distributed import ShardedEmbeddings, distributed_id_order
from placer.executor.id_order import IdRange
from placer.plan.plan import Plan
from placer.storage import tensor_rows
from placer.storage.checkpoint.table_blocks import NamedTables, rounds_of
from placer.tables import Feature, Table

POOLINGS = ("sum", "mean", "max", "none")
SIZES = (5, 0, 7, 3)
"""Samples of each rank: they need not be equal, and one has none."""


def table_with(
    optimizer: str, poolings: Sequence[str] = POOLINGS, *, name: str = "t", rows: int = 61
) -> Table:
    """A table with a feature for each pooling."""
    features = tuple(Feature(f"{name}.{pooling}", pooling=pooling) for pooling in poolings)
    return Table(name, rows, 8, "float32", optimizer, features)


def plan_of_plans(plans: Sequence[Plan]) -> Plan:
    """One plan with the tables of several."""
    return Plan(
        tuple(table for plan in plans for table in plan.tables),
        machine(),
        tuple(shard for plan in plans for shard in plan.shards),
        {name: order for plan in plans for name, order in plan.row_order.items()},
        {name: ids for plan in plans for name, ids in plan.hot_ids.items()},
    )


def every_placement(optimizer: str, poolings: Sequence[str] = POOLINGS, rows: int = 61) -> Plan:
    """A table for each placement there is, in one plan."""
    plans = [
        placements(table_with(optimizer, poolings, name=name, rows=rows))[name]
        for name in placements(table_with(optimizer))
    ]
    return plan_of_plans(plans)


def large_plan(gpus: int) -> Plan:
    """Tables cut in every way that solvers cut them over all GPUs of a large machine."""
    hot = 20_000
    tables = [
        Table(name, 2_000_000, 64, "float32", "adagrad", (Feature(name),))
        for name in ("hot rows everywhere", "strides", "blocks", "grid", "whole")
    ]
    everywhere, strides, blocks, grid, whole = tables
    ids = [f"gpu:{i}" for i in range(gpus)]
    rows = whole.rows
    shards = [shard(everywhere, (0, hot, 1), on=tuple(ids)), shard(whole, on=ids[-1])]
    for i, gpu in enumerate(ids):
        low, high = rows * i // gpus, rows * (i + 1) // gpus
        shards += [
            shard(everywhere, (hot + i, rows, gpus), on=gpu, memory="dram", lookup="staged"),
            shard(strides, (i, rows // 2, gpus), on=gpu),
            shard(strides, (rows // 2 + i, rows, gpus), on=gpu, memory="dram"),
            shard(blocks, (low, high, 1), on=gpu),
        ]
        half, strip = i % (gpus // 2), i // (gpus // 2)
        cols = (32 * strip, 32 * strip + 32)
        shards.append(shard(grid, (half, rows, gpus // 2), cols, on=gpu))
    listed = np.random.default_rng(0).permutation(rows)[:hot]
    order = {everywhere.name: listed, grid.name: listed}
    return plan_of(tables, shards, order, machine(gpus, hbm_bytes=2**36, hosts=gpus // 8))


def batches_of(
    tables: Sequence[Table], world: int, step: int, *, weighted: bool = False, longest: int = 5
) -> list[BagBatch]:
    """The batch of each rank; who has how many samples changes from step to step."""
    return [
        random_batch(
            tables,
            SIZES[(rank + step) % len(SIZES)],
            seed=1000 * step + rank,
            weighted=weighted,
            longest=longest,
        )
        for rank in range(world)
    ]


def joined(batches: Sequence[BagBatch], features: int) -> BagBatch:
    """All ranks' samples as one batch."""
    ids, lengths, weights = [], [], []
    for feature in range(features):
        for batch in batches:
            size = batch.batch_size
            offsets = batch.offsets[feature * size : (feature + 1) * size + 1]
            start, stop = (int(offsets[0]), int(offsets[-1])) if size else (0, 0)
            ids.append(batch.ids[start:stop])
            lengths.append(offsets.diff())
            if batch.weights is not None:
                weights.append(batch.weights[start:stop])
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    size = sum(batch.batch_size for batch in batches)
    return BagBatch(torch.cat(ids), offsets, size, torch.cat(weights) if weights else None)


def own_part(
    whole: Mapping[str, Tensor], batches: Sequence[BagBatch], poolings: Sequence[str], rank: int
) -> dict[str, Tensor]:
    """A rank's part of outputs (or gradients) over all ranks' samples, by feature."""
    parts = {}
    for index, (name, pooling) in enumerate(zip(whole, poolings, strict=True)):
        rows = []
        for batch in batches:
            size = batch.batch_size
            ends = batch.offsets[[index * size, (index + 1) * size]]
            rows.append(int(ends[1] - ends[0]) if pooling == "none" else size)
        first = sum(rows[:rank])
        parts[name] = whole[name][first : first + rows[rank]]
    return parts


def sharded(plan: Plan, **options: object) -> ShardedEmbeddings:
    return ShardedEmbeddings(plan, **{"lr": LR, "eps": EPS, "seed": 3, **options})


def close(actual: Tensor, expected: Tensor, what: str, scale: float = 1) -> None:
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=1e-4 * scale,
        atol=2e-5 * scale,
        msg=lambda text: f"{what}: {text}",
    )


def all_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: float = 1
) -> None:
    """What is expected by each name is there by that name."""
    for name, value in expected.items():
        close(found[name], value, name, scale)


def backward(outputs: Mapping[str, Tensor], scale: float = 1) -> None:
    """Of the sum of all outputs."""
    torch.autograd.backward([output.sum() * scale for output in outputs.values()])


def backward_of_squares(outputs: Mapping[str, Tensor]) -> None:
    torch.autograd.backward([output.square().sum() for output in outputs.values()])


def train_step(
    model: ShardedEmbeddings, rank: int, batches: Sequence[BagBatch], seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One step with random gradients; this rank's outputs, and the gradients of all samples."""
    features = [feature for table in model.plan.tables for feature in table.features]
    poolings = [feature.pooling for feature in features]
    dims = [table.dim for table in model.plan.tables for _ in table.features]
    whole = joined(batches, len(features))
    size = whole.batch_size
    generator = torch.Generator().manual_seed(seed)
    gradients = {}
    for index, (feature, dim) in enumerate(zip(features, dims, strict=True)):
        ends = whole.offsets[[index * size, (index + 1) * size]]
        rows = int(ends[1] - ends[0]) if feature.pooling == "none" else size
        gradients[feature.name] = torch.randn((rows, dim), generator=generator)
    outputs = model(batches[rank])
    own = own_part(gradients, batches, poolings, rank)
    torch.autograd.backward(list(outputs.values()), [own[name] for name in outputs])
    return {name: output.detach() for name, output in outputs.items()}, gradients


def trains_alike(
    rank: int,
    world: int,
    plan: Plan,
    steps: int,
    scale: float = 1,
    group: "dist.ProcessGroup | None" = None,
    **options: object,
) -> None:
    """Train by the plan and in float64 without one, and compare all that there is.

    The first rank does so for all, so that the others need not train the float64 model too. The
    group is that of the ranks that train.
    """
    model = sharded(plan, **options)
    state = model.state_dict()
    (optimizer,) = {table.optimizer for table in plan.tables}
    weights = {table.name: state[f"{table.name}.weight"] for table in plan.tables}
    reference = DoubleModel(plan.tables, weights, optimizer)
    features = sum(len(table.features) for table in plan.tables)
    for step in range(steps):
        batches = batches_of(plan.tables, world, step)
        outputs, gradients = train_step(model, rank, batches, step)
        parts: list[dict[str, Any]] | None = [{} for _ in batches] if rank == 0 else None
        arrays = {name: output.numpy() for name, output in outputs.items()}  # Which pickle fast.
        dist.gather_object(arrays, parts, group=group)
        if parts is None:
            continue
        expected = reference.step(
            joined(batches, features),
            {name: gradient / world for name, gradient in gradients.items()},
        )
        for name, output in expected.items():
            found = np.concatenate([part[name] for part in parts])
            close(torch.from_numpy(found), output.detach(), f"step {step}, feature {name!r}", scale)
    if rank == 0:
        equals_double(model, reference, scale)
    else:
        model.state_dict(), model.optimizer_state_dict()
    model.close()


def equals_double(model: ShardedEmbeddings, expected: DoubleModel, scale: float = 1) -> None:
    """Weights and optimizer state of every table."""
    weights, state = model.state_dict(), model.optimizer_state_dict()
    for table in model.plan.tables:
        weight = expected.weights[table.name].detach()
        close(weights[f"{table.name}.weight"], weight, f"weights of {table.name!r}", scale)
        states = expected.states(table.name)
        own = {key for key in state if key.startswith(f"{table.name}.")}
        assert own == {f"{table.name}.{name}" for name in states}
        for name, expected_state in states.items():
            close(state[f"{table.name}.{name}"], expected_state, f"{name} of {table.name!r}", scale)
    assert state.get("updates", expected.updates) == expected.updates


def weighted_bags(rank: int, world: int, plan: Plan) -> None:
    """Weights scale rows under every pooling, and get the gradients of their own rank's loss."""
    model = sharded(plan)
    weights = {name.removesuffix(".weight"): value for name, value in model.state_dict().items()}
    reference = UnplacedEmbeddings(plan.tables, weights=weights)
    trainers = reference.optimizers(lr=LR, eps=EPS)
    features = sum(len(table.features) for table in plan.tables)
    for step in range(3):
        batches = batches_of(plan.tables, world, step, weighted=True)
        whole = joined(batches, features)
        for batch in (*batches, whole):
            batch.weights.requires_grad_()
        _, gradients = train_step(model, rank, batches, step)
        found = reference(whole)
        for trainer in trainers:
            trainer.zero_grad()
        torch.autograd.backward(list(found.values()), [gradients[name] / world for name in found])
        for trainer in trainers:
            trainer.step()
        expected = []
        before = sum(batch.batch_size for batch in batches[:rank])
        for index in range(features):
            first = index * whole.batch_size + before
            start, stop = whole.offsets[[first, first + batches[rank].batch_size]].tolist()
            expected.append(whole.weights.grad[start:stop] * world)
        close(batches[rank].weights.grad, torch.cat(expected), f"step {step}: gradient of weights")
    state = model.state_dict()
    for name, weight in reference.table_weights().items():
        close(state[f"{name}.weight"], weight, f"weights of {name!r}")
    model.close()


def passes_refused(rank: int, world: int, plan: Plan, is_alone: bool = False) -> None:
    """A second pass through one lookup, and one whose rows others have updated; then it goes on."""
    model = placed(plan) if is_alone else sharded(plan)
    batch = random_batch(plan.tables, seed=rank, weighted=True)

    def loss() -> Tensor:
        return sum(output.sum() for output in model(batch).values())

    once = loss()
    once.backward(retain_graph=True)
    with pytest.raises(PlacerError, match="a second backward pass through one forward pass"):
        once.backward()
    joined = loss() + loss()
    joined.backward()  # Without gradients of weights, these are two updates.
    batch.weights.requires_grad_()
    both = loss(), loss()
    both[0].backward()
    with pytest.raises(PlacerError, match="another backward pass has updated them since"):
        both[1].backward()
    loss().backward()
    assert model.id_order().update_count() == 5
    model.close()


def bytes_sent(rank: int, world: int, plan: Plan, samples: int, bag: int) -> dict[str, int]:
    """Bytes that a rank sends to others in a step, by table, each in a plan of its own.

    Each bag has as many rows of each residue modulo its length, and all ranks have the same.
    What only says how much comes is left out.
    """
    found = {}
    for table in plan.tables:
        own = [shard for shard in plan.shards if shard.table == table.name]
        model = sharded(plan_of([table], own, topology=plan.topology))
        ids = torch.arange(samples * bag) % table.rows
        batch = BagBatch(ids, torch.arange(0, samples * bag + 1, bag), samples)
        model.reset_comm_stats()
        backward(model(batch))
        found[table.name] = sum(
            volume.to_others_bytes
            for kind, volume in model.comm_stats().items()
            if kind not in ("header", "replica counts")
        )
        model.close()
    return found


def held_cells(rank: int, world: int, optimizer: str) -> list[tuple[str, str, list[int], tuple]]:
    """What a rank says that it holds; what is written there is what the whole tensors have then."""
    plan = every_placement(optimizer)
    model = sharded(plan)
    train_step(model, rank, batches_of(plan.tables, world, 0), 0)
    before = contents(model)
    held = []
    order = model.id_order()
    for tensor in order.tensors():
        table, name, half = tensor.table.name, tensor.name, tensor.table.rows // 2
        for start, stop in ((0, half), (half, tensor.table.rows)):
            block = IdRange(tensor, start, stop)
            order.write(block, before[f"{table}.{name}"][start:stop] * 2)
            for target, places, _ in order._parts(tensor.table, block.ids, order._is_written):
                cols = (0, 1) if tensor.is_per_row else target.cols
                held.append((table, name, (start + places).tolist(), cols))
    after = contents(model)
    for key in before.keys() - {"updates"}:
        assert torch.equal(after[key], before[key] * 2)
    return held


def saved_cells(rank: int, world: int, optimizer: str) -> tuple[int, list[float]]:
    """How many cells all tensors have, and those that this rank sends when they are saved.

    Each cell has a number of its own as its value, so that what is sent tells which cells it is.
    """
    order = sharded(every_placement(optimizer)).id_order()
    whole, cells = {}, 0
    for tensor in order.tensors():
        stop = cells + torch.Size(tensor.shape).numel()
        values = torch.arange(cells, stop, dtype=torch.float32).view(tensor.shape)
        whole[tensor.table.name, tensor.name] = values
        order.write(IdRange(tensor, 0, tensor.shape[0]), values)
        cells = stop
    order.synchronize()
    sent: list[float] = []
    read_rows = distributed_id_order.read_rows

    def recorded(*arguments) -> torch.Tensor:
        rows = read_rows(*arguments)
        sent.extend(rows.flatten().tolist())
        return rows

    named = NamedTables(order, {(t.table.name, t.name): t for t in order.tensors()})
    with (
        mock.patch.object(tensor_rows, "BLOCK_BYTES", 512),  # So that tables have several blocks.
        mock.patch.object(distributed_id_order, "read_rows", recorded),
    ):
        for each in rounds_of([named]):
            block, name = order.fetch(each.requests), each.names[rank]
            if block is not None:
                request = each.requests[rank]
                assert torch.equal(block, whole[name][request.start : request.stop])
    return cells, sent
