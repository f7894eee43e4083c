"""Counts what a Python program feeds its model: batches of arrays, or a DataLoader."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from placer.data.log import Bags
from placer.errors import DataError
from placer.profile.count import AccessCounter, TableOptions
from placer.profile.profile import Profile
from placer.tables import DType, OptimizerName, Pooling

Batch = TypeVar("Batch")
# `Bags`; ids of one lookup a sample (1-D) or of equally many (2-D); or ids with offsets.
# Arrays may be NumPy's or torch's.
BagsLike = Any


class CountedLoader(Generic[Batch]):
    """Iterates over `loader` unchanged and counts what passes: a hook for a trainer.

    ::

        loader = CountedLoader(loader, tables={"user": 10**6})
        for batch in loader:
            ...  # train
        loader.profile(dim=64).save("profile")

    Parameters
    ----------
    loader : iterable of batches
        Such as a ``torch.utils.data.DataLoader``; it must be iterated through this object.
    extract : callable, optional
        The ids of a batch, by feature: `Bags`; an array of one id a sample, shape
        (samples,), or of several, shape (samples, ids); a list of arrays, which is what torch
        makes of lists of one length; a pair (ids, offsets), bag i being
        ``ids[offsets[i]:offsets[i + 1]]`` of samples + 1 offsets; or a JaggedTensor of
        TorchRec's. Arrays are NumPy's or torch's, of integers. By default `features_in` finds
        them.
    tables : mapping of table name to int
        Rows of each table.
    feature_tables : mapping of feature name to table name, optional
        By default each table is read by one feature of its name.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        extract: Callable[[Batch], Mapping[str, BagsLike]] | None = None,
        *,
        tables: Mapping[str, int],
        feature_tables: Mapping[str, str] | None = None,
    ) -> None:
        self.loader = loader
        feature_tables = feature_tables or {name: name for name in tables}
        self._extract = extract or partial(features_in, names=tuple(feature_tables))
        self._counter = AccessCounter(tables, feature_tables)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            features = {name: as_bags(name, ids) for name, ids in self._extract(batch).items()}
            samples = next(iter(features.values())).samples if features else 0
            # It keeps them for a while, and the arrays are the trainer's.
            self._counter.add(samples, {name: _copied(bags) for name, bags in features.items()})
            yield batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # raises as the loader itself does

    def profile(
        self,
        *,
        dim: int = 64,
        dtype: DType = "float32",
        optimizer: OptimizerName = "rowwise_adagrad",
        pooling: Pooling | Mapping[str, Pooling] = "sum",
        source: str = "",
    ) -> Profile:
        """Return the profile of all batches so far, in their order.

        With it come the distinct rows of windows of consecutive samples, as of a log.

        Raises DataError if nothing has.
        """
        if not self._counter.samples:
            raise DataError("no sample has passed; iterate over the batches before profiling them")
        options = TableOptions(dim, dtype, optimizer, pooling)
        return self._counter.profile(options, source=source)


def profile_batches(
    batches: Iterable[Batch],
    extract: Callable[[Batch], Mapping[str, BagsLike]] | None = None,
    *,
    tables: Mapping[str, int],
    feature_tables: Mapping[str, str] | None = None,
    **options: Any,
) -> Profile:
    """Read batches, or a DataLoader, once and count the lookups.

    `options` are those of `CountedLoader.profile`; `CountedLoader` explains the parameters.

    Examples
    --------
    >>> profile = profile_batches([{"user": np.array([0, 2, 2])}], tables={"user": 3})
    >>> profile["user"].counts.hottest().tolist()
    [2, 0]
    """
    counted = CountedLoader(batches, extract, tables=tables, feature_tables=feature_tables)
    for _ in counted:
        pass
    return counted.profile(**options)


def features_in(batch: Any, names: Sequence[str]) -> dict[str, BagsLike]:
    """Return the features of a batch by name, wherever they are in it.

    A batch is a mapping of feature name to ids (and to other things, which are left out), a
    KeyedJaggedTensor of TorchRec's, or a tuple, list, mapping or object with `__dict__` that holds
    one of these.

    >>> sorted(features_in(({"user": [1], "item": [2], "label": [0.0]}, 7), ["user", "item"]))
    ['item', 'user']
    """
    found = _named(batch, names, depth=2)
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(
            f"a batch, a {type(batch).__name__}, has no feature {missing[0]!r}; give extract=, a "
            "function that returns the ids of a batch by feature"
        )
    return found


def _named(batch: Any, names: Sequence[str], depth: int) -> dict[str, BagsLike]:
    if hasattr(batch, "to_dict") and hasattr(batch, "offset_per_key"):
        batch = batch.to_dict()  # KeyedJaggedTensor
    held: Iterable[Any] = ()
    found = {}
    if isinstance(batch, Mapping):
        found = {name: batch[name] for name in names if name in batch}
        held = batch.values()
    elif isinstance(batch, tuple | list):
        held = batch
    elif hasattr(batch, "__dict__") and not hasattr(batch, "detach"):
        held = vars(batch).values()
    if depth and len(found) < len(names):
        for one in held:
            found = _named(one, names, depth - 1) | found
    return found


def as_bags(feature: str, value: BagsLike) -> Bags:
    """Convert one feature's ids to bags; see `CountedLoader` for the accepted forms.

    Raises DataError if ids or offsets are not integers, or offsets do not run from 0 to the number
    of ids.
    """
    if isinstance(value, Bags):
        return value
    if not hasattr(value, "detach") and hasattr(value, "values") and hasattr(value, "offsets"):
        value = (value.values(), value.offsets())  # JaggedTensor
    if isinstance(value, list) and value and all(hasattr(one, "shape") for one in value):
        # What torch makes of lists of one length: the first ids of all samples, the second, …
        value = np.stack([_array(one) for one in value], axis=1)
    if isinstance(value, tuple) and len(value) == 2:
        ids, offsets = _integers(feature, value[0]), _integers(feature, value[1])
        if offsets.size == 0 or offsets[0] != 0 or offsets[-1] != ids.size:
            raise DataError(
                f"feature {feature!r}: offsets must be samples + 1 numbers from 0 to "
                f"{ids.size}, the number of ids"
            )
        if (np.diff(offsets) < 0).any():
            raise DataError(f"feature {feature!r}: offsets must not decrease")
        return Bags(ids, offsets)
    ids = _integers(feature, value)
    if ids.ndim == 1:
        return Bags(ids)
    if ids.ndim != 2:
        raise DataError(
            f"feature {feature!r} has ids of shape {ids.shape}; "
            "they are (samples,) or (samples, ids per sample), or a pair (ids, offsets)"
        )
    samples, width = ids.shape
    return Bags(ids.reshape(-1), np.arange(samples + 1, dtype=np.int64) * width)


def _copied(bags: Bags) -> Bags:
    return Bags(bags.ids.copy(), None if bags.offsets is None else bags.offsets.copy())


def _integers(feature: str, value: Any) -> npt.NDArray[np.int64]:
    try:
        array = _array(value)
    except ValueError as error:
        raise DataError(
            f"feature {feature!r}: lists of ids that differ in length are a pair (ids, offsets), "
            "with samples + 1 offsets"
        ) from error
    if array.dtype.kind not in "iu" and array.size:
        raise DataError(f"feature {feature!r}: ids and offsets are integers, not {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _array(value: Any) -> npt.NDArray[Any]:
    # Tensors are recognised by their methods, as importing torch here would weigh on everyone.
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
