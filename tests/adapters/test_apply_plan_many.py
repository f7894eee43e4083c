"""Many tables on two ranks: one process group, one exchange, and files for few of them."""

import gc
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import machine
from ranks_launcher import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from placer import Feature, Plan, Shard, Table, apply_plan, remove_plan
from placer.adapters.pytorch.calls import Later
from placer.errors import DataError
from placer.executor.distributed.collectives import Communicator

WORLD, ROWS, DIM = 2, 20, 4


class Many(nn.Module):
    """Bags of means, concatenated; `peek` has a rank see an output before others do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM) for _ in range(count))
        self.out = nn.Linear(count * DIM, 1)
        self.peek: int | None = None
        self.seen: list[type[Tensor]] = []

    def forward(self, ids: Tensor) -> Tensor:
        parts = []
        for number, bag in enumerate(self.bags):
            parts.append(bag(ids[:, number]))
            self.seen.append(type(parts[-1]))
            if number == self.peek:
                assert parts[-1].tolist() == parts[-1].detach().tolist()
        return self.out(torch.cat(parts, 1))


def plan_of(count: int, optimizer: str = "adagrad") -> Plan:
    """Every other table on either GPU."""
    tables = tuple(
        Table(
            f"bags.{i}", ROWS, DIM, optimizer=optimizer, features=(Feature(f"{i}", pooling="mean"),)
        )
        for i in range(count)
    )
    shards = tuple(
        Shard(one.name, (0, ROWS, 1), (0, DIM), (f"gpu:{i % 2}",), "hbm", "device")
        for i, one in enumerate(tables)
    )
    return Plan(tables, machine(), shards)


def ids_of(count: int, step: int, rank: int, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(ROWS, (samples, count, 2), generator=generator)


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return _entries("/proc/self/task"), _entries("/proc/self/fd")


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _counts(rank: int, world: int) -> tuple[Any, Any]:
    """What ranks hold, and how many collectives a step is, by the number of tables."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    found: dict[int, tuple[int, int]] = {}
    calls: dict[int, int] = {}
    for count in (50, 200, 300):
        model = Many(count)
        apply_plan(model, plan_of(count), backend="torch")
        model(ids_of(count, 0, rank, 4)).sum().backward()
        calls[count] = _counted(partial(_step, model, count, rank))
        found[count] = held()
        remove_plan(model)
        del model
        gc.collect()
    return found, calls


def _step(model: Many, count: int, rank: int) -> None:
    model(ids_of(count, 1, rank, 4)).sum().backward()


def _counted(work: Any) -> int:
    """How many collectives a piece of work is."""
    calls = 0
    kept = {name: getattr(Communicator, name) for name in ("exchange", "gather", "total")}

    def counting(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*arguments)

        return call

    try:
        for name, method in kept.items():
            setattr(Communicator, name, counting(method))
        work()
    finally:
        for name, method in kept.items():
            setattr(Communicator, name, method)
    return calls


@pytest.mark.slow
def test_threads_descriptors_and_exchanges_do_not_grow_with_tables() -> None:
    """Also: 300 tables train where a process may have 1,024 descriptors."""
    for found, calls in run(WORLD, [("counts", _counts, ())], timeout_s=60).of("counts"):
        assert found[50] == found[200] == found[300]
        assert len(set(calls.values())) == 1
        assert calls[50] <= 12


def _trains(rank: int, world: int, optimizer: str) -> Any:
    model, count = Many(4), 4
    applied = apply_plan(model, plan_of(count, optimizer), lr=0.05, backend="torch")
    for step in range(4):
        model.peek = step if rank else None  # A rank may look at its outputs when it likes.
        loss = model(ids_of(count, step, rank, 3 + rank)).square().mean()
        if step == 2:  # A call outside of the model's forward pass trains with the others.
            loss = loss + model.bags[1](ids_of(count, 9, rank, 2)[:, 1]).sum()
        loss.backward()
        with torch.no_grad():
            for parameter in model.out.parameters():
                assert parameter.grad is not None
                parameter.grad = None
    assert model.seen[0] is Later
    before = {name: table.weight() for name, table in applied.tables.items()}
    first = 1 if rank else 0
    table = r"calls table 'bags\.{}' to train it"
    with pytest.raises(DataError, match=f"rank 0 {table} where rank 1 {table};".format(0, 1)):
        model.bags[first](torch.tensor([[1]]))
    state = remove_plan(model)
    return model.state_dict(), state, before


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_calls_that_wait_for_one_another_train_as_one_process(optimizer: str) -> None:
    outcomes = run(WORLD, [("trains", _trains, (optimizer,))])
    alone = Many(4)
    applied = apply_plan(alone, plan_of(4, optimizer), lr=0.05, backend="torch")
    for step in range(4):
        losses = []
        for rank in range(WORLD):
            loss = alone(ids_of(4, step, rank, 3 + rank)).square().mean()
            if step == 2:
                loss = loss + alone.bags[1](ids_of(4, 9, rank, 2)[:, 1]).sum()
            losses.append(loss / WORLD)
        torch.stack(losses).sum().backward()
    expected = {name: table.weight() for name, table in applied.tables.items()}
    for after, state, before in outcomes.of("trains"):
        for name, weight in expected.items():
            torch.testing.assert_close(before[name], weight)
            assert torch.equal(after[f"{name}.weight"], before[name])
        for name, values in applied.optimizer_state_dict().items():
            torch.testing.assert_close(state[name], values)


