"""Processor time of counting a log by Spark, Dask and Ray, beside one process of placer alone.

Generates Parquet files of one column of Zipf-distributed ids and counts them by each engine on
this machine, each in a process of its own, after a warm-up on a small log. Counted is the processor
time of the process and all that it started (the JVM, workers), so that other work on the machine
matters little. Written to ``benchmarks/results/engines-MACHINE.json``::

    python benchmarks/engines.py [--rounds 3] [--quick]

Spark needs a Java runtime (``JAVA_HOME``).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from _machine import RESULTS, machine, slug, versions
from profiling import write_log

FILES = 8
CORES = 2


def main() -> None:
    """Generate the log, measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--lookups", type=int, default=64_000_000)
    parser.add_argument("--quick", action="store_true", help="a small log, once")
    parser.add_argument("--output", type=Path, default=RESULTS / f"engines-{slug()}.json")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "LOG"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        engine, folder = options.worker
        print(json.dumps(measure(engine, folder, options.rows)))
        return
    if options.quick:
        options.rounds, options.rows, options.lookups = 1, 1_000_000, 4_000_000
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            write_log(Path(folder) / f"{number}.parquet", options.rows,
                      options.lookups // FILES, "int64", number)  # fmt: skip
        runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
        for _ in range(options.rounds):
            for engine in ENGINES:
                runs[engine].append(run_worker(engine, folder, options.rows))
    speeds = {
        engine: statistics.median(options.lookups / run["cpu_s"] for run in of_engine)
        for engine, of_engine in runs.items()
    }
    result = {
        "machine": machine(),
        "versions": versions("pyspark", "dask", "ray", "pyarrow", "numpy", "pandas"),
        "rows": options.rows,
        "lookups": options.lookups,
        "lookups_per_cpu_s": speeds,
        "cpu_time_over_placer": {name: speeds["placer"] / speed for name, speed in speeds.items()},
        "runs": runs,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["lookups_per_cpu_s"], indent=1))


def run_worker(engine: str, folder: str, rows: int) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--rows", str(rows), "--worker", engine, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(engine: str, folder: str, rows: int) -> dict[str, Any]:
    """Processor time of counting the log, and what was found."""
    with ENGINES[engine]() as count, tempfile.TemporaryDirectory() as small:
        write_log(Path(small) / "0.parquet", rows, 10_000, "int64")
        count(small, rows)
        before = cpu_seconds()
        profile = count(folder, rows)
        spent = cpu_seconds() - before
    table = profile["item"]
    return {"cpu_s": spent, "lookups": table.lookups, "rows_read": table.counts.ids.size}


def cpu_seconds() -> float:
    """Processor time of this process and all that it started, those that ended included."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # Its own, and that of its ended children.
        except psutil.Error:
            continue
    return total


Count = Callable[[str, int], Any]


@contextmanager
def one_process() -> Iterator[Count]:
    """`profile_log`, on one core."""
    import pyarrow as pa

    from placer.data import open_log
    from placer.profile.count import profile_log

    pa.set_cpu_count(1)
    yield lambda folder, rows: profile_log(open_log(folder, rows=rows))


@contextmanager
def parts_in_one_process() -> Iterator[Count]:
    """What an engine's workers and driver do, without an engine."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    from placer.profile.parts.counter import PartitionCounter
    from placer.profile.parts.counts import merge_counts

    def count(folder: str, rows: int) -> Any:
        log = ds.dataset(folder)
        counter = PartitionCounter.for_log(log.head(1000), rows=rows)
        parts = [
            pa.Table.from_batches(counter.count(ds.dataset(file), number))
            for number, file in enumerate(log.files)
        ]
        return counter.profile(merge_counts(parts))

    pa.set_cpu_count(1)
    yield count


@contextmanager
def dask_threads() -> Iterator[Count]:
    """Dask in this process."""
    import dask
    from dask import dataframe

    from placer.adapters.dask import profile_dask

    def count(folder: str, rows: int) -> Any:
        frame = dataframe.read_parquet(folder, dtype_backend="pyarrow")
        return profile_dask(frame, rows=rows)

    with dask.config.set(scheduler="threads", num_workers=CORES):
        yield count


@contextmanager
def spark_local() -> Iterator[Count]:
    """Spark's own local mode."""
    from pyspark.sql import SparkSession

    from placer.adapters.spark import profile_spark

    session = (
        SparkSession.builder.master(f"local[{CORES}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.maxResultSize", "4g")
        .config("spark.sql.shuffle.partitions", str(2 * CORES))
        .getOrCreate()
    )
    yield lambda folder, rows: profile_spark(session.read.parquet(folder), rows=rows)
    session.stop()


@contextmanager
def ray_local() -> Iterator[Count]:
    """Ray's own local mode."""
    import ray

    from placer.adapters.ray import profile_ray

    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def count(folder: str, rows: int) -> Any:
        return profile_ray(ray.data.read_parquet(folder), partitions=2 * CORES, rows=rows)

    yield count
    ray.shutdown()


ENGINES: dict[str, Any] = {
    "placer": one_process,
    "placer, in parts": parts_in_one_process,
    "Dask": dask_threads,
    "Spark": spark_local,
    "Ray": ray_local,
}


if __name__ == "__main__":
    main()
