"""Profiles of logs that Ray Data reads, counted and added up by its workers."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from placer.profile.parts.counter import PartitionCounter, profile_in_parts
from placer.profile.parts.counts import KEYS, SCHEMA
from placer.profile.profile import Profile

_SOME_SAMPLES = 1000
_POSITION = "__position"


def count_ray(dataset: Any, counter: PartitionCounter, partitions: int | None = None) -> Any:
    """Return the counts of a log, added up by a shuffle: a Dataset with a line for each row read.

    Ray does not number blocks: where there are vocabularies to make, a column of the samples has
    their positions (`PartitionCounter.position`). `partitions` is Ray's own number of them by
    default.
    """
    from ray.data.aggregate import Min, Sum

    def count(part: pa.Table) -> Iterator[pa.Table]:
        for batch in counter.count(part):
            yield pa.Table.from_batches([batch], SCHEMA)

    parts = dataset.select_columns(counter.reads).map_batches(
        count, batch_format="pyarrow", batch_size=None, zero_copy_batch=True
    )
    return parts.groupby(list(KEYS), num_partitions=partitions).aggregate(
        Sum("count", alias_name="count"), Min("first", alias_name="first")
    )


def profile_ray(dataset: Any, partitions: int | None = None, **options: Any) -> Profile:
    """Return the profile of a Dataset: that of `profile_log` over its samples in order.

    ::

        profile = profile_ray(ray.data.read_parquet("s3://logs/"), rows={"user": 10**7}, dim=64)

    `options` are those of `PartitionCounter.for_log` and `PartitionCounter.profile`; `partitions`
    is that of `count_ray`.
    """
    if "position" not in options:
        from ray.data.expressions import monotonically_increasing_id

        dataset = dataset.with_column(_POSITION, monotonically_increasing_id())
        options = {**options, "position": _POSITION}
    some = dataset.take_batch(_SOME_SAMPLES, batch_format="pyarrow")

    def count(counter: PartitionCounter) -> Iterator[pa.Table]:
        found: Iterator[pa.Table] = count_ray(dataset, counter, partitions).iter_batches(
            batch_format="pyarrow"
        )
        return found

    return profile_in_parts(some, count, options)
