"""Tables on the meta device: made where the plan has them, by their module's own law."""

import pytest
import torch
from plan_cases import machine
from ranks_launcher import run
from torch import Tensor, nn

from placer import Plan, Shard, Table, apply_plan, remove_plan
from placer.adapters.pytorch import models
from placer.errors import PlanMismatchError
from placer.executor.memory.arena import CHUNK_ROWS

ROWS, DIM = 2 * CHUNK_ROWS + 100, 4


class Narrow(nn.EmbeddingBag):
    """A law of its own, which never sees the whole weight."""

    largest = 0

    def reset_parameters(self) -> None:
        bound = self.num_embeddings**-0.5
        Narrow.largest = max(Narrow.largest, self.weight.shape[0] * (not self.weight.is_meta))
        nn.init.uniform_(self.weight, 2 * bound, 3 * bound)
        self._fill_padding_idx_with_zero()


class Fanned(nn.EmbeddingBag):
    """A law that depends on the number of rows at hand."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
            self.narrow = Narrow(ROWS, DIM, mode="sum", padding_idx=CHUNK_ROWS + 7)
            self.item = nn.Embedding(30, DIM, padding_idx=3)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.bag(ids) + self.narrow(ids) + self.item(ids[:, 0] % 30))


def plan() -> Plan:
    """One table in stripes on two GPUs, one in halves of columns, one whole."""
    tables = tuple(Table(name, ROWS, DIM, optimizer="sgd") for name in ("bag", "narrow"))
    item = Table("item", 30, DIM, optimizer="sgd")
    shards = [
        Shard("bag", (i, ROWS, 2), (0, DIM), (f"gpu:{i}",), "hbm", "device") for i in range(2)
    ]
    shards += [
        Shard("narrow", (0, ROWS, 1), (2 * i, 2 * i + 2), (f"gpu:{i}",), "hbm", "device")
        for i in range(2)
    ]
    shards.append(Shard("item", (0, 30, 1), (0, DIM), ("gpu:1",), "hbm", "device"))
    return Plan((*tables, item), machine(), tuple(shards))


def made() -> dict[str, Tensor]:
    """Weights after a step, and what the modules have when the plan is removed."""
    torch.manual_seed(5)
    model = Model()
    applied = apply_plan(model, plan(), lr=0.0, backend="torch")
    model(torch.tensor([[1, 2], [ROWS - 1, 3]])).sum().backward()
    weights = {name: table.weight() for name, table in applied.tables.items()}
    remove_plan(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.bag.weight, weights["bag"])
    return weights


def _made(rank: int, world: int) -> tuple[dict[str, Tensor], int]:
    return made(), Narrow.largest


def test_weights_follow_the_modules_law_and_not_the_ranks() -> None:
    outcomes = run(2, [("made", _made, ())])
    alone = made()
    bound = ROWS**-0.5
    bag, narrow = alone["bag"], alone["narrow"]
    assert abs(float(bag.mean())) < 0.01
    assert abs(float(bag.std()) - 1) < 0.01
    assert not torch.equal(bag[:100], bag[CHUNK_ROWS : CHUNK_ROWS + 100])
    padding = CHUNK_ROWS + 7
    assert not narrow[padding].any()
    assert not alone["item"][3].any()
    others = torch.cat([narrow[:padding], narrow[padding + 1 :]])
    assert 2 * bound <= float(others.min()) < 2.01 * bound
    assert 2.99 * bound < float(others.max()) <= 3 * bound
    for weights, largest in outcomes.of("made"):
        assert 0 < largest < ROWS / 1.9  # No rank has drawn more than a block at a time.
        for name, weight in alone.items():
            assert torch.equal(weights[name], weight), name


def test_a_law_that_depends_on_the_rows_at_hand_is_replaced_with_a_warning() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Fanned(50, DIM, mode="sum"))
    model.append(nn.Linear(DIM, 1))
    whole = Shard("0", (0, 50, 1), (0, DIM), ("gpu:0",), "hbm", "device")
    own = Plan((Table("0", 50, DIM, optimizer="sgd"),), machine(), (whole,))
    with pytest.warns(UserWarning, match=r"the reset_parameters of Fanned is not the same law"):
        applied = apply_plan(model, own, backend="torch")
    weight = applied.tables["0"].weight()
    assert 0.9 * 50**-0.5 < float(weight.abs().max()) <= 50**-0.5
    kept = torch.arange(50.0 * DIM).view(50, DIM)
    model.load_state_dict(model.state_dict() | {"0.weight": kept})
    assert torch.equal(applied.tables["0"].weight(), kept)


@pytest.mark.parametrize("law", ["first row", "sinus", "padding", "one column"])
def test_laws_that_tell_rows_apart_are_seen(law: str) -> None:
    class Odd(nn.Embedding):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                if law == "sinus":
                    self.weight.copy_(torch.arange(self.weight.numel()).view_as(self.weight).sin())
                    return
                nn.init.normal_(self.weight)
                if law == "one column":
                    self.weight[:, 0] = 1
                    return
                self.weight[0 if law == "first row" else self.padding_idx] = 0

    with torch.device("meta"):
        module = Odd(40, DIM, padding_idx=1)
    assert models._is_by_block(module) == (law in ("padding", "one column"))


def test_a_default_device_without_values_is_refused() -> None:
    whole = Shard("0", (0, 9, 1), (0, DIM), ("gpu:0",), "hbm", "device")
    plan = Plan((Table("0", 9, DIM),), machine(1), (whole,))
    model = nn.Sequential(nn.EmbeddingBag(9, DIM, mode="sum"))
    with torch.device("meta"), pytest.raises(PlanMismatchError, match="default device is meta"):
        apply_plan(model, plan)
    apply_plan(model, plan, backend="torch")
