"""Processor time of `placer --help`, and of each command's, beside that of an empty program.

    python benchmarks/help_time.py

Each is run in turns and its least time is taken: what else the machine does only ever adds time.
Writes results/help-time-*.json.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from _machine import RESULTS, machine, slug, versions

TURNS = 5
ROOT = Path(__file__).resolve().parent.parent
_START = "import sys; sys.argv[0] = 'placer'; from cli import main; main()"


def processor_s(arguments: list[str]) -> float:
    """User and system time of a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(arguments, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from cli import main as commands  # noqa: TID251

    placer = [sys.executable, "-c", _START]
    programs = {"python -c pass": [sys.executable, "-c", "pass"]}
    programs["placer --help"] = [*placer, "--help"]
    for name in sorted(commands.commands):
        programs[f"placer {name} --help"] = [*placer, name, "--help"]
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(TURNS):
        for name, program in programs.items():
            seconds[name].append(processor_s(program))
    for name, times in seconds.items():
        print(f"{name:<26} {min(times):.3f} s")
    results = {"machine": machine(), "versions": versions("click"), "processor_s": seconds}
    path = RESULTS / f"help-time-{slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
