"""Read batches of a log for the training loop: of one size, and ahead of time."""

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
"""Samples to read from a log at once, rounded down to whole batches."""

T = TypeVar("T")

_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a batch of the log has besides its lookups."""

    # Number of samples in the batch, and of those with a label.
    samples: int
    labelled: int
    # Of this rank's samples with a label: float32, shapes (own, columns) and (own,). Empty if the
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
    """Yield the batches of one pass over a log, from its sample `skip` on.

    Lookups are None in batches that are not trained on: held-out batches, and those without any
    label. End after `limit` batches to train on. Pin tensors that a GPU will copy. Each rank takes
    its part of a batch's labelled samples, but checks all labels, so all ranks raise for a bad one.
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
    """Return a rank's samples of a batch; all samples without other ranks."""
    return chunk if ranks.world == 1 else slice_chunk(chunk, *ranks.part_of(chunk.samples))


def dense_of(chunk: Chunk) -> Tensor:
    """Return the numeric columns of a batch, float32, shape (samples, columns)."""
    return torch.from_numpy(np.ascontiguousarray(chunk.dense))


def labels_of(chunk: Chunk) -> npt.NDArray[np.float32]:
    """Return the labels of a batch, shape (samples,); raise DataError for a bad label."""
    if chunk.labels is None:
        raise DataError(
            "the log has no labels to train on; profile it again, with --label and the column of "
            "clicks, and plan with that profile"
        )
    labels = np.ascontiguousarray(chunk.labels, dtype=np.float32)
    labels = np.where(labels == -1, np.float32(0), labels)  # Some logs write -1 and 1.
    wrong = ~np.isin(labels, (0, 1))  # Evaluation would round a label in between.
    if wrong.any():
        raise DataError(
            f"a label is {labels[wrong][0]}, which is neither 0 nor 1; profile the log again, with "
            "--label and a column of clicks, as the bundled model learns these"
        )
    return labels


def batches(log: Log, batch_size: int, skip: int = 0) -> Generator[Chunk]:
    """Yield batches in the log's order; all but the last have `batch_size` samples.

    The log is read in larger chunks, and a batch may span chunks. So batches after `skip` samples
    equal those of an uninterrupted pass, for any chunks of the reader.
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
    """Return the samples of a batch that have a label.

    Batches are formed before this. So the samples that a batch spans, and the position of a run,
    do not depend on labels.
    """
    if chunk.labels is None:
        return chunk
    known = ~np.isnan(chunk.labels)
    if known.all():
        return chunk
    return samples_of(chunk, int(known.sum()), known)


def no_label_error(samples: int) -> DataError:
    """Return the error for a log of which no sample has a label."""
    return DataError(
        f"none of the {samples} samples of the log has a label to train on; "
        "name the label column when profiling, or train on another log"
    )


def in_background(make: Callable[[], Generator[T]], depth: int = 2) -> Generator[T]:
    """Yield the items of a generator, which a thread runs at most `depth` items ahead.

    An error of the generator is raised here after the items before it. If the loop over items ends
    early, the thread ends after its current item. The thread makes and closes the generator.
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

    # A daemon thread, so a second Ctrl-C ends the program while it reads a file.
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
