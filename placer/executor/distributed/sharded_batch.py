"""A batch exchanged between ranks: lookups sent and received, and the order of results."""

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
    """The lookups of all source ranks in one unit."""

    # The lookups of all sources' samples, channel by channel; None if only `prefetch` needed ids.
    batch: BagBatch | None
    weights: Tensor | None  # Of the batch's lookups, if any rank has weights.
    prepared: PreparedBatch | None  # The result of `prefetch`, if it was called.
    # Position of each lookup among the received lookups, int32; None if the order is the same, or
    # if no rank needs gradients of weights.
    source: Tensor | None
    bounds: tuple[int, ...]  # Lookups of channel c are ``bounds[c]..bounds[c + 1]``.


@dataclass(frozen=True, slots=True, eq=False)
class ShardedBatch:
    """A batch whose lookups have been sent to the ranks that hold their rows.

    `ShardedEmbeddings.prefetch` makes it for one forward pass.
    """

    bags: Bags  # The bags of this rank's own samples.
    weight_gradients: bool  # Whether any rank needs gradients of weights.
    # By feature and column slice: the feature's lookups sorted by target, int32; None with one
    # target, or if targets send sums.
    routes: tuple[tuple[Tensor | None, ...], ...]
    sent_rows: tuple[int, ...]  # Rows returned by each channel of `Channels.sent`.
    # Rows that each channel of `Channels.served` returns to each rank, shape (world, served).
    served_rows: npt.NDArray[np.int64]
    # Lookups sent to and received from each rank.
    sent_lookups: tuple[int, ...]
    served_lookups: tuple[int, ...]
    # Position in the batch of each lookup sent, in the order of sending. Empty if no rank needs
    # gradients of weights.
    lookups: Tensor
    units: tuple[UnitStep, ...]
    key_step: KeyStep | None  # The step of growing tables in which keys got rows.
    number: "NumberedBatch | None" = None  # The batch's number for servers.


def spans(starts: npt.ArrayLike, sizes: npt.ArrayLike, device: torch.device) -> Tensor:
    """Return ``starts[i]..starts[i] + sizes[i]`` for every i, concatenated; int32.

    It is a running sum of ones, with jumps where spans start, to need one array of this length.

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
