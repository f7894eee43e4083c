"""Where lookups are served from: caches on traces, RecShard's models, a small cache for Criteo.

    python benchmarks/slow_memory.py [--part traces|recshard|fang] [--traces FOLDER] [--quick]

traces    hit shares on two real traces of keys: the executor's pool beside LRU, LFU, FBGEMM's
          cache, static sets and the optimum (Belady's MIN)
recshard  hot/cold plans beside whole-table greedies on RecShard's RM1 to RM3: lookups and rows
          that a step reads from host memory, load balance, predicted step time
fang      Criteo Terabyte with 1.5% of its rows in HBM: static split, cache, and both

All counts are of rows that were drawn or read, one by one; only times are predicted, by the
cost model `roofline`. Results go to benchmarks/results/slow-memory-PART.json and .png; --quick
runs a small piece of each part and writes nothing unless told to. --docs FILE runs nothing, and
puts the tables of these files into docs/studies.md, between its marks.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _fang
import _recshard
import _traces
from _machine import RESULTS, machine, versions

from placer.files import write_text

MODULES = {"traces": _traces, "recshard": _recshard, "fang": _fang}
PARTS = tuple(MODULES)
CLOSE = "<!-- end -->"
MARK = re.compile(rf"(?P<open><!-- (?P<part>\w+) (?P<number>\d+) -->)\n.*?{CLOSE}", re.DOTALL)
PACKAGES = ("embedding-placer", "numpy", "numba", "ortools", "torch")


def with_tables(page: str, folder: Path) -> str:
    """A page with the tables of a folder's results between its marks."""
    reports = {
        part: json.loads(file_of(part, folder).read_text(encoding="utf-8"))
        for part in PARTS
        if f"<!-- {part} " in page
    }
    found = {part: MODULES[part].tables(report) for part, report in reports.items()}

    def renewed(mark: re.Match[str]) -> str:
        table = found[mark["part"]][int(mark["number"])]
        return f"{mark['open']}\n{table}\n{CLOSE}"

    return MARK.sub(renewed, page)


def file_of(part: str, folder: Path) -> Path:
    """Where the results of a part are."""
    return folder / f"slow-memory-{part}.json"


def main() -> None:
    """Parse the command line and run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="one part (all)")
    parser.add_argument(
        "--traces", type=Path, help="folder of scarab-recs.npz and orm-busy.npz, for traces"
    )
    parser.add_argument("--quick", action="store_true", help="a small piece, no file")
    parser.add_argument("--docs", type=Path, help="page whose tables are renewed")
    parser.add_argument("--output", type=Path, help="folder that results go to")
    options = parser.parse_args()
    if options.docs is not None:
        text = options.docs.read_text(encoding="utf-8")
        write_text(options.docs, with_tables(text, options.output or RESULTS))
        return
    if options.traces is None and options.part == "traces":
        parser.error("part traces needs --traces FOLDER")
    folder = options.output or (None if options.quick else RESULTS)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "recshard": lambda: _recshard.run(
            _recshard.MODELS[:1] if options.quick else _recshard.MODELS,
            5.0 if options.quick else _recshard.TIME_LIMIT_S,
        ),
        "fang": lambda: _fang.run(_fang.QUICK if options.quick else _fang.SIZE),
    }
    if options.traces is not None:
        runs["traces"] = lambda: _traces.run(options.traces, quick=options.quick)
    for part in [options.part] if options.part else PARTS:
        if part not in runs:
            print(f"{part} is left out: it needs --traces FOLDER")
            continue
        print(f"\n== {part} ==", flush=True)
        started = time.perf_counter()
        report = {
            "benchmark": f"slow memory: {part}",
            "machine": machine(),
            "versions": versions(*PACKAGES),
            **runs[part](),
            "seconds": time.perf_counter() - started,
        }
        if folder is not None:
            file = file_of(part, folder)
            write_text(file, json.dumps(report, indent=1) + "\n")
            MODULES[part].plot(report, file.with_suffix(".png"))
            print(f"\nraw numbers: {file}")


if __name__ == "__main__":
    main()
