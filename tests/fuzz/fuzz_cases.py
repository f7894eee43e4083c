"""Files of every format that placer reads, sound ones, and how they are read."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from checkpoint_cases import load

from placer import Constraints, Feature, Plan, Profile, Shard, Table, Topology
from placer.data import open_log
from placer.plan.fields import RowOrder
from placer.plan.verify import violations
from placer.profile.count import profile_log
from placer.profile.from_counts import profile_counts
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.manifest import Checkpoint, Position
from placer.training import checkpoint


@dataclass(frozen=True, slots=True)
class Format:
    """A format: what writes sound files into a folder, and what reads them."""

    name: str  # That of the file or folder that is read.
    write: Callable[[Path], object]  # Writes it, and what belongs beside it, into a folder.
    read: Callable[[Path], object]
    # Changes a file in a folder, where changes of bytes and values would find little.
    change: Callable[[Path, random.Random], object] | None = None


def _log(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = [
        "\t".join(["1", *map(str, rng.integers(0, 9, 13)), *(f"{i:08x}" for i in row)])
        for row in rng.integers(0, 50, (20, 26))
    ]
    (folder / "log.tsv").write_text("\n".join(lines) + "\n")
    return folder / "log.tsv"


def _parquet(folder: Path) -> Path:
    columns = {
        "label": [0, 1] * 10,
        "item": list(range(20)),
        "words": [["a", "b"], []] * 10,
        "seen": [True, None] * 10,
        "x": [0.5, None] * 10,
        "user": [{"id": 3, "geo": {"country": "AT"}}, None] * 10,
    }
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.parquet"


def _read_log(path: Path) -> None:
    for _ in open_log(path, id_mapping="vocabulary").chunks():
        pass


def _counts(folder: Path) -> None:
    columns = {"table": ["a"] * 9, "id": list(range(9)), "count": list(range(1, 10))}
    pq.write_table(pa.table(columns), folder / "counts.parquet")


def _tensors(folder: Path) -> None:
    offsets, lengths = torch.arange(0, 13, 2), torch.full((2, 3), 2)
    torch.save((torch.arange(12), offsets, lengths), folder / "log.pt")


def _plan(folder: Path) -> Plan:
    table = Table("t", 12, 4, features=(Feature("f"),))
    hot = Shard("t", (0, 3, 1), (0, 4), ("gpu:0",), "hbm", "device")
    cold = Shard("t", (3, 12, 1), (0, 4), ("gpu:0",), "dram", "staged", staging_rows=4)
    order, ids = {"t": RowOrder("profile")}, {"t": np.array([7, 1, 4])}
    plan = Plan((table,), Topology.parse("1xh100"), (hot, cold), order, ids)
    plan.save(folder / "plan.json")
    return plan


def _plan_without_hash(folder: Path) -> None:
    _plan(folder)
    path = folder / "plan.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps(document))


def _checkpoint() -> Checkpoint:
    tensors = {
        "embeddings": {"t.weight": torch.arange(48.0).reshape(12, 4)},
        "embedding_optimizer": {"t.sum": torch.arange(12.0)},
    }
    return Checkpoint(Position(3), {"lr": 0.1}, tensors)


def _saved(folder: Path) -> Path:
    return checkpoint.save(folder, _checkpoint())


def _dcp(folder: Path) -> None:
    """The same without a manifest, so that nothing but the format itself is checked."""
    made = _saved(folder / "made")
    (made / "checkpoint.json").unlink()
    made.rename(folder / "dcp")
    shutil.rmtree(folder / "made")


def _read_tensors(path: Path) -> None:
    for tensor in read_tensors(path).values():
        tensor.whole()


_RULES = """
tables:
  C1: {devices: [gpu:0], tier: hbm}
  C2: {forbid: [staged]}
together:
- [C3, C4]
reserve: {gpu: 1GiB}
"""

FORMATS = {
    "tsv": Format("log.tsv", _log, _read_log),
    "parquet": Format("log.parquet", _parquet, _read_log),
    "counts": Format("counts.parquet", _counts, lambda path: profile_counts(path, samples=99)),
    "pt": Format("log.pt", _tensors, _read_log),
    "profile": Format(
        "profile",
        lambda folder: profile_log(open_log(_log(folder), id_mapping="vocabulary")).save(
            folder / "profile"
        ),
        Profile.load,
    ),
    "plan": Format("plan.json", _plan, lambda path: violations(Plan.load(path))),
    "plan-without-hash": Format(
        "plan.json", _plan_without_hash, lambda path: violations(Plan.load(path))
    ),
    "topology": Format(
        "machine.yaml",
        lambda folder: Topology.parse("2x2xh100").save(folder / "machine.yaml"),
        Topology.load,
    ),
    "constraints": Format(
        "rules.yaml",
        lambda folder: (folder / "rules.yaml").write_text(_RULES),
        Constraints.load,
    ),
    "checkpoint": Format("step-000000000003", _saved, load),
    "dcp": Format("dcp", _dcp, _read_tensors),
}
"""Formats by name; a name of the corpus begins with one, and a dot."""
