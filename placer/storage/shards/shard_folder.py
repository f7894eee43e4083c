"""Folders of shards: a plan, the file of every shard on every device, and ``shards.json``.

docs/reshard.md describes the format. The plan says which files there are, what they are called
and what is in them; ``shards.json`` adds each one's size and SHA-256.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from placer.errors import CheckpointError, PlanMismatchError
from placer.files import StrPath, sha256_file, sync_folder
from placer.folders import new_folder
from placer.plan.diff import Home, homes_of
from placer.plan.order import Int, Ranks, listed_ids
from placer.plan.plan import Plan
from placer.plan.verify import check_shards, refuse_growing
from placer.storage.manifest import (
    Manifest,
    Strict,
    check_size,
    read_manifest,
    write_manifest,
)
from placer.storage.run_state import Position
from placer.storage.safetensors_layout import StoredTensor
from placer.storage.shards.shard_file import Bytes, ShardLayout, check_file, read_rows

FORMAT_VERSION = 1
MANIFEST = "shards.json"
PLAN = "plan.json"


class ShardEntry(Strict):
    """A file of ``shards.json``."""

    table: str
    rows: list[int]
    cols: list[int]
    device: str
    memory: str
    tensors: dict[str, Any]
    size_bytes: int
    sha256: str


class CheckpointEntry(Strict):
    """How far the run was whose checkpoint the rows are from."""

    step: int
    epoch: int
    samples: int


class ShardManifest(Manifest):
    """``shards.json``."""

    plan_sha256: str
    checkpoint: CheckpointEntry
    updates: int | None
    files: dict[str, ShardEntry]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The file of one shard on one of its devices."""

    name: str  # Path within the folder.
    layout: ShardLayout
    home: Home  # The device that serves its rows, and the tier.


def files_by_table(plan: Plan) -> dict[str, list[tuple[ShardFile, ...]]]:
    """Return the files of each shard of a table: one for every device that serves the shard."""
    by_table: dict[str, list[tuple[ShardFile, ...]]] = {table.name: [] for table in plan.tables}
    for index, shard in enumerate(plan.shards):
        layout = ShardLayout(plan.tables_by_name[shard.table], shard)
        word = re.sub(r"[^A-Za-z0-9_]+", "-", shard.table)[:40]
        name = f"{index:05d}-{word}.safetensors"
        files = (
            ShardFile(f"{quote(home.device, safe='')}.{home.memory}/{name}", layout, home)
            for home in homes_of(shard)
        )
        by_table[shard.table].append(tuple(files))
    return by_table


