"""Checkpoints: folders that are either whole or not there.

A checkpoint is a folder ``step-<number>`` in the format of `torch.distributed.checkpoint`, with
a ``checkpoint.json`` beside, which lists every file with its size and SHA-256. It is written under
a hidden name and becomes visible by one rename, so that a crash, a kill or a full disk leaves
the earlier checkpoints as they were. What is a pickle in it is read as in
`placer.storage.checkpoint`: no code of a file is run.

Tables are stored in the order of their original ids, not in the plan's layout: a run can go
on under another plan, and with another number of ranks. Of many ranks each writes a file of its
own. The folder must be one that all of them see.
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from placer.errors import CheckpointError
from placer.files import sha256_file
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.checkpoint.dcp_writer import write_folder
from placer.storage.checkpoint.sink import Written, flush
from placer.storage.checkpoint.table_blocks import Name, NamedTables
from placer.storage.tensor_rows import AnyTensor, in_rows
from placer.training.distributed import ALONE, Ranks

FORMAT_VERSION = 2
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{12})")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come.

    Attributes
    ----------
    step : int
        Steps taken.
    epoch : int
        Passes over the log that are complete.
    samples : int
        Samples of the log read in the current pass, held-out ones included.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a run needs to go on.

    Attributes
    ----------
    position : Position
    settings : mapping of str to JSON value
        What must be the same when the run goes on, by name: the model's shape, the batch, …
    tensors : mapping of group to mapping of name to tensor
        In memory, or to be read in rows. When saved, those that all ranks have alike; when read,
        those of the tables too. Groups have no dot in their name.
    """

    position: Position
    settings: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, AnyTensor]]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size_bytes: int
    sha256: str


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format_version: int
    step: int
    epoch: int
    samples: int
    settings: dict[str, Any]
    files: dict[str, _File]
    sha256: str


def save(
    folder: Path,
    checkpoint: Checkpoint,
    keep: int = 2,
    ranks: Ranks = ALONE,
    tables: Sequence[NamedTables] = (),
) -> Path:
    """Write a checkpoint into `folder` and remove all but the newest `keep`.

    All ranks must call it: each writes its part of the tables, and the first one all other
    tensors. It becomes visible when all have written theirs, and they return when it is.

    Returns
    -------
    Path
        The checkpoint's own folder.

    Raises
    ------
    CheckpointError
        On all ranks, if it cannot be written, as on a full disk; earlier checkpoints are
        untouched then.
    BackendError
        If a rank is lost; there is no checkpoint then, or a complete one.
    """
    name = f"step-{checkpoint.position.step:012d}"
    target, partial = folder / name, folder / f".{name}.partial"
    first = ranks.rank == 0

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        partial.mkdir()

    def publish(files: Mapping[str, Written]) -> None:
        if not first:
            return
        with _reporting(f"cannot write checkpoint {target}"):
            _write_manifest(partial, checkpoint, files)
            if target.exists():
                target.rename(folder / f".{name}.replaced")
            partial.rename(target)
            flush(folder)
            _tidy(folder)
            for old in _by_step(folder)[:-keep]:
                # Hidden by one rename first: a removal cut short must not look like a checkpoint.
                hidden = folder / f".{old.name}.partial"
                old.rename(hidden)
                shutil.rmtree(hidden)

    tensors: dict[Name, AnyTensor] = {
        (group, key): tensor
        for group, held in checkpoint.tensors.items()
        for key, tensor in held.items()
    }
    try:
        own = write_folder(partial, tables, tensors, target=target, begin=begin)
        files = _of_all_ranks(own, ranks)
        ranks.together(lambda: publish(files))
    finally:
        if first and folder.is_dir():
            with contextlib.suppress(OSError):
                _tidy(folder)
    return target


def _of_all_ranks(own: Mapping[str, Written], ranks: Ranks) -> dict[str, Written]:
    """The files that all ranks wrote, with what each found of its own."""
    said = ranks.texts(json.dumps({name: asdict(file) for name, file in own.items()}))
    return {
        name: Written(**file) for text in said for name, file in sorted(json.loads(text).items())
    }


