"""How the ids of each table become rows, where a profile does not say."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from placer.data.files.stores import shown
from placer.data.mapping import Hash, Identity, IdMapping
from placer.data.names import ID_MAPPINGS, MappingKind
from placer.data.source import Progress, Source
from placer.data.vocabulary import build_vocabularies
from placer.errors import DataError
from placer.units import listed

# A table that the largest id seen would give more rows than this is surely not meant.
MAX_INFERRED_ROWS = 1 << 31
_OTHERS = "*"
_SURELY_FINE_ROWS = 1 << 20
_ROWS_A_SAMPLE = 64
"""From both on, most rows of a table of identity would never be read."""


def choose_mappings(
    source: Source,
    feature_tables: Mapping[str, str],
    id_mapping: str | Mapping[str, str] = "auto",
    rows: int | Mapping[str, int] | None = None,
    min_count: int | Mapping[str, int] = 1,
    headroom: float = 0.0,
    progress: Progress | None = None,
) -> tuple[dict[str, IdMapping], list[str]]:
    """Return a mapping for each table, and notes for the user; see `placer.data.open_log`."""
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
    largest: dict[str, int] = {}
    negative: dict[str, str] = {}
    for feature, (least, most) in ranges.items():
        table = feature_tables[feature]
        largest[table] = max(largest.get(table, 0), most)
        if least < 0:
            negative[table] = min(feature, negative.get(table, feature))
    notes: list[str] = []
    sized: list[str] = []
    for name, most in largest.items():
        is_auto = asked.get(name, "auto") == "auto"
        if is_auto and name in negative:
            chosen[name] = "vocabulary"
            notes.append(
                f"table {name}: {negative[name]} has negative ids, or ids from 2^63 on, which "
                "are no row numbers, so rows are given to the ids that there are"
            )
        elif is_auto and most >= max(_SURELY_FINE_ROWS, _ROWS_A_SAMPLE * samples):
            chosen[name] = "vocabulary"
            notes.append(
                f"table {name}: ids up to {most:,} in {samples:,} samples are no row numbers, so "
                f"rows are given to those that there are (--id-mapping {name}=identity: one a "
                f"number; --ignore {name} if it is a time)"
            )
        else:
            row_counts[name] = _rows(name, most, headroom)
            sized.append(f"{name} {row_counts[name]:,} (ids up to {most:,})")
    if headroom and sized:
        notes.append(f"rows with {headroom:.0%} for later ids: {listed(sized, 5)}")
    keyed = {name: own for name, own in feature_tables.items() if chosen[own] == "vocabulary"}
    vocabularies = {}
    if keyed:
        vocabularies = build_vocabularies(
            source, keyed, min_count=counts, rows=row_counts, progress=progress
        )
    mappings: dict[str, IdMapping] = {}
    for name in names:
        if name in vocabularies:
            mappings[name] = vocabularies[name]
        elif chosen[name] == "hash":
            mappings[name] = Hash(row_counts[name])
        else:
            # Texts are refused by `EncodedLog`, whatever their table's rows.
            mappings[name] = Identity(row_counts.get(name, 1))
    return mappings, notes


def feature_tables_of(
    source: Source, sparse: Sequence[str] | None, renamed: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the table that each feature reads, in the log's order."""
    tables = dict(renamed or {})
    kept = list(source.text_features) if sparse is None else list(sparse)
    unknown = [name for name in [*kept, *tables] if name not in source.text_features]
    if unknown:
        raise DataError(
            f"{shown(source.files[0])} has no feature {unknown[0]!r}; "
            f"it has {listed(list(source.text_features))}"
        )
    return {feature: tables.get(feature, feature) for feature in kept}


def mapping_kinds(
    source: Source,
    feature_tables: Mapping[str, str],
    id_mapping: str | Mapping[str, str],
    rows: int | Mapping[str, int] | None,
) -> tuple[dict[str, MappingKind], dict[str, int]]:
    """Return how the ids of each table become rows, and the rows of those whose number is set."""
    names = list(dict.fromkeys(feature_tables.values()))
    row_counts = _of_each("rows", rows, names)
    asked = _of_each("id_mapping", id_mapping, names)
    for kind in asked.values():
        if kind not in ID_MAPPINGS:
            raise DataError(f"id_mapping {kind!r} is none of {', '.join(ID_MAPPINGS)}")
    for name, count in row_counts.items():
        if count < 1:
            raise DataError(f"table {name!r} needs at least 1 row, not {count}")
    texts = {table for name, table in feature_tables.items() if source.text_features[name]}
    kinds: dict[str, Any] = {name: asked.get(name, "auto") for name in names}
    for name in [name for name in names if kinds[name] == "auto"]:
        kinds[name] = "vocabulary" if name in texts else "identity"
    unsized = [name for name in names if kinds[name] == "hash" and name not in row_counts]
    if unsized:
        raise DataError(
            f"a hash needs the number of rows of table {unsized[0]!r}; give rows=, "
            "one number for all tables or one for each (--rows N, --rows TABLE=N)"
        )
    return kinds, row_counts


def _of_each(what: str, value: Any, names: list[str]) -> dict[str, Any]:
    """Return a value for each table, where there is one; that of ``*`` is for those not named."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    known = {*names, _OTHERS}
    for name in value:
        if name not in known:
            are = "are" if what == "rows" else "is"
            raise DataError(f"{what} {are} given for table {name!r}; tables are {listed(names)}")
    given = {name: value.get(name, value.get(_OTHERS)) for name in names}
    return {name: one for name, one in given.items() if one is not None}


def _rows(table: str, largest: int, headroom: float) -> int:
    """Return one more than the largest id, with headroom."""
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
    """Return the smallest and largest id of integer features, 0 included, and the samples."""
    integers = [name for name in features if not source.text_features[name]]
    if not integers:
        return {}, source.samples or 0
    known = source.id_ranges()
    if known is not None and source.samples is not None:
        return {name: known[name] for name in integers}, source.samples
    ranges, samples = dict.fromkeys(integers, (0, 0)), 0
    for batch in source.batches(65536):
        samples += batch.samples
        for name, (least, most) in ranges.items():
            keys = batch.features[name].keys.view("i8")
            ranges[name] = int(keys.min(initial=least)), int(keys.max(initial=most))
    return ranges, samples
