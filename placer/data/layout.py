"""How the values of a log's files are written: what one must know to read the next one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from placer.data.names import NULLS, Decimal, Format, IdType, Missing


@dataclass(frozen=True, slots=True)
class Layout:
    """The format of a log's files, and what they do not say of their columns themselves.

    Recorded in a profile, so that the next file is read with no option. What is None is found
    from the first file.
    """

    format: Format | None = None  # One of `placer.data.FORMATS`.
    # Between the fields of a line of text; it may have several characters.
    separator: str | None = None
    header: bool | None = None  # Whether the first line of each text file names the columns.
    quotes: bool | None = None  # Whether a field of text may stand between double quotes.
    names: tuple[str, ...] = ()  # The columns in order, where no file names them.
    # ``integer``, ``unsigned``, ``text`` or ``boolean``, for columns of ids.
    types: Mapping[str, IdType] = field(default_factory=dict)
    # The separator of ids, in each column of texts that hold several: ``"12|7|9"``.
    lists: Mapping[str, str] | None = None
    # What begins the decimals of a number in text: a comma, or else a point.
    decimal: Decimal | None = None
    # Texts that stand for a missing value; an empty one always does.
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
