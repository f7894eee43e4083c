"""Read folders of shards: a plan, a file for each shard and device, and ``shards.json``.

docs/reshard.md describes the format. The plan determines the files, their names and their content.
``shards.json`` adds the size and SHA-256 of each file.
"""

import hashlib
import json
import re
from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.errors import CheckpointError, PlanMismatchError
from placer.executor.distributed.placement.division import ranks_of_devices
from placer.executor.id_order import IdRange, TableTensor, tensors_of
from placer.executor.tensor_names import UPDATES, check_shapes
from placer.files import StrPath
from placer.plan.diff import Home, homes_of
from placer.plan.fields import Shard
from placer.plan.plan import Int, Plan, Ranks, listed_ids
from placer.plan.verify import check_shards
from placer.storage.manifest import (
    STATES,
    WEIGHTS,
    Checkpoint,
    Manifest,
    Position,
    Strict,
    check_sha256,
    check_size,
    read_manifest,
)
from placer.storage.tensor_rows import (
    AnyTensor,
    StoredTensor,
    TensorRows,
    chunk_rows,
    lay_out,
    row_blocks,
)
from placer.tables import Table

if TYPE_CHECKING:
    from placer.executor import Embeddings

Bytes = npt.NDArray[np.uint8]

FORMAT_VERSION = 1
MANIFEST = "shards.json"
PLAN = "plan.json"


class ShardEntry(Strict):
    """Entry of a shard's file in ``shards.json``."""

    table: str
    rows: list[int]
    cols: list[int]
    device: str
    memory: str
    tensors: dict[str, Any]
    size_bytes: int
    sha256: str


class ShardManifest(Manifest):
    """The content of ``shards.json``."""

    plan_sha256: str
    checkpoint: Position  # Position of the run at the rows' checkpoint.
    updates: int | None
    files: dict[str, ShardEntry]


@dataclass(frozen=True)
class ShardFile:
    """The safetensors file of one shard on one of its devices.

    The table and the shard determine its tensors and their shapes. So its first bytes and the place
    of each row are known without reading it.
    """

    name: str  # Path within the folder.
    table: Table
    shard: Shard
    home: Home  # Device that serves the rows, and tier of the rows.

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors by name, in the order of the file."""
        return {tensor.name: tensor for tensor in self._laid_out[1]}

    @property
    def header(self) -> bytes:
        """First bytes of the file."""
        return self._laid_out[0]

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(tensor.size_bytes for tensor in self.tensors.values())

    @cached_property
    def _laid_out(self) -> tuple[bytes, tuple[StoredTensor, ...]]:
        held = replace(self.table, rows=self.shard.row_count, dim=self.shard.width)
        tensors = tensors_of(held, held.optimizer)
        return lay_out((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def files_by_table(plan: Plan) -> dict[str, list[tuple[ShardFile, ...]]]:
    """Return, by table, the files of each shard: one file for each device of the shard."""
    by_table: dict[str, list[tuple[ShardFile, ...]]] = {table.name: [] for table in plan.tables}
    for index, shard in enumerate(plan.shards):
        table = plan.tables_by_name[shard.table]
        word = re.sub(r"[^A-Za-z0-9_]+", "-", shard.table)[:40]
        name = f"{index:05d}-{word}.safetensors"
        files = (
            ShardFile(f"{quote(home.device, safe='')}.{home.memory}/{name}", table, shard, home)
            for home in homes_of(shard)
        )
        by_table[shard.table].append(tuple(files))
    return by_table


def placement_sha256(plan: Plan) -> str:
    """Return a SHA-256 of everything in a plan that determines its files.

    These are tables, shards and row orders; not lookup kinds, buffers, bandwidths or the solver.
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
    """A folder of shards. Its rows are read on demand."""

    path: Path
    plan: Plan  # The plan of the files' shards.
    manifest: ShardManifest
    verifies: bool = True  # Whether to check a file's SHA-256 before its first row is read.
    _checked: set[str] = field(default_factory=set, repr=False, compare=False)

    @cached_property
    def files(self) -> dict[str, list[tuple[ShardFile, ...]]]:
        """By table, the files of each of its shards, in the plan's order."""
        return files_by_table(self.plan)

    @property
    def step(self) -> int:
        """Number of training steps at the rows' checkpoint."""
        return self.manifest.checkpoint.step

    @property
    def updates(self) -> int | None:
        """Number of updates so far, if the optimizer counts them; see `PlacedEmbeddings`."""
        return self.manifest.updates

    def order_of(self, table: str) -> Ranks:
        """Return the row order of a table."""
        if table not in self._orders:
            self._orders[table] = Ranks.in_plan(self.plan, table)
        return self._orders[table]

    def rows(self, file: ShardFile, tensor: StoredTensor, positions: Int) -> Bytes:
        """Return rows of a tensor at `positions`, in any order: uint8, shape (n, row_bytes)."""
        self.check(file)
        if not positions.size:
            return np.empty((0, tensor.row_bytes), dtype=np.uint8)
        path, shape = self.path / file.name, (tensor.shape[0], tensor.row_bytes)
        try:
            rows = np.memmap(path, np.uint8, "r", tensor.offset, shape)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        return np.asarray(rows[positions])

    def check(self, file: ShardFile) -> None:
        """Check a file once; raise `CheckpointError` if it is missing or damaged."""
        if file.name in self._checked:
            return
        path = self.path / file.name
        fix = "write the shards again from a checkpoint (`placer export --to shards`)"
        check_size(path, file.size_bytes, fix)
        try:
            with path.open("rb") as opened:
                first_bytes = opened.read(len(file.header))
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {error.strerror or error}; {fix}"
            ) from error
        if first_bytes != file.header:
            raise CheckpointError(
                f"{path} was altered: it does not begin as its shard's does; {fix}"
            )
        if self.verifies:
            check_sha256(path, self.manifest.files[file.name].sha256, MANIFEST, fix)
        self._checked.add(file.name)

    @cached_property
    def _orders(self) -> dict[str, Ranks]:
        return {}


