"""How values are written in a log's files, and its columns. Does not import pyarrow."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Format = Literal["criteo", "csv", "tsv", "interactions", "jsonl", "arrow", "parquet", "dlrm"]
MappingKind = Literal["identity", "hash", "vocabulary", "key"]
IdMappingName = Literal["auto", "identity", "hash", "vocabulary"]
"""Names of id mappings that users choose from."""
IdType = Literal["integer", "unsigned", "text", "boolean"]
"""How a column's ids are read if the file does not state their type."""
Decimal = Literal[".", ","]
"""The decimal separator of numbers in text."""
Missing = Literal["zero", "empty"]
"""Whether a missing value is id 0, or no lookup."""
Role = Literal["label", "sparse", "dense", "ignore"]

FORMATS: tuple[str, ...] = get_args(Format)
SOURCES: dict[Format, str] = {
    "parquet": "columnar.ParquetSource",
    "arrow": "columnar.IpcSource",
    "jsonl": "json_lines.JsonLinesSource",
    "criteo": "delimited.DelimitedSource",
    "csv": "delimited.DelimitedSource",
    "tsv": "delimited.DelimitedSource",
    "interactions": "delimited.InteractionsSource",
    "dlrm": "dlrm.DlrmSource",
}
"""By format, the module and class in `placer.data.formats`, imported when they are needed."""
SUFFIXES: dict[str, Format] = {
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow"),
    ".csv": "csv",
    ".pt": "dlrm",
}
"""Formats by the suffix of a file's name."""
ID_MAPPINGS: tuple[str, ...] = get_args(IdMappingName)

NULLS = ("NULL", "null", "NA", "N/A", "NaN", "nan", "None", "\\N")
"""By default, these texts stand for a missing value. The empty text always does."""
ALL = "*"
"""Stands for all tables or features that are not named."""
LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
"""Names of the columns of Criteo's logs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The format of a log's files, and properties of columns that the files do not state.

    A profile records it, so the next log is read without options. Fields that are None are found
    from the first file.
    """

    format: Format | None = None
    # Separates the fields of a line of text; one or more characters.
    separator: str | None = None
    header: bool | None = None  # Whether the first line of each text file names the columns.
    quotes: bool | None = None  # Whether double quotes may enclose a field of text.
    names: tuple[str, ...] = ()  # The columns in order, if no file names them.
    # Type of each column of ids, and of each other column of booleans.
    types: Mapping[str, IdType] = field(default_factory=dict)
    # Separator of ids, by column of texts with several ids each: ``"12|7|9"``.
    lists: Mapping[str, str] | None = None
    decimal: Decimal | None = None  # By default a point.
    nulls: tuple[str, ...] = NULLS

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values, without unknown fields."""
        values = asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and (value != () or name == "nulls")
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Layout":
        """Return the layout that `to_json` wrote.

        >>> layout = Layout("csv", separator=",", names=("user", "item"))
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        names, nulls = values.get("names", ()), map(str, values["nulls"])
        return cls(**{**values, "names": tuple(names), "nulls": tuple(nulls)})


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """Roles of columns that the user or a profile names; other columns' roles are inferred."""

    # If not None, these are all columns of their role.
    sparse: Sequence[str] | None = None
    dense: Sequence[str] | None = None
    label: str | None = None
    ignore: Sequence[str] = ()  # Columns to leave out.
    missing: Missing = "zero"
    # Whether a profile recorded all this, so no sample of the log is needed. Otherwise samples of
    # named columns, too, are checked for lists.
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The inferred role of a column."""

    column: str
    role: Role
    why: str
    warns: bool = False  # Whether to tell the user.
    separator: str | None = None  # Of ids, if the column's texts are lists.
    element: IdType | None = None  # Type of these ids.
    decimal: Decimal | None = None  # Decimal separator of numbers in texts.
    # Whether it may be the label: its values are 0 and 1, -1 and 1, or true and false.
    has_two_values: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """The roles of a log's columns, and the layout for reading similar files."""

    sparse: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    label: str | None = None
    layout: Layout = Layout(lists={})
    decisions: tuple[Decision, ...] = ()  # Empty if the format fixes all columns.

    @property
    def names(self) -> list[str]:
        """Names of all columns: label, dense, sparse."""
        label = [] if self.label is None else [self.label]
        return [*label, *self.dense, *self.sparse]

    def is_text(self, name: str) -> bool:
        """Return whether the ids of a sparse column are texts."""
        return self.layout.types.get(name) == "text"
