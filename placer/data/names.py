"""Names that readers of logs take, in a file whose import needs no pyarrow."""

from typing import Literal, get_args

Format = Literal["criteo", "csv", "tsv", "interactions", "jsonl", "arrow", "parquet", "dlrm"]
MappingKind = Literal["identity", "hash", "vocabulary", "key"]
IdType = Literal["integer", "unsigned", "text", "boolean"]
"""How the values of a column of ids are read where a file does not say."""
Decimal = Literal[".", ","]
"""What begins the decimals of a number in text."""
Missing = Literal["zero", "empty"]
"""Whether a missing value is id 0 or no lookup."""

FORMATS: tuple[str, ...] = get_args(Format)
ID_MAPPINGS: tuple[str, ...] = ("auto", "identity", "hash", "vocabulary")

NULLS = ("NULL", "null", "NA", "N/A", "NaN", "nan", "None", "\\N")
"""Texts that stand for a missing value, where nobody says which do; an empty one always does."""
LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
"""Columns of Criteo's logs."""
