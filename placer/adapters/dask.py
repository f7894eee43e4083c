"""Profile logs that Dask reads; its workers count lookups and add up the counts."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from placer.profile.parts.counter import PartitionCounter, profile_in_parts
from placer.profile.parts.counts import KEYS, SCHEMA
from placer.profile.profile import Profile

_SOME_SAMPLES = 1000
_SPLIT_EVERY = 8
"""Number of parts whose counts one task adds up."""


def count_dask(parts: Any, counter: PartitionCounter, split_out: int = 1) -> Any:
    """Count a log's lookups: a DataFrame with one line for each table row that is read.

    `parts` is a DataFrame, or a list of Delayed values that `placer.data.in_memory.batches_of`
    takes. Vocabularies number ids in the order of the parts. A tree of tasks adds up the counts
    into `split_out` partitions.
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
    """Profile a DataFrame or delayed parts, as `profile_log` profiles their samples in order.

    ::

        frame = dask.dataframe.read_parquet("s3://logs/", dtype_backend="pyarrow")
        profile = profile_dask(frame, rows={"user": 10**7}, dim=64)

    `options` go to `PartitionCounter.for_log` and `PartitionCounter.profile`, the other arguments
    to `count_dask`. Without `dtype_backend="pyarrow"`, pandas turns integer columns with missing
    values into floating-point numbers.
    """
    some = parts[0].compute() if isinstance(parts, Sequence) else parts.head(_SOME_SAMPLES)

    def count(counter: PartitionCounter) -> pa.Table:
        counts = count_dask(parts, counter, split_out).compute()
        return pa.Table.from_pandas(counts, SCHEMA, preserve_index=False)

    return profile_in_parts(some, count, options)


def _count(counter: PartitionCounter, part: Any, number: int) -> Any:
    return pa.Table.from_batches(counter.count(part, number), SCHEMA).to_pandas()
