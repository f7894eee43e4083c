"""A log whose raw ids are mapped to rows: what profiling and training read."""

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
        What the user should hear: columns that were left out, files without a sample.
    expected_samples : int or None
        Samples that somebody else has counted, where the files do not say how many they hold.
    unknown : mapping of table name to UnknownKeys
        Ids that were read and that a vocabulary does not list.
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
        """Samples of the log where that is known without reading it."""
        return self.expected_samples if self.source.samples is None else self.source.samples

    @property
    def description(self) -> str:
        """The log's files, for people."""
        return listed([shown(file) for file in self.source.files], 1)

    def identity(self) -> tuple[FileIdentity, ...]:
        """Return what the log's files are known by, in order."""
        return self.source.identity()

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        """Yield chunks of exactly `samples` samples, save the last, after leaving out `skip`.

        The samples do not depend on how the log is divided into files, row groups or chunks.

        Raises DataError if the log is empty, a column is missing, a line is ragged or an id is out
        of range; the message names the file and the place.
        """
        with self._reading(samples) as cursor:
            cursor.skip(skip)
            while (chunk := self._next_chunk(cursor, samples)) is not None:
                yield chunk

    def blocks(self, samples: int, keep: Callable[[int], bool]) -> Iterator[Chunk | int]:
        """Yield the log's blocks of `samples` samples; of those not kept, only their size.

        Block i is read if ``keep(i)``, else skipped, which costs less than reading.
        """
        with self._reading(samples) as cursor:
            for block in count():
                part = self._next_chunk(cursor, samples) if keep(block) else cursor.skip(samples)
                if part is None or part == 0:
                    return
                yield part

    @contextmanager
    def _reading(self, samples: int) -> Iterator[Cursor]:
        """A cursor over the log, whose files are to be the same at the end as at the start."""
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
