"""Find ids that are no rows of their tables, without waiting for the device."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import FeatureRead, check_ids, feature_bounds
from placer.executor.streams import recorded

NO_FAULT = torch.iinfo(torch.int64).max


_Watched = tuple[Tensor, torch.cuda.Event, BagBatch, Sequence[FeatureRead]]
"""A position, the event after its copy, and its batch and features."""


class Faults:
    """Raises DataError for a batch's bad ids: at once on a CPU, at a later batch on a GPU.

    Until then, lookups of bad ids read and update nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watched: deque[_Watched] = deque()
        self._spare: list[Tensor] = []  # Allocating pinned memory is slow.

    def new(self) -> Tensor:
        """Return an int64 tensor, shape (1,), for kernels to note the first bad id's position."""
        return torch.full((1,), NO_FAULT, device=self._device)

    def watch(self, fault: Tensor, batch: BagBatch, features: Sequence[FeatureRead]) -> None:
        """Check the position that kernels wrote: now on a CPU, or when it arrives from a GPU."""
        if self._device.type != "cuda":
            if int(fault) != NO_FAULT:
                _raise(int(fault), batch, features)
            return
        if torch.cuda.is_current_stream_capturing():
            return  # A captured graph runs no host code, but skips bad lookups.
        copy = (
            self._spare.pop() if self._spare else torch.empty(1, dtype=torch.int64, pin_memory=True)
        )
        copy.copy_(fault, non_blocking=True)
        self._watched.append((copy, recorded(), batch, features))

    def poll(self) -> None:
        """Raise for bad ids of earlier batches, if their positions have arrived; see `watch`."""
        if self._watched and torch.cuda.is_current_stream_capturing():
            return  # CUDA forbids event queries during a capture.
        while self._watched and self._watched[0][1].query():  # type: ignore[no-untyped-call]
            position, _, batch, features = self._watched.popleft()
            self._spare.append(position)
            if int(position) != NO_FAULT:
                _raise(int(position), batch, features)


def _raise(position: int, batch: BagBatch, features: Sequence[FeatureRead]) -> None:
    for feature, (start, stop) in zip(features, feature_bounds(batch, features), strict=True):
        if start <= position < stop:
            check_ids(batch.ids[start:stop], feature)
