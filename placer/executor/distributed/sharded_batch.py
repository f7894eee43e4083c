"""A batch on its way: what was sent, what came, and how to reassemble results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import Bags
from placer.executor.lookups.steps import PreparedBatch


@dataclass(frozen=True, slots=True, eq=False)
class UnitStep:
    """All ranks' lookups in one unit.

    Attributes
    ----------
    batch : BagBatch or None
        Of all its sources' samples, channel by channel; None where its ids were needed only to
        look for rows ahead.
    weights : float32, shape (lookups,), or None
        Of the batch's lookups.
    prepared : PreparedBatch or None
        The same, where its rows were looked for ahead.
    source : int32, shape (lookups,), or None
        Position of each lookup among those that came here; None where they stand as they came, or
        nobody wants gradients of weights.
    bounds : tuple of int
        Lookups of channel c are ``bounds[c]..bounds[c + 1]``.
    """

    batch: BagBatch | None
    weights: Tensor | None
    prepared: PreparedBatch | None
    source: Tensor | None
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardedBatch:
    """A batch whose lookups have been sent to the ranks that hold their rows.

    Made by `ShardedEmbeddings.prefetch`, and used up by one forward pass.

    Attributes
    ----------
    bags : Bags
        Of this rank's own samples.
    samples : tuple of int
        Of each rank.
    weight_gradients : bool
        Whether any rank wants gradients of its lookups' weights.
    routes : tuple of tuple of int32, shape (lookups,), or None
        By feature and column slice: the feature's lookups by target; None where there is one, or
        where targets send sums.
    sent_rows, served_rows : tuple of int
        Rows that each channel gives back: by position in `Channels.sent`, and, for each rank,
        by position in its `Channels.active`.
    sent_lookups, served_lookups : tuple of int
        Lookups sent to and received from each rank.
    lookups : int64
        Position in the batch of each lookup sent, in the order of sending. Empty unless
        gradients of weights are wanted.
    units : tuple of UnitStep
    """

    bags: Bags
    samples: tuple[int, ...]
    weight_gradients: bool
    routes: tuple[tuple[Tensor | None, ...], ...]
    sent_rows: tuple[int, ...]
    served_rows: tuple[tuple[int, ...], ...]
    sent_lookups: tuple[int, ...]
    served_lookups: tuple[int, ...]
    lookups: Tensor
    units: tuple[UnitStep, ...]


def spans(starts: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """``starts[i], starts[i] + 1, …`` for `sizes[i]` numbers, one i after the other; int32.

    Counted up by one, and by a jump where a span starts: no other array is as long.

    Examples
    --------
    >>> spans([5, 0], [2, 3], torch.device("cpu")).tolist()
    [5, 6, 0, 1, 2]
    """
    first = torch.tensor([0, *starts], dtype=torch.int64)
    size = torch.tensor([0, *sizes], dtype=torch.int64)
    jumps = (first[1:] - (first + size)[:-1]).int().to(device)
    places = size.cumsum(0)[:-1].to(device)
    counted = torch.ones(sum(sizes) + 1, dtype=torch.int32, device=device)
    counted[:1] = 0
    counted.index_add_(0, places, jumps)
    return counted.cumsum_(0)[:-1]