def placement_sha256(plan: Plan) -> str:
    """Return SHA-256 over what of a plan decides its files: tables, shards and row orders.

    How rows are read, buffers, the machine's bandwidths and the solver's record do not enter.
    """
    facts = {
        "tables": [[t.name, t.rows, t.dim, t.dtype, t.optimizer] for t in plan.tables],
        "shards": [[s.table, s.rows, s.cols, s.devices, s.memory] for s in plan.shards],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for table in plan.tables:
        ids = listed_ids(plan, table.name)
        digest.update(f"{ids.size}:".encode())
        digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class ShardFolder:
    """A folder of shards, whose rows are read on demand."""

    path: Path
    plan: Plan  # Whose shards the files are.
    manifest: ShardManifest
    verifies: bool = True  # Whether a file's SHA-256 is compared before its first row is read.
    _checked: set[str] = field(default_factory=set, repr=False, compare=False)

    @cached_property
    def files(self) -> dict[str, list[tuple[ShardFile, ...]]]:
        """For each shard of a table, in the plan's order, its files, by table."""
        return files_by_table(self.plan)

    @property
    def position(self) -> Position:
        """How far the run was whose rows these are."""
        return Position(**self.manifest.checkpoint.model_dump())

    @property
    def step(self) -> int:
        """Training steps that the rows have seen."""
        return self.position.step

    @property
    def updates(self) -> int | None:
        """Updates so far, where the optimizer counts them; see `PlacedEmbeddings`."""
        return self.manifest.updates

    def order_of(self, table: str) -> Ranks:
        """Return the row order of a table."""
        if table not in self._orders:
            self._orders[table] = Ranks.in_plan(self.plan, table)
        return self._orders[table]

    def rows(self, file: ShardFile, tensor: StoredTensor, positions: Int) -> Bytes:
        """Return rows of a file: uint8, shape (n, row_bytes)."""
        self.check(file)
        return read_rows(self.path / file.name, tensor, positions)

    def check(self, file: ShardFile) -> None:
        """Check a file once; raises `CheckpointError` if it is missing or damaged."""
        if file.name not in self._checked:
            sha256 = self.manifest.files[file.name].sha256 if self.verifies else None
            check_file(self.path / file.name, file.layout, sha256)
            self._checked.add(file.name)

    @cached_property
    def _orders(self) -> dict[str, Ranks]:
        return {}


def open_shards(path: StrPath, *, verify: bool = True) -> ShardFolder:
    """Return a folder that `write_shards` or `reshard` made.

    With `verify`, every byte of a file is compared with ``shards.json`` before it is used; sizes
    always are. Raises CheckpointError if it is no such folder, a file is missing or truncated,
    ``shards.json`` or the plan was altered, or it is of a newer format; the message names the file.
    Raises PlanError if a shard of the plan is malformed.
    """
    folder = Path(path)
    manifest = read_manifest(
        folder / MANIFEST,
        ShardManifest,
        FORMAT_VERSION,
        if_older="write the shards again",
        if_missing="a folder of shards is made by `placer export --to shards`",
    )
    plan = Plan.load(folder / PLAN)
    if placement_sha256(plan) != manifest.plan_sha256:
        raise CheckpointError(
            f"{folder / PLAN} is not the plan that the shards in {folder} were written with; "
            "write them again with `placer export --to shards`"
        )
    check_shards(plan)
    folder_of_shards = ShardFolder(folder, plan, manifest, verify)
    files = (file for shards in folder_of_shards.files.values() for own in shards for file in own)
    expected = {file.name: file for file in files}
    if expected.keys() != manifest.files.keys():
        odd = min(expected.keys() ^ manifest.files.keys())
        raise CheckpointError(
            f"{folder / MANIFEST} does not list the files of its plan: {odd} is in one of both "
            "only; write the shards again"
        )
    for name, file in expected.items():
        check_size(folder / name, file.layout.size_bytes, "write the shards again")
    return folder_of_shards


def refuse_other_plan(folder: ShardFolder, plan: Plan) -> None:
    """Raise `PlanMismatchError` if a folder's files are not those of a plan."""
    expected, own = placement_sha256(plan), folder.manifest.plan_sha256
    if expected != own:
        raise PlanMismatchError(
            f"the shards in {folder.path} were not written with the older plan: its placement has "
            f"SHA-256 {expected[:12]}…, theirs {own[:12]}…; give the plan that they were written "
            f"with, which is {folder.path / PLAN}"
        )


class NewShards:
    """A folder of shards that is being written; see `new_shards`."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        self.entries: dict[str, ShardEntry] = {}  # What has been written, by the file's name.
        # Files that an earlier checkpoint has already; of them, those that were linked, not copied.
        self.kept: set[str] = set()
        self.linked: set[str] = set()

    def target(self, file: ShardFile) -> Path:
        """Return where a file belongs; its own folder is there."""
        path = self.path / file.name
        path.parent.mkdir(exist_ok=True)
        return path

    def link(self, source: Path, copies: Sequence[ShardFile], sha256: str) -> None:
        """Make files of one that is there already."""
        for file in copies:
            target = self.target(file)
            try:
                target.hardlink_to(source)
                self.linked.add(file.name)
            except OSError:  # Another file system, or one without links.
                shutil.copyfile(source, target)
                sync_folder(target)
            self.kept.add(file.name)
            self._add(file, sha256)

    def add_written(self, copies: Sequence[ShardFile]) -> None:
        """List a shard's first file, which is there, and make the others of it."""
        path = self.target(copies[0])
        sha256 = sha256_file(path)
        self._add(copies[0], sha256)
        self.link(path, copies[1:], sha256)

    def _add(self, file: ShardFile, sha256: str) -> None:
        layout, shard = file.layout, file.layout.shard
        self.entries[file.name] = ShardEntry(
            table=shard.table,
            rows=list(shard.rows),
            cols=list(shard.cols),
            device=file.home.device,
            memory=file.home.memory,
            tensors={
                name: {"dtype": tensor.dtype, "shape": list(tensor.shape)}
                for name, tensor in layout.tensors.items()
            },
            size_bytes=layout.size_bytes,
            sha256=sha256,
        )

    def finish(self, position: Position, updates: int | None) -> None:
        """Write the plan and ``shards.json``."""
        self.plan.save(self.path / PLAN)
        manifest = ShardManifest(
            format_version=FORMAT_VERSION,
            plan_sha256=placement_sha256(self.plan),
            checkpoint=CheckpointEntry(**asdict(position)),
            updates=updates,
            files=dict(sorted(self.entries.items())),
        )
        body = manifest.model_dump(exclude={"sha256"})
        write_manifest(self.path / MANIFEST, body, end="\n")
        for folder in {(self.path / name).parent for name in self.entries}:
            sync_folder(folder)


@contextlib.contextmanager
def new_shards(path: StrPath, plan: Plan) -> Iterator[NewShards]:
    """Write a folder of shards, which appears when it is complete; see `new_folder`."""
    refuse_growing(plan, "a folder of shards")
    with new_folder(path) as folder:
        yield NewShards(folder, plan)
