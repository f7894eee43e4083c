"""Names that readers of logs take, in a file whose import needs no pyarrow."""

from typing import Literal, get_args

Format = Literal["criteo", "csv", "tsv", "jsonl", "arrow", "parquet", "dlrm"]
MappingKind = Literal["identity", "hash", "vocabulary"]
IdType = Literal["integer", "unsigned", "text", "boolean"]
"""How the values of a column of ids are read where a file does not say."""
Decimal = Literal[".", ","]
"""What begins the decimals of a number in text."""
Missing = Literal["zero", "empty"]
"""Whether a missing value is id 0 or no lookup."""

FORMATS: tuple[str, ...] = get_args(Format)
ID_MAPPINGS: tuple[str, ...] = ("auto", *get_args(MappingKind))

NULLS = ("", "NULL", "null", "NA", "N/A", "NaN", "nan", "None", "\\N")
"""What is written for a missing number."""
LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
"""Columns of Criteo's logs."""
