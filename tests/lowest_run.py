"""Plan with the lowest version of each dependency that pyproject.toml allows, without torch.

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
    f"plan {PROBLEM} --no-cache -o plan.json",
    f"plan {PROBLEM} --no-cache --solver ilp -o ilp.json",
    f"plan {PROBLEM} --no-cache --solver lns -o lns.json",
    f"plan {PROBLEM} --no-cache --solver flow -o flow.json",
    "show plan.json --memory",
    "verify plan.json",
    "diff plan.json ilp.json",
    f"compare {PROBLEM} --solvers greedy-size,greedy-cost",
    f"whatif {PROBLEM}",
    f"replan --from plan.json {PROBLEM} -o next.json",
    "sweep --vary dense=64 --format json",
)
"""Commands that need no torch."""


def lowest_versions() -> list[str]:
    """What pip is asked for: ``numpy==2.0.*`` where pyproject.toml says ``numpy>=2.0``.

    >>> lowest_versions()[0]
    'click==8.1.*'
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", one) for one in project["dependencies"]]
    assert all(found), "a dependency has no lower bound"
    pins = [(match[1], match[2]) for match in found if match is not None]
    return [f"{name}=={version}.*" for name, version in pins if name != "torch"]


def main() -> None:
    """Install in a folder of its own, and run all lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *lowest_versions()], check=True)
        choose = random.Random(0)
        rows = [f"{n % 2},{choose.randrange(999)},{choose.randrange(5000)}" for n in range(5000)]
        (folder / "log.csv").write_text("\n".join(["label,user,item", *rows]) + "\n")
        for line in LINES:
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
    print("all of them run with", ", ".join(lowest_versions()))


if __name__ == "__main__":
    main()
