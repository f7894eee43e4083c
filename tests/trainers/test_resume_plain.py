"""A run of a plain loop, saved and resumed; what is not saved is said."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from resume_cases import STEPS, assert_keys_came_and_went, assert_same, everything, loss_of, placed
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from placer.adapters.pytorch import AppliedPlan
from placer.errors import CheckpointError, PlacerError
from placer.storage.checkpoint import load_tables, save_tables

HALF = STEPS // 2
LACKS_STATE = (
    "training goes on, and the last .* without the optimizer's state of placed.*: torch.save"
)
Run = tuple[nn.Module, AppliedPlan, torch.optim.Optimizer]


def start(kind: str = "adam", placement: str = "mixed", seed: int = 0) -> Run:
    model, applied = placed(kind, placement, seed)
    return model, applied, torch.optim.Adam(model.parameters(), lr=0.01)


def train(run: Run, steps: range) -> None:
    model, _, optimizer = run
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def uninterrupted(kind: str = "adam") -> dict[str, Tensor]:
    run = start(kind)
    train(run, range(HALF))
    run[1].set_lr(0.02)
    train(run, range(HALF, STEPS))
    return everything(*run[:2])


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_state_dicts_resume_under_another_plan(kind: str, grows: bool, tmp_path: Path) -> None:
    first = start(kind)
    train(first, range(HALF))
    first[1].set_lr(0.02)
    torch.save([each.state_dict() for each in first], tmp_path / "run.pt")
    second = start(kind, "uva", seed=1)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    for each, state in zip(second, saved, strict=True):
        each.load_state_dict(state)
    train(second, range(HALF, STEPS))
    assert_same(everything(*second[:2]), uninterrupted(kind))
    assert_keys_came_and_went(second[1])


def test_distributed_checkpoint_resumes(tmp_path: Path) -> None:
    first, second = start(), start(seed=1)
    assert isinstance(first[1], Stateful)
    train(first, range(HALF))
    first[1].set_lr(0.02)
    train(second, range(1))  # Makes the optimizer's state, which `dcp.load` fills.
    names = "model", "tables", "optimizer"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That there is no process group.
        dcp.save(dict(zip(names, first, strict=True)), checkpoint_id=tmp_path)
        dcp.load(dict(zip(names, second, strict=True)), checkpoint_id=tmp_path)
    train(second, range(HALF, STEPS))
    assert_same(everything(*second[:2]), uninterrupted())


def test_a_folder_of_tables_resumes(tmp_path: Path) -> None:
    model, applied, optimizer = first = start()
    applied.leave_state_dict()
    train(first, range(HALF))
    applied.set_lr(0.02)
    assert list(model.state_dict()) == ["out.weight", "out.bias"]
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    save_tables(tmp_path / "tables", applied)
    with pytest.raises(CheckpointError, match="is there already"):
        save_tables(tmp_path / "tables", applied)
    save_tables(tmp_path / "tables", applied, replace=True)
    model, applied, optimizer = second = start(seed=1, placement="staged")
    model(torch.tensor([1]), torch.tensor([[0]]))  # The padding's row is kept from here on.
    applied.leave_state_dict()
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    load_tables(tmp_path / "tables", applied)
    train(second, range(HALF, STEPS))
    assert_same(everything(model, applied), uninterrupted())
    other = start("adagrad")
    before = everything(*other[:2])
    with pytest.raises(CheckpointError, match="does not fit the tables"):
        load_tables(tmp_path / "tables", other[1])
    assert_same(everything(*other[:2]), before)


def test_a_model_saved_alone_is_said_when_training_goes_on() -> None:
    run = start()
    train(run, range(1))
    model, applied, _ = run
    model.state_dict()
    with pytest.warns(UserWarning, match=LACKS_STATE):
        train(run, range(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, range(2, 3))
        applied.state_dict()
        model.state_dict()
        train(run, range(3, 4))
        model.state_dict()
        applied.state_dict()
        train(run, range(4, 5))
        model.state_dict()  # At the end nothing goes on from it.
        stateless = start("sgd")
        stateless[0].state_dict()
        train(stateless, range(1))


_ENDS = """
import gc, os, sys, tempfile, warnings
sys.path[:0] = {path!r}
warnings.simplefilter("ignore")
import numba.np.arraymath, torch, torch._dynamo, torch.distributed.checkpoint as dcp
from resume_cases import loss_of, placed
from placer import remove_plan
from placer.storage.checkpoint import save_model, save_tables
from safetensors.torch import save_file
warnings.resetwarnings()
warnings.filterwarnings("ignore", module="torch")

def run(kind="adam", steps=2):
    model, applied = placed(kind)
    for step in range(steps):
        loss_of(model, step).backward()
    return model, applied

