"""Count a log in parts, each on the worker that has it, and make one profile of the sum.

A `PartitionCounter` is made once, from some samples of the log, and sent to workers. `count` turns
the record batches of a part into counts (`placer.profile.parts.counts`), and an engine adds the
counts. `profile` turns the sum into the profile that `profile_log` returns for the whole log.
docs/profile.md shows it with Spark, Dask and Ray; `placer.adapters` has the code for each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from placer.data.encoding import Encoding, Identity, IdMapping, Vocabulary
from placer.data.in_memory import ArrowSource, BatchSource, InMemory, batches_of
from placer.data.layout import NULLS, Columns, Layout, MappingKind, Missing, NamedColumns
from placer.data.log import Bags
from placer.data.reader import rows_of
from placer.data.vocabulary import (
    MAX_INFERRED_ROWS,
    feature_tables_of,
    mapping_kinds,
    sized_mappings,
    vocabulary_of,
)
from placer.errors import DataError
from placer.profile.count import TableOptions
from placer.profile.locality import STRETCH_SAMPLES, LocalityCounter
from placer.profile.parts.counts import WINDOW_KINDS, Counts, CountSums, PartReader, sums_of
from placer.profile.profile import Profile
from placer.profile.table_profile import FeatureCounts, RowCounts, TableProfile, UnknownIds


@dataclass(frozen=True, slots=True)
class PartitionCounter:
    """Counts parts of a log on workers. Make one with `for_log`."""

    columns: Columns  # Roles of the log's columns.
    feature_tables: Mapping[str, str]
    kinds: Mapping[str, MappingKind]  # How each table's ids become rows.
    mappings: Mapping[str, IdMapping]  # Of tables whose mapping needs no counts.
    missing: Missing = "zero"
    rows: Mapping[str, int] = field(default_factory=dict)  # Of tables with a given number of rows.
    min_count: int = 1  # A vocabulary leaves out ids that are read fewer times.
    position: str | None = None  # Column of integers that order the samples.
    memory_bytes: int = 512 << 20  # Limit of a task's counts.

    @classmethod
    def for_log(
        cls,
        some: InMemory,
        *,
        id_mapping: Literal["auto", "identity", "hash", "vocabulary"] = "auto",
        rows: int | Mapping[str, int] | None = None,
        min_count: int = 1,
        sparse: Sequence[str] | None = None,
        dense: Sequence[str] | None = None,
        label: str | None = None,
        ignore: Sequence[str] = (),
        feature_tables: Mapping[str, str] | None = None,
        missing: Missing = "zero",
        null: Sequence[str] = NULLS,
        encoding: Encoding | None = None,
        position: str | None = None,
        memory_bytes: int = 512 << 20,
    ) -> "PartitionCounter":
        """Return a counter for a log like `some` samples of it.

        Raises DataError if a column is missing or of a wrong type, or an option is invalid.

        - `some`: an object that `placer.data.in_memory.batches_of` takes, for the columns of the
          log.
        - `missing`, `null`, `encoding`: as in `placer.data.open_log`.
        - `position`: column of integers that order the samples, from 0 to below 2⁶² / features.
          Vocabularies number ids in this order. By default the order is by partition, then by
          sample.
        - `memory_bytes`: most bytes that a task holds besides the record batch that it reads. If
          counts exceed it, they are yielded before the partition's end, and are added up later.
        """
        source = batches_of(some)
        if position is not None and source.schema.names.count(position) != 1:
            raise DataError(
                f"{source.name} has no column {position!r}; it has {', '.join(source.schema.names)}"
            )
        ignore = [*ignore, *([] if position is None else [position])]
        named = NamedColumns(sparse, dense, label, ignore, missing)
        layout = Layout(nulls=tuple(null))
        if encoding is not None:
            named, layout = encoding.columns, encoding.layout
        log = ArrowSource(source, layout, named)
        kinds: dict[str, MappingKind]
        if encoding is not None:
            tables, row_counts = dict(encoding.feature_tables), encoding.tables
            kinds = {name: mapping.kind for name, mapping in encoding.mappings.items()}
            mappings = dict(encoding.mappings)
        else:
            tables = feature_tables_of(log, None, feature_tables)
            kinds, row_counts = mapping_kinds(log, tables, id_mapping, rows)
            mappings = sized_mappings(kinds, row_counts, MAX_INFERRED_ROWS)
        how: Any = named.missing, row_counts, min_count, position, memory_bytes
        return cls(log.columns, tables, kinds, mappings, *how)

    @property
    def reads(self) -> list[str]:
        """Names of the log's columns that are read. An engine may leave out others."""
        return [*self.columns.sparse, *([] if self.position is None else [self.position])]

    def count(
        self, part: Iterator[pa.RecordBatch] | InMemory, partition: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Yield the counts of one part of the log.

        Raises DataError if an id is out of range; the message names the place.

        `part`: an iterator of its record batches, or an object that
        `placer.data.in_memory.batches_of` takes. `partition`: number of the part, which orders the
        ids of vocabularies. Parts may share a number if no table has a vocabulary, or if a column
        orders the samples.

        Yields
        ------
        pyarrow.RecordBatch
            Counts with `placer.profile.parts.counts.SCHEMA`, at most 65,536 rows each.
        """
        if not 0 <= partition < 1 << 24:
            raise DataError(f"partition {partition} is not from 0 to {(1 << 24) - 1}")
        if isinstance(part, Iterator):
            first = next(part, None)
            if first is None:
                return
            every = chain([first], part)
            part = BatchSource(
                f"partition {partition}",
                first.schema,
                lambda columns: (batch.select(list(columns)) for batch in every),
                once=True,
            )
        source = part if isinstance(part, BatchSource) else batches_of(part)
        reader = PartReader(source, self.columns, self.missing, self.position)
        sums = CountSums()
        near = LocalityCounter(
            {
                name: self.mappings[name].rows if name in self.mappings else 1 << 62
                for name in self.kinds
            },
            self.feature_tables,
        )
        features = dict.fromkeys(self.feature_tables, FeatureCounts())
        samples = 0
        for batch, positions in reader.positioned(partition):
            read = {}
            for place, (feature, table) in enumerate(self.feature_tables.items()):
                bags = batch.chunk.features[feature]
                if table in self.mappings:
                    ids = rows_of(batch, feature, table, self.mappings[table])
                    sums.add("row", table, *np.unique(ids, return_counts=True))
                else:
                    of_sample = positions[bags.samples_of_lookups]
                    places = of_sample * len(self.feature_tables) + place
                    sums.add_keys(table, bags.keys, places)
                    ids = bags.ids
                read[feature] = Bags(ids, bags.offsets)
                features[feature] += FeatureCounts(ids.size, read[feature].filled)
            if samples < STRETCH_SAMPLES:  # One stretch is enough: counting windows is slow.
                near.add(batch.chunk.samples, read)
            samples += batch.chunk.samples
            yield from sums.overflow(self.memory_bytes)
        sums.add_number("samples", "", samples)
        for feature, of_feature in features.items():
            sums.add_number("lookups", feature, of_feature.lookups)
            sums.add_number("bags", feature, of_feature.bags)
        for name, locality in near.localities().items():
            for one in locality:
                counted = one.windows, one.lookups, one.distinct
                for kind, count in zip(WINDOW_KINDS, counted, strict=True):
                    sums.add_number(kind, name, count, one.samples)
        yield from sums.batches()

    def profile(
        self,
        parts: Counts | Iterable[Counts],
        *,
        sampling: float = 1.0,
        source: str = "",
        **options: Any,
    ) -> Profile:
        """Return the profile of the log from the counts of its parts, which may be merged.

        It equals the profile of `profile_log` over the whole log bit by bit. Memory grows with the
        number of rows that were read, not with the log.

        Raises DataError if the parts hold no samples, or are not counts of this log.

        - `parts`: tables or record batches of counts, or Parquet files that hold them.
        - `sampling`: share of the log that was counted.
        - `source`: where the log comes from, as text for people.
        - `options`: the dim, dtype, optimizer and pooling of the tables, as in `profile_log`.
        """
        sums = sums_of(parts)
        samples = self._check(sums)
        mappings: dict[str, IdMapping] = {}
        counted: dict[str, RowCounts] = {}
        for name in self.kinds:
            mappings[name], counted[name] = self._table(name, sums)
        features: dict[str, dict[str, FeatureCounts]] = {name: {} for name in self.kinds}
        for feature, own in self.feature_tables.items():
            features[own][feature] = FeatureCounts(
                sums.total("lookups", feature), sums.total("bags", feature)
            )
        profiles = []
        for one in TableOptions(**options).profiles(counted, features, samples):
            unknown = self._unknown(one.name, mappings[one.name], one, sums)
            # Windows counted ids. Ids outside the vocabulary share a row, so windows do not fit.
            share_row = one.name not in self.mappings and unknown is not None and unknown.lookups
            locality = () if share_row else sums.locality(one.name)
            profiles.append(replace(one, locality=locality, unknown=unknown))
        columns = self.columns
        return Profile(
            tables=tuple(profiles),
            samples=samples,
            sampling=sampling,
            source=source,
            encoding=Encoding(
                self.feature_tables,
                mappings,
                columns.dense,
                columns.label,
                self.missing,
                columns.layout,
            ),
        )

    def _table(self, name: str, sums: CountSums) -> tuple[IdMapping, RowCounts]:
        if name in self.mappings:
            run, mapping = sums.run("row", name), self.mappings[name]
            ids = run.keys.view(np.int64)
            if isinstance(mapping, Identity) and name not in self.rows:
                mapping = Identity(int(ids[-1]) + 1 if ids.size else 1)
            return mapping, RowCounts(mapping.rows, ids, run.counts)
        run = sums.run("key", name)
        vocabulary = vocabulary_of(run, self.min_count, self.rows.get(name))
        dense = np.zeros(vocabulary.rows, np.int64)
        np.add.at(dense, vocabulary.map(run.keys), run.counts)
        return vocabulary, RowCounts.from_dense(dense)

    def _unknown(
        self, name: str, mapping: IdMapping, profile: TableProfile, sums: CountSums
    ) -> UnknownIds | None:
        """Return counts of ids that the vocabulary lacks; None without a vocabulary."""
        if not isinstance(mapping, Vocabulary) or profile.counts is None:
            return None
        lookups = profile.counts.of_row_0
        if name not in self.mappings:
            return UnknownIds(lookups, sums.run("key", name).keys.size - mapping.keys.size)
        return UnknownIds(lookups, None if lookups else 0)

    def _check(self, sums: CountSums) -> int:
        """Return the number of samples. Raise DataError if the counts are not of this log."""
        samples = sums.total("samples", "")
        if not samples:
            raise DataError("the log is empty; a profile needs at least one sample")
        strange = sums.names("row", "key") - set(self.kinds)
        strange |= sums.names("lookups", "bags") ^ set(self.feature_tables)
        if strange:
            raise DataError(
                f"the counts are not of this log: they differ in {', '.join(sorted(strange)[:9])}"
            )
        lookups = dict.fromkeys(self.kinds, 0)
        for feature, table in self.feature_tables.items():
            lookups[table] += sums.total("lookups", feature)
        for name in self.kinds:
            counted = sums.total("row", name) + sums.total("key", name)
            if counted != lookups[name]:
                raise DataError(
                    f"the features of table {name!r} have {lookups[name]} lookups, but its counts "
                    f"sum to {counted}; is a part missing, or there twice?"
                )
        return samples


def profile_in_parts(
    some: InMemory, count: Callable[[PartitionCounter], Any], options: dict[str, Any]
) -> Profile:
    """Return the profile of a log that `count` counts in parts, given `some` of its samples.

    `count` gets the counter and returns the counts of all parts. `options` are those of
    `PartitionCounter.for_log` and of `PartitionCounter.profile`.
    """
    own = {name: options[name] for name in options if name in _PROFILE_OPTIONS}
    others = {name: options[name] for name in options if name not in _PROFILE_OPTIONS}
    counter = PartitionCounter.for_log(some, **others)
    return counter.profile(count(counter), **own)


_PROFILE_OPTIONS = ("dim", "dtype", "optimizer", "pooling", "sampling", "source")
