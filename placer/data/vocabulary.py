"""Choose how the ids of each table become rows, without a profile.

A vocabulary lists the raw ids of a log in the order of their first appearance.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from placer.data.encoding import Hash, Identity, IdMapping, Vocabulary
from placer.data.files.stores import shown
from placer.data.layout import ALL, ID_MAPPINGS, MappingKind
from placer.data.log import Keys
from placer.data.source import Progress, Source
from placer.errors import DataError
from placer.units import listed

_Int = npt.NDArray[np.int64]
_CHUNK_SAMPLES = 16384
_MIN_MERGE = 1 << 20

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
KEPT_HASHES = 16384
"""Number of hashes for an estimate. Its standard error is 1 / √16,384 = 0.8%."""
# If the largest id needs more rows than this, ids are surely not rows.
MAX_INFERRED_ROWS = 1 << 31
_SURELY_FINE_ROWS = 1 << 20
_ROWS_A_SAMPLE = 64
"""If ids reach both, most rows of an identity table would never be read; use a vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Distinct keys in ascending order, with their counts and places of their first reads."""

    keys: Keys
    counts: _Int
    first: _Int


class DistinctKeys:
    """Counts the distinct keys of one table.

    Runs are merged only when new keys outnumber the merged ones. So n lookups of d distinct keys
    cost O(n log d), instead of a full merge per chunk.
    """

    def __init__(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        self._merged, self._pending = Run(none.view(np.uint64), none, none), list[Run]()
        self._pending_keys = 0

    def add(self, keys: Keys, places: _Int) -> None:
        """Count `keys` read at `places`. Places must ascend from call to call."""
        distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
        self.add_run(distinct, counts, places[first])

    def add_run(self, keys: Keys, counts: _Int, first: _Int) -> None:
        """Add counts of keys and the places of their first reads. Keys may repeat."""
        self._pending.append(Run(keys, counts, first))
        self._pending_keys += keys.size
        if self._pending_keys > max(self._merged.keys.size, _MIN_MERGE):
            self.merge()

    @property
    def held(self) -> int:
        """Number of keys in memory. A key counts once for each run that has it."""
        return self._pending_keys + self._merged.keys.size

    def merge(self) -> Run:
        """Merge all runs so far, and return the merged run."""
        if self._pending:
            runs = [self._merged, *self._pending]
            keys = np.concatenate([run.keys for run in runs])
            counts = np.concatenate([run.counts for run in runs])
            first = np.concatenate([run.first for run in runs])
            keys, start, key = np.unique(keys, return_index=True, return_inverse=True)
            sums, least = np.zeros(keys.size, dtype=np.int64), first[start]
            np.add.at(sums, key, counts)
            np.minimum.at(least, key, first)
            self._merged = Run(keys, sums, least)
            self._pending, self._pending_keys = [], 0
        return self._merged


def build_vocabularies(
    source: Source,
    feature_tables: Mapping[str, str],
    min_counts: Mapping[str, int],
    rows: Mapping[str, int],
    progress: Progress | None,
) -> dict[str, IdMapping]:
    """Return vocabularies of the tables in `feature_tables`, from one pass over a log.

    Keys are in the order of their first appearance: by sample, then by feature, then by key. Keys
    that are read less often than `min_counts` share row 0. If `rows` limits a table, row 0
    included, keep its most read keys; of equal counts, those that appear first. Memory grows with
    the number of distinct ids.
    """
    distinct = {table: DistinctKeys() for table in feature_tables.values()}
    feature_count = len(feature_tables)
    start = 0
    for batch in source.of_ids_alone.batches(_CHUNK_SAMPLES):
        for position, (feature, table) in enumerate(feature_tables.items()):
            bags = batch.features[feature]
            places = (start + bags.samples_of_lookups) * feature_count + position
            distinct[table].add(bags.keys, places)
        start += batch.samples
        if progress is not None:
            progress(start, source.samples)
    return {
        table: vocabulary_of(keys.merge(), min_counts.get(table, 1), rows.get(table))
        for table, keys in distinct.items()
    }


def vocabulary_of(run: Run, min_count: int, rows: int | None) -> Vocabulary:
    """Return the vocabulary of a table with distinct keys `run`; see `build_vocabularies`."""
    kept = np.flatnonzero(run.counts >= min_count)
    if rows is not None and len(kept) > rows - 1:
        by_count = np.lexsort((run.first[kept], -run.counts[kept]))
        kept = np.sort(kept[by_count[: rows - 1]])
    # Keys of one bag share a place. The stable sort keeps their order.
    order = np.argsort(run.first[kept], kind="stable")
    return Vocabulary(run.keys[kept][order])


class UnknownKeys:
    """Estimates the number of distinct keys that a vocabulary does not list, in constant memory.

    If n distinct hashes lie within 0..1 and h is the k-th smallest, (k − 1) / h is an unbiased
    estimate of n. Z. Bar-Yossef et al., "Counting Distinct Elements in a Data Stream", RANDOM 2002,
    doi:10.1007/3-540-45726-7_1. Below `KEPT_HASHES` keys the number is exact.

    >>> seen = UnknownKeys()
    >>> seen.add(np.array([3, 5, 3], dtype=np.uint64))
    >>> seen.estimate()
    2
    """

    def __init__(self) -> None:
        self._smallest = np.zeros(0, dtype=np.uint64)

    def add(self, keys: Keys) -> None:
        """Count keys. A key that was counted before changes nothing."""
        if keys.size:
            joined = np.concatenate((self._smallest, mixed_bits(np.unique(keys) + _GOLDEN)))
            self._smallest = np.unique(joined)[:KEPT_HASHES]

    def estimate(self) -> int:
        """Return the estimated number of distinct keys so far."""
        if self._smallest.size < KEPT_HASHES:
            return int(self._smallest.size)
        largest = float(self._smallest[-1]) / 2.0**64
        return round((KEPT_HASHES - 1) / largest)


def mixed_bits(keys: Keys) -> Keys:
    """Mix bits as SplitMix64 finally does (Steele et al. 2014, doi:10.1145/2714064.2660195)."""
    bits = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def choose_mappings(
    source: Source,
    feature_tables: Mapping[str, str],
    id_mapping: str | Mapping[str, str] = "auto",
    rows: int | Mapping[str, int] | None = None,
    min_count: int | Mapping[str, int] = 1,
    headroom: float = 0.0,
    progress: Progress | None = None,
) -> tuple[dict[str, IdMapping], list[str]]:
    """Return the id mapping of each table, and notes for the user; see `placer.data.open_log`."""
    names = list(dict.fromkeys(feature_tables.values()))
    chosen, row_counts = mapping_kinds(source, feature_tables, id_mapping, rows)
    asked = _of_each("id_mapping", id_mapping, names)
    counts = _of_each("min_count", min_count, names)
    for name, least in counts.items():
        if least < 1:
            raise DataError(f"table {name!r}: min_count is at least 1, not {least}")
    unsized = [
        feature
        for feature, table in feature_tables.items()
        if chosen[table] == "identity" and table not in row_counts
    ]
    ranges, samples = _id_ranges(source, unsized)
    by_table: dict[str, list[tuple[str, int, int]]] = {}
    for feature, (smallest, largest) in ranges.items():
        by_table.setdefault(feature_tables[feature], []).append((feature, smallest, largest))
    notes = _texts_beside_integers(source, feature_tables)
    sized: list[str] = []
    for name, found in by_table.items():
        most = max(largest for *_, largest in found)
        negative = [feature for feature, smallest, _ in found if smallest < 0]
        if asked.get(name, "auto") == "auto" and negative:
            chosen[name] = "vocabulary"
            notes.append(
                f"table {name}: each id that occurs gets a row, as {min(negative)} has ids below 0 "
                "or from 2^63 on"
            )
        elif asked.get(name, "auto") == "auto" and most >= max(
            _SURELY_FINE_ROWS, _ROWS_A_SAMPLE * samples
        ):
            chosen[name] = "vocabulary"
            notes.append(
                f"table {name}: each id that occurs gets a row, as {samples:,} samples have ids up "
                f"to {most:,} (--id-mapping {shlex.quote(f'{name}=identity')} gives one to every "
                f"number; --ignore {shlex.quote(name)} if it is a time)"
            )
        else:
            row_counts[name] = _rows(name, most, headroom)
            sized.append(f"{name} {row_counts[name]:,} (ids up to {most:,})")
    if headroom and sized:
        notes.append(f"rows with {headroom:.0%} for later ids: {listed(sized, 5)}")
    keyed = {name: own for name, own in feature_tables.items() if chosen[own] == "vocabulary"}
    mappings = build_vocabularies(source, keyed, counts, row_counts, progress) if keyed else {}
    # `EncodedLog` refuses texts as row numbers, so the number of rows does not matter.
    mappings |= sized_mappings(chosen, row_counts, 1)
    return {name: mappings[name] for name in names}, notes


def sized_mappings(
    kinds: Mapping[str, MappingKind], row_counts: Mapping[str, int], rows: int
) -> dict[str, IdMapping]:
    """Return the mappings of tables that have no vocabulary, by default with `rows` rows."""
    made: dict[str, type[Hash | Identity]] = {"hash": Hash, "identity": Identity}
    return {
        name: made[kind](row_counts.get(name, rows)) for name, kind in kinds.items() if kind in made
    }


def _texts_beside_integers(source: Source, feature_tables: Mapping[str, str]) -> list[str]:
    """Return notes on tables that features of texts and of integers share: ids never match."""
    kinds: dict[str, dict[bool, str]] = {}
    for feature, table in feature_tables.items():
        kinds.setdefault(table, {}).setdefault(source.columns.is_text(feature), feature)
    return [
        f"table {table}: {one[True]} holds texts and {one[False]} integers, so that one id has two "
        "keys; write them alike, or say in a schema what text is read as (type)"
        for table, one in kinds.items()
        if len(one) == 2
    ]


def feature_tables_of(
    source: Source, sparse: Sequence[str] | None, renamed: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the table that each feature reads, in the log's order."""
    tables = dict(renamed or {})
    known = dict.fromkeys(source.columns.sparse)
    kept = known if sparse is None else sparse
    unknown = [name for name in [*kept, *tables] if name not in known]
    if unknown:
        raise DataError(
            f"{shown(source.files[0])} has no feature {unknown[0]!r}; it has {listed(list(known))}"
        )
    return {feature: tables.get(feature, feature) for feature in kept}