# To import, and to look through all modules at the end, would take each child seconds.
numba.njit(lambda: 0)()
gc.freeze()
for number, body in enumerate({bodies!r}):
    child = os.fork()  # Each ends by itself; a start takes seconds.
    if not child:
        os.dup2(os.open("said-%d" % number, os.O_CREAT | os.O_WRONLY), 2)
        with tempfile.TemporaryDirectory() as folder:
            exec(body)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
STATE = "without the optimizer's state of placed tables: item, pages."
ENDS = {
    # What a loop does that knows nothing of tables, whatever becomes of the model.
    "model, applied = run(); torch.save(model.state_dict(), f'{folder}/m.pt')": STATE,
    "torch.save(run()[0].state_dict(), f'{folder}/m.pt')": STATE,
    "model, applied = run(); applied.state_dict(); loss_of(model, 5).backward(); "
    "model.state_dict()": STATE,
    # The rows are left to a folder that nobody makes.
    "model, applied = run(); applied.leave_state_dict(); model.state_dict()": "the rows and",
    "model, applied = run('sgd'); applied.leave_state_dict(); model.state_dict()": "the rows of",
    # All is saved, or there is nothing to save.
    "model, applied = run(); save_file(applied.state_dict(), f'{folder}/t'); "
    "model.state_dict()": "",
    "model, applied = run(); model.state_dict(); applied.state_dict()": "",
    "model, applied = run(); dcp.save({'m': model, 't': applied}, checkpoint_id=folder)": "",
    "model, applied = run(); model.state_dict(); save_model(f'{folder}/m', model)": "",
    "model, applied = run(); applied.leave_state_dict(); model.state_dict(); "
    "save_tables(f'{folder}/t', applied)": "",
    "model, applied = run(); state = remove_plan(model); model.state_dict()": "",
    "model, applied = run(); torch.save(model, f'{folder}/m.pt'); model.state_dict()": "",
    "model, applied = run('sgd'); model.state_dict()": "",
    "model, applied = run(steps=0); model.state_dict()": "",
    "run()": "",
    "model, applied = run(); model.state_dict(); 1 / 0": "",
    "model, applied = run(); model.state_dict(); raise KeyboardInterrupt": "",
}


@pytest.mark.slow
def test_what_the_last_checkpoint_lacks_is_said_when_the_process_ends(tmp_path: Path) -> None:
    program = _ENDS.format(path=sys.path, bodies=list(ENDS))
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path)
    for number, (code, (body, expected)) in enumerate(
        zip(done.stdout.split(), ENDS.items(), strict=True)
    ):
        printed = (tmp_path / f"said-{number}").read_text()
        said = [line for line in printed.splitlines() if "the process ends" in line]
        assert bool(said) == bool(expected), (body, printed)
        assert expected in "".join(said), body
        assert ("Error" in printed or "Interrupt" in printed) == (int(code) != 0), body


def test_a_state_without_rates_is_refused() -> None:
    _, applied, _ = start()
    state = applied.state_dict()
    del state["pages.lr"]
    with pytest.raises(CheckpointError, match=r"lacks pages\.lr; load a state"):
        applied.load_state_dict(state)


def test_a_schedule_goes_on_where_it_was() -> None:
    """With a warm-up from 0, and `update_with` before the state is loaded or after it."""

    def made(seed: int) -> tuple[Run, torch.optim.lr_scheduler.LRScheduler]:
        model, applied, optimizer = start("adagrad", seed=seed)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / STEPS)
        return (model, applied, optimizer), warm_up

    def go_on(run: Run, schedule: torch.optim.lr_scheduler.LRScheduler, steps: range) -> None:
        for step in steps:
            train(run, range(step, step + 1))
            schedule.step()

    whole, schedule = made(0)
    whole[1].update_with(whole[2])
    before = everything(*whole[:2])
    go_on(whole, schedule, range(1))
    assert_same(
        {k: v for k, v in everything(*whole[:2]).items() if k.endswith("weight")},
        {k: v for k, v in before.items() if k.endswith("weight")},
    )
    go_on(whole, schedule, range(1, HALF))
    states = [copy.deepcopy(each.state_dict()) for each in (*whole, schedule)]
    go_on(whole, schedule, range(HALF, STEPS))
    for late in (False, True):
        run, resumed = made(1)
        if not late:
            run[1].update_with(run[2])
        for each, state in zip((*run, resumed), states, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        if late:
            run[1].update_with(run[2])
        go_on(run, resumed, range(HALF, STEPS))
        assert_same(everything(*run[:2]), everything(*whole[:2]))


def test_scaled_gradients_are_refused_where_a_step_updates_too() -> None:
    model, applied, optimizer = start()
    applied.update_with(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(PlacerError, match="the loss was scaled by a GradScaler"):
        scaler.scale(loss_of(model, 0)).backward()
