"""Plan with the lowest version of each dependency that pyproject.toml allows, without torch.

First with none of the extras, then with those that planning and its reports have.

`make lowest` runs it: it needs an index of packages, and takes some minutes.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROBLEM = "--profile profile --topology 2xh100 --hbm 64KiB --batch-size 64 --time-limit 1s"
LINES = (
    "profile log.csv --label label --dim 8 -o profile",
    f"plan {PROBLEM} -o plan.json",
    f"plan {PROBLEM} --solver ilp -o ilp.json",
    f"plan {PROBLEM} --solver dp -o dp.json",
    "show plan.json --memory",
    "verify plan.json",
    "diff plan.json ilp.json",
    f"compare {PROBLEM} --solvers greedy-size,greedy-cost",
    f"whatif {PROBLEM}",
    f"replan --from plan.json {PROBLEM} -o next.json",
    "sweep --vary dense=64 --format json",
    "fleet --profile profile --batch-size 64 --time-limit 1s",
)
"""Commands that need no torch."""
EXTRAS = ("cpu", "report")
LINES_OF_EXTRAS = (
    f"plan {PROBLEM} -o plan.json",
    # Compiled code is for searches of ten seconds and more.
    "plan --workload recshard-rm1 --topology 2x8xa100-40 --time-limit 12s -o rm1.json",
    "report plan.json -o report.html",
    f"compare {PROBLEM} --solvers greedy-size,greedy-cost --plot picture.png",
)
"""Commands that do more, or anything at all, with the extras."""


def lowest_versions(*extras: str) -> list[str]:
    """What pip is asked for: ``numpy==2.0.*`` where pyproject.toml says ``numpy>=2.0``.

    Of the distribution itself, or of some extras.

    >>> lowest_versions()[0]
    'click==8.1.*'
    >>> lowest_versions("cpu")
    ['numba==0.60.*']
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    bounds = [one for extra in extras for one in optional[extra]] or project["dependencies"]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", one) for one in bounds]
    assert all(found), "a dependency has no lower bound"
    pins = [(match[1], match[2]) for match in found if match is not None]
    return [f"{name}=={version}.*" for name, version in pins if name != "torch"]


def main() -> None:
    """Install in a folder of its own, and run all lines."""
    parts = (lowest_versions(), LINES), (lowest_versions(*EXTRAS), LINES_OF_EXTRAS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        choose = random.Random(0)
        rows = [f"{n % 2},{choose.randrange(999)},{choose.randrange(5000)}" for n in range(5000)]
        (folder / "log.csv").write_text("\n".join(["label,user,item", *rows]) + "\n")
        python = folder / "venv" / "bin" / "python"
        for versions, lines in parts:
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*install, *versions], check=True)
            for line in lines:
                run(line, python, folder)
            print("all of them run with", ", ".join(versions), flush=True)


def run(line: str, python: Path, folder: Path) -> None:
    """Run a command of ours in a folder, and end where it fails."""
    print(f"$ placer {line}", flush=True)
    ran = subprocess.run(
        [python, "-m", "placer", *line.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        sys.exit(ran.stdout + ran.stderr)


if __name__ == "__main__":
    main()