def _goes_on(rank: int, world: int) -> Tensor:
    """Train a table with padding after a first batch with a wrong id in another table."""
    model = Many(2)
    model.bags[1] = nn.Sequential(nn.Embedding(ROWS, DIM, padding_idx=0), nn.Flatten())
    model.out = nn.Linear(3 * DIM, 1)
    names = {"bags.1": "bags.1.0"}
    apply_plan(model, plan_of(2, "sgd"), lr=0.05, names=names, backend="torch")
    with pytest.raises(DataError, match=f"id {ROWS} is not a row|refused their batches"):
        model(torch.tensor([[[ROWS * rank, 1], [0, 2]]]))
    out = model(torch.tensor([[[3, 1], [0, 2]]]))
    out.sum().backward()
    return out.detach()


def test_ranks_go_on_after_a_refused_batch() -> None:
    first, second = run(WORLD, [("goes_on", _goes_on, ())]).of("goes_on")
    assert first.isfinite().all()
    assert second.isfinite().all()


class _Twice(nn.Module):
    """Two tables read the same bags; the ids change in between."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(ROWS, DIM, mode=mode, include_last_offset=True) for _ in range(2)
        )

    def forward(self, ids: Tensor, offsets: Tensor, step: int = 0) -> Tensor:
        first = self.bags[0](ids, offsets)
        if step:
            ids.add_(step).remainder_(ROWS)
        return (first * self.bags[1](ids, offsets)).sum(1)


def _bags(part: int, rank: int) -> tuple[Tensor, Tensor]:
    ids, offsets = ids_of(1, part, rank, 4).flatten(), [0, 1 + part, 4, 8 - rank, 8]
    return ids, torch.tensor(offsets)


def _disagrees(rank: int, world: int) -> None:
    model = _Twice("sum")
    applied = apply_plan(model, plan_of(2, "sgd"), lr=0.1, backend="torch")
    bag, bags = model.bags[0], _bags(0, rank)
    weights = torch.ones(8).requires_grad_(rank == 0)
    words = "rank 0 calls table 'bags.0' to train it and weights where rank 1 calls table 'bags.0' "
    with pytest.raises(DataError, match=f"{words}to train it;"):
        bag(*bags, per_sample_weights=weights)
    applied.tables["bags.0"].set_lr(0.1 + rank)
    words = "table 'bags.0': rank 0 trains with lr=0.1, eps=.* and rank 1 with lr=1.1, eps="
    with pytest.raises(DataError, match=words):
        bag(*bags)
    applied.tables["bags.0"].set_lr(0.1)
    bag(*bags, per_sample_weights=torch.ones(8, requires_grad=True)).sum().backward()
    goes_on = (bag(*bags).sum().backward, partial(bag, *bags))[rank]
    with pytest.raises(DataError, match="rank 0 updates tables where rank 1 calls modules; all"):
        goes_on()


def test_ranks_that_train_other_things_are_refused_and_go_on() -> None:
    run(WORLD, [("disagrees", _disagrees, ())]).of("disagrees")


def _refills(rank: int, world: int, mode: str) -> Any:
    model = _Twice(mode)
    applied = apply_plan(model, plan_of(2, "sgd"), lr=0.1, backend="torch")
    with torch.no_grad():
        read = model(*_bags(0, rank), 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    applied.update_with(optimizer)
    buffers = _bags(0, rank)
    for part in range(2):
        for buffer, values in zip(buffers, _bags(part, rank), strict=True):
            buffer.copy_(values)
        model(*buffers).square().mean().backward()
    optimizer.step()
    return read, model.state_dict()


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_callers_may_change_their_tensors_after_a_call(mode: str) -> None:
    whole = _Twice(mode)
    losses = [whole(*_bags(part, rank)).square().mean() for part in range(2) for rank in range(2)]
    (torch.stack(losses).sum() / WORLD).backward()
    outcomes = run(WORLD, [("refills", _refills, (mode,))]).of("refills")
    for rank, (read, state) in enumerate(outcomes):
        with torch.no_grad():
            torch.testing.assert_close(read, whole(*_bags(0, rank), 1))
        for name, weight in whole.named_parameters():
            torch.testing.assert_close(state[name], weight.detach() - 0.1 * weight.grad)


class _Recomputed(Many):
    """Layers that first read the modules' outputs are computed once more in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        def layers(*parts: Tensor) -> Tensor:
            return torch.cat(parts, 1).sin()

        parts = [bag(ids[:, number]) for number, bag in enumerate(self.bags)]
        return self.out(checkpoint(layers, *parts, use_reentrant=False))


def _recomputes(rank: int, world: int) -> Any:
    model = _Recomputed(2)
    apply_plan(model, plan_of(2, "sgd"), lr=0.1, backend="torch")
    model(ids_of(2, 0, rank, 4)).sum().backward()
    return model.state_dict()


def test_layers_under_checkpointing_may_read_outputs_first() -> None:
    whole = _Recomputed(2)
    (sum(whole(ids_of(2, 0, rank, 4)).sum() for rank in range(WORLD)) / WORLD).backward()
    for state in run(WORLD, [("recomputes", _recomputes, ())]).of("recomputes"):
        for number, bag in enumerate(whole.bags):
            expected = bag.weight.detach() - 0.1 * bag.weight.grad
            torch.testing.assert_close(state[f"bags.{number}.weight"], expected)


def _compiles(rank: int, world: int) -> Any:
    """What a compiled model has learned; to compile anything a second time is an error."""
    model = Many(3)
    apply_plan(model, plan_of(3), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            compiled(ids_of(3, step, rank, 4)).sum().backward()
    remove_plan(model)
    return model.state_dict()


@pytest.mark.slow
def test_a_model_is_compiled_once() -> None:
    model = Many(3)
    apply_plan(model, plan_of(3), lr=0.1)
    for step in range(3):
        (sum(model(ids_of(3, step, rank, 4)).sum() for rank in range(WORLD)) / WORLD).backward()
    remove_plan(model)
    for state in run(WORLD, [("compiles", _compiles, ())]).of("compiles"):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)
