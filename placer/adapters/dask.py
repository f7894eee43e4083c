"""Profiles of logs that Dask reads, counted and added up by its workers."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from placer.profile.parts.counter import PartitionCounter, profile_in_parts
from placer.profile.parts.counts import KEYS, SCHEMA
from placer.profile.profile import Profile

_SOME_SAMPLES = 1000
_SPLIT_EVERY = 8
"""Parts that one task adds up."""


def count_dask(parts: Any, counter: PartitionCounter, split_out: int = 1) -> Any:
    """Return the counts of a log, added up by trees: a DataFrame of `split_out` partitions.

    `parts` are a DataFrame, or Delayed that hold what `placer.data.in_memory.batches_of` takes.
    Vocabularies number ids in the order of the parts.
    """
    from dask import dataframe, delayed

    delayed_parts = parts if isinstance(parts, Sequence) else parts[counter.reads].to_delayed()
    counts = dataframe.from_delayed(
        [delayed(_count)(counter, part, number) for number, part in enumerate(delayed_parts)],
        meta=SCHEMA.empty_table().to_pandas(),
        verify_meta=False,
    )
    return (
        counts.groupby(list(KEYS), sort=False)
        .agg({"count": "sum", "first": "min"}, split_every=_SPLIT_EVERY, split_out=split_out)
        .reset_index()
    )


def profile_dask(parts: Any, split_out: int = 1, **options: Any) -> Profile:
    """Return the profile of a DataFrame or of delayed parts, as `profile_log` counts their samples.

    ::

        frame = dask.dataframe.read_parquet("s3://logs/", dtype_backend="pyarrow")
        profile = profile_dask(frame, rows={"user": 10**7}, dim=64)

    `options` are those of `PartitionCounter.for_log` and `PartitionCounter.profile`; the others
    those of `count_dask`. Without `dtype_backend="pyarrow"`, pandas makes floating-point numbers
    of integers where some are missing.
    """
    some = parts[0].compute() if isinstance(parts, Sequence) else parts.head(_SOME_SAMPLES)

    def count(counter: PartitionCounter) -> pa.Table:
        counts = count_dask(parts, counter, split_out).compute()
        return pa.Table.from_pandas(counts, SCHEMA, preserve_index=False)

    return profile_in_parts(some, count, options)


def _count(counter: PartitionCounter, part: Any, number: int) -> Any:
    return pa.Table.from_batches(counter.count(part, number), SCHEMA).to_pandas()
