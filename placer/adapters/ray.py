"""Profile logs that Ray Data reads; its workers count lookups and add up the counts."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from placer.profile.parts.counter import PartitionCounter, profile_in_parts
from placer.profile.parts.counts import KEYS, SCHEMA
from placer.profile.profile import Profile

_SOME_SAMPLES = 1000
_POSITION = "__position"


def count_ray(dataset: Any, counter: PartitionCounter, partitions: int | None = None) -> Any:
    """Count a log's lookups: a Dataset with one line for each table row that is read.

    A shuffle into `partitions` parts adds up the counts; Ray chooses their number by default. Ray
    does not number blocks. So to make vocabularies, a column of the samples must hold their
    positions (`PartitionCounter.position`).
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
    """Profile a Dataset, as `profile_log` profiles its samples in order.

    ::

        profile = profile_ray(ray.data.read_parquet("s3://logs/"), rows={"user": 10**7}, dim=64)

    `options` go to `PartitionCounter.for_log` and `PartitionCounter.profile`, `partitions` goes to
    `count_ray`.
    """
    if "position" not in options:
        from ray.data.expressions import monotonically_increasing_id

        dataset = dataset.with_column(_POSITION, monotonically_increasing_id())
        options = {**options, "position": _POSITION}
    some = dataset.take_batch(_SOME_SAMPLES, batch_format="pyarrow")

    def count(counter: PartitionCounter) -> Any:
        return count_ray(dataset, counter, partitions).iter_batches(batch_format="pyarrow")

    return profile_in_parts(some, count, options)
