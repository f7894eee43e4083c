"""How the values of a log's files are written, and what its columns are; no import of pyarrow."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Format = Literal["criteo", "csv", "tsv", "interactions", "jsonl", "arrow", "parquet", "dlrm"]
MappingKind = Literal["identity", "hash", "vocabulary", "key"]
IdMappingName = Literal["auto", "identity", "hash", "vocabulary"]
"""What a user may ask for."""
IdType = Literal["integer", "unsigned", "text", "boolean"]
"""How the values of a column of ids are read where a file does not say."""
Decimal = Literal[".", ","]
"""What begins the decimals of a number in text."""
Missing = Literal["zero", "empty"]
"""Whether a missing value is id 0 or no lookup."""
Role = Literal["label", "sparse", "dense", "ignore"]

FORMATS: tuple[str, ...] = get_args(Format)
ID_MAPPINGS: tuple[str, ...] = get_args(IdMappingName)

NULLS = ("NULL", "null", "NA", "N/A", "NaN", "nan", "None", "\\N")
"""Texts that stand for a missing value, where nobody says which do; an empty one always does."""
LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
"""Columns of Criteo's logs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The format of a log's files, and what they do not say of their columns themselves.

    Recorded in a profile, so that the next file is read with no option. What is None is found
    from the first file.
    """

    format: Format | None = None
    # Between the fields of a line of text; it may have several characters.
    separator: str | None = None
    header: bool | None = None  # Whether the first line of each text file names the columns.
    quotes: bool | None = None  # Whether a field of text may stand between double quotes.
    names: tuple[str, ...] = ()  # The columns in order, where no file names them.
    # Of columns of ids, and of booleans among the others.
    types: Mapping[str, IdType] = field(default_factory=dict)
    # The separator of ids, in each column of texts that hold several: ``"12|7|9"``.
    lists: Mapping[str, str] | None = None
    decimal: Decimal | None = None  # By default a point.
    nulls: tuple[str, ...] = NULLS

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without what is not known."""
        values = asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and (value != () or name == "nulls")
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Layout":
        """Return what `to_json` wrote.

        >>> layout = Layout("csv", separator=",", names=("user", "item"))
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        names, nulls = values.get("names", ()), map(str, values["nulls"])
        return cls(**{**values, "names": tuple(names), "nulls": tuple(nulls)})


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """What somebody says of a log's columns; the others are inferred."""

    # All columns of their kind.
    sparse: Sequence[str] | None = None
    dense: Sequence[str] | None = None
    label: str | None = None
    ignore: Sequence[str] = ()  # What the inference leaves out.
    missing: Missing = "zero"
    # Whether a profile says all this, so that no sample of the log has to be looked at: else even
    # those of named columns are, to see whether they hold lists.
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What a column was taken for where nobody says."""

    column: str
    role: Role
    why: str
    warns: bool = False  # Whether the user should hear of it.
    separator: str | None = None  # Of the ids in a column of texts that are lists.
    element: IdType | None = None  # How these ids are read.
    decimal: Decimal | None = None  # What begins the decimals of numbers in texts.
    # Whether a label could be meant: it holds 0 and 1, -1 and 1, or true and false.
    has_two_values: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a log are what, and how the next file of the kind is read."""

    sparse: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    label: str | None = None
    layout: Layout = Layout(lists={})
    decisions: tuple[Decision, ...] = ()  # Of no column where the format says what all are.

    @property
    def names(self) -> list[str]:
        """All of them."""
        label = [] if self.label is None else [self.label]
        return [*label, *self.dense, *self.sparse]

    def is_text(self, name: str) -> bool:
        """Return whether the ids of a sparse column are texts."""
        return self.layout.types.get(name) == "text"
