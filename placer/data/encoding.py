"""Encodings: which columns of a log are read, and how their ids become rows of tables."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from placer.data.layout import NULLS, Layout, MappingKind, Missing, NamedColumns
from placer.data.log import Keys
from placer.errors import DataError
from placer.files.atomic import sha256_json

Rows = npt.NDArray[np.int64]


class OutOfRange(Exception):
    """An id that is no row. The caller knows the file and place, and reports them."""

    def __init__(self, position: int, raw_id: int) -> None:
        super().__init__(position, raw_id)
        self.position, self.raw_id = position, raw_id


@dataclass(frozen=True, slots=True)
class Identity:
    """Ids are rows. An id outside 0..rows-1 is an error."""

    kind: ClassVar[MappingKind] = "identity"
    rows: int

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape.

        Raises OutOfRange at the first key that is not below `rows`. Negative ids are large keys.
        """
        if keys.size and int(keys.max()) >= self.rows:
            position = int(np.argmax(keys >= np.uint64(self.rows)))
            raise OutOfRange(position, int(keys.view(np.int64)[position]))
        return keys.view(np.int64)


@dataclass(frozen=True, slots=True)
class Hash:
    """Row = key modulo rows, as ``--max-ind-range`` of the DLRM reference does.

    Keys of texts are already hashes (see `placer.data.keys`). Integers and Criteo's hexadecimal
    categories are their own keys.
    """

    kind: ClassVar[MappingKind] = "hash"
    rows: int

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape."""
        if keys.size and int(keys.max()) < self.rows:
            return keys.view(np.int64)
        # A faster `%`: NumPy divides by a constant with multiplications, but not in its `%`.
        rows = np.uint64(self.rows)
        return (keys - keys // rows * rows).view(np.int64)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Lists keys: the key at place i has row i + 1, and every other key has row 0."""

    kind: ClassVar[MappingKind] = "vocabulary"
    keys: Keys  # Shape (n,), distinct.

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", np.ascontiguousarray(self.keys, dtype=np.uint64))
        ascending, _ = self._ascending
        if (ascending[1:] == ascending[:-1]).any():
            raise DataError("a vocabulary lists an id twice; each id has one row")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and np.array_equal(self.keys, other.keys)

    def __hash__(self) -> int:
        return hash(self.keys.tobytes())

    @cached_property
    def _ascending(self) -> tuple[Keys, Rows]:
        """The keys in ascending order, and their rows."""
        order = np.argsort(self.keys, kind="stable")
        return self.keys[order], order + 1

    @property
    def rows(self) -> int:
        """Rows of the table, including row 0 for unlisted keys."""
        return self.keys.size + 1

    @cached_property
    def sha256(self) -> str:
        """Hash of the keys in their order."""
        return hashlib.sha256(self.keys.astype("<u8", copy=False).data).hexdigest()

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape."""
        if not self.keys.size:
            return np.zeros(keys.size, dtype=np.int64)
        ascending, rows = self._ascending
        place = np.searchsorted(ascending, keys)
        place[place == ascending.size] = 0
        return np.where(ascending[place] == keys, rows[place], 0)


@dataclass(frozen=True, slots=True)
class RawKeys:
    """Keeps raw keys, for growing tables, which assign rows to keys as they are read."""

    kind: ClassVar[MappingKind] = "key"
    rows: int  # Rows of the table. Keys may be any int64.

    def map(self, keys: Keys) -> Rows:
        """Return `keys` as int64."""
        return keys.view(np.int64)


IdMapping = Identity | Hash | Vocabulary | RawKeys
_SIZED: Mapping[str, type[Identity | Hash | RawKeys]] = {
    one.kind: one for one in (Identity, Hash, RawKeys)
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """The columns of a log that are read, and the table and row that an id reads.

    A profile records it, so training maps ids to the rows that were counted:
    ``open_log(paths, encoding=profile.encoding)``.
    """

    feature_tables: Mapping[str, str]  # In the log's order.
    mappings: Mapping[str, IdMapping]
    dense: tuple[str, ...] = ()  # Numeric columns.
    label: str | None = None  # The label's column.
    missing: Missing = "zero"  # Whether a missing value is id 0 or an empty bag.
    # How values are written in the log's files.
    layout: Layout = Layout(lists={})  # noqa: RUF009  # Layouts are frozen.

    def __post_init__(self) -> None:
        unknown = sorted(set(self.feature_tables.values()) - set(self.mappings))
        if unknown:
            raise DataError(f"no id mapping for tables {', '.join(unknown)}")

    @property
    def tables(self) -> dict[str, int]:
        """Rows of each table."""
        return {name: mapping.rows for name, mapping in self.mappings.items()}

    @property
    def columns(self) -> NamedColumns:
        """The columns of the log, for opening another log like it."""
        names = list(self.feature_tables)
        return NamedColumns(names, self.dense, self.label, (), self.missing, recorded=True)

    @property
    def of_ids_alone(self) -> "Encoding":
        """The encoding without the label and numeric columns, for counting ids."""
        return replace(self, dense=(), label=None)

    @property
    def vocabularies(self) -> dict[str, Keys]:
        """Keys of each table with a vocabulary, in row order from row 1."""
        return {
            name: mapping.keys
            for name, mapping in self.mappings.items()
            if isinstance(mapping, Vocabulary)
        }

    @property
    def ids_sha256(self) -> dict[str, str]:
        """Hash of each table's mapping of ids to rows. Tables of equal size may map differently.

        >>> Encoding({"C1": "C1"}, {"C1": Hash(10)}).ids_sha256["C1"][:8]
        '9e95a691'
        """
        types = self.layout.types
        texts = {t for name, t in self.feature_tables.items() if types.get(name) == "text"}
        return {
            name: sha256_json(
                [
                    mapping.kind,
                    mapping.rows,
                    self.missing,
                    mapping.sha256 if isinstance(mapping, Vocabulary) else "",
                    *self._nulls(of_texts=name in texts),
                ]
            )
            for name, mapping in self.mappings.items()
        }

    def _nulls(self, *, of_texts: bool) -> list[str]:
        """Return texts for missing ids that differ from the default and concern a table's ids."""
        nulls = self.layout.nulls
        if set(nulls) == set(NULLS):
            return []
        whole = [one for one in nulls if one.removeprefix("-").isdigit()]
        return ["null", *sorted(nulls)] if of_texts else sorted(whole)

    def to_json(self) -> dict[str, Any]:
        """Return the encoding as JSON values, without the keys of vocabularies."""
        return {
            "feature_tables": dict(self.feature_tables),
            "mappings": {
                name: {"kind": mapping.kind, "rows": mapping.rows}
                for name, mapping in self.mappings.items()
            },
            "dense": list(self.dense),
            "label": self.label,
            "missing": self.missing,
            "layout": self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], vocabularies: Mapping[str, Keys]) -> "Encoding":
        """Return the encoding that `to_json` wrote, given the keys of its vocabularies."""
        mappings: dict[str, IdMapping] = {}
        for name, mapping in values["mappings"].items():
            kind = mapping["kind"]
            if kind == "vocabulary" and name in vocabularies:
                mappings[name] = Vocabulary(vocabularies[name])
            elif kind in _SIZED:
                mappings[name] = _SIZED[kind](mapping["rows"])
            else:
                raise DataError(f"table {name!r}: id mapping {kind!r} cannot be rebuilt")
        return cls(
            feature_tables=dict(values["feature_tables"]),
            mappings=mappings,
            dense=tuple(values["dense"]),
            label=values["label"],
            missing=values["missing"],
            layout=Layout.from_json(values["layout"]),
        )
