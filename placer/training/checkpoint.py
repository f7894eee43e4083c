"""Save and load checkpoints: folders that are either complete or absent.

A checkpoint is a folder ``step-<number>`` that all processes must see. It is written under a hidden
name and becomes visible by one rename. docs/training.md describes its files.
"""

import contextlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from placer.errors import CheckpointError
from placer.executor.embeddings import Embeddings
from placer.files.atomic import FileRecord, StrPath
from placer.files.folders import HiddenFolder
from placer.files.locks import is_locked
from placer.plan.plan import Plan
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.checkpoint.dcp_writer import write_folder
from placer.storage.checkpoint.table_blocks import Name, SavedTables
from placer.storage.manifest import (
    KEYS,
    STATES,
    WEIGHTS,
    Checkpoint,
    Position,
    by_step,
    check_sha256,
    latest,
    manifest_of,
    write_manifest,
)
from placer.storage.table_files import write_increment, write_tables
from placer.storage.tensor_rows import AnyTensor, TensorRows
from placer.training.distributed import ALONE, Ranks
from placer.units import counted

GROW = "`placer grow OLD NEW --checkpoint FOLDER -o FOLDER`"


def save(
    folder: Path,
    checkpoint: Checkpoint,
    keep: int = 2,
    tables: SavedTables | None = None,
) -> Path:
    """Write a checkpoint into `folder`, remove all but the newest `keep`, and return its folder.

    All ranks must call this. Each writes its part of the tables, and the first rank writes all
    other tensors. The checkpoint becomes visible when all ranks have written. Then they return.

    Raises CheckpointError on all ranks if it cannot be written, as on a full disk. Earlier
    checkpoints are then unchanged. Raises BackendError if a rank is lost. The checkpoint is then
    absent or complete.
    """
    hidden = HiddenFolder(folder / f"step-{checkpoint.position.step:012d}")
    tables = tables or SavedTables()
    first = not tables.named or tables.named[0].tables.rank == 0

    def begin() -> None:
        tidy(folder)
        hidden.begin()

    def publish(files: Mapping[str, FileRecord]) -> None:
        body = {
            **asdict(checkpoint.position),
            "settings": dict(checkpoint.settings),
            **({"data": dict(checkpoint.data)} if checkpoint.data else {}),
            "files": {name: asdict(file) for name, file in files.items()},
        }
        write_manifest(hidden.partial, body)
        hidden.publish()
        for old in by_step(folder)[:-keep]:
            # Rename it first, so an interrupted removal does not look like a checkpoint.
            removed = old.rename(folder / f".{old.name}.partial")
            shutil.rmtree(removed)

    tensors: dict[Name, AnyTensor] = {
        (group, key): tensor
        for group, held in checkpoint.tensors.items()
        for key, tensor in held.items()
    }
    try:
        write_folder(hidden, tables.named, tensors | tables.kept(), begin, publish)
    finally:
        hidden.discard()
        if first and folder.is_dir():
            with contextlib.suppress(OSError):
                tidy(folder)
    return hidden.target


def tidy(folder: Path) -> None:
    """Remove what interrupted writes left, and restore checkpoints that they had moved away."""
    for partial in folder.glob(".step-*.partial"):
        if not is_locked(partial):
            shutil.rmtree(partial)
    for replaced in folder.glob(".step-*.replaced"):
        target = folder / replaced.name[1:].removesuffix(".replaced")
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def exist(folder: Path) -> bool:
    """Return whether a folder holds checkpoints, complete or not."""
    return bool(by_step(folder))


