"""Processor time of every planning command over the number of tables, on 128 GPUs.

    python benchmarks/growth.py
    python benchmarks/growth.py --tables 1000,4000 --commands show,verify

Ends with an error where the seconds of a command grow faster than n log n, by more than
`TOLERANCE`, or where a command with a time limit takes longer than that limit by more than a tenth
and by more than two seconds. Searches until a time limit take that long whatever there is to
search: of them the second rule says more. Writes results/growth-*.json.
"""

import argparse
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from _machine import markdown, write_results

ROOT = Path(__file__).resolve().parent.parent
TOPOLOGY, BATCH_SIZE = "16x8xh200", 2048
"""10,000 tables fit with their buffers."""

LIMIT_S = 60
"""Of searches; the three greedies and the questions to a plan do not search for so long."""

TOLERANCE = 1.25
"""Seconds may grow so many times as much as n log n: other tables are drawn for each n."""

_START = "import sys; sys.argv[0] = 'placer'; from cli import main; main()"


def commands(tables: int, folder: Path) -> dict[str, tuple[list[str], float]]:
    """Arguments of each command by its name, in an order in which files are there, and its limit.

    The limit is in seconds, and infinite for commands that may run several searches or none.
    """
    problem = ["--workload", f"random-{tables}", "--topology", TOPOLOGY]
    problem += ["--batch-size", str(BATCH_SIZE)]
    plan, other = str(folder / "plan.json"), str(folder / "other.json")
    limit = ["--time-limit", str(LIMIT_S)]

    def planned(solver: str, file: str = other) -> tuple[list[str], float]:
        asked = ["plan", *problem, "--solver", solver, *limit, "-o", file]
        return asked, float(LIMIT_S)

    questions = {
        "show": ["show", plan],
        "show --explain": ["show", plan, "--explain", "t6"],
        "show --memory": ["show", plan, "--memory"],
        "verify": ["verify", plan],
        "diff": ["diff", plan, other],
        "export": ["export", plan, "--to", "torchrec", "-o", str(folder / "sharding.json")],
        "export hugectr": ["export", plan, "--to", "hugectr", "-o", str(folder / "hugectr.json")],
        "report": ["report", plan, "-o", str(folder / "page.html")],
        "simulate": ["simulate", plan, "--batches", "1", "--batch-size", "64"],
        "compare": ["compare", *problem, "--solvers", "greedy-size,greedy-dim", *limit],
        "whatif": ["whatif", *problem, "--solver", "greedy-size", *limit],
    }
    followed = ["replan", "--from", plan, *problem[:2], *limit, "-o", str(folder / "next.json")]
    return {
        "plan greedy-size": planned("greedy-size", plan),
        "plan greedy-lookup": planned("greedy-lookup"),
        "plan greedy-cost": planned("greedy-cost"),
        "plan auto": planned("auto"),
        "replan": (followed, float(LIMIT_S)),
        **{name: (arguments, math.inf) for name, arguments in questions.items()},
    }


def seconds_of(arguments: list[str], most_s: float) -> tuple[float, float]:
    """Processor and wall time of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", _START, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=most_s,
        check=False,
    )
    took_s = time.monotonic() - began
    if ended.returncode not in (0, 4):
        sys.exit(f"placer {' '.join(arguments)} ended with {ended.returncode}: {ended.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took_s


def faults(measured: dict[str, dict[int, list[float]]]) -> list[str]:
    """What grows too fast, or takes longer than its limit.

    >>> faults({"show": {1000: [1.0, 1.0, math.inf], 4000: [5.0, 5.0, math.inf]}})
    []
    >>> faults({"show": {1000: [1.0, 1.0, math.inf], 4000: [16.0, 16.0, math.inf]}})
    ['show: 16.0 s of 4,000 tables are 16.0 times those of 1,000; n log n is 4.8']
    >>> faults({"plan auto": {1000: [9.0, 63.0, 60.0]}, "plan ilp": {1000: [9.0, 70.0, 60.0]}})
    ['plan ilp: 70.0 s of 1,000 tables with a limit of 60 s']
    """
    found = []
    for name, by_tables in measured.items():
        for (few, (before_s, *_)), (many, (after_s, *_)) in pairwise(sorted(by_tables.items())):
            allowed = many * math.log(many) / (few * math.log(few))
            if after_s > before_s * allowed * TOLERANCE:
                found.append(
                    f"{name}: {after_s:.1f} s of {many:,} tables are {after_s / before_s:.1f} "
                    f"times those of {few:,}; n log n is {allowed:.1f}"
                )
        for tables, (_, wall_s, limit_s) in by_tables.items():
            if wall_s > max(1.1 * limit_s, limit_s + 2):
                found.append(
                    f"{name}: {wall_s:.1f} s of {tables:,} tables with a limit of {limit_s:.0f} s"
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tables", default="1000,4000,10000")
    parser.add_argument("--commands", help="Comma-separated; all by default.")
    parser.add_argument("--most", type=float, default=1800.0, help="Seconds of one command.")
    asked = parser.parse_args()
    sizes = [int(text) for text in asked.tables.split(",")]
    wanted = asked.commands.split(",") if asked.commands else None
    measured: dict[str, dict[int, list[float]]] = {}
    for tables in sizes:
        with tempfile.TemporaryDirectory() as folder:
            for name, (arguments, limit_s) in commands(tables, Path(folder)).items():
                # The first makes the plan that others are about, the second one to compare with.
                needed = name in ("plan greedy-size", "plan greedy-lookup")
                if wanted is None or name in wanted or needed:
                    times = *seconds_of(arguments, asked.most), limit_s
                    measured.setdefault(name, {})[tables] = list(times)
                    print(f"{tables:6d} {name:<20} {times[0]:8.1f} s", file=sys.stderr)
    head = ["command", *(f"{tables:,} tables" for tables in sizes)]
    print(
        markdown(
            head,
            [[name, *(f"{of[n][0]:.1f} s" for n in sizes)] for name, of in measured.items()],
        )
    )
    results = {
        "topology": TOPOLOGY,
        "batch_size": BATCH_SIZE,
        "processor_wall_limit_s": {
            name: {n: [s if math.isfinite(s) else None for s in of[n]] for n in of}
            for name, of in measured.items()
        },
    }
    write_results("growth", ("numpy", "ortools"), results)
    if found := faults(measured):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
