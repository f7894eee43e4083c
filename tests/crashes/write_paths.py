"""Each way in which placer writes results, as versions of one thing, and how they are read."""

import gzip
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

sys.path += [str(Path(__file__).resolve().parent.parent / name) for name in ("", "executor")]
from calibration_cases import calibration
from checkpoint_cases import load
from executor_cases import plan_of, two_features

from cost_models.calibrated.model import Calibration
from placer import Feature, Plan, Profile, Shard, Table, Topology
from placer.data import open_log
from placer.errors import PlanError
from placer.executor import PlacedEmbeddings
from placer.plan import file as plan_file
from placer.plan.fields import RowOrder
from placer.profile.count import profile_log
from placer.storage.checkpoint import load_model, save_model
from placer.storage.manifest import Checkpoint, Position
from placer.storage.table_files import write_tables
from placer.training import checkpoint
from placer.training.trace import _export


@dataclass(frozen=True)
class WritePath:
    """A thing that is written."""

    write: Callable[[Path, int], object]  # Writes a version of it into a folder.
    # The version that is in a folder, None without one; fails if it is neither.
    read: Callable[[Path], int | None]


def _plan(version: int) -> Plan:
    table = Table("t", 12, 4, features=(Feature("f"),))
    hot = Shard("t", (0, 3, 1), (0, 4), ("gpu:0",), "hbm", "device")
    cold = Shard("t", (3, 12, 1), (0, 4), ("gpu:0",), "dram", "staged", staging_rows=4)
    ids = {"t": np.array([7, version, 11])}
    order = {"t": RowOrder("profile")}
    return Plan((table,), Topology.parse("1xh100"), (hot, cold), order, ids, batch_size=version)


def _read_plan(folder: Path) -> int | None:
    if not (folder / "plan.json").exists():
        return None
    plan = Plan.load(folder / "plan.json")
    assert plan.hot_ids["t"].tolist() == [7, plan.batch_size, 11]
    return plan.batch_size


@cache
def _profile(version: int) -> Profile:
    import pyarrow as pa

    items = np.concatenate([np.arange(8), np.arange(version) + 20])
    table = pa.table({"label": np.zeros(len(items), np.int64), "item": items})
    return profile_log(open_log(table, id_mapping="vocabulary"), dim=2)


def _read_profile(folder: Path) -> int | None:
    if not (folder / "profile" / "profile.json").exists():
        return None
    profile = Profile.load(folder / "profile")
    version = profile.samples - 8
    assert profile.ids_sha256 == _profile(version).ids_sha256
    return version


def _read_calibration(folder: Path) -> int | None:
    path = folder / "machine.json"
    return Calibration.load(path).cases if path.exists() else None


def _checkpoint(step: int, epoch: int = 0) -> Checkpoint:
    version = float(step + epoch)
    tensors = {
        "embeddings": {"t.weight": torch.full((12, 4), version)},
        "embedding_optimizer": {"t.sum": torch.full((12,), version)},
        "dense": {"w": torch.full((3,), version)},
    }
    return Checkpoint(Position(step, epoch), {"lr": 0.1}, tensors)


def _read_checkpoint(folder: Path) -> int | None:
    """The newest; older ones may be there or not."""
    if not checkpoint.exist(folder / "run"):
        return None
    found = load(folder / "run")
    version = found.position.step + found.position.epoch
    assert all(
        (tensor == version).all() for held in found.tensors.values() for tensor in held.values()
    )
    return version


def _read_tables(folder: Path) -> int | None:
    from safetensors.torch import load_file

    path = folder / "tables.safetensors"
    if not path.exists():
        return None
    weights = load_file(path)["t.weight"]
    assert weights.shape == (12, 4)
    assert (weights == weights[0, 0]).all()
    return int(weights[0, 0])


def _model(version: int) -> PlacedEmbeddings:
    model = PlacedEmbeddings(plan_of([two_features(rows=9)]), backend="torch")
    state = {name: torch.full_like(one, version) for name, one in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def _read_model(folder: Path) -> int | None:
    if not (folder / "model").exists():
        return None
    model = _model(99)
    load_model(folder / "model", model)
    (weights,) = model.state_dict().values()
    assert (weights == weights[0, 0]).all()
    return int(weights[0, 0])


def _trace(folder: Path, version: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        torch.ones(version).sum()
    _export(recorded, folder / "trace.json.gz")
    time_of = hashlib.sha256((folder / "trace.json.gz").read_bytes()).hexdigest()
    _TRACES[time_of] = version


_TRACES: dict[str, int] = {}


def _read_trace(folder: Path) -> int | None:
    path = folder / "trace.json.gz"
    if not path.exists():
        return None
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    # One that was written and then said to be lost, as by a flush that failed, is the second.
    return _TRACES.get(hashlib.sha256(path.read_bytes()).hexdigest(), 2)


def _fresh(write: Callable[[Path, int], object], name: str) -> Callable[[Path, int], object]:
    """Write what must not be there; the first version is none, the later ones are one."""

    def written(folder: Path, version: int) -> None:
        if version > 1 and not (folder / name).exists():
            write(folder, 2)

    return written


def _seal(folder: Path, version: int) -> None:
    path = folder / "plan.json"
    if version == 1:
        _plan(1).save(path)
        document = json.loads(path.read_text()) | {"batch_size": 5}
        path.write_text(json.dumps(document))
    else:
        plan_file.seal(path)


def _read_sealed(folder: Path) -> int | None:
    document = json.loads((folder / "plan.json").read_text())
    assert document["batch_size"] == 5
    try:
        plan = Plan.load(folder / "plan.json")
    except PlanError:
        return 1
    assert plan.hot_ids["t"].tolist() == [7, 1, 11]
    return 2


WRITE_PATHS = {
    "plan": WritePath(lambda folder, n: _plan(n).save(folder / "plan.json"), _read_plan),
    "seal": WritePath(_seal, _read_sealed),
    "profile": WritePath(lambda folder, n: _profile(n).save(folder / "profile"), _read_profile),
    "calibration": WritePath(
        lambda folder, n: replace(calibration(), cases=n).save(folder / "machine.json"),
        _read_calibration,
    ),
    "checkpoint": WritePath(
        lambda folder, n: checkpoint.save(folder / "run", _checkpoint(n), keep=1), _read_checkpoint
    ),
    "checkpoint-again": WritePath(
        lambda folder, n: checkpoint.save(folder / "run", _checkpoint(0, n)), _read_checkpoint
    ),
    "model": WritePath(
        _fresh(lambda folder, n: save_model(folder / "model", _model(n)), "model"),
        _read_model,
    ),
    "tables": WritePath(
        lambda folder, n: write_tables(_plan(1), _checkpoint(n), folder / "tables.safetensors"),
        _read_tables,
    ),
    "trace": WritePath(_trace, _read_trace),
}
"""All of them: what else is written goes through one of these, see `test_places.py`."""
