"""The tables of a run in its checkpoints: in the order of ids, some rows at a time.

No process holds a table whole, whether one trains or many: rows are gathered for a chunk of ids,
and each rank takes from a checkpoint what it holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Protocol

import torch
from torch import Tensor

from placer.executor import PlacedEmbeddings
from placer.executor.arena import TORCH_DTYPES
from placer.executor.checkpointing import UPDATES, check_shapes
from placer.executor.hit_rates import HitRates
from placer.executor.initial import CHUNK_ROWS
from placer.executor.pool import PoolStats
from placer.executor.ranks import ShardedEmbeddings
from placer.executor.ranks.pieces import read_rows, write_rows
from placer.executor.rule import STATE
from placer.plan.plan import Plan
from placer.tables import Table
from placer.training.ranks import Ranks
from placer.training.tensor_file import AnyTensor, TensorRows, in_rows

WEIGHTS, STATES = "embeddings", "embedding_optimizer"
"""Files of a checkpoint: ``<table>.weight``, and ``<table>.<name of the state>``."""

AnyEmbeddings = PlacedEmbeddings | ShardedEmbeddings


class _Access(Protocol):
    """How rows are reached. With many ranks all must read together, and may write alone."""

    def settle(self) -> None: ...

    def read(self, table: Table, tensor: str, ids: Tensor) -> Tensor: ...

    def write(self, table: Table, tensor: str, ids: Tensor, values: Tensor) -> None: ...

    def holds(self, table: Table) -> bool: ...

    def updates(self) -> int: ...

    def set_updates(self, updates: int) -> None: ...


def table_tensors(embeddings: AnyEmbeddings) -> dict[str, dict[str, AnyTensor]]:
    """Weights and optimizer state, by file and name; many ranks must read them together."""
    access = _access(embeddings)
    access.settle()
    files: dict[str, dict[str, AnyTensor]] = {WEIGHTS: {}, STATES: {}}
    for table, tensor, shape, dtype in _tensors(embeddings.plan):
        file = WEIGHTS if tensor == "weight" else STATES
        files[file][f"{table.name}.{tensor}"] = _rows(access, table, tensor, shape, dtype)
    if _counts_updates(embeddings.plan):
        files[STATES][UPDATES] = torch.tensor(access.updates())
    return files


def load_tables(embeddings: AnyEmbeddings, files: Mapping[str, Mapping[str, AnyTensor]]) -> None:
    """Overwrite weights and optimizer state; each rank reads the tables of which it has rows.

    Raises
    ------
    CheckpointError
        If a tensor is missing, of no table, or of another shape; nothing is changed then.
    """
    plan, access = embeddings.plan, _access(embeddings)
    expected: dict[str, dict[str, tuple[int, ...]]] = {WEIGHTS: {}, STATES: {}}
    for table, tensor, shape, _ in _tensors(plan):
        expected[WEIGHTS if tensor == "weight" else STATES][f"{table.name}.{tensor}"] = shape
    if _counts_updates(plan):
        expected[STATES][UPDATES] = ()
    for file, shapes in expected.items():
        found = files.get(file, {})
        check_shapes(f"{file} do not fit the plan", found, shapes)
    access.settle()
    for table, tensor, _, _ in _tensors(plan):
        if not access.holds(table):
            continue
        rows = in_rows(files[WEIGHTS if tensor == "weight" else STATES][f"{table.name}.{tensor}"])
        for start, chunk in enumerate(rows.chunks()):
            first = start * CHUNK_ROWS
            ids = torch.arange(first, first + chunk.shape[0])
            access.write(table, tensor, ids, chunk)
    if _counts_updates(plan):
        access.set_updates(int(in_rows(files[STATES][UPDATES]).whole()))


def hit_rates(embeddings: AnyEmbeddings, ranks: Ranks) -> HitRates | None:
    """Lookups that HBM served, on all ranks, which must ask together; waits for the device.

    None for backends that read all rows where they are.
    """
    if isinstance(embeddings, PlacedEmbeddings):
        return embeddings.hit_rates()
    counted = [found for module in embeddings._held if (found := module.hit_rates()) is not None]
    if not ranks.any(bool(counted)):
        return None
    pool = sum((found.pool for found in counted), PoolStats())
    own = [
        sum(found.lookups for found in counted),
        sum(found.home_lookups for found in counted),
        *astuple(pool),
    ]
    lookups, home, *rest = ranks.total(torch.tensor(own)).tolist()
    return HitRates(lookups, home, PoolStats(*rest))


def _tensors(plan: Plan) -> Iterator[tuple[Table, str, tuple[int, ...], torch.dtype]]:
    for table in plan.tables:
        yield table, "weight", (table.rows, table.dim), TORCH_DTYPES[table.dtype]
        per_row = table.optimizer == "rowwise_adagrad"
        for name in STATE[table.optimizer]:
            shape = (table.rows,) if per_row else (table.rows, table.dim)
            yield table, name, shape, torch.float32


def _counts_updates(plan: Plan) -> bool:
    """Whether it matters how many updates there have been."""
    return any(table.optimizer == "adam" for table in plan.tables)


def _rows(
    access: _Access, table: Table, tensor: str, shape: tuple[int, ...], dtype: torch.dtype
) -> TensorRows:
    def read(start: int, stop: int) -> Tensor:
        return access.read(table, tensor, torch.arange(start, stop))

    return TensorRows(shape, dtype, read)


def _access(embeddings: AnyEmbeddings) -> _Access:
    if isinstance(embeddings, PlacedEmbeddings):
        return _Here(embeddings)
    return _Spread(embeddings)


class _Here:
    """Tables that this process has alone."""

    def __init__(self, module: PlacedEmbeddings) -> None:
        self._module = module

    def settle(self) -> None:
        self._module.rows.settle()

    def read(self, table: Table, tensor: str, ids: Tensor) -> Tensor:
        return read_rows(self._module, table.name, tensor, ids)

    def write(self, table: Table, tensor: str, ids: Tensor, values: Tensor) -> None:
        write_rows(self._module, table.name, tensor, ids, values)

    def holds(self, table: Table) -> bool:
        return table.rows > 0

    def updates(self) -> int:
        return self._module.update_count()

    def set_updates(self, updates: int) -> None:
        self._module.set_update_count(updates)


class _Spread:
    """Tables whose parts many ranks have."""

    def __init__(self, module: ShardedEmbeddings) -> None:
        self._module = module
        self._canonical = module._parts.canonical
        self._held = {piece.table for piece in module.local_pieces()}

    def settle(self) -> None:
        for module in self._module._held:
            module.rows.settle()

    def read(self, table: Table, tensor: str, ids: Tensor) -> Tensor:
        """Each rank puts in what it holds; bits are added as integers, and arrive as they are."""
        per_row = tensor != "weight" and table.optimizer == "rowwise_adagrad"
        chunk = torch.zeros((ids.numel(),) if per_row else (ids.numel(), table.dim))
        comm = self._canonical.comm
        for target, module, places, rows in self._canonical._here(table.name, ids):
            if target.holders[0] != comm.rank:
                continue
            values = read_rows(module, target.name, tensor, rows).float()
            if not per_row:
                chunk[places, slice(*target.cols)] = values
            elif not target.cols[0]:  # Of copies that strips of a row share, one.
                chunk[places] = values
        return comm.total("state", chunk.view(torch.int32)).cpu().view(torch.float32)

    def write(self, table: Table, tensor: str, ids: Tensor, values: Tensor) -> None:
        self._canonical._put(table.name, tensor, ids, values)

    def holds(self, table: Table) -> bool:
        return table.name in self._held

    def updates(self) -> int:
        own = torch.tensor([self._module.update_count()])
        return int(self._canonical.comm.gather("state", own).max())

    def set_updates(self, updates: int) -> None:
        self._module.set_update_count(updates)
