"""What a call of `nn.EmbeddingBag` or `nn.Embedding` reads, as bags of ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.errors import DataError
from placer.executor import BagBatch


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """Bags of ids of one call."""

    ids: Tensor  # Int64 or int32, shape (lookups,).
    offsets: Tensor  # Shape (bags + 1,)
    weights: Tensor | None = None  # Shape (lookups,), or None: gradients flow to them.

    @property
    def batch_size(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - 1

    def to(self, device: torch.device) -> "Lookups":
        """Return the same on a device, without gradients."""
        weights = None if self.weights is None else self.weights.detach().to(device)
        return Lookups(self.ids.to(device), self.offsets.to(device), weights)

    def batch(self) -> BagBatch:
        """Return the same, checked."""
        bounds = 0, self.ids.numel()
        return BagBatch(self.ids, self.offsets, self.batch_size, self.weights, bounds)

    def single(self) -> "Lookups":
        """Return each lookup in a bag of its own."""
        return Lookups(self.ids, _range(self.ids.numel() + 1, self.ids), self.weights)

    def without(self, padding_idx: int) -> "Lookups":
        """Return the same without lookups of an id. Waits for the device."""
        keep = self.ids != padding_idx
        before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
        weights = None if self.weights is None else self.weights[keep]
        return Lookups(self.ids[keep], before[self.offsets], weights)


def of_rows(ids: Tensor) -> Lookups:
    """Return each id of a tensor of any shape in a bag of its own."""
    flat = _checked(ids).reshape(-1)
    return Lookups(flat, _range(flat.numel() + 1, flat))


def of_bags(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool
) -> Lookups:
    """Return the bags of a call of `nn.EmbeddingBag`.

    Ids have shape (bags, length), or (lookups,) with offsets of shape (bags,), or (bags + 1,) if
    they include the last one; weights have that of the ids.
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


def of_each_lookup(batch: BagBatch | Lookups, of_bags: Tensor) -> Tensor:
    """Repeat what each bag has for each of its lookups: shape (lookups, …)."""
    bags = torch.arange(batch.batch_size, device=of_bags.device)
    return of_bags[bags.repeat_interleave(batch.offsets.diff(), output_size=batch.ids.numel())]


def squared_norm(calls: Sequence[tuple[BagBatch, Tensor]]) -> Tensor:
    """Σ g² over the rows of a table, each row's gradient the sum over its lookups.

    `calls` are what was looked up, and the gradient of its bags, shape (bags, dim).

    >>> ids, offsets = torch.tensor([2, 2, 0]), torch.tensor([0, 1, 3])
    >>> batch = BagBatch(ids, offsets, 2, None, (0, 3))
    >>> squared_norm([(batch, torch.tensor([[1.0], [2.0]]))])  # Row 2: 1 + 2; row 0: 2.
    tensor(13., dtype=torch.float64)
    """
    ids, gradients = [], []
    for batch, gradient in calls:
        of_lookups = of_each_lookup(batch, gradient)
        if batch.weights is not None:
            of_lookups = of_lookups * batch.weights.unsqueeze(1)
        ids.append(batch.ids.long())
        gradients.append(of_lookups)
    if not ids:
        return torch.zeros((), dtype=torch.float64)
    unique, places = torch.unique(torch.cat(ids), return_inverse=True)
    every = torch.cat(gradients)
    sums = every.new_zeros((unique.numel(), every.shape[1])).index_add_(0, places, every)
    return sums.double().square().sum()


def _checked(values: Tensor) -> Tensor:
    if values.dtype not in (torch.int64, torch.int32):
        raise DataError(f"ids and offsets are int64 or int32, not {values.dtype}")
    return values


def _range(stop: int, like: Tensor) -> Tensor:
    return torch.arange(stop, device=like.device)
