"""Batches of a log as the training loop takes them: of one size, and read ahead."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.data.log import Chunk, Log, joined, samples_of, slice_chunk
from placer.errors import DataError
from placer.executor import BagBatch
from placer.training.config import TrainConfig
from placer.training.distributed import ALONE, Ranks

READ_SAMPLES = 65536
"""Samples that are read from a log at once, rounded to whole batches."""

T = TypeVar("T")


_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a batch of the log holds besides its lookups."""

    # Samples of the log, and how many of them have a label.
    samples: int
    labelled: int
    # Of those that are this rank's, shapes (own, columns) and (own,), float32; empty where the
    # batch is not trained on.
    dense: Tensor = _NOTHING
    labels: Tensor = _NOTHING


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
    left, size = limit, config.batch_size
    for number, chunk in enumerate(batches(log, size, skip), skip // size):
        usable = labelled(chunk)
        if not usable.samples or config.is_held_out(number):
            yield None, Reading(chunk.samples, usable.samples)
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
    return samples_of(chunk, int(known.sum()), known)


def no_label_error(samples: int) -> DataError:
    """Return what to raise where none of a log's samples has a label."""
    return DataError(
        f"none of the {samples} samples of the log has a label to train on; "
        "name the label column when profiling, or train on another log"
    )


def in_background(make: Callable[[], Generator[T]], depth: int = 2) -> Generator[T]:
    """Return the items of a generator, made by a thread that is at most `depth` items ahead.

    What the generator raises is raised here, in its place among the items. Leaving the loop, by
    closing or by an exception, ends the thread after the item that it is at. The thread makes the
    generator, and closes it.
    """
    results: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    free = threading.Semaphore(depth)
    stopped = threading.Event()

    def work() -> None:
        end: BaseException | None = None
        try:
            with closing(make()) as items:
                free.acquire()
                for item in items:
                    results.put((item,))
                    free.acquire()
                    if stopped.is_set():
                        break
        except BaseException as error:
            end = error
        finally:
            results.put(end)

    # A daemon, so that a second Ctrl-C ends the program while a file is being read.
    thread = threading.Thread(target=work, name="placer reader", daemon=True)
    thread.start()
    try:
        while isinstance(result := results.get(), tuple):
            free.release()
            yield result[0]
        if result is not None:
            raise result
    finally:
        stopped.set()
        free.release()
        thread.join()
