"""Everything that turns a log's columns into rows of tables, so that a trainer can redo it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from placer.data.layout import Layout, NamedColumns
from placer.data.mapping import Hash, Identity, IdMapping, RawKeys, Vocabulary
from placer.data.names import NULLS, Missing
from placer.data.text_keys import Keys
from placer.errors import DataError
from placer.files import sha256_json

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
