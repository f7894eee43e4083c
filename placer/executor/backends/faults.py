"""Finds ids that are no rows of their tables, without waiting for the device."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import FeatureRead, check_ids, feature_bounds
from placer.executor.streams import recorded, start_copy

NO_FAULT = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    position: Tensor
    copied: torch.cuda.Event
    batch: BagBatch
    features: Sequence[FeatureRead]


class Faults:
    """Raises for a batch's bad ids: at once on a CPU, at a later batch on a GPU.

    Until then such lookups read nothing and update nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watched: deque[_Watched] = deque()

    def new(self) -> Tensor:
        """int64, shape (1,): kernels lower it to the position of the first bad id."""
        return torch.full((1,), NO_FAULT, device=self._device)

    def watch(self, fault: Tensor, batch: BagBatch, features: Sequence[FeatureRead]) -> None:
        """Check the position that kernels wrote, now or as soon as it is there.

        Raises
        ------
        DataError
            Names the feature, the id and the table.
        """
        if self._device.type != "cuda":
            if int(fault) != NO_FAULT:
                _raise(int(fault), batch, features)
            return
        if torch.cuda.is_current_stream_capturing():
            return  # A captured graph has no host code; its bad lookups are skipped all the same.
        self._watched.append(_Watched(start_copy(fault), recorded(), batch, features))

    def poll(self) -> None:
        """Raise for earlier batches whose result has come in meanwhile; see `watch`."""
        if self._watched and torch.cuda.is_current_stream_capturing():
            return  # Events must not be queried meanwhile.
        while self._watched and self._watched[0].copied.query():  # type: ignore[no-untyped-call]
            seen = self._watched.popleft()
            if int(seen.position) != NO_FAULT:
                _raise(int(seen.position), seen.batch, seen.features)


def _raise(position: int, batch: BagBatch, features: Sequence[FeatureRead]) -> None:
    for feature, (start, stop) in zip(features, feature_bounds(batch, features), strict=True):
        if start <= position < stop:
            check_ids(batch.ids[start:stop], feature)
