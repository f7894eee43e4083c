"""Names that readers of logs take, in a file whose import needs no pyarrow."""

from typing import Literal, get_args

Format = Literal["criteo", "parquet", "dlrm"]
MappingKind = Literal["identity", "hash", "vocabulary"]

FORMATS: tuple[str, ...] = get_args(Format)
ID_MAPPINGS: tuple[str, ...] = ("auto", *get_args(MappingKind))