def mapping_kinds(
    source: Source,
    feature_tables: Mapping[str, str],
    id_mapping: str | Mapping[str, str],
    rows: int | Mapping[str, int] | None,
) -> tuple[dict[str, MappingKind], dict[str, int]]:
    """Return the kind of each table's id mapping, and the number of rows where it is given."""
    names = list(dict.fromkeys(feature_tables.values()))
    row_counts = _of_each("rows", rows, names)
    asked = _of_each("id_mapping", id_mapping, names)
    for kind in asked.values():
        if kind not in ID_MAPPINGS:
            raise DataError(f"id_mapping {kind!r} is none of {', '.join(ID_MAPPINGS)}")
    for name, count in row_counts.items():
        if count < 1:
            raise DataError(f"table {name!r} needs at least 1 row, not {count}")
    texts = {table for name, table in feature_tables.items() if source.columns.is_text(name)}
    kinds: dict[str, Any] = {n: "vocabulary" if n in texts else "identity" for n in names}
    kinds |= {name: kind for name, kind in asked.items() if kind != "auto"}
    unsized = [name for name in names if kinds[name] == "hash" and name not in row_counts]
    if unsized:
        raise DataError(
            f"a hash needs the number of rows of table {unsized[0]!r}; give rows=, "
            "one number for all tables or one for each (--rows N, --rows TABLE=N)"
        )
    return kinds, row_counts


