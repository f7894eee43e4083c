"""Trainers on two ranks that share the tables: each gets other samples."""

import os
import socket
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from ranks_launcher import leave_group
from resume_cases import GROWS, STEPS, assert_same, everything, loss_of, placed
from torch import Tensor, nn

WORLD = 2
Runs = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]

pytestmark = pytest.mark.slow


def with_accelerate(folder: Path) -> Runs:
    """What uninterrupted and resumed runs leave."""
    from test_resume_accelerate import HALF, STEPS, run

    in_folder = GROWS in os.environ  # Whole or in a folder by turns, as `with_lightning`.
    run(range(HALF), in_folder, save=folder / "saved")
    resumed = run(range(HALF, STEPS), in_folder, load=folder / "saved")
    return {"": (run(range(STEPS), in_folder), resumed)}


def with_huggingface(folder: Path) -> Runs:
    from test_resume_huggingface import HALF, settings, trainer

    settings(folder)  # Makes the process group.
    runs = []
    for seed, resume in enumerate((None, f"{folder}/checkpoint-{HALF}")):
        model, applied = placed("adagrad", seed=seed)
        trainer(model, folder).train(resume_from_checkpoint=resume)
        runs.append(everything(model, applied))
    return {"": (runs[0], runs[1])}


def with_lightning(folder: Path) -> Runs:
    from test_resume_lightning import Module, PlacerCallback, fit

    from placer.errors import BackendError

    ranks: dict[str, Any] = {"strategy": "ddp", "devices": WORLD}
    with pytest.raises(BackendError, match=r"before torch\.distributed was"):
        fit(Module(), 1, PlacerCallback(), **ranks)
    path = folder / "saved.ckpt"
    callback = PlacerCallback(folder / "tables" if GROWS in os.environ else None, keep=2)
    whole, first, second = (Module(seed, late=True) for seed in (0, 0, 1))
    fit(whole, 2, callback, **ranks)
    fit(first, 1, callback, **ranks).save_checkpoint(path)
    fit(second, 2, callback, path, **ranks)
    return {"": (everything(whole, whole.applied), everything(second, second.applied))}


def with_torch(folder: Path) -> Runs:
    """State dicts in a file, as Ray Train's workers keep them, and a distributed checkpoint."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    def start(seed: int) -> tuple[nn.Module, dict[str, Any]]:
        model, applied = placed(seed=seed)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return wrapped, {"model": model, "tables": applied, "optimizer": optimizer}

    def train(run: tuple[nn.Module, dict[str, Any]], steps: range) -> None:
        wrapped, parts = run
        for step in steps:
            parts["optimizer"].zero_grad()
            loss_of(wrapped, step * WORLD + rank).backward()
            parts["optimizer"].step()

    whole, by_file, by_dcp = start(0), start(1), start(1)
    train(whole, range(STEPS // 2))
    torch.save({name: part.state_dict() for name, part in whole[1].items()}, f"{folder}/run-{rank}")
    dcp.save(whole[1], checkpoint_id=folder / "dcp")
    saved = torch.load(f"{folder}/run-{rank}", weights_only=True)
    for name, part in by_file[1].items():
        part.load_state_dict(saved[name])
    train(by_dcp, range(1))  # Makes the optimizer's state, which `dcp.load` fills.
    dcp.load(by_dcp[1], checkpoint_id=folder / "dcp")
    runs = []
    for run in (whole, by_file, by_dcp):
        train(run, range(STEPS // 2, STEPS))
        runs.append(everything(run[1]["model"], run[1]["tables"]))
    return {"file": (runs[0], runs[1]), "dcp": (runs[0], runs[2])}


TRAINERS: dict[str, tuple[str, Callable[[Path], Runs]]] = {
    "accelerate": ("test_resume_accelerate", with_accelerate),
    "lightning": ("test_resume_lightning", with_lightning),
    "torch": ("resume_cases", with_torch),
    "transformers": ("test_resume_huggingface", with_huggingface),
}
"""By package: the module that imports it, and what the ranks run."""


def work(rank: int, name: str, folder: Path, port: int) -> None:
    """One rank, which no launcher has told of the others but by the environment."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    torch.save(TRAINERS[name][1](folder), folder / f"{rank}.pt")
    leave_group()


def work_twice(_: int, name: str, folders: dict[bool, Path]) -> None:
    """Without and with tables that grow. The ranks are forked: to import packages takes seconds."""
    import_module(TRAINERS[name][0])
    for grows, folder in folders.items():
        folder.mkdir()
        if grows:
            os.environ[GROWS] = "1"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.start_processes(work, (name, folder, port), WORLD, start_method="fork")


@pytest.mark.parametrize("name", TRAINERS)
def test_resumed_runs_are_equal(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    folders = {grows: tmp_path / str(grows) for grows in (False, True)}
    mp.start_processes(work_twice, (name, folders), 1, start_method="forkserver")
    weights = []
    for folder in folders.values():
        first, second = (torch.load(folder / f"{rank}.pt") for rank in range(WORLD))
        assert first
        for which, (whole, resumed) in first.items():
            assert_same(resumed, whole)
            weights.append(whole["item.weight"])
            for ours, theirs in zip(second[which], first[which], strict=True):
                assert_same(ours, theirs)  # The ranks have one model, whatever they read.
    assert not torch.equal(weights[0], weights[-1])  # Tables that grow have other rows.
