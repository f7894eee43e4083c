"""Columns whose values the names of folders hold, as Hive writes them: ``day=3/country=DE/``."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from placer.data.files.finding import partitions
from placer.data.files.stores import shown
from placer.data.formats.inference import PARTITION
from placer.data.names import IdType
from placer.errors import DataError


class Partitions:
    """The partition columns of a log's files.

    A column holds integers if all its values are some, without zeros in front; else texts.
    """

    def __init__(self, files: Sequence[str], types: Mapping[str, IdType] | None = None) -> None:
        self._values = {file: partitions(file) for file in files}
        names = dict.fromkeys(name for own in self._values.values() for name in own)
        self._types: dict[str, pa.DataType] = {}
        for name in names:
            values = [own.get(name) for own in self._values.values()]
            whole = all(value is None or _is_whole(value) for value in values)
            known = (types or {}).get(name)
            text = known == "text" if known else not whole
            self._types[name] = pa.string() if text else pa.int64()

    def added_to(self, schema: pa.Schema) -> pa.Schema:
        """A file's schema with the partition columns that the file itself has not."""
        own = set(schema.names)
        for name, kind in self._types.items():
            if name not in own:
                schema = schema.append(pa.field(name, kind, metadata={PARTITION: b"1"}))
        return schema

    def filled(
        self, batch: pa.RecordBatch | pa.Table, file: str, names: Sequence[str]
    ) -> pa.RecordBatch | pa.Table:
        """A batch with those of the named columns that it lacks and the file's folders hold."""
        if self._types:
            own = set(batch.schema.names)
            for name in names:
                if name in self._types and name not in own:
                    batch = batch.append_column(name, self._column(file, name, batch.num_rows))
        return batch

    def of_file(self, names: Sequence[str], columns: Sequence[str]) -> list[str]:
        """Those of the named columns that are read from a file itself, which has some columns."""
        held = set(self._types).difference(columns)
        return [name for name in names if name not in held]

    def _column(self, file: str, name: str, samples: int) -> pa.Array:
        value = self._values[file].get(name)
        if value is not None and self._types[name] == pa.int64():
            if not _is_whole(value):
                raise DataError(
                    f"{shown(file)}: its folder says {name}={value}, which is no integer"
                )
            return pa.array(np.full(samples, int(value), dtype=np.int64))
        none = pa.nulls(samples, self._types[name])
        return none if value is None else none.fill_null(value)


def _is_whole(value: str) -> bool:
    digits = value.removeprefix("-")
    return digits.isascii() and digits.isdigit() and (digits == "0" or digits[0] != "0")
