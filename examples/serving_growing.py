"""Keeps a server up to date: its table grows in training, and increments tell it what changed.

A run saves checkpoints. The server loads all tables of the first one, and of each later one the
rows and keys that changed since. It answers as if it had loaded that one whole.
"""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from placer import Problem, Topology
from placer.data import open_log
from placer.data.reader import EncodedLog
from placer.executor import BagBatch
from placer.growing import Growing
from placer.profile.count import profile_log
from placer.storage.serving import ReadOnlyTables, load_read_only
from placer.storage.table_files import write_increment, write_tables
from placer.training import CheckpointPolicy, TrainConfig, train
from placer.training.checkpoint import open_checkpoint
from solvers import solve

SAMPLES, BATCH = 20_000, 200


def clicks() -> pa.Table:
    """Clicks on articles of a news site: new ones appear all the time, old ones are forgotten."""
    random = np.random.default_rng(0)
    article = np.arange(SAMPLES) // 10 - random.geometric(0.02, SAMPLES)
    label = (article + random.integers(0, 3, SAMPLES)) % 2
    return pa.table(
        {"label": label, "hour": label + random.random(SAMPLES), "article": article << 32}
    )


def answers(tables: ReadOnlyTables, keys: Tensor) -> Tensor:
    """Rows of some articles; all that the server does not know share one."""
    bags = {"article": (keys, torch.arange(len(keys) + 1), None)}
    return tables(BagBatch.from_features(bags, tables.feature_names))["article"]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    # The trainer: an export of the first checkpoint, and of each later one what changed.
    found = open_log(
        clicks(), label="label", dense=["hour"], sparse=["article"], id_mapping="vocabulary"
    )
    growing = {"article": Growing(capacity=2000, ttl=40)}
    topology = Topology.parse("1xh100")
    problem = Problem(profile_log(found, dim=8), topology, BATCH, growing=growing)
    plan = solve(problem, solver="greedy-cost").plan
    log = EncodedLog(found.source, problem.profile.encoding)
    policy = CheckpointPolicy(folder / "runs", every_steps=30, keep=10)
    train(plan, log, TrainConfig(batch_size=BATCH), checkpoints=policy)
    checkpoints = [open_checkpoint(path) for path in sorted((folder / "runs").iterdir())]
    write_tables(plan, checkpoints[0], folder / "0.safetensors")
    for number, (before, after) in enumerate(pairwise(checkpoints), 1):
        rows = write_increment(plan, before, after, folder / f"{number}.safetensors")
        print(f"steps {before.position.step} to {after.position.step}: {rows} rows changed")
    # The server: it has the plan and the files.
    tables = load_read_only(plan, folder / "0.safetensors")
    articles = torch.from_numpy(np.unique(clicks()["article"].to_numpy()))
    for number, checkpoint in enumerate(checkpoints[1:], 1):
        tables.apply_increment(folder / f"{number}.safetensors")
        write_tables(plan, checkpoint, folder / "whole.safetensors")
        whole = load_read_only(plan, folder / "whole.safetensors")
        assert torch.equal(answers(tables, articles), answers(whole, articles))
print("the server answers as one that loaded the last checkpoint whole")
