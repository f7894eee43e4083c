"""Write and read profiles: a small JSON, the counts, and vocabularies if there are any.

docs/profile.md describes the files. Binary files are named by their content and written first. Then
the JSON is replaced, and files that it no longer names are removed.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from placer.data.encoding import Encoding
from placer.data.log import Keys
from placer.errors import PlacerError, ProfileError
from placer.files.atomic import (
    SEAL,
    StrPath,
    is_name,
    read_parts,
    replacing_parts,
    sealed,
    write_bytes,
    write_text,
)
from placer.files.reading import LimitError, kind_of, read_json, read_limited
from placer.growing.working_set import HitRate
from placer.profile.cdf import AccessCdf
from placer.profile.locality import WindowCounts
from placer.profile.table_profile import (
    FeatureCounts,
    RowCounts,
    TableProfile,
    UnknownIds,
    narrowest,
)
from placer.tables import DType, Feature, OptimizerName, Table

if TYPE_CHECKING:
    from placer.profile.profile import Profile

SCHEMA_VERSION = 1
JSON_NAME = "profile.json"

_Arrays = dict[str, npt.NDArray[Any]]


class _Strict(BaseModel):
    """Values of exactly these types. Unknown keys, from later versions, are ignored."""

    model_config = ConfigDict(strict=True)


class _Table(_Strict):
    name: str
    rows: int
    dim: int
    dtype: DType
    optimizer: OptimizerName
    zipf_exponent: float | None
    features: list[Feature]
    counted: dict[str, FeatureCounts]
    locality: list[list[int]] = []
    unknown: UnknownIds | None = None
    hit_rates: list[HitRate] = []


class _Mapping(_Strict):
    kind: str
    rows: int | None = None


class _Encoding(_Strict):
    mappings: dict[str, _Mapping]
    feature_tables: dict[str, str]
    dense: list[str]
    label: str | None
    missing: Literal["zero", "empty"]


class _File(_Strict):
    name: str
    bytes: int = Field(ge=0)
    sha256: str


class _Document(_Strict):
    source: str
    samples: int = Field(ge=0)
    sampling: float
    encoding: _Encoding | None
    tables: list[_Table]
    files: dict[str, _File]


def write(profile: "Profile", path: StrPath) -> None:
    """Write a profile into the folder `path`, replacing an earlier profile there."""
    arrays: _Arrays = {}
    folder, encoding = Path(path), profile.encoding
    tables = [_table_to_json(table, f"{i}", arrays) for i, table in enumerate(profile.tables)]
    kinds = ("counts-*.safetensors", "vocabulary-*.parquet")
    with replacing_parts(
        folder / JSON_NAME, lambda: chain.from_iterable(map(folder.glob, kinds))
    ) as names:
        content = to_bytes({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        files = {"counts": _write(folder, "counts", "safetensors", content)}
        if encoding is not None and encoding.vocabularies:
            content = _vocabulary_to_parquet(encoding.vocabularies)
            files["vocabulary"] = _write(folder, "vocabulary", "parquet", content)
        names |= {file["name"] for file in files.values()}
        document = {
            "schema_version": SCHEMA_VERSION,
            "source": profile.source,
            "samples": profile.samples,
            "sampling": profile.sampling,
            "encoding": None if encoding is None else encoding.to_json(),
            "tables": tables,
            "files": files,
        }
        text = json.dumps(sealed(document), indent=1, ensure_ascii=False) + "\n"
        write_text(folder / JSON_NAME, text)


def read(path: StrPath) -> dict[str, Any]:
    """Read the fields of a `Profile` from its folder or its JSON.

    Raises ProfileError if a file is missing, cut short, altered or of a newer version.
    """
    file = Path(path)
    if file.is_dir():
        file = file / JSON_NAME
    return read_parts(file, lambda: _read_all(file))


def _read_all(file: Path) -> dict[str, Any]:
    document = _read_document(file)
    try:
        # Validate JSON text, in which dataclasses are objects of their fields.
        known = _Document.model_validate_json(json.dumps(document))
        counts = known.files["counts"]
        arrays = _read_safetensors(_read(file.parent, counts), counts.name)
        vocabularies: dict[str, Keys] = {}
        if "vocabulary" in known.files:
            vocabularies = _vocabulary_from_parquet(_read(file.parent, known.files["vocabulary"]))
        encoding = document["encoding"]
        return {
            "tables": tuple(
                _table_from_json(table, f"{i}", arrays) for i, table in enumerate(known.tables)
            ),
            **{name: document[name] for name in ("samples", "sampling", "source")},
            "encoding": None if encoding is None else Encoding.from_json(encoding, vocabularies),
        }
    except ProfileError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ProfileError(f"{file}: {where}: {first['msg']}") from error
    except (KeyError, TypeError, ValueError, PlacerError) as error:
        raise ProfileError(f"{file} is no profile that can be read: {error!r}") from error


def _table_to_json(profile: TableProfile, key: str, arrays: _Arrays) -> dict[str, Any]:
    table = asdict(profile.table)
    features = table.pop("features")
    if profile.counts is None:
        arrays[f"{key}.ranks"], arrays[f"{key}.shares"] = profile.cdf.ranks, profile.cdf.shares
    else:
        arrays.update({f"{key}.{name}": array for name, array in _packed(profile.counts).items()})
    return {
        **table,
        "zipf_exponent": profile.zipf_exponent,
        "features": features,
        "counted": {name: asdict(counts) for name, counts in profile.features.items()},
        **({"locality": [astuple(one) for one in profile.locality]} if profile.locality else {}),
        **({} if profile.unknown is None else {"unknown": asdict(profile.unknown)}),
        **({"hit_rates": [asdict(one) for one in profile.hit_rates]} if profile.hit_rates else {}),
    }


def _table_from_json(entry: _Table, key: str, arrays: _Arrays) -> TableProfile:
    """Return the profile of the table with arrays named `key`."""
    features = tuple(entry.features)
    table = Table(entry.name, entry.rows, entry.dim, entry.dtype, entry.optimizer, features)
    if f"{key}.ranks" in arrays:
        counts, cdf = None, AccessCdf(arrays[f"{key}.ranks"], arrays[f"{key}.shares"])
    else:
        counts = _unpacked(table.rows, arrays, key)
        cdf = AccessCdf.from_counts(counts.counts, table.rows)
    return TableProfile(
        table=table,
        cdf=cdf,
        counts=counts,
        features=entry.counted,
        zipf_exponent=entry.zipf_exponent,
        locality=tuple(WindowCounts(*one) for one in entry.locality),
        unknown=entry.unknown,
        hit_rates=tuple(entry.hit_rates),
    )


def _packed(counts: RowCounts) -> _Arrays:
    """Return counts of all rows, or gaps and counts of rows that were read: the smaller."""
    narrow = counts.counts.astype(_narrowest(counts.counts))
    gaps = np.diff(counts.ids, prepend=counts.ids.dtype.type(0))
    gaps = gaps.astype(_narrowest(gaps))
    if counts.rows * narrow.itemsize > gaps.nbytes + narrow.nbytes:
        return {"gaps": gaps, "counts": narrow}
    dense = np.zeros(counts.rows, dtype=narrow.dtype)
    dense[counts.ids] = narrow
    return {"dense": dense}


def _unpacked(rows: int, arrays: _Arrays, key: str) -> RowCounts:
    if f"{key}.dense" in arrays:
        return RowCounts.from_dense(arrays[f"{key}.dense"])
    ids = np.cumsum(arrays[f"{key}.gaps"], dtype=np.int64)
    counts = arrays[f"{key}.counts"]
    ids, counts = (one.astype(narrowest(int(one.max(initial=0)))) for one in (ids, counts))
    return RowCounts(rows, ids, counts)


def _narrowest(values: npt.NDArray[Any]) -> np.dtype[Any]:
    return np.min_scalar_type(int(values.max(initial=0)))


def _read_safetensors(content: bytes, name: str) -> _Arrays:
    try:
        arrays: _Arrays = from_bytes(content)
    except SafetensorError as error:
        raise ProfileError(f"{name} is no safetensors file: {error}") from error
    for own, array in arrays.items():
        kinds = "f" if own.endswith(".shares") else "iu"
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise ProfileError(f"{name} has {array.dtype} of shape {array.shape} as {own!r}")
    return arrays


def _vocabulary_to_parquet(vocabularies: Mapping[str, Keys]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(vocabularies)
    sizes = [vocabularies[name].size for name in names]
    table = pa.table(
        {
            "table": pa.DictionaryArray.from_arrays(
                np.repeat(np.arange(len(names), dtype=np.int32), sizes), names
            ),
            "row": np.concatenate([np.arange(1, size + 1) for size in sizes]),
            "key": np.concatenate([vocabularies[name] for name in names]),
        },
        # A table without frequent ids has no row in this file, but its name is here.
        metadata={"tables": json.dumps(names)},
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _vocabulary_from_parquet(content: bytes) -> dict[str, Keys]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Use neither a Python file nor threads: Arrow's threads may clean up while Python exits,
        # and then abort the process (apache/arrow issue 34314).
        with pq.ParquetFile(pa.BufferReader(content)) as file:
            table = file.read(columns=["table", "key"], use_threads=False)
        column = table.column("table").cast(pa.dictionary(pa.int32(), pa.string()))
    except (OSError, pa.ArrowException) as error:
        raise ProfileError(f"its vocabulary is no Parquet that can be read: {error}") from error
    key, column = table.column("key"), column.combine_chunks()
    if key.type != pa.uint64() or key.null_count or column.null_count:
        raise ProfileError("its vocabulary has other columns than the table and the key of an id")
    names: list[str] = json.loads(table.schema.metadata[b"tables"])
    written = column.dictionary.to_pylist()
    index = column.indices.to_numpy(zero_copy_only=False)
    keys = key.to_numpy()
    return {
        name: keys[index == written.index(name)] if name in written else keys[:0] for name in names
    }


def _write(folder: Path, kind: str, suffix: str, content: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(content).hexdigest()
    name = f"{kind}-{sha256[:16]}.{suffix}"
    write_bytes(folder / name, content)
    return {"name": name, "bytes": len(content), "sha256": sha256}


def _read(folder: Path, entry: _File) -> bytes:
    name = entry.name
    if not is_name(name):
        raise ProfileError(f"a profile's files are beside its JSON, not at {name!r}")
    try:
        # One byte more than expected is enough to show that the file was replaced.
        content = read_limited(folder / name, entry.bytes + 1)
    except (OSError, LimitError, OverflowError) as error:
        raise ProfileError(
            f"cannot read {folder / name}: {getattr(error, 'strerror', None) or error}; it belongs "
            "to the profile"
        ) from error
    if len(content) != entry.bytes:
        raise ProfileError(
            f"{folder / name} has {len(content)} bytes instead of {entry.bytes}; "
            "it was cut short or replaced, profile the log again"
        )
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ProfileError(f"{folder / name} was altered; profile the log again")
    return content


def _read_document(file: Path) -> dict[str, Any]:
    try:
        document = read_json(file)
    except OSError as error:
        if file.parent.is_dir() and file.name == JSON_NAME and not file.exists():
            raise ProfileError(
                f"{file.parent} is a folder without {JSON_NAME} and no profile; give the folder "
                "that `placer profile` wrote"
            ) from error
        raise ProfileError(f"cannot read profile {file}: {error.strerror or error}") from error
    except LimitError as error:
        if file.name == JSON_NAME:
            raise ProfileError(f"{file} is cut short or no JSON: {error}") from error
        raise ProfileError(
            f"{file} is no profile ({error}); if it is a log, make one with "
            f"`placer profile {file} -o profile`"
        ) from error
    kind = kind_of(document)
    if kind not in ("", "a profile"):
        raise ProfileError(
            f"{file} is {kind} and no profile; give the folder that `placer profile` wrote"
        )
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ProfileError(f"{file} is no profile; it has no schema_version")
    version = document["schema_version"]
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise ProfileError(
            f"{file} has schema_version {version}, this placer reads up to {SCHEMA_VERSION}; "
            "upgrade placer or profile the log again"
        )
    if document.get(SEAL) != sealed(document)[SEAL]:
        raise ProfileError(f"{file} was altered since it was written; profile the log again")
    return document
