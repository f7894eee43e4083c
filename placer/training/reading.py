"""Batches of a log as the training loop takes them."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.data.log import Chunk, Log
from placer.errors import DataError
from placer.executor import BagBatch
from placer.training.batches import batches, labelled, slice_chunk
from placer.training.config import TrainConfig
from placer.training.distributed import ALONE, Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a batch of the log holds besides its lookups."""

    # Samples of the log, and how many of them have a label.
    samples: int
    labelled: int
    # Of those that are this rank's, shapes (own, columns) and (own,), float32; empty where the
    # batch is not trained on.
    dense: Tensor
    labels: Tensor


_NOTHING = torch.empty(0)


def readings(
    log: Log,
    features: Sequence[str],
    config: TrainConfig,
    *,
    skip: int = 0,
    limit: int | None = None,
    ranks: Ranks = ALONE,
) -> Generator[tuple[BagBatch | None, Reading]]:
    """Return the batches of one pass over a log, from its sample `skip` on.

    Lookups are None in batches that are not trained on, because they are held out or none of
    their samples has a label. Ends after `limit` batches to train on. Tensors are pinned where
    a GPU will copy them. Of each batch's samples that have a label a rank takes its part, but
    looks at all labels, so that every rank raises for a bad one.
    """
    pins = torch.device(config.device).type == "cuda"
    number, left = skip // config.batch_size, limit
    for chunk in batches(log, config.batch_size, skip):
        usable = labelled(chunk)
        trained = usable.samples > 0 and not config.is_held_out(number)
        number += 1
        if not trained:
            yield None, Reading(chunk.samples, usable.samples, _NOTHING, _NOTHING)
            continue
        labels_of(usable)
        own = own_part(usable, ranks)
        lookups, dense = BagBatch.from_chunk(own, features), dense_of(own)
        labels = torch.tensor(labels_of(own))
        if pins:
            lookups, dense, labels = lookups.pin_memory(), dense.pin_memory(), labels.pin_memory()
        yield lookups, Reading(chunk.samples, usable.samples, dense, labels)
        if left is not None:
            left -= 1
            if not left:
                return


def own_part(chunk: Chunk, ranks: Ranks) -> Chunk:
    """Return a rank's samples of a batch; all of them where it is alone."""
    return chunk if ranks.world == 1 else slice_chunk(chunk, *ranks.part_of(chunk.samples))


def dense_of(chunk: Chunk) -> Tensor:
    """Numeric columns of a batch, float32, shape (samples, columns)."""
    return torch.from_numpy(np.ascontiguousarray(chunk.dense))


def labels_of(chunk: Chunk) -> npt.NDArray[np.float32]:
    """Labels of a batch, shape (samples,)."""
    if chunk.labels is None:
        raise DataError(
            "the log has no labels to train on; profile it anew, with --label and the column of "
            "clicks, and plan with that profile"
        )
    labels = np.ascontiguousarray(chunk.labels, dtype=np.float32)
    labels = np.where(labels == -1, np.float32(0), labels)  # Some logs write -1 and 1.
    wrong = ~((labels >= 0) & (labels <= 1))
    if wrong.any():
        raise DataError(
            f"a label is {labels[wrong][0]}, which is neither 0 nor 1; profile the log anew, with "
            "--label and a column of clicks, as the bundled model learns these"
        )
    return labels
