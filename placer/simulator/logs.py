"""A log as batches of a plan's tables; the next one is read while one is counted."""

from collections.abc import Generator, Iterator
from itertools import islice

from placer.data.log import Chunk, Log
from placer.plan.plan import Plan
from placer.training.background import in_background
from placer.training.batches import batches as batches_of
from placer.training.loop import check_log


def log_batches(log: Log, plan: Plan, batch_size: int, most: int | None = None) -> Iterator[Chunk]:
    """Batches in the log's order, of `batch_size` samples but for the last.

    Labelled or not, all samples count, and none is held out.

    Parameters
    ----------
    batch_size : int
        Samples of all GPUs together.
    most : int, optional
        Batches; by default all.

    Raises
    ------
    PlanMismatchError
        If the log lacks a feature of the plan, or its tables have other sizes.
    """
    check_log(plan, log)

    def read() -> Generator[Chunk]:
        yield from islice(batches_of(log, batch_size), most)

    yield from in_background(read)
