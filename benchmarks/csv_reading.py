"""Counting a CSV log beside what `pyarrow.csv` alone takes to read it, in processor time.

Both read the same file in turns in one process on one thread; the least of the rounds counts.
Written to ``benchmarks/results/csv_reading.json``::

    python benchmarks/csv_reading.py [--samples 400000] [--rounds 3]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from _machine import RESULTS, machine, versions

from placer.data import open_log
from placer.profile.count import AccessCounter

RESULT = RESULTS / "csv_reading.json"
ROWS = 1_000_000


def main() -> None:
    """Write the logs, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pa.set_cpu_count(1)
    result: dict[str, object] = {
        "machine": machine(),
        "versions": versions("pyarrow", "numpy"),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, table in logs(options.samples).items():
            file = Path(folder) / f"{name}.csv"
            csv.write_csv(table, file, csv.WriteOptions(quoting_style="none"))
            seconds: dict[str, list[float]] = {"pyarrow": [], "placer": []}
            for _ in range(options.rounds):
                seconds["pyarrow"].append(timed(read, file))
                seconds["placer"].append(timed(count, file))
            least = {tool: min(measured) for tool, measured in seconds.items()}
            result[name] = {
                "megabytes": round(file.stat().st_size / 1e6, 1),
                "cpu_seconds": seconds,
                "share_of_pyarrow_speed": round(least["pyarrow"] / least["placer"], 2),
            }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def logs(samples: int) -> dict[str, pa.Table]:
    """A log of integers and numbers, and one of texts, half of them hexadecimal."""
    rng = np.random.default_rng(0)
    label = {"click": rng.integers(0, 2, samples)}
    ids = {f"c{i}": rng.integers(0, 10 ** (2 + i % 5), samples) for i in range(20)}
    numbers = {f"d{i}": np.round(rng.random(samples), 3) for i in range(4)}
    texts = {}
    for i in range(10):
        values = np.minimum(rng.zipf(1.2, samples), 50_000)
        texts[f"t{i}"] = [f"{v * 40503:08x}" if i < 5 else f"site-{v}" for v in values.tolist()]
    return {
        "integers and numbers": pa.table(label | ids | numbers),
        "texts": pa.table(label | texts),
    }


def timed(function: Callable[[Path], None], file: Path) -> float:
    """Processor time of a call, in seconds."""
    start = time.process_time()
    function(file)
    return time.process_time() - start


def read(file: Path) -> None:
    """All columns, of the types that Arrow infers."""
    one_thread = csv.ReadOptions(use_threads=False, block_size=2 << 20)
    for _ in csv.open_csv(file, read_options=one_thread):
        pass


def count(file: Path) -> None:
    """The accesses of all features, the schema inferred."""
    log = open_log(file, id_mapping="hash", rows=ROWS)
    counter = AccessCounter(log.tables, log.feature_tables)
    for chunk in log.chunks(16384):
        counter.add(chunk.samples, chunk.features)


if __name__ == "__main__":
    main()
