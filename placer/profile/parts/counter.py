"""Counts a log in parts, each where it lies, and makes the profile of their sum.

A `PartitionCounter` is made once, from some samples of the log. Workers take it along: `count`
turns the record batches of a part into counts (`placer.profile.parts.counts`), an engine adds
these up, and `profile` makes of the sum what `profile_log` would make of the whole log.
docs/profile.md shows it with Spark, Dask and Ray; `placer.adapters` has the few lines for each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from placer.data.encoded import rows_of
from placer.data.encoding import Encoding, Hash, Identity, IdMapping, Vocabulary
from placer.data.in_memory import ArrowSource, BatchSource, InMemory, batches_of
from placer.data.layout import NULLS, Columns, Layout, MappingKind, Missing, NamedColumns
from placer.data.log import Bags
from placer.data.source import samples_of
from placer.data.vocabulary import (
    MAX_INFERRED_ROWS,
    Run,
    feature_tables_of,
    mapping_kinds,
    vocabulary_of,
)
from placer.errors import DataError
from placer.profile.count import TableOptions
from placer.profile.counts import RowCounts
from placer.profile.locality import STRETCH_SAMPLES, LocalityCounter
from placer.profile.parts.counts import (
    Counts,
    CountSums,
    PartitionTables,
    PartReader,
    batches,
    sums_of,
    window_batches,
)
from placer.profile.profile import Profile
from placer.profile.table_profile import FeatureCounts, TableProfile, UnknownIds


@dataclass(frozen=True, slots=True)
class PartitionCounter:
    """What a worker has to know in order to count a part of a log; make it with `for_log`."""

    columns: Columns  # Which column of the log is what.
    feature_tables: Mapping[str, str]
    kinds: Mapping[str, MappingKind]  # By table, how its ids become rows.
    mappings: Mapping[str, IdMapping]  # Of tables for which it is known before the log is counted.
    missing: Missing = "zero"
    rows: Mapping[str, int] = field(default_factory=dict)  # Of tables that have a set number.
    min_count: int = 1  # A vocabulary leaves out ids that are read less often.
    position: str | None = None  # A column of integers that order the samples of the log.
    memory_bytes: int = 512 << 20  # Of what a task holds while it counts.

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

        Parameters
        ----------
        some
            What `placer.data.in_memory.batches_of` takes. Only its columns are read.
        id_mapping, rows, min_count, sparse, dense, label, ignore, feature_tables
        missing, null, encoding
            As of `placer.data.open_log`.
        position : str, optional
            A column of integers that order the samples, from 0 to less than 2⁶² over the number
            of features. Vocabularies number ids in this order, and otherwise in the order of
            partitions and of samples within them.
        memory_bytes : int
            Of what a task holds, at most, besides the record batch that it reads. Counts that
            exceed it are passed on before the partition's end, and are added up later.

        Raises
        ------
        DataError
            If a column is missing or does not fit, or an option does not.
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
        common: dict[str, Any] = {
            "columns": log.columns,
            "missing": named.missing,
            "min_count": min_count,
            "position": position,
            "memory_bytes": memory_bytes,
        }
        if encoding is not None:
            return cls(
                feature_tables=dict(encoding.feature_tables),
                kinds={name: mapping.kind for name, mapping in encoding.mappings.items()},
                mappings=dict(encoding.mappings),
                rows=encoding.tables,
                **common,
            )
        tables = feature_tables_of(log, None, feature_tables)
        kinds, row_counts = mapping_kinds(log, tables, id_mapping, rows)
        return cls(
            feature_tables=tables,
            kinds=kinds,
            mappings={
                name: Hash(row_counts[name])
                if kind == "hash"
                else Identity(row_counts.get(name, MAX_INFERRED_ROWS))
                for name, kind in kinds.items()
                if kind != "vocabulary"
            },
            rows=row_counts,
            **common,
        )

    @property
    def reads(self) -> list[str]:
        """The columns of the log that are read; an engine may leave out the others."""
        return [*self.columns.sparse, *([] if self.position is None else [self.position])]

    def count(
        self, part: Iterator[pa.RecordBatch] | InMemory, partition: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Yield the counts of one part of the log.

        Parameters
        ----------
        part
            Its record batches, or what `placer.data.in_memory.batches_of` takes.
        partition : int
            Its place among the parts, which orders the ids of vocabularies; parts may share a
            number where no table has one, or where a column has the samples' positions.

        Yields
        ------
        pyarrow.RecordBatch
            Of `placer.profile.parts.counts.SCHEMA`; no more than 65,536 rows each.

        Raises
        ------
        DataError
            If an id is out of range; the message names the place.
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
        keyed = self.kinds.keys() - self.mappings.keys()
        tables = PartitionTables(self.kinds, keyed, self.memory_bytes)
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
                bags = batch.features[feature]
                if table in self.mappings:
                    ids = rows_of(batch, feature, table, self.mappings[table])
                    tables.add_rows(table, ids)
                else:
                    of_sample = positions[samples_of(bags, batch.samples)]
                    places = of_sample * len(self.feature_tables) + place
                    tables.add_keys(table, bags.keys, places)
                    ids = bags.keys.view(np.int64)
                read[feature] = Bags(ids, bags.offsets)
                features[feature] += FeatureCounts(bags.keys.size, read[feature].filled)
            if samples < STRETCH_SAMPLES:  # One stretch: counting windows takes its time.
                near.add(batch.samples, read)
            samples += batch.samples
            yield from tables.overflow()
        yield from tables.rest()
        one = np.zeros(1, np.int64)
        for feature, counted in features.items():
            yield from batches("lookups", feature, one, one + counted.lookups)
            yield from batches("bags", feature, one, one + counted.bags)
        yield from batches("samples", "", one, one + samples)
        for name, locality in near.localities().items():
            yield from window_batches(name, locality)

    def profile(
        self,
        parts: Counts | Iterable[Counts],
        *,
        sampling: float = 1.0,
        source: str = "",
        **options: Any,
    ) -> Profile:
        """Return the profile of the log from the counts of its parts, merged before or not.

        It equals that of `profile_log` over the whole log, bit by bit. Memory grows with the
        rows that were read, not with the log.

        Parameters
        ----------
        parts
            Tables or record batches of counts, or Parquet files that hold them.
        sampling : float
            Share of the log that was counted.
        source : str
            Where the log comes from, for people.
        options
            The dim, dtype, optimizer and pooling of the tables, as of `profile_log`.

        Raises
        ------
        DataError
            If the parts hold no sample, or are no counts of this log.
        """
        sums = sums_of(parts)
        self._check(sums)
        mappings: dict[str, IdMapping] = {}
        counted: dict[str, RowCounts] = {}
        for name in self.kinds:
            mappings[name], counted[name] = self._table(name, sums)
        features: dict[str, dict[str, FeatureCounts]] = {name: {} for name in self.kinds}
        for feature, own in self.feature_tables.items():
            features[own][feature] = FeatureCounts(sums.lookups[feature], sums.bags[feature])
        profiles = []
        for one in TableOptions(**options).profiles(counted, features, sums.samples):
            unknown = self._unknown(one.name, mappings[one.name], one, sums)
            # Ids were counted in windows, not the row that those share which are left out.
            share_row = one.name in sums.keys and unknown is not None and unknown.lookups
            locality = () if share_row else sums.locality(one.name)
            profiles.append(replace(one, locality=locality, unknown=unknown))
        columns = self.columns
        return Profile(
            tables=tuple(profiles),
            samples=sums.samples,
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
        """Return how a table's ids became rows, and how often each was read."""
        none = np.zeros(0, np.int64)
        empty = Run(none.view(np.uint64), none, none)
        if name in self.mappings:
            run = sums.rows.get(name, empty)
            ids, mapping = run.keys.view(np.int64), self.mappings[name]
            if isinstance(mapping, Identity) and name not in self.rows:
                mapping = Identity(int(ids[-1]) + 1 if ids.size else 1)
            return mapping, RowCounts(mapping.rows, ids, run.counts)
        run = sums.keys.get(name, empty)
        vocabulary = vocabulary_of(run, self.min_count, self.rows.get(name))
        dense = np.zeros(vocabulary.rows, np.int64)
        np.add.at(dense, vocabulary.map(run.keys), run.counts)
        return vocabulary, RowCounts.from_dense(dense)

    def _unknown(
        self, name: str, mapping: IdMapping, profile: TableProfile, sums: CountSums
    ) -> UnknownIds | None:
        """Return what a vocabulary does not list; None without one."""
        if not isinstance(mapping, Vocabulary) or profile.counts is None:
            return None
        lookups = int(profile.counts.counts[:1][profile.counts.ids[:1] == 0].sum())
        if name in sums.keys:
            return UnknownIds(lookups, sums.keys[name].keys.size - mapping.keys.size)
        return UnknownIds(lookups, None if lookups else 0)

    def _check(self, sums: CountSums) -> None:
        if not sums.samples:
            raise DataError("the log is empty; a profile needs at least one sample")
        strange = {*sums.rows, *sums.keys} - set(self.kinds)
        strange |= {*sums.lookups, *sums.bags} ^ set(self.feature_tables)
        if strange:
            raise DataError(
                f"the counts are not of this log: they differ in {', '.join(sorted(strange)[:9])}"
            )
        lookups = dict.fromkeys(self.kinds, 0)
        for feature, table in self.feature_tables.items():
            lookups[table] += sums.lookups[feature]
        for name in self.kinds:
            runs = [of[name] for of in (sums.rows, sums.keys) if name in of]
            counted = sum(int(run.counts.sum()) for run in runs)
            if counted != lookups[name]:
                raise DataError(
                    f"the features of table {name!r} have {lookups[name]} lookups, but its counts "
                    f"sum to {counted}; is a part missing, or there twice?"
                )


def profile_in_parts(
    some: InMemory, count: Callable[[PartitionCounter], Any], options: dict[str, Any]
) -> Profile:
    """The profile from what `count` returns, the counts of all parts of a log like `some` samples.

    `options` are those of `PartitionCounter.for_log` and of `PartitionCounter.profile`.
    """
    own = {name: options[name] for name in options if name in _PROFILE_OPTIONS}
    others = {name: options[name] for name in options if name not in _PROFILE_OPTIONS}
    counter = PartitionCounter.for_log(some, **others)
    return counter.profile(count(counter), **own)


_PROFILE_OPTIONS = ("dim", "dtype", "optimizer", "pooling", "sampling", "source")
