"""Counts that NVTabular's Categorify keeps of what it encodes.

A fitted workflow leaves a folder ``categories`` with two files for each encoded column, which
may also be folders of parts (``nvtabular/ops/categorify.py``, `_save_encodings`):

``unique.NAME.parquet``
    The values that have a row of their own, in the order of their rows, and in the column
    ``NAME_size`` how often each was read.
``meta.NAME.parquet``
    Four lines of kind, offset, num_indices and num_observed: row 0 is padding, row 1 a missing
    value, then come the rows of other values, and then those of ``unique``.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from placer.data.formats.base import UNREADABLE
from placer.errors import DataError
from placer.files import StrPath
from placer.profile.counts import RowCounts

_UNIQUE = re.compile(r"unique\.(.+)\.parquet")
_KINDS = ["pad", "null", "oov", "unique"]


def is_categories(path: StrPath) -> bool:
    """Whether a path is a folder of Categorify's."""
    return Path(path).is_dir() and any(Path(path).glob("unique.*.parquet"))


def read_categories(path: StrPath) -> dict[str, RowCounts]:
    """Access counts by table, in the order of their names; rows are those of the encoded data.

    Values that share several rows as they are hashed (``num_buckets``) are counted together: they
    are taken to be as many in each of these rows, and the first get one more where that is uneven.

    Raises
    ------
    DataError
        If a file is missing or unreadable, or holds no counts.
    """
    found = {}
    for file in sorted(Path(path).glob("unique.*.parquet")):
        if match := _UNIQUE.fullmatch(file.name):
            found[match[1]] = _table(file, match[1])
    return found


def _table(file: Path, name: str) -> RowCounts:
    meta_file = file.with_name(f"meta.{name}.parquet")
    if not meta_file.exists():
        raise DataError(
            f"{file} has no {meta_file.name} beside it, which tells the rows of its values; "
            "fit the workflow with a version of NVTabular that writes it"
        )
    meta = _read(meta_file, ["kind", "offset", "num_indices", "num_observed"])
    if meta.column("kind").to_pylist() != _KINDS:
        raise DataError(f"{meta_file}: column 'kind' holds {', '.join(_KINDS)}, in this order")
    offsets, sizes, observed = (
        _integers(meta, column, meta_file) for column in meta.column_names[1:]
    )
    if (np.cumsum(sizes)[:3] != offsets[1:]).any() or offsets[0] != 0:
        raise DataError(f"{meta_file}: the offsets {offsets.tolist()} do not follow from the sizes")
    unique = _integers(_read(file, [f"{name}_size"]), f"{name}_size", file)
    if unique.size != sizes[3] or int(unique.sum()) != observed[3]:
        raise DataError(
            f"{file} has {unique.size} values that were read {unique.sum()} times, but "
            f"{meta_file.name} says {sizes[3]} and {observed[3]}"
        )
    dense = np.zeros(int(offsets[3] + sizes[3]), np.int64)
    dense[1] = observed[1]
    share, rest = divmod(int(observed[2]), int(sizes[2]))
    dense[2 : offsets[3]] = share + (np.arange(sizes[2]) < rest)
    dense[offsets[3] :] = unique
    if dense.min() < 0:
        raise DataError(f"{file}: a value was read {dense.min()} times")
    return RowCounts.from_dense(dense)


def _read(file: Path, columns: list[str]) -> pa.Table:
    try:
        # Parts of a folder are in the order of their numbers: part.10 comes after part.9.
        parts = sorted(file.glob("part.*.parquet"), key=_number) if file.is_dir() else [file]
        data = ds.dataset([str(part) for part in parts], format="parquet")
        missing = [column for column in columns if column not in data.schema.names]
        if missing:
            raise DataError(
                f"{file} has no column {missing[0]!r}; it has {', '.join(data.schema.names)}. "
                "Categorify keeps counts unless it was given a vocabulary"
            )
        return data.to_table(columns=columns)
    except UNREADABLE as error:
        raise DataError(f"cannot read {file} as Parquet: {str(error).splitlines()[0]}") from error


def _number(part: Path) -> int:
    match = re.search(r"\d+", part.name)
    return int(match[0]) if match else 0


def _integers(table: pa.Table, name: str, file: Path) -> npt.NDArray[np.int64]:
    """A column as integers; what pandas made floating-point numbers for lack of a value is 0."""
    column = table.column(name)
    try:
        values: Any = column.fill_null(0).cast(pa.int64()).to_numpy()
    except pa.ArrowException as error:
        raise DataError(f"{file}: column {name!r} holds integers: {error}") from error
    return np.asarray(values, np.int64)
