"""Speed and memory of exact access counts from Parquet, beside polars on the same file.

Generates a log of one integer column, Zipf-distributed ids over a table of 40 million rows
in shuffled order, in two lengths. Each measurement runs in a process of its own on one
core; placer and polars take turns, and medians are reported. Written to
``benchmarks/results/profiling.json``::

    python benchmarks/profiling.py [--rounds 5] [--rows 40000000] [--lookups 120000000]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _machine import machine, versions

RESULT = Path(__file__).parent / "results" / "profiling.json"
EXPONENT = 1.05
GROUP_ROWS = 1 << 20


def main() -> None:
    """Generate the logs, measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=40_000_000)
    parser.add_argument("--lookups", type=int, default=120_000_000)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--worker", nargs=2, metavar=("TOOL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        tool, file = options.worker
        use_one_core()
        with tempfile.TemporaryDirectory() as folder:
            # Modules that are loaded at first use are no part of what is measured.
            warm_up = Path(folder) / "warm-up.parquet"
            write_log(warm_up, 10, 10, "int64")
            WORKERS[tool](str(warm_up), 10)
        print(json.dumps(measured_by(tool, file, options.rows)))
        return
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for width, lookups in (
            ("int64", options.lookups),
            ("int64", options.lookups // 4),
            ("int32", options.lookups // 4),
        ):
            name = f"{width}, {lookups:,} lookups"
            files[name] = Path(folder) / f"{width}-{lookups}.parquet"
            write_log(files[name], options.rows, lookups, width)
            print(f"{name}: {files[name].stat().st_size / 1e6:.0f} MB", file=sys.stderr)
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {
            name: {tool: [] for tool in WORKERS} for name in files
        }
        for _ in range(options.rounds):
            for name, file in files.items():
                for tool in WORKERS:
                    runs[name][tool].append(run_worker(tool, file, options.rows))
    summary = {name: summarise(tools, options.rows) for name, tools in runs.items()}
    result = {
        "machine": machine() | versions("numpy"),
        "rows": options.rows,
        "zipf_exponent": EXPONENT,
        "threads": 1,
        "count_array_bytes": 4 * options.rows,
        "summary": summary,
        "runs": runs,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


def write_log(file: Path, rows: int, lookups: int, width: str, part: int = 0) -> None:
    """A Parquet log, or a part of one, of one column; rank to id by a random permutation."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = np.random.default_rng(0)
    ids = generator.permutation(rows).astype(width)
    if part:
        generator = np.random.default_rng(part)
    power = 1 - EXPONENT
    with pq.ParquetWriter(file, pa.schema([("item", pa.type_for_alias(width))])) as writer:
        for start in range(0, lookups, GROUP_ROWS):
            uniform = generator.random(min(GROUP_ROWS, lookups - start))
            # The inverse of the continuous power law; near enough to Zipf for a benchmark.
            ranks = (((rows + 1.0) ** power - 1) * uniform + 1) ** (1 / power) - 1
            writer.write_table(pa.table({"item": ids[ranks.astype(np.int64) % rows]}))


def run_worker(tool: str, file: Path, rows: int) -> dict[str, Any]:
    """One measurement in a fresh process on one core."""
    environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rows", str(rows), "--worker", tool, str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def count_with_placer(file: str, rows: int) -> tuple[int, int, int]:
    """Counts, row order and CDF of the log."""
    import pyarrow as pa

    from placer.data import open_log
    from placer.profile.count import profile_log

    pa.set_cpu_count(1)
    profile = profile_log(open_log(file, "parquet", id_mapping="identity", rows=rows))
    counts = profile["item"].counts
    assert counts is not None
    return counts.total, counts.ids.size, int(counts.counts.max())


def count_with_polars(file: str, rows: int) -> tuple[int, int, int]:
    """``group_by().len()``, which gives the same counts, unordered."""
    import polars as pl

    counts = pl.scan_parquet(file).group_by("item").len().collect()
    return int(counts["len"].cast(pl.Int64).sum()), counts.height, int(counts["len"].max())


WORKERS = {"placer": count_with_placer, "polars": count_with_polars}


def measured_by(tool: str, file: str, rows: int) -> dict[str, Any]:
    """Time and memory of a tool, and its lookups, distinct ids and those of the hottest one."""
    baseline = peak_bytes()
    start, cpu = time.perf_counter(), time.process_time()
    found = WORKERS[tool](file, rows)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        **dict(zip(("lookups", "distinct", "hottest"), found, strict=True)),
        "peak_bytes": peak_bytes(),
        "idle_bytes": baseline,
    }


def summarise(tools: dict[str, list[dict[str, Any]]], rows: int) -> dict[str, Any]:
    """Medians; fails if the two tools disagree on the counts."""
    for measured in zip(*tools.values(), strict=True):
        facts = {tuple(run[key] for key in ("lookups", "distinct", "hottest")) for run in measured}
        if len(facts) != 1:
            raise SystemExit(f"the tools counted differently: {facts}")
    summary: dict[str, Any] = {}
    for tool, measured in tools.items():
        seconds = statistics.median(run["seconds"] for run in measured)
        # On a machine that others use too, the time on the core is the steadier measure.
        cpu_seconds = statistics.median(run["cpu_seconds"] for run in measured)
        peak = max(run["peak_bytes"] for run in measured)
        summary[tool] = {
            "million_lookups_per_s": round(measured[0]["lookups"] / seconds / 1e6, 1),
            "million_lookups_per_cpu_s": round(measured[0]["lookups"] / cpu_seconds / 1e6, 1),
            "peak_mb": round(peak / 1e6),
            "peak_over_count_array_mb": round((peak - 4 * rows) / 1e6),
        }
    return summary


def use_one_core() -> None:
    """Pin the process and its later threads, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss, which a child inherits from the process that started it.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
