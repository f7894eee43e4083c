"""How a log's columns become rows of tables, the way that trainers do it."""

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
from placer.files import sha256_json

Rows = npt.NDArray[np.int64]


class OutOfRange(Exception):
    """An id that is no row; the reader, which knows the file and the place, reports it."""

    def __init__(self, position: int, raw_id: int) -> None:
        super().__init__(position, raw_id)
        self.position, self.raw_id = position, raw_id


@dataclass(frozen=True, slots=True)
class Identity:
    """Ids are rows already; an id outside 0..rows-1 is an error."""

    kind: ClassVar[MappingKind] = "identity"
    rows: int

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape.

        Raises OutOfRange at the first key that is not below `rows`; negative ids are among them.
        """
        if keys.size and int(keys.max()) >= self.rows:
            position = int(np.argmax(keys >= np.uint64(self.rows)))
            raise OutOfRange(position, int(keys.view(np.int64)[position]))
        return keys.view(np.int64)


@dataclass(frozen=True, slots=True)
class Hash:
    """Row = key modulo rows, as ``--max-ind-range`` of the DLRM reference does.

    Keys of texts are hashes already (see `placer.data.keys`); integers and Criteo's
    hexadecimal categories are taken as they are.
    """

    kind: ClassVar[MappingKind] = "hash"
    rows: int

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape."""
        if keys.size and int(keys.max()) < self.rows:
            return keys.view(np.int64)
        # The remainder; NumPy divides by a constant with multiplications, but not in its `%`.
        rows = np.uint64(self.rows)
        return (keys - keys // rows * rows).view(np.int64)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A listed key has the row after its place in the list; every other key has row 0."""

    kind: ClassVar[MappingKind] = "vocabulary"
    keys: Keys  # Shape (n,): distinct; ``keys[i]`` is row i + 1.

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
        """The keys, ascending, and their rows."""
        order = np.argsort(self.keys, kind="stable")
        return self.keys[order], order + 1

    @property
    def rows(self) -> int:
        """Rows of the table, the one for unlisted keys included."""
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
    """Keys as they are, of a table that gives its rows to keys as they are read."""

    kind: ClassVar[MappingKind] = "key"
    rows: int  # Of the table; keys may be any int64.

    def map(self, keys: Keys) -> Rows:
        """`keys` as int64."""
        return keys.view(np.int64)


IdMapping = Identity | Hash | Vocabulary | RawKeys
_SIZED: Mapping[str, type[Identity | Hash | RawKeys]] = {
    one.kind: one for one in (Identity, Hash, RawKeys)
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Which column is what, and which row of which table an id reads.

    Recorded in a profile, so that training maps ids as they were counted:
    ``open_log(paths, encoding=profile.encoding)``.
    """

    feature_tables: Mapping[str, str]  # In the log's order.
    mappings: Mapping[str, IdMapping]
    dense: tuple[str, ...] = ()  # Numeric columns.
    label: str | None = None  # The label's column.
    missing: Missing = "zero"  # Whether a missing value is read as id 0 or as an empty bag.
    # How the values of the log's files were written.
    layout: Layout = Layout(lists={})  # noqa: RUF009  # It is frozen.

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
        """The columns of the log."""
        names = list(self.feature_tables)
        return NamedColumns(names, self.dense, self.label, (), self.missing, recorded=True)

    @property
    def of_ids_alone(self) -> "Encoding":
        """The encoding for who counts ids, and needs neither the label nor numbers of a log."""
        # Criteo's format has its numbers always.
        dense = self.dense if self.layout.format == "criteo" else ()
        return replace(self, dense=dense, label=None)

    @property
    def vocabularies(self) -> dict[str, Keys]:
        """Keys of the tables that have a vocabulary, in row order from row 1."""
        return {
            name: mapping.keys
            for name, mapping in self.mappings.items()
            if isinstance(mapping, Vocabulary)
        }

    @property
    def ids_sha256(self) -> dict[str, str]:
        """Hash of how each table's ids become rows: equal sizes do not make equal rows.

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
        """Return what stands for missing ids, where it is unusual and concerns a table's ids."""
        nulls = self.layout.nulls
        if set(nulls) == set(NULLS):
            return []
        whole = [one for one in nulls if one.removeprefix("-").isdigit()]
        return ["null", *sorted(nulls)] if of_texts else sorted(whole)

    def to_json(self) -> dict[str, Any]:
        """Return all but the vocabularies, as JSON values."""
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
        """Return what `to_json` wrote, with the vocabularies that were saved beside it."""
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
