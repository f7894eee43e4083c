"""Count the lookups of a training program's batches or DataLoader."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
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
# `Bags`; ids with one lookup per sample (1-D) or equally many (2-D); or ids with offsets.
# Arrays may be NumPy's or torch's.
BagsLike = Any


class CountedLoader(Generic[Batch]):
    """Yields the batches of `loader` unchanged and counts their lookups: a hook for trainers.

    ::

        loader = CountedLoader(loader, tables={"user": 10**6})
        for batch in loader:
            ...  # train
        loader.profile(dim=64).save("profile")

    Parameters
    ----------
    loader : iterable of batches
        Such as a ``torch.utils.data.DataLoader``. Iterate over this object instead of it.
    extract : callable, optional
        Function that returns the ids of a batch, by feature. Ids are `Bags`; an array of shape
        (samples,) or (samples, ids per sample); a list of arrays, as torch collates lists of equal
        length; a pair (ids, offsets) with samples + 1 offsets, where bag i is
        ``ids[offsets[i]:offsets[i + 1]]``; or a JaggedTensor of TorchRec. Arrays are NumPy's or
        torch's, of integers. By default `features_in` finds the ids.
    tables : mapping of table name to int
        Rows of each table.
    feature_tables : mapping of feature name to table name, optional
        The table of each feature. By default each table has one feature of its own name.
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
            # Copy: the counter keeps arrays for a while, and the trainer may change its own.
            self._counter.add(samples, deepcopy(features))
            yield batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # Raises the loader's own error.

    def profile(
        self,
        *,
        dim: int = 64,
        dtype: DType = "float32",
        optimizer: OptimizerName = "rowwise_adagrad",
        pooling: Pooling | Mapping[str, Pooling] = "sum",
        source: str = "",
    ) -> Profile:
        """Return the profile of all batches so far.

        It includes distinct rows of windows of consecutive samples, as for a log.

        Raises DataError if there was no sample.
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
    """Read batches or a DataLoader once, and return the profile of their lookups.

    `CountedLoader` explains the parameters; `options` are those of `CountedLoader.profile`.

    >>> profile = profile_batches([{"user": np.array([0, 2, 2])}], tables={"user": 3})
    >>> profile["user"].counts.hottest().tolist()
    [2, 0]
    """
    counted = CountedLoader(batches, extract, tables=tables, feature_tables=feature_tables)
    for _ in counted:
        pass
    return counted.profile(**options)


def features_in(batch: Any, names: Sequence[str]) -> dict[str, BagsLike]:
    """Find the ids of the named features in a batch, and return them by feature.

    A batch is a mapping of feature name to ids, which may have other keys; a KeyedJaggedTensor of
    TorchRec; or a tuple, list, mapping or object with `__dict__` that contains one of these.

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
        # torch collates lists of equal length into the first ids of all samples, the second, …
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
    # Recognize tensors by their methods: importing torch would be slow for everyone.
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
