"""Schemas: files that say how a log is read and what its columns are.

docs/data.md describes the file. `placer profile --infer` writes it as TOML; `placer profile
--schema` and `Schema.load` read it.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, model_validator

from placer.config_file import StrictModel, read_file
from placer.data.files.stores import AnyPath, shown
from placer.data.layout import (
    NULLS,
    Decimal,
    Format,
    IdMappingName,
    IdType,
    Layout,
    Missing,
    NamedColumns,
    Role,
)
from placer.data.reader import EncodedLog, open_log, open_source
from placer.data.source import Progress, Source
from placer.errors import DataError
from placer.files.atomic import write_text
from placer.tables import MOST_DIM, MOST_ROWS, Pooling
from placer.units import listed

_OF_LAYOUT = ("format", "separator", "header", "quotes", "decimal")


class _ColumnModel(StrictModel):
    role: Role = Field(alias="as")
    type: IdType | None = None
    table: str | None = Field(None, min_length=1)
    separator: str | None = Field(None, min_length=1)
    pooling: Pooling | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_role(cls, value: Any) -> Any:
        return {"as": value} if isinstance(value, str) else value


class _TableModel(StrictModel):
    rows: int | None = Field(None, ge=1, le=MOST_ROWS)
    dim: int | None = Field(None, ge=1, le=MOST_DIM)
    id_mapping: IdMappingName | None = None
    min_count: int | None = Field(None, ge=1, le=MOST_ROWS)


class _SchemaModel(StrictModel):
    format: Format | None = None
    separator: str | None = Field(None, min_length=1)
    header: bool | None = None
    quotes: bool | None = None
    decimal: Decimal | None = None
    names: tuple[str, ...] = ()
    missing: Missing = "zero"
    null: tuple[str, ...] | None = None
    headroom: float = Field(0.0, ge=0)
    columns: dict[str, _ColumnModel] = Field(default_factory=dict)
    tables: dict[str, _TableModel] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Schema:
    """How a log is read, and what its columns are. Fields that are None are inferred."""

    format: Format | None = None
    layout: Layout | None = None
    sparse: tuple[str, ...] | None = None
    dense: tuple[str, ...] | None = None
    label: str | None = None
    ignore: tuple[str, ...] = ()
    feature_tables: Mapping[str, str] = field(default_factory=dict)  # By column.
    # By table; ``"*"`` stands for all other tables.
    rows: Mapping[str, int] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    min_counts: Mapping[str, int] = field(default_factory=dict)
    id_mappings: Mapping[str, str] = field(default_factory=dict)
    poolings: Mapping[str, Pooling] = field(default_factory=dict)  # By column.
    missing: Missing = "zero"
    headroom: float = 0.0

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Schema":
        """Read a schema from a TOML, YAML or JSON file.

        Raises DataError if the file is missing, or a field is unknown or invalid; the message
        names the field.
        """
        model = read_file(path, _SchemaModel, "schema", DataError)
        of = {
            role: tuple(name for name, column in model.columns.items() if column.role == role)
            for role in get_args(Role)
        }
        if len(of["label"]) > 1:
            raise DataError(f"{path}: a log has one label, not {', '.join(of['label'])}")
        columns, tables = model.columns, model.tables
        return cls(
            format=model.format,
            layout=Layout(
                types=_given(columns, "type"),
                lists=_given(columns, "separator") if columns else None,
                nulls=NULLS if model.null is None else model.null,
                **model.model_dump(include={*_OF_LAYOUT, "names"}),
            ),
            sparse=of["sparse"] if columns else None,
            dense=of["dense"] if columns else None,
            label=next(iter(of["label"]), None),
            ignore=of["ignore"],
            feature_tables=_given(columns, "table"),
            rows=_given(tables, "rows"),
            dims=_given(tables, "dim"),
            min_counts=_given(tables, "min_count"),
            id_mappings=_given(tables, "id_mapping"),
            poolings=_given(columns, "pooling"),
            missing=model.missing,
            headroom=model.headroom,
        )

    def open(
        self, paths: AnyPath | Sequence[AnyPath], progress: Progress | None = None
    ) -> EncodedLog:
        """Open a log with this schema; see `placer.data.open_log`."""
        return open_log(
            paths,
            self.format,
            layout=self.layout,
            sparse=self.sparse,
            dense=self.dense,
            label=self.label,
            ignore=self.ignore,
            missing=self.missing,
            id_mapping=self.id_mappings or "auto",
            rows=self.rows or None,
            min_count=self.min_counts or 1,
            feature_tables=self.feature_tables,
            headroom=self.headroom,
            progress=progress,
        )

    def infer(self, paths: AnyPath | Sequence[AnyPath], file: str | os.PathLike[str]) -> None:
        """Write a log's schema as a TOML file, with the role of each column and the reason.

        Only the log's beginning is read. Columns that this schema names keep their role, and what
        it says of tables is written, too.

        Raises DataError if the log cannot be read.
        """
        if Path(file).suffix.lower() != ".toml":
            raise DataError(f"{file}: schemas are written as TOML; end the name in .toml")
        named = NamedColumns(self.sparse, self.dense, self.label, self.ignore, self.missing)
        source = open_source(paths, self.format, self.layout or Layout(), named)
        if not source.columns.decisions:
            raise DataError(
                f"{shown(source.files[0])} is of a format whose columns are fixed; it needs no "
                "schema"
            )
        write_text(Path(file), _text(source, self))


def _given(models: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a field of the models, by name, without models in which it is None."""
    return {
        name: value for name, one in models.items() if (value := getattr(one, field)) is not None
    }


