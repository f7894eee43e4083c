"""Describe a checkpoint, and its manifest: JSON that lists files, their sizes and SHA-256."""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from placer.data.files.opening import FileIdentity
from placer.errors import CheckpointError
from placer.files.atomic import SEAL, FileRecord, HashedFile, is_name, sealed, sha256_file
from placer.files.reading import LimitError, read_json
from placer.growing.options import Growing
from placer.tables import Table
from placer.units import listed

if TYPE_CHECKING:
    from placer.storage.tensor_rows import AnyTensor


FORMAT_VERSION = 2
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{12})")

_logger = logging.getLogger(__name__)


class RunData(BaseModel, extra="forbid", strict=True):
    """What identifies a log. Checkpoints of earlier versions lack it."""

    log: list[FileIdentity] = Field(default=[])
    ids_sha256: dict[str, str] = Field(default={})


class Manifest(BaseModel, extra="forbid", strict=True):
    """The content of ``checkpoint.json``. `sha256` is of all other keys."""

    format_version: int
    step: int
    epoch: int
    samples: int
    settings: dict[str, Any]
    data: RunData = RunData()
    files: dict[str, FileRecord]
    sha256: str = ""


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Write a checkpoint's manifest: its keys and then their SHA-256. Raises OSError on failure."""
    file = HashedFile(folder / MANIFEST)
    file.write(json.dumps(sealed({"format_version": FORMAT_VERSION, **body}), indent=1).encode())
    file.finish()


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest of this version."""
    try:
        content = read_json(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except LimitError as error:
        raise CheckpointError(f"{path} is cut short or altered: it is not JSON: {error}") from error
    written = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(written, int) and written != FORMAT_VERSION:
        advice = "update placer" if written > FORMAT_VERSION else "train again"
        raise CheckpointError(
            f"{path} has format version {written} and this placer reads {FORMAT_VERSION}; {advice}"
        )
    try:
        # From JSON, because strict models only then take a dictionary for a dataclass.
        manifest = Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(f"{path} was altered: {where}: {first['msg']}") from error
    if sealed(content)[SEAL] != manifest.sha256:
        raise CheckpointError(f"{path} was altered: its content is not what its SHA-256 says")
    return manifest


def check_sha256(path: Path, sha256: str) -> None:
    """Raise CheckpointError unless a file has this SHA-256."""
    advice = "use an earlier checkpoint"
    try:
        same = sha256_file(path) == sha256
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; {advice}") from error
    if not same:
        raise CheckpointError(
            f"{path} was altered: its SHA-256 is not the one that {MANIFEST} lists; {advice}"
        )


def latest(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest complete checkpoint in that folder.

    Incomplete checkpoints are skipped with a warning in the log. Raises CheckpointError if the
    folder has no complete checkpoint. The message says what is wrong with the newest one.
    """
    if _NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        if not path.exists():
            beside = listed([one.name for one in by_step(path.parent)]) or "none"
            raise CheckpointError(f"there is no checkpoint {path}; {path.parent} has {beside}")
        return path
    problems: list[CheckpointError] = []
    before, there = list[Path](), by_step(path)
    while there != before:  # Beside a fast writer, all listed checkpoints may be gone by now.
        for found in reversed(there):
            try:
                manifest_of(found)
            except CheckpointError as error:
                _logger.warning("passing over a checkpoint: %s", error)
                problems.append(error)
            else:
                return found
        before, there = there, by_step(path)
    if problems:
        raise CheckpointError(f"no checkpoint in {path} is complete: {problems[0]}")
    raise CheckpointError(f"there is no checkpoint in {path}")


def manifest_of(path: Path) -> Manifest:
    """Read a checkpoint's manifest; check that its files exist and have the listed sizes."""
    file = path / MANIFEST
    manifest = read_manifest(file)
    unsafe = [name for name in manifest.files if not is_name(name)]
    if unsafe:
        raise CheckpointError(f"{file} names a file outside its folder: {unsafe[0]!r}")
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{path} holds step {manifest.step}, and is named for step {int(named[1])}: a folder "
            f"was renamed; name it step-{manifest.step:012d} again"
        )
    for name, entry in manifest.files.items():
        advice = "use another checkpoint"
        try:
            size_bytes = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} is missing; {advice}") from error
        if size_bytes != entry.size_bytes:
            raise CheckpointError(
                f"{path / name} is cut short or altered: it has {size_bytes} bytes and should "
                f"have {entry.size_bytes}; {advice}"
            )
    return manifest


def by_step(folder: Path) -> list[Path]:
    """Return folders that look like checkpoints, by rising step."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


WEIGHTS, STATES, KEYS = "embeddings", "embedding_optimizer", "key_maps"
"""Groups of tensors in a checkpoint: ``<table>.weight``, ``<table>.<name of the state>``, and the
key maps of tables that grow."""


def table_settings(tables: Iterable[Table]) -> dict[str, Any]:
    """Return the part of a run's settings that describes its tables."""
    return {
        table.name: {
            "rows": table.rows,
            "dim": table.dim,
            "dtype": table.dtype,
            "optimizer": table.optimizer,
            "features": [[feature.name, feature.pooling] for feature in table.features],
        }
        for table in tables
    }


def growing_settings(growing: Mapping[str, Growing]) -> dict[str, Any]:
    """Return a run's settings of tables that grow, which a resumed run must keep."""
    return {
        name: {"capacity": how.capacity, "admission": how.admission}
        for name, how in growing.items()
    }


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has trained."""

    step: int = 0  # Steps taken.
    epoch: int = 0  # Complete passes over the log.
    samples: int = 0  # Samples read in the current pass, held-out ones included.


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything that a run needs to continue."""

    position: Position
    # Settings that a resumed run must keep, by name: the model's shape, the batch size, …
    settings: Mapping[str, Any]
    # Tensors by group and name, in memory or to be read in rows. To save, only tensors that are
    # equal in all processes; when read, also those of tables. Names of groups have no dot.
    tensors: Mapping[str, Mapping[str, "AnyTensor"]]
    # What identifies the log; empty if unknown.
    data: Mapping[str, Any] = field(default_factory=dict)
    # Hash that identifies the checkpoint's files; empty if it was not read from files.
    sha256: str = ""
