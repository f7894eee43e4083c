"""Tensors of whole tables, read from and written to the ranks that hold their parts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.initial import CHUNK_ROWS, initial_weights
from placer.executor.placed import PlacedEmbeddings
from placer.executor.ranks.comm import Communicator
from placer.executor.ranks.division import Target
from placer.executor.ranks.pieces import read_rows, write_rows
from placer.executor.ranks.table_map import TableMap


@dataclass(frozen=True, slots=True, eq=False)
class Canonical:
    """Reads and writes tables in id order, whatever the plan.

    Attributes
    ----------
    maps : mapping of table name to TableMap
    held : mapping of target name to PlacedEmbeddings
        What this rank holds.
    comm : Communicator
    device : torch.device
        Of the maps.
    """

    maps: Mapping[str, TableMap]
    held: Mapping[str, PlacedEmbeddings]
    comm: Communicator
    device: torch.device

    def gather(self, table: str, tensor: str, into: Tensor) -> None:
        """Fill a tensor of a whole table, on the host, on every rank; all must be here.

        A chunk of rows at a time: each rank puts in what it holds and zeros elsewhere, and the
        bits are added as integers, so that they arrive as they are.
        """
        if not into.numel():
            return
        for start in range(0, into.shape[0], CHUNK_ROWS):
            part = into[start : start + CHUNK_ROWS]
            ids = torch.arange(start, start + part.shape[0])
            chunk = torch.zeros(part.shape, dtype=torch.float32)
            for target, module, places, rows in self._here(table, ids):
                if target.holders[0] != self.comm.rank:
                    continue
                values = read_rows(module, target.name, tensor, rows).float()
                if chunk.dim() == 2:
                    chunk[places, slice(*target.cols)] = values
                elif not target.cols[0]:  # Of copies that strips of a row share, one.
                    chunk[places] = values
            bits = self.comm.total("state", chunk.view(torch.int32)).cpu()
            part.copy_(bits.view(torch.float32))

    def scatter(self, table: str, tensor: str, values: Tensor) -> None:
        """Overwrite what this rank holds of a table, from the whole tensor."""
        for start in range(0, values.shape[0], CHUNK_ROWS):
            part = values[start : start + CHUNK_ROWS]
            self._put(table, tensor, torch.arange(start, start + part.shape[0]), part)

    def draw(self, table: str, seed: int) -> None:
        """Set initial weights, as one process would draw them."""
        for ids, values in initial_weights(self.maps[table].table, seed):
            self._put(table, "weight", ids, values)

    def _put(self, table: str, tensor: str, ids: Tensor, values: Tensor) -> None:
        for target, module, places, rows in self._here(table, ids):
            own = values[places]
            if own.dim() == 2:
                own = own[:, slice(*target.cols)]
            write_rows(module, target.name, tensor, rows, own)

    def _here(
        self, table: str, ids: Tensor
    ) -> Iterator[tuple[Target, PlacedEmbeddings, Tensor, Tensor]]:
        """What is here of some ids: target, module, positions among the ids, rows."""
        known = self.maps[table]
        for strip in known.strips:
            if not any(target.name in self.held for target in strip.targets):
                continue
            position, rows = (part.cpu() for part in known.route(ids.to(self.device), strip))
            for number, target in enumerate(strip.targets):
                module = self.held.get(target.name)
                if module is not None:
                    places = torch.nonzero(position == number).squeeze(1)
                    yield target, module, places, rows[places]