def _tidy(folder: Path) -> None:
    """Remove what writes that were cut short left, and give back what they had set aside."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial)
    for replaced in folder.glob(".step-*.replaced"):
        target = folder / replaced.name[1:].removesuffix(".replaced")
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def exist(folder: Path) -> bool:
    """Whether a folder holds checkpoints, complete or not."""
    return bool(_by_step(folder))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None if it has no checkpoint at all.

    Incomplete ones are passed over with a warning in the log.

    Raises
    ------
    CheckpointError
        If there are checkpoints but none is complete; says what the newest one lacks.
    """
    problems = []
    for path in reversed(_by_step(folder)):
        try:
            _check_sizes(path, _read_manifest(path))
        except CheckpointError as error:
            _logger.warning("passing over an incomplete checkpoint: %s", error)
            problems.append(error)
        else:
            return path
    if problems:
        raise CheckpointError(f"no checkpoint in {folder} is complete: {problems[0]}")
    return None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, or the newest complete one of a folder of them, into memory.

    Raises
    ------
    CheckpointError
        See `open_checkpoint`.
    """
    found = open_checkpoint(path)
    with _reporting(f"cannot read checkpoint {path}"):
        tensors = {
            group: {name: in_rows(tensor).whole() for name, tensor in held.items()}
            for group, held in found.tensors.items()
        }
    return Checkpoint(found.position, found.settings, tensors)


def open_checkpoint(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """One checkpoint, or the newest complete one of a folder, whose tensors are read in rows.

    All ranks must call it. The first one picks the checkpoint and compares every byte with what
    was written; the others look at sizes.

    Raises
    ------
    CheckpointError
        On all ranks, if there is none, a file of it is missing, cut short or altered, or it was
        written in a newer format; the message names the file.
    """
    first = ranks.rank == 0
    chosen = Path(ranks.told(ranks.together(lambda: str(_chosen(path)) if first else "")))
    return ranks.together(lambda: _open(chosen, verifies=first))


def _chosen(path: Path) -> Path:
    if _NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        return path
    newest = latest(path) if path.is_dir() else None
    if newest is None:
        raise CheckpointError(f"there is no checkpoint in {path}; start without one")
    return newest


def _open(path: Path, verifies: bool) -> Checkpoint:
    manifest = _read_manifest(path)
    _check_sizes(path, manifest)
    with _reporting(f"cannot read checkpoint {path}"):
        for name, file in manifest.files.items():
            if verifies and sha256_file(path / name) != file.sha256:
                raise CheckpointError(
                    f"{path / name} was altered: its SHA-256 is not the one that "
                    f"{MANIFEST} lists; use an earlier checkpoint"
                )
    tensors: dict[str, dict[str, AnyTensor]] = defaultdict(dict)
    for full_name, tensor in read_tensors(path).items():
        group, _, key = full_name.partition(".")
        tensors[group][key] = tensor
    position = Position(manifest.step, manifest.epoch, manifest.samples)
    return Checkpoint(position, manifest.settings, dict(tensors))


def check_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint of another model or another way of training.

    Raises
    ------
    CheckpointError
        Names the first settings that differ, with both values.
    """
    # Through JSON, as the saved ones went: tuples become lists.
    now = json.loads(json.dumps(dict(current)))
    different = [
        f"{path} was {_shown(before)} and is {_shown(after)}"
        for path, before, after in _differences(dict(saved), now)
    ]
    if different:
        more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
        raise CheckpointError(
            f"the checkpoint is of another run: {'; '.join(different[:3])}{more}; "
            "resume with the settings that it was made with"
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


def _write_manifest(folder: Path, checkpoint: Checkpoint, files: Mapping[str, Written]) -> None:
    position = checkpoint.position
    body = {
        "format_version": FORMAT_VERSION,
        "step": position.step,
        "epoch": position.epoch,
        "samples": position.samples,
        "settings": dict(checkpoint.settings),
        "files": {name: asdict(file) for name, file in files.items()},
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(body | {"sha256": _hash_of(body)}, indent=1), encoding="utf-8")
    flush(manifest)
    flush(folder)


def _read_manifest(path: Path) -> _Manifest:
    file = path / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is cut short or altered: it is not JSON") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        advice = "update placer" if version > FORMAT_VERSION else "train anew"
        raise CheckpointError(
            f"{file} has format version {version} and this placer reads {FORMAT_VERSION}; {advice}"
        )
    try:
        manifest = _Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(f"{file} was altered: {where}: {first['msg']}") from error
    if _hash_of({key: content[key] for key in content if key != "sha256"}) != manifest.sha256:
        raise CheckpointError(f"{file} was altered: its content is not what its SHA-256 says")
    unsafe = [name for name in manifest.files if Path(name).name != name]
    if unsafe:
        raise CheckpointError(f"{file} names a file outside its folder: {unsafe[0]!r}")
    return manifest


def _check_sizes(path: Path, manifest: _Manifest) -> None:
    for name, file in manifest.files.items():
        try:
            size_bytes = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} is missing; use another checkpoint") from error
        if size_bytes != file.size_bytes:
            raise CheckpointError(
                f"{path / name} is cut short or altered: it has {size_bytes} bytes "
                f"and should have {file.size_bytes}; use another checkpoint"
            )


def _by_step(folder: Path) -> list[Path]:
    """Folders that look like checkpoints, by rising step."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def _hash_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Turn what the disk raises into one clear error."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error