def open_shards(path: StrPath, *, verify: bool = True) -> ShardFolder:
    """Open a folder that `write_shards` or `reshard` made.

    File sizes are checked now. With `verify`, a file's SHA-256 is checked before its first use.
    Raises CheckpointError if this is no such folder, a file is missing or truncated, the plan or
    ``shards.json`` was altered, or the format is newer. The message names the file. Raises
    PlanError if a shard of the plan is malformed.
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
        check_size(folder / name, file.size_bytes, "write the shards again")
    return folder_of_shards


def refuse_other_plan(folder: ShardFolder, plan: Plan) -> None:
    """Raise `PlanMismatchError` if a folder's files were written for another plan."""
    expected, own = placement_sha256(plan), folder.manifest.plan_sha256
    if expected != own:
        raise PlanMismatchError(
            f"the shards in {folder.path} were not written with the older plan: its placement has "
            f"SHA-256 {expected[:12]}…, theirs {own[:12]}…; give the plan that they were written "
            f"with, which is {folder.path / PLAN}"
        )


def held_rows(ranks: Int, shard: Shard) -> tuple[Int, Int]:
    """Return which of `ranks` a shard holds, as ascending indices, and their places in the shard.

    `ranks` are row ranks in the row order of the shard's plan.
    """
    start, stop, step = shard.rows
    inside = (ranks >= start) & (ranks < stop)
    if step > 1:
        inside &= (ranks - start) % step == 0
    where = np.flatnonzero(inside)
    return where, (ranks[where] - start) // step


