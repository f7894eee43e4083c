"""Batches of exactly one size from a log's chunks, whatever the chunks' sizes are."""

from collections.abc import Generator

import numpy as np
import numpy.typing as npt

from placer.data.log import Bags, Chunk, Log, joined
from placer.errors import DataError

READ_SAMPLES = 65536
"""Samples that are read from a log at once, rounded to whole batches."""


def batches(log: Log, batch_size: int, skip: int = 0) -> Generator[Chunk]:
    """Return batches in the log's order; all but the last have `batch_size` samples.

    Reading is in larger chunks, and a batch may span several: so the batches after `skip`
    samples are those of an uninterrupted pass, whatever the reader's chunks.
    """
    per_read = batch_size * max(1, READ_SAMPLES // batch_size)
    rest: Chunk | None = None
    for chunk in log.chunks(per_read, skip=skip):
        known = chunk if rest is None else joined([rest, chunk])
        read = known.samples
        whole = read - read % batch_size
        for start in range(0, whole, batch_size):
            yield slice_chunk(known, start, start + batch_size)
        rest = slice_chunk(known, whole, read) if whole < read else None
    if rest is not None:
        yield rest


def slice_chunk(chunk: Chunk, start: int, stop: int) -> Chunk:
    """Return samples ``start..stop`` of a chunk, as views where that is possible."""
    features = {name: _slice_bags(bags, start, stop) for name, bags in chunk.features.items()}
    labels = None if chunk.labels is None else chunk.labels[start:stop]
    return Chunk(stop - start, features, chunk.dense[start:stop], labels)


def labelled(chunk: Chunk) -> Chunk:
    """Return the samples of a batch that have a label; the batch itself where all have one.

    Batches are formed before this, so that which samples a batch spans, and with it the position
    of a run, does not depend on the labels.
    """
    if chunk.labels is None:
        return chunk
    known = ~np.isnan(chunk.labels)
    if known.all():
        return chunk
    features = {name: _select_bags(bags, known) for name, bags in chunk.features.items()}
    return Chunk(int(known.sum()), features, chunk.dense[known], chunk.labels[known])


def no_label_error(samples: int) -> DataError:
    """Return what to raise where none of a log's samples has a label."""
    return DataError(
        f"none of the {samples} samples of the log has a label to train on; "
        "name the label column when profiling, or train on another log"
    )


def _slice_bags(bags: Bags, start: int, stop: int) -> Bags:
    if bags.offsets is None:
        weights = None if bags.weights is None else bags.weights[start:stop]
        return Bags(bags.ids[start:stop], None, weights)
    low, high = int(bags.offsets[start]), int(bags.offsets[stop])
    weights = None if bags.weights is None else bags.weights[low:high]
    return Bags(bags.ids[low:high], bags.offsets[start : stop + 1] - low, weights)


def _select_bags(bags: Bags, kept: npt.NDArray[np.bool_]) -> Bags:
    if bags.offsets is None:
        return Bags(bags.ids[kept], None, None if bags.weights is None else bags.weights[kept])
    lengths = np.diff(bags.offsets)
    lookups = np.repeat(kept, lengths)
    return Bags(
        bags.ids[lookups],
        np.concatenate([[0], np.cumsum(lengths[kept])]),
        None if bags.weights is None else bags.weights[lookups],
    )