def _text(source: Source, schema: Schema) -> str:
    layout, lists = source.columns.layout, source.columns.layout.lists or {}
    named = listed([shown(file) for file in source.files], 1)
    lines = [f"# How {named} is read; docs/data.md describes the fields."]
    for name in _OF_LAYOUT:
        value = getattr(layout, name)
        if value is not None:
            lines.append(f"{name} = {_toml(value)}")
    if layout.names:
        lines.append(f"names = {_toml(list(layout.names))}  # no line of the file names them")
    lines.append(f"null = {_toml(list(layout.nulls))}  # texts that say: a value is missing")
    lines.append(f'missing = "{schema.missing}"  # or "empty": a missing value is no lookup')
    lines += [
        f"headroom = {schema.headroom}  # share of rows for larger ids of later logs, in tables of "
        "row numbers",
        "",
        "[columns]  # label, sparse (ids), dense (numbers) or ignore; a column that is not here is",
        "# left out",
    ]
    entries = []
    for one in source.columns.decisions:
        value = _toml(one.role)
        if one.role == "sparse":
            parts = [f'as = "sparse", type = {_toml(layout.types[one.column])}']
            if one.column in lists:
                parts.append(f"separator = {_toml(lists[one.column])}")
            if table := schema.feature_tables.get(one.column):
                parts.append(f"table = {_toml(table)}")
            if pooling := schema.poolings.get(one.column, schema.poolings.get("*")):
                parts.append(f"pooling = {_toml(pooling)}")
            value = "{" + ", ".join(parts) + "}"
        plain = re.fullmatch(r"[A-Za-z0-9_-]*[A-Za-z0-9][A-Za-z0-9_-]*", one.column) is not None
        name = one.column if plain else _toml(one.column)
        entries.append((f"{name} = {value}", one.why))
    width = max(len(entry) for entry, _ in entries)
    lines += [f"{entry:<{width}}  # {' '.join(why.split())}" for entry, why in entries]
    lines += [
        "",
        '# Features that read one table: {..., table = "item"}; that are pooled otherwise than by',
        '# sum: {..., pooling = "mean"}. Of tables, "*" is all others:',
        '# [tables."*"]',
        "# dim = 64",
        '# id_mapping = "auto"  # identity, hash or vocabulary',
        "# rows = 1000000",
        "# min_count = 1  # a vocabulary leaves out ids that are read less often",
        "",
    ]
    fields: dict[str, Mapping[str, Any]] = {
        "dim": schema.dims,
        "id_mapping": schema.id_mappings,
        "rows": schema.rows,
        "min_count": schema.min_counts,
    }
    for table in sorted({name for of in fields.values() for name in of}):
        given = {name: of[table] for name, of in fields.items() if table in of}
        if (table, given) != ("*", {"id_mapping": "auto"}):  # Which is the default.
            set_fields = [f"{name} = {_toml(value)}" for name, value in given.items()]
            lines += [f"[tables.{_toml(table)}]", *set_fields, ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """Return a value as TOML, which writes texts as JSON does, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