def gather(
    folder: ShardFolder,
    tensor: TableTensor,
    ids: Int,
    cols: tuple[int, int],
    own: Set[str] = frozenset(),
) -> Tensor:
    """Read the rows `ids` and columns `cols` of a tensor, preferring the files of `own` devices.

    Returns shape (n, stop − start), or (n,) for state with one number a row. Raises CheckpointError
    if a file is damaged or the folder lacks some of the rows.
    """

    def is_foreign(file: ShardFile) -> bool:
        return file.home.device not in own

    table, width = tensor.table.name, cols[1] - cols[0]
    result = np.empty((ids.size, tensor.width_bytes(width)), dtype=np.uint8)
    columns_read = np.zeros(ids.size, dtype=np.int64)
    ranks = folder.order_of(table).ranks(ids)
    nearest = (min(copies, key=is_foreign) for copies in folder.files[table])
    for file in sorted(nearest, key=is_foreign):
        shard, stored = file.shard, file.tensors[tensor.name]
        low, high = max(cols[0], shard.cols[0]), min(cols[1], shard.cols[1])
        if tensor.is_per_row:
            low, high = cols
        if low >= high:
            continue
        where, positions = held_rows(ranks, shard)
        if tensor.is_per_row:
            is_new = columns_read[where] == 0
            where, positions = where[is_new], positions[is_new]
        if where.size:
            here = stored.columns(low - cols[0], high - cols[0])
            there = stored.columns(low - shard.cols[0], high - shard.cols[0])
            result[where, here] = folder.rows(file, stored, positions)[:, there]
            columns_read[where] += high - low
    if (columns_read != width).any():
        raise CheckpointError(
            f"the shards in {folder.path} do not hold every row and column of table {table!r} "
            "once; `placer verify` says which of its plan's are missing"
        )
    values = torch.from_numpy(result).view(tensor.dtype)
    return values.reshape(-1) if tensor.is_per_row else values


def checkpoint_of_shards(folder: ShardFolder) -> Checkpoint:
    """Return a folder's tables as a checkpoint. Rows are read on demand, in id order."""
    groups: dict[str, dict[str, AnyTensor]] = {WEIGHTS: {}, STATES: {}}

    def read(tensor: TableTensor, start: int, stop: int) -> Tensor:
        cols = (0, 1) if tensor.is_per_row else (0, tensor.table.dim)
        return gather(folder, tensor, np.arange(start, stop), cols)

    for table in folder.plan.tables:
        for tensor in tensors_of(table, table.optimizer):
            group = WEIGHTS if tensor.name == "weight" else STATES
            groups[group][f"{table.name}.{tensor.name}"] = TensorRows(
                tensor.shape, tensor.dtype, partial(read, tensor)
            )
    if folder.updates is not None:
        groups[STATES][UPDATES] = torch.tensor(folder.updates)
    return Checkpoint(folder.manifest.checkpoint, {}, groups)


def load_shards(
    embeddings: "Embeddings",
    shards: ShardFolder | StrPath,
    *,
    verify_files: bool = True,
) -> ShardFolder:
    """Load weights, optimizer state and the number of updates from a folder of shards.

    Every process reads its own rows, without the others. If the folder has the module's own plan,
    these are the files of the process's own devices; otherwise, any files with the rows. Everything
    except the content of files is checked before anything is overwritten. `verify_files` says
    whether to check a file's SHA-256 before its first row is read. Returns the folder; its `step`
    is the rows' training step.

    Raises CheckpointError if the folder's tables differ from the module's, and names each. Raises
    it if a file is missing or damaged; then some rows may be overwritten already.
    """
    if not isinstance(shards, ShardFolder):
        shards = open_shards(shards, verify=verify_files)
    order = embeddings.id_order()
    held = {
        f"{table.name}.{tensor.name}": tensor
        for table in shards.plan.tables
        for tensor in tensors_of(table, table.optimizer)
    }
    expected = {f"{tensor.table.name}.{tensor.name}": tensor for tensor in order.tensors()}
    check_shapes(
        f"the shards in {shards.path} do not fit",
        held,
        {name: tensor.shape for name, tensor in expected.items()},
        {name: tensor.dtype for name, tensor in expected.items()},
    )
    order.synchronize()
    ranks = ranks_of_devices(order.plan.topology, order.world)
    own = frozenset(device for device, rank in ranks.items() if rank == order.rank)
    for tensor in order.tensors():
        for start, stop in row_blocks(tensor.table.rows, chunk_rows(tensor.row_bytes)):
            for places, cols, write in order.held(IdRange(tensor, start, stop)):
                write(gather(shards, tensor, (start + places).numpy(), cols, own))
    if shards.updates is not None:
        order.set_update_count(shards.updates)
    return shards
