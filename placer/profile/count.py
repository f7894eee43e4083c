"""Count how often a log reads each row, in a dense array of counts per table.

A later log may be profiled with the columns, tables and id mappings of an earlier profile.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from placer.data.layout import Format
from placer.data.log import Bags, Chunk, Log
from placer.data.reader import EncodedLog, open_log
from placer.data.source import Progress
from placer.errors import DataError, ProfileError, check_kinds
from placer.files.atomic import StrPath
from placer.profile.locality import LocalityCounter
from placer.profile.profile import Profile
from placer.profile.table_profile import FeatureCounts, RowCounts, TableProfile, UnknownIds
from placer.tables import DType, Feature, OptimizerName, Pooling, Table
from placer.units import listed

# A chunk with 200 lookups per sample takes 26 MB, and a multiple of it while it is read.
CHUNK_SAMPLES = 16384
# Samples of a block are kept or left out together. Blocks are small, so that sampling a small log
# keeps about the requested share, and large enough to be read at once.
SAMPLE_BLOCK = 256


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Properties of tables that a log does not contain."""

    dim: int | Mapping[str, int] = 64
    dtype: DType = "float32"
    optimizer: OptimizerName = "rowwise_adagrad"
    pooling: Pooling | Mapping[str, Pooling] = "sum"

    def profiles(
        self,
        counts: Mapping[str, RowCounts],
        features: Mapping[str, dict[str, FeatureCounts]],
        samples: int,
    ) -> list[TableProfile]:
        """Return profiles of tables from counts of their rows and features."""
        self.check([name for own in features.values() for name in own], counts)
        profiles = []
        for name, own in counts.items():
            read = tuple(
                count.measured(
                    Feature(feature, pooling=_given(self.pooling, feature, "sum")), samples
                )
                for feature, count in features[name].items()
            )
            dim = _given(self.dim, name, 64)
            table = Table(name, own.rows, dim, self.dtype, self.optimizer, read)
            profiles.append(TableProfile.counted(table, own, features[name]))
        return profiles

    def check(self, features: Collection[str], tables: Collection[str]) -> None:
        """Raise DataError if a pooling names an unknown feature, or a dim an unknown table."""
        for what, given, known in (
            ("pooling is given for feature", self.pooling, features),
            ("dim is given for table", self.dim, tables),
        ):
            for name in () if isinstance(given, str | int) else given:
                if name != "*" and name not in known:
                    raise DataError(f"{what} {name!r}; there are {listed(list(known))}")


def _given(given: Any, name: str, default: Any) -> Any:
    """Return the value for `name`: one for all, or by name, with ``*`` for all others."""
    return given.get(name, given.get("*", default)) if isinstance(given, Mapping) else given


class AccessCounter:
    """Counts lookups of chunks of samples. It takes 4 bytes per row, for logs of any length."""

    def __init__(self, tables: Mapping[str, int], feature_tables: Mapping[str, str]) -> None:
        for feature, table in feature_tables.items():
            if table not in tables:
                raise DataError(
                    f"feature {feature!r} reads table {table!r}; tables are {', '.join(tables)}"
                )
        self.samples = 0
        self._feature_tables = dict(feature_tables)
        self._features = dict.fromkeys(feature_tables, FeatureCounts())
        self._counts = {name: DenseCounts(rows) for name, rows in tables.items()}
        self._locality = LocalityCounter(tables, feature_tables)

    def add(self, samples: int, features: Mapping[str, Bags]) -> None:
        """Count the bags of the next `samples` samples. Do not change the arrays afterwards.

        Raises DataError if a feature is missing or unknown, has another number of samples, or an id
        is not within its table's rows. Then none of these samples is counted.
        """
        if features.keys() != self._feature_tables.keys():
            different = sorted(features.keys() ^ self._feature_tables.keys())
            raise DataError(
                f"features of a batch differ from those expected in {', '.join(different)}; "
                f"expected {', '.join(self._feature_tables)}"
            )
        for name, bags in features.items():
            if bags.samples != samples:
                raise DataError(
                    f"feature {name!r} has {bags.samples} bags for {samples} samples; "
                    "each sample has one, if an empty one"
                )
            self._counts[self._feature_tables[name]].check(bags.ids, name)
        for name, bags in features.items():
            self._counts[self._feature_tables[name]].add(bags.ids)
            self._features[name] += FeatureCounts(bags.ids.size, bags.filled)
        self.samples += samples
        self._locality.add(samples, features)

    def gap(self) -> None:
        """Say that the next samples are from another place in the log."""
        self._locality.gap()

    def profile(self, options: TableOptions | None = None, **fields: Any) -> Profile:
        """Return the profile of all samples so far; `fields` are further fields of `Profile`.

        Counting may continue afterwards.
        """
        counts = {name: RowCounts.from_dense(one.values) for name, one in self._counts.items()}
        features: dict[str, dict[str, FeatureCounts]] = {name: {} for name in counts}
        for feature, counted in self._features.items():
            features[self._feature_tables[feature]][feature] = counted
        localities = self._locality.localities()
        profiles = (options or TableOptions()).profiles(counts, features, self.samples)
        tables = tuple(replace(one, locality=localities[one.name]) for one in profiles)
        return Profile(tables=tables, samples=self.samples, **fields)


