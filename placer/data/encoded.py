"""A log with ids mapped to rows, for profiling and training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import count

import numpy as np

from placer.data.encoding import Encoding, IdMapping, OutOfRange, Rows
from placer.data.files.opening import FileIdentity, check_unchanged
from placer.data.files.stores import shown
from placer.data.log import Bags, Chunk, joined
from placer.data.source import Cursor, RawBatch, Source
from placer.data.vocabulary import UnknownKeys
from placer.errors import DataError
from placer.units import listed


class EncodedLog:
    """A `Source` read through an `Encoding`; implements `placer.data.log.Log`.

    Attributes
    ----------
    notes : sequence of str
        Messages for the user, such as columns that were left out or files without samples.
    expected_samples : int or None
        Number of samples that the caller knows; used if the files do not state it.
    unknown : mapping of table name to UnknownKeys
        Estimates of how many distinct ids were read that a table's vocabulary does not list.
    """

    def __init__(self, source: Source, encoding: Encoding, notes: Sequence[str] = ()) -> None:
        first, columns = shown(source.files[0]), source.columns
        known = set(columns.sparse)
        missing = [name for name in encoding.feature_tables if name not in known]
        if missing:
            raise DataError(
                f"{first} has no feature {missing[0]!r}, which the encoding names; "
                f"it has {', '.join(columns.sparse)}"
            )
        if columns.dense != encoding.dense:
            raise DataError(
                f"{first} has numeric columns {', '.join(columns.dense) or 'none'}, "
                f"but the encoding names {', '.join(encoding.dense) or 'none'}"
            )
        for feature, table in encoding.feature_tables.items():
            if columns.is_text(feature) and encoding.mappings[table].kind == "identity":
                raise DataError(
                    f"{first}: feature {feature!r} holds texts, which are no row "
                    "numbers; map it with id_mapping='hash' or 'vocabulary'"
                )
        self.source = source
        self.notes = (*source.notes, *notes)
        self.encoding = encoding
        self.tables: Mapping[str, int] = encoding.tables
        self.feature_tables = encoding.feature_tables
        self.dense_names = encoding.dense
        self.expected_samples: int | None = None
        self.unknown = {name: UnknownKeys() for name in encoding.vocabularies}
        check_unchanged(source.before)

    @property
    def samples(self) -> int | None:
        """Number of samples of the log, None if it is unknown before reading."""
        return self.expected_samples if self.source.samples is None else self.source.samples

    @property
    def description(self) -> str:
        """The log's files, as text for messages."""
        return listed([shown(file) for file in self.source.files], 1)

    def identity(self) -> tuple[FileIdentity, ...]:
        """Return the identities of the log's files, in order."""
        return self.source.identity()

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        """Yield chunks of exactly `samples` samples, except the last; skip the first `skip`.

        The samples do not depend on how the log is divided into files, row groups or chunks.

        Raises DataError if the log is empty, a column is missing, a line is ragged or an id is out
        of range; the message names the file and the place.
        """
        with self._reading(samples) as cursor:
            cursor.skip(skip)
            while (chunk := self._next_chunk(cursor, samples)) is not None:
                yield chunk

    def blocks(self, samples: int, keep: Callable[[int], bool]) -> Iterator[Chunk | int]:
        """Yield the log's blocks of `samples` samples, or only the size of a block not kept.

        Block i is read if ``keep(i)`` is true. Otherwise it is skipped, which costs less.
        """
        with self._reading(samples) as cursor:
            for block in count():
                part = self._next_chunk(cursor, samples) if keep(block) else cursor.skip(samples)
                if part is None or part == 0:
                    return
                yield part

    @contextmanager
    def _reading(self, samples: int) -> Iterator[Cursor]:
        """Open a cursor over the log, and check at its end that no file has changed."""
        if samples < 1:
            raise DataError(f"a chunk holds at least 1 sample, not {samples}")
        check_unchanged(self.source.before)
        with closing(self.source.open()) as cursor:
            yield cursor
            check_unchanged(self.source.before)

    def _next_chunk(self, cursor: Cursor, samples: int) -> Chunk | None:
        parts: list[Chunk] = []
        read = 0
        while read < samples and (batch := cursor.read(samples - read)) is not None:
            features = {}
            for feature, table in self.encoding.feature_tables.items():
                raw = batch.features[feature]
                ids = rows_of(batch, feature, table, self.encoding.mappings[table])
                if table in self.unknown:
                    self.unknown[table].add(raw.keys[ids == 0])
                features[feature] = Bags(ids, raw.offsets)
            parts.append(Chunk(batch.samples, features, batch.dense, batch.labels))
            read += batch.samples
        return joined(parts) if parts else None


def rows_of(batch: RawBatch, feature: str, table: str, mapping: IdMapping) -> Rows:
    """Return the rows that the ids of a feature read."""
    raw = batch.features[feature]
    try:
        return mapping.map(raw.keys)
    except OutOfRange as error:
        sample = (
            error.position
            if raw.offsets is None
            else int(np.searchsorted(raw.offsets, error.position, side="right")) - 1
        )
        more, flag = (
            ("give it more rows, or ", f"--rows {table}=N, ") if error.raw_id >= 0 else ("", "")
        )
        raise DataError(
            f"{batch.place.of(sample)}: feature {feature!r} has id {error.raw_id}, but "
            f"table {table!r} has rows 0..{mapping.rows - 1}; {more}map ids "
            "with id_mapping='hash' or 'vocabulary' "
            f"(placer profile {flag}--id-mapping {table}=hash)"
        ) from None
