"""Arenas: weights and optimizer state, one row per slot, in HBM and DRAM with common row numbers.

The *place* of a row says where it is now. Places below ``hbm.shape[0]`` are rows of `hbm`:
first the *home* rows, which a plan keeps there, then the entries of a row cache with copies of cold
rows (see `placer.executor.memory.row_cache`). Later places are rows of `dram`, read over the link.
−1 is no place: kernels skip such a lookup.

Cold rows that are records (`placer.executor.cold_store`) have places between the two matrices. Such
a row without a cache entry is read through the store.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.executor import Policy
from placer.executor.cold_store import ColdStore, HostRecords, Records, StoredRows
from placer.executor.drive import DriveRecords
from placer.executor.memory.host_memory import host_rows
from placer.executor.memory.layout import ArenaKey, ArenaSpec
from placer.executor.memory.row_cache import RowCache
from placer.tables import OPTIMIZER_STATE, ColdDType, OptimizerName, Table

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, eq=False)
class TieredRows:
    """A matrix (or vector) over slots. The first `home` slots are in HBM, and the others in DRAM.

    If there is a store, it has the first slots after `home`.
    """

    # Shape (home + entries of the row cache, ...): home rows, then cache entries, on the computing
    # device.
    hbm: Tensor
    dram: Tensor  # Shape (cold, ...): cold rows in host memory that the device can read.
    home: int  # Number of slots with home rows in HBM.
    # Says which cold rows have a copy in HBM; weights and state share it.
    row_cache: RowCache | None = None
    store: ColdStore | None = None  # Has the staged and cached rows, if they are records.
    is_state: bool = False  # Whether the matrix is the optimizer state instead of the weights.

    @property
    def boundary(self) -> int:
        """The first place in `dram`."""
        return self.hbm.shape[0] + (0 if self.store is None else self.store.rows)

    @property
    def is_read_in_store(self) -> bool:
        """Whether an open step reads rows in the store, which kernels cannot read."""
        return self.store is not None and self.store.is_read_in_place

    def read(self, slots: Tensor) -> Tensor:
        """Return a copy of the rows at `slots`, in that order, on the computing device."""
        places = self._original_places(slots)
        if self.row_cache is not None:
            entries = self.row_cache.find(slots)
            places = torch.where(entries >= 0, entries.long() + self.home, places)
        return self.at(places)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Overwrite the rows at distinct `slots`, and their copies in the row cache."""
        self.write_places(self._original_places(slots), rows)
        if self.row_cache is not None:
            entries = self.row_cache.find(slots)
            copied = torch.nonzero(entries >= 0).squeeze(1)
            own = rows[copied]
            if self.store is not None and copied.numel():  # The store may round.
                own = self.at(self._original_places(slots[copied]))
            self.write_places(entries[copied].long() + self.home, own)

    def _original_places(self, slots: Tensor) -> Tensor:
        """Return the places of the rows themselves instead of cached copies, int64."""
        slots = slots.long()
        return torch.where(slots < self.home, slots, slots + (self.hbm.shape[0] - self.home))

    def rounded(self, places: Tensor, rows: Tensor, updates: Tensor) -> Tensor:
        """Return updated rows rounded to the dtype in which the store keeps them.

        `updates` is the number of the update. Rounding at each update makes results independent of
        the time when a cached row is written back.
        """
        if self.store is None or not self.store.is_narrow or self.row_cache is None:
            return rows
        entries, places = self.row_cache.entries, places.long()
        held = self.row_cache.directory.slots[(places - self.home).clamp(0, entries)].long()
        held = torch.where(places < self.hbm.shape[0], held, places - entries)
        slots = torch.where(places < self.home, places, held)
        return self.store.rounded(slots - self.home, rows, updates)

    def at(self, places: Tensor) -> Tensor:
        """Return a copy of the rows at places, none of which may be −1.

        It waits for the device, so only checkpoints and plain PyTorch kernels use it.
        """
        if not len(self.dram) and self.store is None:
            return self.hbm.index_select(0, places)
        rows = self.hbm.new_empty((places.numel(), *self.hbm.shape[1:]))
        for data, here, local in self._parts(places):
            rows[here] = data.index_select(0, local).to(rows.device)
        here, local = self._stored(places)
        if self.store is not None and here.numel():
            distinct, back = torch.unique(local, return_inverse=True)
            read = self.store.read_state if self.is_state else self.store.read_weights
            rows[here] = read(distinct)[back].to(rows.device)
        return rows

    def write_places(self, places: Tensor, rows: Tensor) -> None:
        """Overwrite the rows at places, which must be distinct and not −1."""
        if not len(self.dram) and self.store is None:
            self.hbm.index_copy_(0, places.long(), rows.to(self.hbm.device, self.hbm.dtype))
            return
        for data, here, local in self._parts(places):
            data.index_copy_(0, local, rows[here].to(data.device, data.dtype))
        here, local = self._stored(places)
        if self.store is not None and here.numel():
            values = {"state" if self.is_state else "weights": rows[here].to("cpu", self.hbm.dtype)}
            self.store.write(local, **values)

    def _parts(self, places: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return each matrix, the positions of its places in `places`, and its row numbers."""
        places = places.long()
        hot, cold = (
            torch.nonzero(part).squeeze(1)
            for part in (places < self.hbm.shape[0], places >= self.boundary)
        )
        return [
            (self.hbm, hot, places[hot]),
            (self.dram, cold, (places[cold] - self.boundary).to(self.dram.device)),
        ]

    def _stored(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the store's places, and its row numbers, on the host."""
        here = torch.nonzero((places >= self.hbm.shape[0]) & (places < self.boundary)).squeeze(1)
        return here, (places[here].long() - self.hbm.shape[0]).cpu()


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Weights ``[rows, width]`` and optimizer state of one arena.

    State is always float32: ``[rows]`` for row-wise Adagrad, ``[rows, width]`` for Adagrad,
    ``[rows, 2 · width]`` for Adam, None for SGD. Weights and state share `row_cache`.
    """

    spec: ArenaSpec
    weights: TieredRows
    state: TieredRows | None
    row_cache: RowCache | None = None
    store: ColdStore | None = None

    def row_bytes(self, dtype: ColdDType | None = None) -> int:
        """Return the bytes of weights and state of a row; `dtype` replaces that of the table."""
        return _records(self.spec.key, dtype).nbytes


def state_shape(optimizer: OptimizerName, width: int) -> tuple[int, ...] | None:
    """Return the shape of the state of a row of `width` columns; None for SGD."""
    names = OPTIMIZER_STATE[optimizer]
    if not names:
        return None
    return () if optimizer == "rowwise_adagrad" else (len(names) * width,)


def allocate(
    spec: ArenaSpec, device: torch.device, policy: Policy | None, drive: Path | None = None
) -> Arena:
    """Allocate zeroed memory for an arena: HBM rows and row cache on a device, others on the host.

    Without a `policy`, all rows are in host memory. `drive` is the folder for rows on a drive; by
    default the system's folder for temporary files.
    """
    key, row_cache, store = spec.key, None, None
    home = spec.rows if policy is None else spec.home
    if policy is not None and spec.cache_ranges:
        row_cache = RowCache(spec.cache_ranges, home, device, policy)
    entries = 0 if row_cache is None else row_cache.entries
    if spec.stored:
        store = _store(spec, device, drive)

    def rows(shape: tuple[int, ...], dtype: torch.dtype, *, is_state: bool) -> TieredRows:
        if policy is None:
            hbm = host_rows((home, *shape), dtype, device)
        else:
            hbm = torch.zeros((home + entries, *shape), dtype=dtype, device=device)
        dram = host_rows((spec.rows - home - spec.stored, *shape), dtype, device)
        return TieredRows(hbm, dram, home, row_cache, store, is_state)

    weights = rows((key.width,), TORCH_DTYPES[key.dtype], is_state=False)
    shape = state_shape(key.optimizer, key.width)
    state = None if shape is None else rows(shape, torch.float32, is_state=True)
    return Arena(spec, weights, state, row_cache, store)


def _store(spec: ArenaSpec, device: torch.device, drive: Path | None) -> ColdStore:
    """Make the store of an arena's staged and cached rows; neighbours of a kind share a medium."""
    parts: list[StoredRows] = []
    alike = groupby(spec.cache_ranges, lambda part: (part.memory, part.dtype))
    for (memory, dtype), members in alike:
        ranges = list(members)
        start, stop = ranges[0].start - spec.home, ranges[-1].stop - spec.home
        records = _records(spec.key, dtype)
        shape = stop - start, records.nbytes
        medium = (
            DriveRecords(drive or Path(tempfile.gettempdir()), *shape)
            if memory == "ssd"
            else HostRecords(host_rows(shape, torch.uint8, device))
        )
        parts.append(StoredRows(start, stop, records, medium))
    return ColdStore(parts)


def _records(key: ArenaKey, dtype: ColdDType | None) -> Records:
    shape = state_shape(key.optimizer, key.width)
    return Records(dtype or key.dtype, TORCH_DTYPES[key.dtype], key.width, shape)


CHUNK_ROWS = 65536
"""Rows to process at a time, which limits temporary memory. A change changes drawn weights."""


def initial_weights(table: Table, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of ids and their weights: float32, uniform in ±1/√rows."""
    generator = torch.Generator().manual_seed(_number(f"{seed}/{table.name}"))
    bound = _bound(table)
    for start in range(0, table.rows, CHUNK_ROWS):
        ids = torch.arange(start, min(table.rows, start + CHUNK_ROWS))
        weights = torch.empty(ids.numel(), table.dim, dtype=torch.float32)
        yield ids, weights.uniform_(-bound, bound, generator=generator)


def weights_of_keys(table: Table, seed: int, keys: npt.NDArray[np.int64]) -> Tensor:
    """Draw the weights of reset rows, uniform in ±1/√rows, from seed, table name and key only."""
    from placer.growing import kernels  # Needs Numba, which growing tables require.

    values = np.empty((keys.size, table.dim), np.float32)
    kernels.draw(keys, np.uint64(_number(f"{seed}/{table.name}/keys")), _bound(table), values)
    return torch.from_numpy(values)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def _bound(table: Table) -> float:
    return float(max(table.rows, 1) ** -0.5)