def _of_each(what: str, value: Any, names: list[str]) -> dict[str, Any]:
    """Return each table's value, if it has one. The value of ``*`` is for tables not named."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    known = {*names, ALL}
    for name in value:
        if name not in known:
            are = "are" if what == "rows" else "is"
            raise DataError(f"{what} {are} given for table {name!r}; tables are {listed(names)}")
    given = {name: value.get(name, value.get(ALL)) for name in names}
    return {name: one for name, one in given.items() if one is not None}


def _rows(table: str, largest: int, headroom: float) -> int:
    """Return the number of rows for ids up to `largest`, with headroom."""
    if largest >= MAX_INFERRED_ROWS:
        raise DataError(
            f"table {table!r} has id {largest}, too large for a row number; "
            "map it with id_mapping='hash' or 'vocabulary', or give rows="
        )
    if not (largest + 1) * (1 + headroom) <= 2 * MAX_INFERRED_ROWS:
        raise DataError(
            f"table {table!r} has no more than {largest + 1} rows in the log, and a headroom of "
            f"{headroom:g} times as many is too much; give less headroom, or rows="
        )
    return largest + 1 + math.ceil((largest + 1) * headroom)


def _id_ranges(
    source: Source, features: Sequence[str]
) -> tuple[Mapping[str, tuple[int, int]], int]:
    """Return the smallest and largest id of integer features, 0 included; and samples."""
    source = source.of_ids_alone
    integers = [name for name in features if not source.columns.is_text(name)]
    if not integers:
        return {}, source.samples or 0
    known = source.id_ranges()
    if known is not None and source.samples is not None:
        return {name: known[name] for name in integers}, source.samples
    ranges, samples = dict.fromkeys(integers, (0, 0)), 0
    for batch in source.batches(65536):
        samples += batch.samples
        for name, (least, most) in ranges.items():
            ids = batch.features[name].ids
            ranges[name] = int(ids.min(initial=least)), int(ids.max(initial=most))
    return ranges, samples