def open_checkpoint(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Open a checkpoint, or the newest complete one in a folder; its rows are read on demand.

    All ranks must call this. The first rank chooses the checkpoint and checks every file's SHA-256.
    Other ranks check sizes.

    Raises CheckpointError on all ranks if there is no checkpoint, a file is missing, truncated or
    altered, or the format is newer. The message names the file.
    """
    first = ranks.rank == 0
    chosen = ranks.objects(ranks.together(lambda: latest(path) if first else path))[0]
    return ranks.together(lambda: _open(chosen, verifies=first))


def load_embeddings(folder: StrPath, embeddings: Embeddings) -> Position:
    """Load the tables of a `placer train` checkpoint into embeddings under any plan.

    Loads weights, optimizer state, keys and numbers of updates. `folder` is a checkpoint, or has
    several; the newest complete one is taken. Each rank reads its own rows, and does not wait for
    others; so give all ranks one checkpoint. The first rank also compares hashes. Returns the run's
    position.

    Raises CheckpointError if a file is damaged, or the tables differ. Names, shapes and types are
    checked before anything is changed.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from placer import Plan, Shard, Table, Topology
    >>> from placer.executor import make_embeddings
    >>> shard = Shard("t", (0, 6, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("t", 6, 2, optimizer="sgd"),), Topology.parse("1xh100"), (shard,))
    >>> tensors = {"embeddings": {"t.weight": torch.ones(6, 2)}}
    >>> embeddings = make_embeddings(plan)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(Path(folder), Checkpoint(Position(step=3), {}, tensors))
    ...     load_embeddings(folder, embeddings)
    Position(step=3, epoch=0, samples=0)
    """
    is_first = embeddings.id_order().rank == 0
    saved = _open(latest(Path(folder)), verifies=is_first)
    restore_tables(saved, embeddings)
    return saved.position


def restore_tables(saved: Checkpoint, embeddings: Embeddings) -> None:
    """Load an opened checkpoint's tables; see `load_embeddings`."""
    stored = {
        f"{group}.{name}": TensorRows.of(tensor)
        for group in (WEIGHTS, STATES, KEYS)
        for name, tensor in saved.tensors.get(group, {}).items()
    }
    tables_of(embeddings).load("the checkpoint's tables do not fit the plan", stored)


def tables_of(embeddings: Embeddings) -> SavedTables:
    """Return the tables of embeddings, with their names in a checkpoint."""
    tables = SavedTables()
    tables.add(embeddings, WEIGHTS, STATES, KEYS)
    return tables


def _open(path: Path, verifies: bool) -> Checkpoint:
    manifest = manifest_of(path)
    if verifies:
        for name, file in manifest.files.items():
            check_sha256(path / name, file.sha256)
    tensors: dict[str, dict[str, AnyTensor]] = defaultdict(dict)
    for full_name, tensor in read_tensors(path, manifest.files).items():
        group, _, key = full_name.partition(".")
        tensors[group][key] = tensor
    position = Position(manifest.step, manifest.epoch, manifest.samples)
    data = manifest.data.model_dump(exclude_defaults=True)
    return Checkpoint(position, manifest.settings, dict(tensors), data, manifest.sha256)


def check_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint has another model or other training settings."""
    # Through JSON, like the saved settings: tuples become lists.
    now = json.loads(json.dumps(dict(current)))
    different = [
        f"{path} was {_shown(before)} and is {_shown(after)}"
        for path, before, after in _differences(dict(saved), now)
    ]
    if different:
        more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
        grows = any(one.split(" was ")[0].endswith(" rows") for one in different)
        how = f", or give its tables other rows with {GROW}" if grows else ""
        if any(one.startswith("holdout_every ") for one in different):
            how += " (holdout_every is 0 where another log is evaluated on, as by --eval-data)"
        raise CheckpointError(
            f"the checkpoint is of another run: {'; '.join(different[:3])}{more}; "
            f"resume with the settings that it was made with{how}"
        )


def check_data(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint is of another log, or its ids map to other rows.

    Facts that either side lacks are not compared.
    """
    end = (
        "; resume with the log and the profile that it was made with, or say that other data is "
        "meant (--other-data)"
    )
    ids, own = saved.get("ids_sha256", {}), current.get("ids_sha256", {})
    different = [name for name in ids if own.get(name, ids[name]) != ids[name]]
    if different:
        raise CheckpointError(
            f"the checkpoint maps the ids of {', '.join(different[:3])} to other rows than the "
            f"profile does now{end}. Rows are carried over to other ids by {GROW}"
        )
    before, now = saved.get("log", []), current.get("log", [])
    if not before or not now:
        return
    for number, (one, two) in enumerate(zip_longest(before, now), 1):
        if one is None or two is None:
            raise CheckpointError(
                f"the checkpoint is of a log of {len(before)} files, this one has {len(now)}{end}"
            )
        if (one["size_bytes"], one["sha256"]) != (two["size_bytes"], two["sha256"]):
            what = "other bytes"
            if one["size_bytes"] != two["size_bytes"]:
                what = f"{two['size_bytes']} bytes instead of {one['size_bytes']}"
            raise CheckpointError(
                f"the checkpoint is of another log: its file {number} was {one['name']}, and "
                f"{two['name']} has {what}{end}"
            )


def _differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in [*saved, *(name for name in current if name not in saved)]:
        before, after = saved.get(name), current.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name} ")
        elif before != after:
            yield f"{prefix}{name}", before, after


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)


def export_tables(
    plan: Plan, checkpoint: Path, file: Path, *, since: Path | None, with_optimizer: bool
) -> str:
    """Write a checkpoint's tables, or what changed `since` an earlier one; return what that is."""
    opened = open_checkpoint(checkpoint)
    step = opened.position.step
    if since is None:
        write_tables(plan, opened, file, with_optimizer=with_optimizer)
        return f"{counted(len(plan.tables), 'table')} of step {step}"
    earlier = open_checkpoint(since)
    rows = write_increment(plan, earlier, opened, file)
    return f"{counted(rows, 'changed row')} of steps {earlier.position.step} to {step}"
