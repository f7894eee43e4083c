"""The command line as tests call it: in this process, or as a real one."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from cli import main
from placer import Profile
from placer.workloads.synthetic_log import write_synthetic_log

COMMANDS = sorted(main.commands)

# A console script finds `cli` where the project is installed, whatever the working folder is.
_START = """
import resource, sys
limit_bytes = int(sys.argv.pop(1))
if limit_bytes:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
sys.path.remove("")
sys.argv[0] = "placer"
from cli import main
main()
"""


@dataclass(frozen=True)
class Workbench:
    """A small generated log in both formats, its profile and a plan that splits tables."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log.tsv"

    @property
    def parquet(self) -> Path:
        return self.folder / "log.parquet"

    @property
    def profile(self) -> Path:
        return self.folder / "profile"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    def problem(self) -> tuple[str | Path, ...]:
        """Options of `placer plan` and `placer compare`."""
        return ("--profile", self.profile, *self.machine())

    def machine(self) -> tuple[str | Path, ...]:
        """Two GPUs whose HBM does not hold the tables."""
        return (
            "--topology", self.folder / "machine.yaml", "--hbm", "100KiB", "--batch-size", "8",
        )  # fmt: skip

    def training(self) -> tuple[str | Path, ...]:
        """`placer train` with the plan on the log; batches are larger than it was made for."""
        return ("train", "--plan", self.plan, "--data", self.log, "--batch-size", "64")


# Launches cost little and the link is slow, so that a good plan of small tables splits them.
_MACHINE = """
name: two small GPUs
hosts:
- {id: "host:0", memory: 1GiB, dram_bandwidth: 50GB/s}
gpus:
- {id: "gpu:[0-1]", host: "host:0", memory: 1GiB, hbm_bandwidth: 200GB/s, launch_s: 1.0e-8}
links:
- {a: "gpu:[0-1]", b: "host:0", kind: pcie, bandwidth: 0.1GB/s}
- {a: "gpu:[0-1]", b: "host:0", kind: nvlink, bandwidth: 10GB/s}
"""


def make_workbench(folder: Path) -> Workbench:
    made = Workbench(folder)
    (folder / "machine.yaml").write_text(_MACHINE)
    write_synthetic_log(made.log, samples=1500, scale=0.001)
    write_synthetic_log(made.parquet, samples=1500, scale=0.001, format="parquet")
    succeed("profile", made.log, "--dim", "8", "-o", made.profile)
    succeed("plan", *made.problem(), "--solver", "greedy-cost", "-o", made.plan)
    return made


def make_few_tables(folder: Path, of: Workbench) -> Workbench:
    """Some tables of another one alone, for what needs no log: plans take a third of the time."""
    made, profile = Workbench(folder), Profile.load(of.profile)
    (folder / "machine.yaml").write_text(_MACHINE)
    tables = tuple(profile[f"C{number}"] for number in (1, 2, 3, 4, 12, 16, 21))
    replace(profile, tables=tables).save(made.profile)
    succeed("plan", *made.problem(), "--solver", "greedy-cost", "-o", made.plan)
    return made


def invoke(*arguments: str | Path) -> Result:
    """Run a command in this process."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeed(*arguments: str | Path) -> Result:
    """Run a command that has to end well."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def json_of(*arguments: str | Path) -> Any:
    """What a command that has to end well prints as JSON."""
    return json.loads(succeed(*arguments, "--format", "json").stdout)


def fail(*arguments: str | Path, exit_code: int = 1) -> str:
    """Run a command that has to fail with one line on stderr and nothing on stdout."""
    result = invoke(*arguments)
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def misuse(*arguments: str | Path) -> str:
    """Run a command with a wrong option: what is said of it, without how the command is used."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    usage, _, said = result.stderr.partition("\nError: ")
    assert usage.startswith("Usage: ")
    assert said.count("\n") == 1
    return said.rstrip("\n")


def command_line(*arguments: str | Path, file_limit_bytes: int = 0) -> list[str]:
    """`placer` as a process of its own, which may write files of so many bytes only."""
    texts = [str(argument) for argument in arguments]
    return [sys.executable, "-c", _START, str(file_limit_bytes), *texts]


def run_process(
    *arguments: str | Path, cwd: Path | None = None, file_limit_bytes: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command as a process and wait for it."""
    return subprocess.run(
        command_line(*arguments, file_limit_bytes=file_limit_bytes),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
