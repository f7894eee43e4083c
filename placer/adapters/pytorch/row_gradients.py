"""Gradients that calls of a table have collected, before they update it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from placer.executor import BagBatch


def squared_norm(calls: Sequence[tuple[BagBatch, Tensor]]) -> Tensor:
    """Σ g² over the rows of a table, each row's gradient the sum over its lookups.

    Parameters
    ----------
    calls : sequence of (BagBatch, Tensor)
        What was looked up, and the gradient of its bags, shape (bags, dim).

    Examples
    --------
    >>> ids, offsets = torch.tensor([2, 2, 0]), torch.tensor([0, 1, 3])
    >>> batch = BagBatch(ids, offsets, 2, None, (0, 3))
    >>> squared_norm([(batch, torch.tensor([[1.0], [2.0]]))])  # Row 2: 1 + 2; row 0: 2.
    tensor(13., dtype=torch.float64)
    """
    ids, gradients = [], []
    for batch, gradient in calls:
        bags = torch.arange(batch.batch_size, device=gradient.device)
        source = bags.repeat_interleave(batch.offsets.diff(), output_size=batch.ids.numel())
        of_lookups = gradient[source]
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
