"""What an optimizer has when nobody says it: torch's or FBGEMM's own defaults."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from placer import Plan, Shard, Table, Topology, apply_plan
from placer.adapters.pytorch import AppliedPlan
from placer.executor.optimizers import DEFAULTS
from placer.storage.checkpoint import load_tables, save_tables
from placer.tables import OptimizerName

TORCHS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}


def defaults_of(kind: object) -> dict[str, object]:
    parameters = inspect.signature(kind).parameters  # type: ignore[arg-type]
    return {name: parameter.default for name, parameter in parameters.items()}


def bags() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum", sparse=True), nn.Linear(4, 1))


def placed(kind: str, **options: object) -> tuple[nn.Module, AppliedPlan]:
    whole = Shard("0", (0, 20, 1), (0, 4), ("gpu:0",), "hbm", "device")
    plan = Plan((Table("0", 20, 4, optimizer=kind),), Topology.parse("1xh100"), (whole,))
    model = bags()
    return model, apply_plan(model, plan, backend="torch", **options)  # type: ignore[arg-type]


def step(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 20, (8, 3), generator=generator)
    # Small gradients, beside whose squares' roots an eps is not nothing.
    (model(ids).sum() * 1e-7).backward()


def weight(model: nn.Module) -> Tensor:
    return model.state_dict()["0.weight"]


@pytest.mark.parametrize("kind", TORCHS)
def test_constants_are_those_of_the_class_of_torch(kind: OptimizerName) -> None:
    named = defaults_of(TORCHS[kind])
    assert DEFAULTS[kind].lr == named["lr"]
    assert DEFAULTS[kind].eps == named.get("eps", 0.0)
    assert DEFAULTS[kind].betas == named.get("betas", (0.9, 0.999))
    # What the tables' optimizers do not have is off by default there, too.
    off = ("momentum", "dampening", "weight_decay", "lr_decay", "initial_accumulator_value")
    assert all(named.get(name, 0) == 0 for name in off)


def test_constants_of_row_wise_adagrad_are_those_of_fbgemm() -> None:
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    named = defaults_of(training.SplitTableBatchedEmbeddingBagsCodegen.__init__)
    own = DEFAULTS["rowwise_adagrad"]
    assert (own.lr, own.eps) == (named["learning_rate"], named["eps"])
    assert own.betas == (named["beta1"], named["beta2"])
    assert named["weight_decay"] == 0


@pytest.mark.parametrize("kind", TORCHS)
def test_a_model_trains_as_by_an_optimizer_that_is_made_without_arguments(kind: str) -> None:
    ours, _ = placed(kind)
    theirs = bags()
    optimizer = TORCHS[kind](theirs[0].parameters())
    for number in range(12):
        step(ours, number)
        optimizer.zero_grad()
        step(theirs, number)
        optimizer.step()
    torch.testing.assert_close(weight(ours), weight(theirs), rtol=0, atol=1e-6)


def test_the_page_says_which_defaults_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs/pytorch.md").read_text()
    for kind, own in DEFAULTS.items():
        row = re.search(rf"^\| `{kind}` \|(.*)\|.*\|$", page, re.MULTILINE)
        lr, eps, betas = (cell.strip() for cell in row[1].split("|"))
        assert float(lr) == own.lr
        assert float(eps or 0) == own.eps
        assert betas in ("", str(own.betas))


def test_a_checkpoint_says_its_eps(tmp_path: Path) -> None:
    _, applied = placed("adagrad", lr=0.5)
    save_tables(tmp_path / "tables", applied)
    for load in (
        lambda other: load_tables(tmp_path / "tables", other),
        lambda other: other.load_state_dict(applied.state_dict()),
    ):
        _, other = placed("adagrad", eps=1e-3)
        load(other)
        assert (other.tables["0"].eps, other.tables["0"].lr) == (1e-10, 0.5)
