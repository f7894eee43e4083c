"""Prepare the next batch while the current batch trains."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from placer.errors import BackendError, DataError, PlacerError
from placer.executor.lookups.bag_batch import BagBatch

if TYPE_CHECKING:
    from placer.executor.embeddings import Embeddings

_WINDOW = 2


def look_ahead(batches: Iterable[Any], embeddings: "Embeddings") -> Generator[Any, None, None]:
    """Yield the batches in order, preparing each one while the batch before it trains.

    ::

        for lookups, dense, labels in look_ahead(loader, embeddings):
            loss = criterion(model(dense, embeddings(lookups)), labels)
            loss.backward()
            ...

    While the loop body has batch t, the rows of batch t + 1 are found and copied. With several
    ranks, the ids of batch t + 2 are also sent to the ranks that hold their rows. Training stays
    exact: if batch t updates a row, batch t + 1 reads it after the update. If reading or preparing
    a batch fails, the error is raised when that batch is due, after the steps before it. With
    several ranks, an error on only some ranks is raised at once.

    A batch is a `BagBatch`, or a tuple or list whose first element is a `BagBatch`. The generator
    replaces the `BagBatch` by a `PreparedBatch`, and lists by tuples. It also passes through
    tuples whose first element is None, such as batches that are not trained on. Train on each batch
    before requesting the next one, and prepare no other batch in the loop. The generator has taken
    a few batches more from `batches` than it has yielded. If you leave the loop or save a
    loader's position, count the batches that you trained on, not those that the loader gave out.

    Raises DataError for items of other types.

    >>> from placer import Feature, Plan, Shard, Table, Topology
    >>> table = Table("words", rows=1000, dim=16, features=(Feature("words"),))
    >>> whole = Shard("words", (0, 1000, 1), (0, 16), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((table,), Topology.parse("1xh100"), (whole,))
    >>> import torch
    >>> from placer.executor import BagBatch, PlacedEmbeddings
    >>> embeddings = PlacedEmbeddings(plan, backend="torch")
    >>> features = ({"words": (torch.tensor(ids), None, None)} for ids in ([3, 7], [7, 9]))
    >>> batches = (BagBatch.from_features(one, ["words"]) for one in features)
    >>> for batch in look_ahead(batches, embeddings):
    ...     embeddings(batch)["words"].sum().backward()
    >>> embeddings.update_count()
    2
    """
    if not hasattr(embeddings, "prefetch"):
        raise PlacerError(
            "look_ahead takes batches and the embeddings that look them up, not a "
            f"{type(embeddings).__name__}; modules placed by apply_plan do not look ahead"
        )
    # Sharded embeddings can also send ids while two earlier batches train.
    send: Callable[[BagBatch], Any] | None = getattr(embeddings, "send_ahead", None)
    source = _checked(batches)
    if send is not None:
        source = _behind(source, send, shared=True)
    try:
        yield from _behind(source, embeddings.prefetch, shared=send is not None)
    finally:
        if (keys := getattr(embeddings, "keys", None)) is not None:
            keys.drop_ahead()


def _behind(
    source: Generator[Any, None, None], work: Callable[[Any], Any], shared: bool
) -> Generator[Any, None, None]:
    """Yield items after their work is done. Start the next item's work before yielding an item.

    An error is raised in its item's turn. If ranks are `shared` and not all of them meet the error,
    it is raised at once, because the other ranks would wait for this rank.
    """
    ready: deque[Any] = deque()
    failure: Exception | None = None
    with closing(source):
        while True:
            try:
                item = next(source)
                is_gap = isinstance(item, tuple) and item[0] is None
                if not isinstance(item, tuple):
                    item = work(item)
                elif not is_gap:  # A named tuple keeps its names.
                    item = getattr(item, "_make", tuple)((work(item[0]), *item[1:]))
            except StopIteration:
                break
            except Exception as error:
                if shared and not on_every_rank(error):
                    raise
                failure = error
                break
            ready.append(item)
            while len(ready) > (_WINDOW if is_gap else 1):
                yield ready.popleft()
        while ready:
            yield ready.popleft()
        if failure is not None:
            raise failure


def on_every_rank(error: BaseException) -> bool:
    """Return whether every rank meets this error of a batch, so that all can go on.

    >>> errors = DataError("an id is negative"), BackendError("rank 1 is lost"), ValueError()
    >>> [on_every_rank(error) for error in errors]
    [True, False, False]
    """
    return isinstance(error, PlacerError) and not isinstance(error, BackendError)


def _checked(batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the items; raise DataError for one that `look_ahead` does not take."""
    source = iter(batches)
    try:
        for item in source:
            if isinstance(item, list):  # `DataLoader(batch_size=None)` makes lists of tuples.
                item = tuple(item)
            first = item[0] if isinstance(item, tuple) and item else item
            if not (isinstance(first, BagBatch) or (first is None and item is not None)):
                raise DataError(
                    "look_ahead takes BagBatches, or tuples that begin with one, not "
                    f"{type(item).__name__}"
                )
            yield item
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()
