"""Arenas: weights and optimizer state, one row a slot, in two memories that one address reads.

The *place* of a row says where it is now. Places below ``hbm.shape[0]`` are rows of `hbm`:
first the *home* rows, which a plan keeps there, then the entries of a row cache that holds copies
of cold rows (see `placer.executor.memory.row_cache`). Places from there on are rows of `dram`, read
over the link. −1 is no place: kernels skip such a lookup.

Cold rows that are records (`placer.executor.cold`) have places of their own between the two
matrices. What reads such a row where it is, because it got no entry, goes through the store.
"""

import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from placer.executor.cold.cold_store import (
    ColdStore,
    HostRecords,
    StoredRows,
)
from placer.executor.cold.drive import DriveRecords
from placer.executor.cold.records import Records
from placer.executor.memory.arena_order import ArenaKey
from placer.executor.memory.host_memory import host_rows
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import RowCache
from placer.executor.names import Policy
from placer.tables import OPTIMIZER_STATE, ColdDType, OptimizerName

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, eq=False)
class TieredRows:
    """A matrix (or vector) over slots whose first `home` slots are in HBM, the others in DRAM.

    Where there is a store, the slots after `home` are its rows.

    Attributes
    ----------
    hbm : shape (home + entries of the row cache, ...)
        On the computing device.
    dram : shape (cold, ...)
        In host memory that the device can read.
    home : int
        Slots whose rows live in HBM.
    row_cache : RowCache or None
        Says which cold rows have a newer copy in HBM; one serves weights and state.
    store : ColdStore or None
        Has the rows after `home`, where these are records.
    is_state : bool
        Whether the matrix is the store's state, and not its weights.
    """

    hbm: Tensor
    dram: Tensor
    home: int
    row_cache: RowCache | None = None
    store: ColdStore | None = None
    is_state: bool = False

    @property
    def boundary(self) -> int:
        """The first place that is in `dram`."""
        return self.hbm.shape[0] + (0 if self.store is None else self.store.rows)

    @property
    def is_read_in_store(self) -> bool:
        """Whether an open step reads rows in the store itself, of which kernels know nothing."""
        return self.store is not None and self.store.is_read_in_place

    @property
    def is_rounded(self) -> bool:
        """Whether some rows are narrow at home."""
        return self.store is not None and self.store.is_narrow

    def read(self, slots: Tensor) -> Tensor:
        """Return a copy of the rows at `slots`, in that order, on the computing device."""
        places = self._original_places(slots)
        if self.row_cache is not None:
            entries = self.row_cache.find(slots)
            places = torch.where(entries >= 0, entries.long() + self.home, places)
        return self.at(places)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Overwrite the rows at `slots`, which are distinct, and the copies in the row cache."""
        self.write_places(self._original_places(slots), rows)
        if self.row_cache is not None:
            entries = self.row_cache.find(slots)
            copied = torch.nonzero(entries >= 0).squeeze(1)
            own = rows[copied]
            if self.store is not None and copied.numel():  # The home may have rounded them.
                own = self.at(self._original_places(slots[copied]))
            self.write_places(entries[copied].long() + self.home, own)

    def _original_places(self, slots: Tensor) -> Tensor:
        """Return places of rows outside the row cache, int64."""
        slots = slots.long()
        return torch.where(slots < self.home, slots, slots + (self.hbm.shape[0] - self.home))

    def rounded(self, places: Tensor, rows: Tensor, updates: Tensor) -> Tensor:
        """Return rows as their homes hold them, after an update of that number.

        Done at each update, so that it makes no difference when a row goes home.
        """
        if self.store is None or not self.store.is_narrow or self.row_cache is None:
            return rows
        entries, places = self.row_cache.entries, places.long()
        held = self.row_cache.slots_at((places - self.home).clamp(0, entries)).long()
        held = torch.where(places < self.hbm.shape[0], held, places - entries)
        slots = torch.where(places < self.home, places, held)
        return self.store.rounded(slots - self.home, rows, updates)

    def at(self, places: Tensor) -> Tensor:
        """Return a copy of the rows at places, which are none of them −1.

        Waits for the device: meant for checkpoints and for kernels of plain PyTorch.
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
        """Overwrite the rows at places, which are distinct and none of them −1."""
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
        """Return each matrix, the positions of the places that lie in it, and its rows there."""
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
        """Return positions of the places that are in the store, and its rows there, on the host."""
        here = torch.nonzero((places >= self.hbm.shape[0]) & (places < self.boundary)).squeeze(1)
        return here, (places[here].long() - self.hbm.shape[0]).cpu()


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Weights ``[rows, width]`` and optimizer state of one arena.

    State is float32 whatever the weights are: ``[rows]`` for row-wise Adagrad, ``[rows,
    width]`` for Adagrad, ``[rows, 2 · width]`` for Adam, None for SGD. Both share `row_cache`.
    """

    spec: ArenaSpec
    weights: TieredRows
    state: TieredRows | None
    row_cache: RowCache | None = None
    store: ColdStore | None = None

    @property
    def row_bytes(self) -> int:
        """Weights and state of one row in an entry."""
        return self.home_bytes(None)

    def home_bytes(self, dtype: ColdDType | None) -> int:
        """Return weights and state of one row at home."""
        return _records(self.spec.key, dtype).nbytes


def state_shape(optimizer: OptimizerName, width: int) -> tuple[int, ...] | None:
    """Return the shape of the state of one row that is `width` columns wide; None without state."""
    names = OPTIMIZER_STATE[optimizer]
    if not names:
        return None
    return () if optimizer == "rowwise_adagrad" else (len(names) * width,)


def allocate(
    spec: ArenaSpec, device: torch.device, policy: Policy | None, drive: Path | None = None
) -> Arena:
    """Return zeroed memory for an arena: HBM rows and row cache on a device, others on the host.

    Parameters
    ----------
    spec : ArenaSpec
    device : torch.device
        Where rows are read and updated.
    policy : {"lfu", "rank"} or None
        Which cached rows are evicted first. None gives all rows one memory, the host's.
    drive : Path or None
        Folder for rows on a drive; by default that of the system's temporary files.
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
    """Return the home of an arena's staged and cached rows; alike neighbours share a medium."""
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
