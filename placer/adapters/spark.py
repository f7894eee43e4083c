"""Profile logs that Spark reads; its executors count lookups and add up the counts."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from placer.profile.parts.counter import PartitionCounter, profile_in_parts
from placer.profile.parts.counts import KEYS
from placer.profile.profile import Profile

_SCHEMA = "kind string, name string, id long, count long, first long"
_SOME_SAMPLES = 1000


def count_spark(frame: Any, counter: PartitionCounter) -> Any:
    """Count a log's lookups: a DataFrame with one line for each table row that is read.

    A shuffle adds up the counts of partitions. This needs Spark 4 or newer. Vocabularies number ids
    in the order of the frame's partitions.
    """
    from pyspark.sql import functions

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        return counter.count(batches, TaskContext.get().partitionId())

    parts = frame.select(*counter.reads).mapInArrow(count, _SCHEMA)
    added_up = (functions.sum("count").alias("count"), functions.min("first").alias("first"))
    return parts.groupBy(*KEYS).agg(*added_up)


def profile_spark(frame: Any, **options: Any) -> Profile:
    """Profile a DataFrame, as `profile_log` profiles its samples in order.

    ::

        profile = profile_spark(spark.read.parquet("s3://logs/"), rows={"user": 10**7}, dim=64)

    `options` go to `PartitionCounter.for_log` and `PartitionCounter.profile`. The driver receives
    one line for each row that was read. If it lacks memory for these lines, write the result of
    `count_spark` to Parquet and read that file with `PartitionCounter.profile`.
    """
    some = frame.limit(_SOME_SAMPLES).toArrow()
    return profile_in_parts(some, lambda counter: count_spark(frame, counter).toArrow(), options)
