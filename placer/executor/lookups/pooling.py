"""Poolings that are computed from the fused lookups by ordinary differentiable operations."""

import torch
from torch import Tensor


def mean_from_sum(sums: Tensor, offsets: Tensor) -> Tensor:
    """Divide each bag's sum by its number of lookups; empty bags stay zero.

    With weights this is Σ w·x / lookups.
    """
    counts = offsets.diff().clamp_(min=1).to(sums.dtype)
    return sums / counts.unsqueeze(1)


def segment_max(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the largest value of each column over each bag; empty bags are zero.

    The gradient goes to the first of the lookups that tie, as in `nn.EmbeddingBag`.

    Parameters
    ----------
    rows : float32, shape (lookups, width)
    offsets : int64, shape (bags + 1,), from 0 to lookups

    Returns
    -------
    float32, shape (bags, width)
    """
    lookups, width = rows.shape
    bags = offsets.numel() - 1
    if not lookups:
        return rows.new_zeros((bags, width)) + rows.sum()
    with torch.no_grad():
        bag = torch.arange(bags, device=rows.device).repeat_interleave(
            offsets.diff(), output_size=lookups
        )
        bag = bag.unsqueeze(1).expand(-1, width)
        largest = rows.new_full((bags, width), -torch.inf).scatter_reduce_(0, bag, rows, "amax")
        position = torch.arange(lookups, device=rows.device).unsqueeze(1).expand(-1, width)
        tied = torch.where(rows == largest.gather(0, bag), position, lookups)
        # Empty bags keep the index of the row of zeros behind the last lookup.
        first = torch.full_like(largest, lookups, dtype=torch.int64)
        first.scatter_reduce_(0, bag, tied, "amin")
    return torch.nn.functional.pad(rows, (0, 0, 0, 1)).gather(0, first)
