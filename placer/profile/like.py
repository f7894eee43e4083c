"""Profile a later log with the columns, tables and id mappings of an earlier profile."""

import os
from collections.abc import Sequence
from dataclasses import replace

from placer.data.layout import Format
from placer.data.reader import open_log
from placer.data.source import Progress
from placer.errors import ProfileError
from placer.profile.count import profile_log
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile

_Path = str | os.PathLike[str]


def profile_like(
    earlier: Profile,
    paths: _Path | Sequence[_Path],
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
    tables = tuple(_alike(one, earlier[one.name]) for one in counted)
    return replace(counted, tables=tables, encoding=earlier.encoding)


def _alike(counted: TableProfile, earlier: TableProfile) -> TableProfile:
    was, pooling = earlier.table, {one.name: one.pooling for one in earlier.table.features}
    features = tuple(
        replace(one, pooling=pooling.get(one.name, one.pooling)) for one in counted.table.features
    )
    table = replace(
        counted.table,
        dim=was.dim,
        dtype=was.dtype,
        optimizer=was.optimizer,
        features=features,
    )
    return replace(counted, table=table)
