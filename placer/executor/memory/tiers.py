"""Rows in two memories: the computing device's and the host's, read by one address.

The *place* of a row says where it is now. Places below ``hbm.shape[0]`` are rows of `hbm`:
first the *home* rows, which a plan keeps there, then the entries of a row cache that holds copies
of cold rows (see `placer.executor.memory.row_cache`). Places from there on are rows of `dram`, read
over the link. −1 is no place: whoever meets it skips the lookup.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.memory.row_cache import RowCache


@dataclass(frozen=True, slots=True, eq=False)
class TieredRows:
    """A matrix (or vector) over slots whose first `home` slots are in HBM, the others in DRAM.

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
    """

    hbm: Tensor
    dram: Tensor
    home: int
    row_cache: RowCache | None = None

    @property
    def boundary(self) -> int:
        """The first place that is in host memory."""
        return self.hbm.shape[0]

    def read(self, slots: Tensor) -> Tensor:
        """A copy of the rows at `slots`, in that order, on the computing device."""
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
            self.write_places(entries[copied].long() + self.home, rows[copied])

    def _original_places(self, slots: Tensor) -> Tensor:
        """Places of rows outside the row cache, int64."""
        slots = slots.long()
        return torch.where(slots < self.home, slots, slots + (self.boundary - self.home))

    def at(self, places: Tensor) -> Tensor:
        """A copy of the rows at places, which are none of them −1.

        Waits for the device: meant for checkpoints and for kernels of plain PyTorch.
        """
        if not len(self.dram):
            return self.hbm.index_select(0, places)
        rows = self.hbm.new_empty((places.numel(), *self.hbm.shape[1:]))
        for data, here, local in self._parts(places):
            rows[here] = data.index_select(0, local).to(rows.device)
        return rows

    def write_places(self, places: Tensor, rows: Tensor) -> None:
        """Overwrite the rows at places, which are distinct and none of them −1."""
        if not len(self.dram):
            self.hbm.index_copy_(0, places.long(), rows.to(self.hbm.device, self.hbm.dtype))
            return
        for data, here, local in self._parts(places):
            data.index_copy_(0, local, rows[here].to(data.device, data.dtype))

    def _parts(self, places: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Each matrix, the positions of the places that lie in it, and its rows there."""
        places = places.long()
        in_hbm = places < self.boundary
        hot, cold = (torch.nonzero(part).squeeze(1) for part in (in_hbm, ~in_hbm))
        return [
            (self.hbm, hot, places[hot]),
            (self.dram, cold, (places[cold] - self.boundary).to(self.dram.device)),
        ]
