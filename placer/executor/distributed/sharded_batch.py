"""A batch on its way: what was sent, what came, and how to reassemble results."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.executor.growing_keys import KeyStep
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import Bags
from placer.executor.lookups.steps import PreparedBatch

if TYPE_CHECKING:
    from placer.executor.distributed.table_ranks import NumberedBatch


@dataclass(frozen=True, slots=True, eq=False)
class UnitStep:
    """All ranks' lookups in one unit."""

    # Of all its sources' samples, channel by channel; None where its ids were needed only to look
    # for rows ahead.
    batch: BagBatch | None
    weights: Tensor | None  # Of the batch's lookups.
    prepared: PreparedBatch | None  # The batch, where its rows were looked for ahead.
    # Position of each lookup among those that came here, int32; None where they stand as they came,
    # or nobody wants gradients of weights.
    source: Tensor | None
    bounds: tuple[int, ...]  # Lookups of channel c are ``bounds[c]..bounds[c + 1]``.


@dataclass(frozen=True, slots=True, eq=False)
class ShardedBatch:
    """A batch whose lookups have been sent to the ranks that hold their rows.

    Made by `ShardedEmbeddings.prefetch`, and used up by one forward pass.
    """

    bags: Bags  # Of this rank's own samples.
    weight_gradients: bool  # Whether any rank wants gradients of its lookups' weights.
    # By feature and column slice: the feature's lookups by target, int32; None where there is one,
    # or where targets send sums.
    routes: tuple[tuple[Tensor | None, ...], ...]
    sent_rows: tuple[int, ...]  # Rows that come back from each of `Channels.sent`.
    # Rows that each of `Channels.served` gives back to each rank, shape (world, served).
    served_rows: npt.NDArray[np.int64]
    # Lookups sent to and received from each rank.
    sent_lookups: tuple[int, ...]
    served_lookups: tuple[int, ...]
    # Position in the batch of each lookup sent, in the order of sending. Empty unless gradients of
    # weights are wanted.
    lookups: Tensor
    units: tuple[UnitStep, ...]
    key_step: KeyStep | None  # Of tables that grow, where keys got rows.
    number: "NumberedBatch | None" = None  # By which servers know it.


def spans(starts: npt.ArrayLike, sizes: npt.ArrayLike, device: torch.device) -> Tensor:
    """``starts[i], starts[i] + 1, …`` for `sizes[i]` numbers, one i after the other; int32.

    Counted up by one, and by a jump where a span starts: no other array is as long.

    Examples
    --------
    >>> spans([5, 0], [2, 3], torch.device("cpu")).tolist()
    [5, 6, 0, 1, 2]
    """
    first, size = (np.append(0, part).astype(np.int64) for part in (starts, sizes))
    jumps = torch.from_numpy(first[1:] - (first + size)[:-1]).int().to(device)
    places = torch.from_numpy(size.cumsum()[:-1]).to(device)
    counted = torch.ones(int(size.sum()) + 1, dtype=torch.int32, device=device)
    counted[:1] = 0
    counted.index_add_(0, places, jumps)
    return counted.cumsum_(0)[:-1]
