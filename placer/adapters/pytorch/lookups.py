"""What a call of `nn.EmbeddingBag` or `nn.Embedding` reads, as bags of ids."""

from dataclasses import dataclass

import torch
from torch import Tensor

from placer.errors import DataError
from placer.executor import BagBatch


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """Bags of ids of one call.

    Attributes
    ----------
    ids : int64 or int32, shape (lookups,)
    offsets : int64, shape (bags + 1,)
    weights : float32, shape (lookups,), or None
        Gradients flow to them.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - 1

    def to(self, device: torch.device) -> "Lookups":
        """The same on a device, without gradients."""
        weights = None if self.weights is None else self.weights.detach().to(device)
        return Lookups(self.ids.to(device), self.offsets.to(device), weights)

    def batch(self) -> BagBatch:
        """The same, checked.

        Raises
        ------
        DataError
            If offsets do not rise from 0 to the number of lookups.
        """
        bounds = 0, self.ids.numel()
        return BagBatch(self.ids, self.offsets, self.batch_size, self.weights, bounds)

    def single(self) -> "Lookups":
        """Each lookup in a bag of its own."""
        return Lookups(self.ids, _range(self.ids.numel() + 1, self.ids), self.weights)

    def without(self, padding_idx: int) -> "Lookups":
        """The same without lookups of an id. Waits for the device."""
        keep = self.ids != padding_idx
        before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
        weights = None if self.weights is None else self.weights[keep]
        return Lookups(self.ids[keep], before[self.offsets], weights)


def of_rows(ids: Tensor) -> Lookups:
    """Each id of a tensor of any shape in a bag of its own.

    Raises
    ------
    DataError
        If they are not integers.
    """
    flat = _checked(ids).reshape(-1)
    return Lookups(flat, _range(flat.numel() + 1, flat))


def of_bags(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool
) -> Lookups:
    """The bags of a call of `nn.EmbeddingBag`.

    Parameters
    ----------
    ids : shape (bags, length), or (lookups,) with offsets
    offsets : shape (bags,), or (bags + 1,) if they include the last one
    weights : of the shape of `ids`, or None
    include_last_offset : bool

    Raises
    ------
    DataError
        If shapes do not fit together.
    """
    _checked(ids)
    if weights is not None and weights.shape != ids.shape:
        raise DataError(
            f"per_sample_weights of shape {tuple(weights.shape)} for ids of shape "
            f"{tuple(ids.shape)}; they must be the same"
        )
    scales = None if weights is None else weights.reshape(-1).float()
    flat = ids.reshape(-1)
    if ids.dim() == 2:
        if offsets is not None:
            raise DataError("ids of shape (bags, length) are bags already; leave offsets out")
        bags, length = ids.shape
        return Lookups(flat, _range(bags + 1, ids) * length, scales)
    if ids.dim() != 1 or offsets is None:
        raise DataError(
            f"ids of shape {tuple(ids.shape)} {'without' if offsets is None else 'with'} offsets; "
            "ids are (bags, length), or (lookups,) with offsets"
        )
    starts = _checked(offsets).to(flat.device).long()
    if include_last_offset:
        return Lookups(flat, starts, scales)
    # Filled in place: a tensor made from a Python number waits for the copy to a GPU.
    end = torch.full((1,), flat.numel(), dtype=torch.int64, device=flat.device)
    return Lookups(flat, torch.cat([starts, end]), scales)


def _checked(values: Tensor) -> Tensor:
    if values.dtype not in (torch.int64, torch.int32):
        raise DataError(f"ids and offsets are int64 or int32, not {values.dtype}")
    return values


def _range(stop: int, like: Tensor) -> Tensor:
    return torch.arange(stop, device=like.device)
