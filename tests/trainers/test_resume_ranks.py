"""Accelerate and Hugging Face's Trainer on two ranks that share the tables."""

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from resume_cases import assert_same, everything, placed

WORLD = 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


def work(rank: int, folder: str, port: int) -> None:
    """One rank; writes what whole and resumed runs leave."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    from test_resume_accelerate import HALF, STEPS, run
    from test_resume_huggingface import trainer

    left = {}
    for in_folder in (False, True):
        saved = Path(folder) / f"accelerate-{in_folder}"
        run(range(HALF), in_folder, save=saved)
        resumed = run(range(HALF, STEPS), in_folder, load=saved)
        left[f"accelerate {in_folder}"] = run(range(STEPS), in_folder), resumed
    runs = []
    for seed, resume in enumerate((None, f"{folder}/huggingface/checkpoint-{HALF}")):
        model, applied = placed("adagrad", seed=seed)
        trainer(model, Path(folder) / "huggingface").train(resume_from_checkpoint=resume)
        runs.append(everything(model, applied))
    left["huggingface"] = runs[0], runs[1]
    torch.save(left, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_resumed_runs_are_equal(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, (str(tmp_path), port), WORLD, start_method="forkserver")
    for rank in range(WORLD):
        left = torch.load(tmp_path / f"{rank}.pt")
        assert len(left) == 3
        for name, (whole, resumed) in left.items():
            if name == "accelerate False":  # The row caches begin anew.
                torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-7)
            else:
                assert_same(resumed, whole)
