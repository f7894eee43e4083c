"""Placement solvers side by side: quality, time and memory, in five parts.

    python benchmarks/planners.py [--quick] [--part own|scale|drawn|torchrec]
                                  [--only NAME,...] [--solvers NAME,...] [--runs 3]

own         every solver on published and drawn models (cost model `roofline`): MLPerf
            DLRM-DCNv2 on 8 H100 with 4 to 80 GiB each, HugeCTR's and NVIDIA's synthetic models,
            RecShard's RM1 to RM3 on 16 GPUs as published and at 2x oversubscription, and up to
            10,000 tables on 1,024 GPUs
scale       time to solve as tables × GPUs grow tenfold together, with a plot
drawn       forty problems of all kinds (--tasks): whether any strategy is ahead of `auto`
torchrec    TorchRec's planner against ours, under TorchRec's own perf model

Each solver runs in a process of its own, so that its peak memory and its time are its own; on
the tasks of `drawn`, one process runs all solvers of a task. The plans come back as files, and
are read, verified and evaluated here: a plan that is unsound or not as fast as its solver says
counts as broken. Gaps are to the solver's own bound; "to best" is the gap to
the tightest bound that any solver proved for the same search space. A solver gets 90% of the
seconds of the target; one that is still running after three times its limit is killed, and left
out of problems with more tables × GPUs. `auto`, and whoever ends within 5 seconds, runs
`--runs` times with a seed each; medians count.

Every target is printed with yes or NO and the figures it was held against. Results go to
benchmarks/results/ with the machine and the raw numbers; --quick runs a few small problems once
with 5 seconds each and writes nothing unless told to.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import _own
import _scale
import _tasks
import _torchrec
from _machine import RESULTS, machine, slug, versions
from _problems import OWN, TORCHREC
from _runs import Claim

from placer.files import write_text
from solvers import SOLVERS

PARTS = ("own", "scale", "drawn", "torchrec")
QUICK_LIMIT_S = 5.0
PACKAGES = ("embedding-placer", "ortools", "numpy", "scipy", "torch", "torchrec", "fbgemm-gpu-cpu")


def run_part(part: str, options: argparse.Namespace, solvers: Sequence[str]) -> bool:
    """Run a part, print what was claimed, write its file; whether all targets were met."""
    print(f"\n== {part} ==", flush=True)
    started = time.perf_counter()
    folder = options.output or (None if options.quick else RESULTS)
    file = None if folder is None else folder / f"planners-{slug()}-{part}.json"
    before = machine()

    def save(records: list[dict[str, object]], claims: Sequence[Claim] = ()) -> None:
        if file is None:
            return
        report = {
            "benchmark": f"planners: {part}",
            "machine": before,
            "load_average_after": os.getloadavg(),
            "versions": versions(*PACKAGES),
            "options": {
                "quick": options.quick,
                "runs": options.runs,
                "time_limit_s": options.time_limit,
                "threads": options.threads,
                "solvers": list(solvers),
            },
            "seconds": time.perf_counter() - started,
            "claims": [
                {"claim": claim.text, "holds": claim.holds, "figures": claim.figures}
                for claim in claims
            ],
            "problems": records,
        }
        write_text(file, json.dumps(report, indent=1) + "\n")

    if part == "own":
        records, claims = _own.run(options, solvers, save)
    elif part == "scale":
        plot = None if file is None else file.with_suffix(".png")
        records, claims = _scale.run(options, solvers, save, plot)
    elif part == "drawn":
        records, claims = _tasks.run(options, solvers, save)
    else:
        records, claims = _torchrec.run(options, solvers, save)
    save(records, claims)
    if claims:
        print("\ntargets:")
    for claim in claims:
        print(claim.show())
    print(f"\n{part} took {time.perf_counter() - started:.0f} s")
    if file is not None:
        print(f"raw numbers: {file}")
    return all(claim.holds is not False for claim in claims)


def main() -> None:
    """Parse the command line and run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small problems, 5 s, no file")
    parser.add_argument("--part", choices=PARTS, help="one part (all)")
    parser.add_argument("--only", help="problems of own, scale and torchrec, comma-separated")
    parser.add_argument("--solvers", help="comma-separated (all that are registered)")
    parser.add_argument("--runs", type=int, help="repetitions, of which the median counts (3)")
    parser.add_argument("--tasks", type=int, help="of drawn (40)")
    parser.add_argument("--time-limit", type=float, help="seconds, instead of each target's own")
    parser.add_argument("--threads", type=int, default=0, help="of backends; 0: all cores")
    parser.add_argument("--output", type=Path, help="folder that results go to")
    options = parser.parse_args()
    if options.quick:
        options.time_limit = options.time_limit or QUICK_LIMIT_S
    options.runs = options.runs or (1 if options.quick else 3)
    options.only = _names(
        parser, options.only, [c.name for c in (*OWN, *_scale.cases(), *TORCHREC)]
    )
    solvers = _names(parser, options.solvers, list(SOLVERS))
    chosen = [name for name in SOLVERS if solvers is None or name in solvers]
    met = [run_part(part, options, chosen) for part in ([options.part] if options.part else PARTS)]
    raise SystemExit(0 if all(met) else 1)


def _names(
    parser: argparse.ArgumentParser, given: str | None, known: Sequence[str]
) -> frozenset[str] | None:
    """Names of a comma-separated list; an unknown one ends the program with the known ones."""
    if given is None:
        return None
    names = frozenset(name.strip() for name in given.split(","))
    if names - set(known):
        parser.error(f"unknown: {', '.join(sorted(names - set(known)))}; use {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