class DenseCounts:
    """One count per row: uint32 until a count could overflow, then uint64."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.values: npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
        try:
            self.values = np.zeros(rows, dtype=np.uint32)
        except MemoryError as error:
            raise DataError(
                f"counts of {rows:,} rows take {4 * rows:,} bytes, more than there is; give fewer "
                "rows"
            ) from error
        # Number of lookups to add before a count could overflow.
        self._headroom = np.iinfo(np.uint32).max

    def check(self, ids: npt.NDArray[np.int64], feature: str) -> None:
        """Raise DataError unless all ids are rows."""
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise DataError(
                f"feature {feature!r}: ids must be a vector of int64, "
                f"not {ids.dtype} of shape {ids.shape}"
            )
        # As unsigned integers, negative ids are too large.
        if ids.size and int(ids.view(np.uint64).max()) >= self.rows:
            wrong = int(ids[np.argmax(ids.view(np.uint64) >= np.uint64(self.rows))])
            raise DataError(
                f"feature {feature!r} has id {wrong}, but its table has rows "
                f"0..{self.rows - 1}; give the table more rows or map the ids"
            )

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """Count ids, which `check` has accepted."""
        if ids.size > self._headroom:
            limit, most = np.iinfo(self.values.dtype).max, int(self.values.max(initial=0))
            self._headroom = int(limit) - most
            if ids.size > self._headroom:
                self.values = self.values.astype(np.uint64)
                self._headroom = int(np.iinfo(np.int64).max) - most
        self._headroom -= ids.size
        # Since NumPy 1.25, `add.at` is as fast as memory allows: bincount per block, sorting and a
        # compiled loop were not faster over 160 MB of counts.
        np.add.at(self.values, ids, self.values.dtype.type(1))


def profile_log(
    log: Log,
    *,
    dim: int | Mapping[str, int] = 64,
    dtype: DType = "float32",
    optimizer: OptimizerName = "rowwise_adagrad",
    pooling: Pooling | Mapping[str, Pooling] = "sum",
    sample: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    source: str | None = None,
) -> Profile:
    """Count the accesses of a log and return its profile.

    Raises DataError if the log cannot be read or is empty, or if `sample` keeps no samples.

    Parameters
    ----------
    log : Log
        A log, as `placer.data.open_log` returns it.
    dim, dtype, optimizer, pooling
        Properties of the tables, which the log does not have. `pooling` may be given by feature,
        and `dim` by table (``*``: all others; sum and 64 by default).
    sample : float, optional
        Keep each block of 256 consecutive samples with this probability, independently. The
        profile's `sampling` is the share that was kept.
    seed : int
        Seed for the choice of blocks.
    progress : callable, optional
        Called with the number of samples done and their total (None if unknown).
    source : str, optional
        Where the log comes from, as text for people; by default its files.
    """
    check_kinds(log=(log, Log))
    if sample is not None and not 0 < sample <= 1:
        raise DataError(f"sample must be a share above 0 and at most 1, not {sample}")
    options = TableOptions(dim, dtype, optimizer, pooling)
    options.check(log.feature_tables, log.tables)  # Before the work, not after it.
    counter = AccessCounter(log.tables, log.feature_tables)
    done = 0
    for part in _parts(log, sample, seed):
        if isinstance(part, int):
            done += part
            counter.gap()
        else:
            counter.add(part.samples, part.features)
            done += part.samples
        if progress is not None:
            progress(done, getattr(log, "samples", None))
    if not counter.samples:
        raise DataError(
            "the log is empty; a profile needs at least one sample"
            if not done
            else f"sample={sample} with seed={seed} kept none of {done} samples; raise it"
        )
    profile = counter.profile(
        options,
        sampling=counter.samples / done,
        source=getattr(log, "description", "") if source is None else source,
        encoding=log.encoding if isinstance(log, EncodedLog) else None,
    )
    return replace(
        profile, tables=tuple(replace(table, unknown=_unknown(log, table)) for table in profile)
    )


def _unknown(log: Log, table: TableProfile) -> UnknownIds | None:
    """Return counts of ids that a table's vocabulary lacks; None without a vocabulary."""
    if not isinstance(log, EncodedLog) or table.name not in log.unknown or table.counts is None:
        return None
    return UnknownIds(table.counts.of_row_0, log.unknown[table.name].estimate())


def _parts(log: Log, sample: float | None, seed: int) -> Iterator[Chunk | int]:
    """Yield chunks to count, and for blocks that are left out, their size."""
    log = log.of_ids_alone if isinstance(log, EncodedLog) else log
    if sample is None or sample == 1:
        yield from log.chunks(CHUNK_SAMPLES)
        return

    def keep(block: int) -> bool:
        # Seed by block, so that the choice depends on the seed and the block alone.
        return bool(np.random.default_rng([seed, block]).random() < sample)

    if isinstance(log, EncodedLog):
        yield from log.blocks(SAMPLE_BLOCK, keep)
    else:
        for block, chunk in enumerate(log.chunks(SAMPLE_BLOCK)):
            yield chunk if keep(block) else chunk.samples


def profile_like(
    earlier: Profile,
    paths: StrPath | Sequence[StrPath],
    format: Format | None = None,
    *,
    sample: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Count the accesses of a log to the tables of an earlier profile.

    Columns and ids are mapped as in the earlier profile, so plans and checkpoints fit both
    profiles. The label and numeric columns are not read. Ids that the vocabularies do not list
    share row 0; `TableProfile.unknown` counts them. Tables keep their dim, dtype and optimizer.
    `paths` are as in `placer.data.open_log`, and `sample` as in `profile_log`.

    Raises ProfileError if the earlier profile does not know how ids became rows. Raises DataError
    if the log cannot be read, lacks a column, or has an id beyond its table.
    """
    if earlier.encoding is None:
        raise ProfileError(
            "the earlier profile does not say how ids become rows: it was made from counts or a "
            "published workload; profile a log"
        )
    log = open_log(paths, format, encoding=earlier.encoding.of_ids_alone)
    counted = profile_log(log, sample=sample, seed=seed, progress=progress)
    tables = tuple(replace(one, table=one.table.like(earlier[one.name].table)) for one in counted)
    return replace(counted, tables=tables, encoding=earlier.encoding)
