"""The command and the packages where their users are: beside other modules, from a wheel.

A folder of a user's own holds `cli.py`, `solvers/` and `cost_models/`, and is first on the path of
imports. Who asks for the command gets ours, and who imports `placer` none of them. Where plans are
made, torch may be missing.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from docs_cases import REPOSITORY

from placer import Plan

_THEIRS = "raise SystemExit('a module of the user was imported: ' + __name__)\n"
_TRAINER = """
import sys
import placer
placer.Plan, placer.Profile, placer.Problem
from placer import apply_plan
assert not {"cli", "solvers", "cost_models", "ortools", "click"} & set(sys.modules)
"""


def users_folder(folder: Path) -> Path:
    """A folder whose modules have our names and may not be imported."""
    folder.mkdir()
    (folder / "cli.py").write_text(_THEIRS)
    for package in ("solvers", "cost_models"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(_THEIRS)
    return folder


def run(folder: Path, *command: str | Path, path: str = ".") -> str:
    """What a command prints in a folder that is first on the path of imports."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_command_is_ours_beside_modules_of_the_user(tmp_path: Path) -> None:
    folder = users_folder(tmp_path / "own")
    path = f".{os.pathsep}{REPOSITORY}"
    start = "from placer.__main__ import main; main()"
    shown = run(folder, sys.executable, "-c", start, "workloads", "--help", path=path)
    assert shown.startswith("Usage: placer workloads")


_WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"{name} is not to be imported", name=name)
sys.meta_path.insert(0, Without())
import placer
placer.Plan, placer.Profile, placer.Problem, placer.Topology, placer.Constraints
from cli import main
for line in sys.stdin:
    main(line.split(), standalone_mode=False)
"""
_PLANNING = """
--help
plan --workload random-3@7 --topology 2xt4 --hbm 1GiB --steps 1 -o plan.json
show plan.json
show plan.json --explain t1
show plan.json --memory
verify plan.json
compare --workload random-3@7 --topology 2xt4 --solvers greedy-size,greedy-cost
replan --from plan.json --workload random-3@7 --topology 1xt4 --time-limit 0.2 -o next.json
diff plan.json next.json
whatif --workload random-3@7 --topology 2xt4 --time-limit 0.2
"""


_LOG = """
profile log.tsv --log-format criteo --id-mapping hash --rows 9 -o profile
plan --profile profile --topology 2xt4 --solver greedy-cost -o own.json
"""


def run_without(
    libraries: Sequence[str], lines: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run commands in a process in which a finder refuses some libraries."""
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT, *libraries],
        cwd=folder,
        input=lines.strip(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_planning_imports_no_torch(tmp_path: Path) -> None:
    """Neither a help page, nor a log's profile, nor a plan needs it."""
    (tmp_path / "log.tsv").write_text("\t".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26]) + "\n")
    done = run_without(["torch"], _PLANNING + _LOG.strip(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plan.json is sound" in done.stdout
    assert (tmp_path / "own.json").exists()


@pytest.mark.slow
def test_planning_works_without_arrow_and_scipy(tmp_path: Path) -> None:
    """Branch and bound included, which gets its programs another way. Logs need Arrow."""
    missing = ["torch", "pyarrow", "scipy"]
    for name, libraries in (("with", []), ("without", missing)):
        line = f"plan --workload random-3@7 --topology 2xt4 --steps 9 -o {name}.json"
        done = run_without(libraries, line, tmp_path)
        assert done.returncode == 0, done.stderr
    both = [Plan.load(tmp_path / name) for name in ("with.json", "without.json")]
    assert both[0].shards == both[1].shards
    done = run_without(missing, _PLANNING, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plan.json is sound" in done.stdout
    (tmp_path / "log.csv").write_text("label,item\n1,2\n")
    refused = run_without(missing, "profile log.csv -o profile", tmp_path)
    assert (
        "this needs Apache Arrow, which is not installed here: pip install pyarrow"
        in refused.stderr
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources: building leaves files beside them."""
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("placer", "solvers", "cost_models"):
        shutil.copytree(REPOSITORY / name, sources / name, ignore=skipped)
    for name in ("cli.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources / name)
    run(
        folder,
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--disable-pip-version-check", "-w", folder, sources),
        path="",
    )
    [made] = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_says_that_all_packages_are_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        assert "Classifier: Typing :: Typed" in archive.read(metadata).decode()
    assert {"placer/py.typed", "solvers/py.typed", "cost_models/py.typed"} <= set(names)
    assert "placer/plan/plan.schema.json" in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "cli.py",
        "cost_models",
        "placer",
        "solvers",
    }


@pytest.mark.slow
def test_the_wheel_works_beside_modules_of_the_user(wheel: Path, tmp_path: Path) -> None:
    clean, folder = tmp_path / "venv", users_folder(tmp_path / "own")
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", clean, path="")
    run(
        tmp_path,
        *(sys.executable, "-m", "pip", "--python", clean / "bin" / "python", "install", "--quiet"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
        path="",
    )
    python, placer = clean / "bin" / "python", clean / "bin" / "placer"
    # What it depends on is here already; nothing is fetched.
    [packages] = (clean / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(folder, python, "-c", "import placer; print(placer.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    run(folder, python, "-c", _TRAINER)
    made = run(folder, placer, "plan", "--workload", "random-3@7", "--topology", "2xt4",
               "--solver", "greedy-cost", "-o", "plan.json")  # fmt: skip
    assert "3 tables on 2xt4" in made
    assert "plan.json is sound" in run(folder, python, "-m", "placer", "verify", "plan.json")
