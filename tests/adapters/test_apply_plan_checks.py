"""A plan is checked against the model before anything of it is touched."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from apply_plan_cases import (
    LR,
    TABLES,
    Clicks,
    assert_equal_models,
    batch,
    clicks,
    plan_for,
    table,
    train,
)
from plan_cases import calls_of, machine
from torch import nn
from torch.nn.utils import parametrizations

from placer import Feature, Plan, Shard, Table, apply_plan, remove_plan
from placer.adapters.pytorch import applied_plan
from placer.adapters.pytorch.models import match_tables
from placer.errors import CapacityError, PlacerError, PlanMismatchError
from placer.topology.topology import Topology


def refused(model: nn.Module, tables: object, match: str, **options: object) -> None:
    """The plan is refused, and the model is as it was."""
    before = [id(module) for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanMismatchError, match=match):
        apply_plan(model, plan_for(tables=tables), **options)
    assert [id(module) for module in model.modules()] == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def changed(name: str, **fields: object) -> list[object]:
    return [replace(one, **fields) if one.name == name else one for one in TABLES]


def test_every_fault_is_named_at_once() -> None:
    tables = [
        table("item", 41, 8, "none"),
        table("pages", 30, 8, "sum"),
        replace(table("words", 50, 4, "sum"), dtype="float16"),
        table("last", 20, 6, "max"),
        table("absent", 5, 4, "sum"),
    ]
    with pytest.raises(PlanMismatchError) as caught:
        apply_plan(clicks(), plan_for(tables=tables), names={"other": "item"})
    text = str(caught.value)
    for part in (
        "names has table 'other', which the plan lacks",
        "table 'item': the plan has 41 × 8, the model 40 × 8",
        "table 'pages': the plan pools feature 'pages#0' by sum, the model by mean",
        "table 'words': the plan has float16, the model torch.float32",
        "table 'absent' has no module; there are 'item', 'tower.item', 'pages'",
        "the plan has no table for 'query'",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda m: setattr(m.words, "max_norm", 1.0), "max_norm changes rows"),
        (lambda m: setattr(m.words, "scale_grad_by_freq", True), "scale_grad_by_freq is not"),
        (lambda m: m.double(), "the model torch.float64"),
        (lambda m: setattr(m.out, "weight", m.words.weight), "its weight is 'out.weight' too"),
        (lambda m: setattr(m.answer, "padding_idx", 3), "have different padding_idx"),
        (lambda m: parametrizations.weight_norm(m.words), "table 'words' has no module"),
        (lambda m: setattr(m.words, "forward", m.pages.forward), "has a forward of its own"),
        (
            lambda m: m.words.register_buffer("seen", torch.zeros(50)),
            "EmbeddingBag holds seen, which would be lost",
        ),
        (lambda m: m.words.weight.register_hook(lambda g: 0 * g), "its weight has hooks"),
        (
            lambda m: m.words.weight.register_post_accumulate_grad_hook(lambda p: None),
            "its weight has hooks",
        ),
    ],
)
def test_modules_that_cannot_be_placed(prepare: object, message: str) -> None:
    model = clicks()
    prepare(model)  # type: ignore[operator]
    with pytest.raises(PlanMismatchError, match=message):
        apply_plan(model, plan_for())


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


def test_a_module_with_a_forward_of_its_own_is_refused() -> None:
    model = nn.Sequential(Scaled(10, 4))
    refused(model, [table("0", 10, 4, "none")], "Scaled has a forward of its own")


def test_pooling_does_not_matter_for_one_id_a_sample() -> None:
    item = table("item", 40, 8, "sum")
    single = replace(item, features=(replace(item.features[0], pooling_factor=1.0),))
    refused(clicks(), [item, *TABLES[1:]], "by sum, the model by none")
    apply_plan(clicks(), plan_for(tables=[single, *TABLES[1:]]))


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_a_plan_that_sums_one_id_a_sample_takes_the_models_pooling(mode: str) -> None:
    ids = torch.tensor([[3], [7], [3]])
    single = Table("0", 10, 4, optimizer="sgd", features=(Feature("0", 1.0),))
    several = replace(single, features=(Feature("0", 1.5),))
    model = nn.Sequential(nn.EmbeddingBag(10, 4, mode=mode), nn.Linear(4, 1))
    refused(model, [several], f"profile or plan with --pooling 0={mode}, or say pooling = ")
    expected = copy.deepcopy(model)
    apply_plan(model, plan_for(tables=[single]), optimizer="sgd", lr=0.1)
    for one in (model, expected):
        one(ids).sum().backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert torch.allclose(model[0](ids), expected[0](ids))
    longer = torch.tensor([[3, 5]])  # The model's own way goes on where bags grow.
    assert torch.allclose(model[0](longer), expected[0](longer))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.ModuleDict({"C1": nn.EmbeddingBag(10, 4, mode="sum")})
        self.item = nn.ModuleDict({"C1": nn.EmbeddingBag(10, 4, mode="sum")})
        self.out = nn.Linear(4, 1)


def test_names() -> None:
    one, both = table("C1", 10, 4, "sum"), {"C1": "user.C1", "D1": "item.C1"}
    other = replace(table("D1", 10, 4, "sum"))
    refused(Two(), [one], "may be 'user.C1' and 'item.C1'; say which")
    refused(Two(), [one], "the plan has no table for 'item.C1'", names={"C1": "user.C1"})
    refused(Two(), [one], "'user', where no embedding module is", names={"C1": "user"})
    refused(Two(), [one, other], "are both 'user.C1'", names=dict.fromkeys(both, "user.C1"))
    model = Two()
    assert set(apply_plan(model, plan_for(tables=[one, other]), names=both).tables) == {"C1", "D1"}
    assert model.item["C1"].table.name == "D1"
    model = Two()
    apply_plan(model, plan_for(tables=[one]), names={"C1": "item.C1"}, strict=False)
    assert type(model.user["C1"]) is nn.EmbeddingBag
    model = Two()
    features = {path: tuple(replace(f, name=path) for f in one.features) for path in both.values()}
    tables = [replace(one, name=path, features=features[path]) for path in both.values()]
    apply_plan(model, plan_for(tables=tables))


def test_a_plan_that_is_too_large_with_this_optimizer() -> None:
    plan = plan_for("hbm")
    topology = plan.topology
    bytes_now = sum(one.total_bytes for one in plan.tables)

    def with_spare(spare_bytes: int) -> Plan:
        gpus = tuple(replace(one, memory_bytes=bytes_now + spare_bytes) for one in topology.gpus)
        return replace(plan, topology=Topology("tight", gpus, topology.hosts, topology.links))

    tight, small = with_spare(100_000), with_spare(1000)
    model = clicks()
    apply_plan(model, tight)
    remove_plan(model)
    with pytest.raises(CapacityError, match="bytes too many"):
        apply_plan(model, small, "adam")
    with pytest.raises(PlanMismatchError, match="'rmsprop' is none of"):
        apply_plan(model, tight, "rmsprop")  # type: ignore[arg-type]
    with pytest.raises(PlanMismatchError, match="cannot be trained with"):
        apply_plan(model, replace(plan, shards=plan.shards[1:]))


def test_a_plan_is_applied_once_and_before_wrapping() -> None:
    model = clicks()
    with pytest.raises(PlanMismatchError, match="call apply_plan first"):
        remove_plan(model)
    apply_plan(model, plan_for())
    with pytest.raises(PlanMismatchError, match="call remove_plan first"):
        apply_plan(model, plan_for())
    with pytest.raises(PlanMismatchError, match="wrapped in DataParallel"):
        apply_plan(nn.DataParallel(clicks()), plan_for())
    with pytest.raises(PlanMismatchError, match="the model is an embedding itself"):
        apply_plan(nn.EmbeddingBag(3, 4), plan_for())


def test_when_memory_runs_out_midway_the_model_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from placer.adapters.pytorch import apply

    built: list[str] = []

    class Failing(apply.PlacedTable):
        def __init__(self, plan: object, *arguments: object) -> None:
            if len(built) == 3:
                raise MemoryError
            super().__init__(plan, *arguments)  # type: ignore[arg-type]
            built.append(self.name)

    monkeypatch.setattr(apply, "PlacedTable", Failing)
    model, untouched = clicks(), clicks()
    with pytest.raises(MemoryError):
        apply_plan(model, plan_for())
    assert built == ["item", "pages", "words"]
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    trainer = torch.optim.SGD(model.parameters(), lr=LR)
    assert train(model, [trainer], range(2)) == train(
        untouched, [torch.optim.SGD(untouched.parameters(), lr=LR)], range(2)
    )


def test_optimizers_lose_the_tables() -> None:
    model, other = clicks(), clicks()
    trainer = torch.optim.Adagrad(model.parameters(), lr=LR, weight_decay=0.0)
    count = len(trainer.param_groups[0]["params"])
    with pytest.raises(PlacerError, match="optimizers must be of type Iterable, not Adagrad"):
        apply_plan(model, plan_for(), optimizers=trainer)  # The model is as it was.
    apply_plan(model, plan_for(), optimizers=[trainer])
    assert len(trainer.param_groups[0]["params"]) == count - len(TABLES)
    assert len(trainer.state) == count - len(TABLES)
    decaying = torch.optim.SGD(other.parameters(), lr=LR, weight_decay=0.1)
    with pytest.warns(UserWarning, match=r"weight_decay=0\.1 does not act on placed tables"):
        apply_plan(other, plan_for(), optimizers=[decaying])


@pytest.mark.parametrize(
    ("make", "said", "expected"),
    [
        (partial(torch.optim.Adagrad, lr=LR), {"lr": LR}, []),
        (partial(torch.optim.Adam, lr=LR), {"lr": LR}, []),
        (torch.optim.Adagrad, {}, []),
        (partial(torch.optim.Adagrad, lr=LR), {}, [f"lr={LR}"]),
        (partial(torch.optim.Adagrad, eps=1e-3, lr_decay=0.1), {}, ["lr_decay=0.1", "eps=0.001"]),
        (partial(torch.optim.SGD, lr=LR, momentum=0.9), {"lr": LR}, ["momentum=0.9"]),
        (partial(torch.optim.Adagrad, maximize=True), {}, ["maximize=True"]),
    ],
)
def test_what_an_optimizer_did_and_tables_do_not_is_told(
    make: Callable[..., torch.optim.Optimizer], said: dict[str, float], expected: list[str]
) -> None:
    model = clicks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_plan(model, plan_for(), "adagrad", optimizers=[make(model.parameters())], **said)
    told = [str(one.message) for one in caught]
    assert [words.partition(" does not act on placed tables")[0] for words in told] == expected


def test_state_that_tables_begin_without_is_told_and_can_be_given() -> None:
    model, theirs = clicks(), clicks()
    trainer, other = (torch.optim.Adagrad(each.parameters(), LR) for each in (model, theirs))
    train(model, [trainer], range(2))
    train(theirs, [other], range(4))
    state = {
        f"{one.name}.sum": trainer.state[getattr(model, one.name).weight]["sum"] for one in TABLES
    }
    with pytest.warns(UserWarning, match="begin without the optimizer's state of their 2 steps"):
        applied = apply_plan(model, plan_for(optimizer="adagrad"), lr=LR, optimizers=[trainer])
    applied.load_optimizer_state_dict(state)
    train(model, [trainer], range(2, 4))
    assert_equal_models(model, theirs)


def test_an_optimizer_that_was_made_before_leaves_the_tables_alone() -> None:
    ours, theirs = clicks(), clicks()
    made_before = torch.optim.Adam(ours.parameters(), lr=LR)
    apply_plan(ours, plan_for(optimizer="sgd"), lr=LR)
    apply_plan(theirs, plan_for(optimizer="sgd"), lr=LR)
    made_after = torch.optim.Adam(theirs.parameters(), lr=LR)
    assert train(ours, [made_before], range(3)) == train(theirs, [made_after], range(3))


def test_a_penalty_through_an_old_parameter_is_told_of() -> None:
    model = clicks()
    kept, weight = list(model.parameters()), model.item.weight
    model(batch(0)).sum().backward()
    apply_plan(model, plan_for())
    assert weight.grad is None  # It would take as much memory as the table.
    loss = model(batch(0)).sum() + 1e-5 * sum(weight.square().sum() for weight in kept)
    with pytest.raises(PlanMismatchError, match="is trained outside of its lookups"):
        loss.backward()


def test_a_model_without_dense_parameters_needs_no_optimizer() -> None:
    model = nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum"))
    with pytest.warns(UserWarning, match="it needs no optimizer"):
        apply_plan(model, plan_for(tables=[table("0", 20, 4, "sum")]), "sgd", lr=1.0)
    before = model[0].weight.detach()
    model(torch.tensor([[1, 2]])).sum().backward()
    expected = before.clone()
    expected[1:3] -= 1
    assert torch.equal(model[0].weight, expected)


def test_the_learning_rate_changes() -> None:
    model, other = clicks(), clicks()
    apply_plan(model, plan_for(optimizer="sgd"), lr=0.5)
    apply_plan(other, plan_for(optimizer="sgd"), lr=LR)
    applied_plan(model).set_lr(LR)
    dense = [torch.optim.SGD(one.parameters(), lr=LR) for one in (model, other)]
    assert train(model, dense[:1], range(3)) == train(other, dense[1:], range(3))
    assert isinstance(model, Clicks)


def test_the_work_of_applying_a_plan_grows_with_the_tables_alone() -> None:
    def calls(count: int) -> int:
        model = nn.ModuleDict(
            {"tables": nn.ModuleList(nn.EmbeddingBag(5, 4) for _ in range(count))}
        )
        tables = tuple(Table(f"{i}", 5, 4, optimizer="sgd") for i in range(count))  # Ends of paths.
        shards = tuple(
            Shard(one.name, (0, 5, 1), (0, 4), ("gpu:0",), "hbm", "device") for one in tables
        )
        plan = Plan(tables, machine(), shards)
        return calls_of(lambda: match_tables(model, plan.tables, {}, True))

    assert calls(160) < 2.2 * calls(80)
