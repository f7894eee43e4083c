"""What goes wrong in a command is one line, whatever it is; a terminal is only written to."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import click
import pytest
from cli_cases import Workbench, command_line, fail, files_of, invoke, run_process, succeed

from placer import report
from placer.errors import PlacerError
from placer.report.section import rows_to_csv
from placer.units import MOST_CHARACTERS, shortened

ESCAPE = "\x1b]0;owned\x07\u202e"


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(report, "workloads_report", fails)


def test_an_error_that_nobody_expected_is_one_line_with_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failing(monkeypatch, TypeError("unhashable\nlist" + "x" * 10_000))
    line = fail("workloads")
    assert line.startswith("placer: TypeError: unhashable list")
    assert len(line) < 1000
    (file,) = tmp_path.iterdir()
    assert str(file) in line
    assert "in fails" in file.read_text()


def test_the_traceback_is_raised_for_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, TypeError("unhashable"))
    monkeypatch.setenv("PLACER_DEBUG", "1")
    with pytest.raises(TypeError, match="unhashable"):
        invoke("workloads")


def test_who_lacks_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert "needs PyTorch" in fail("workloads")
    failing(monkeypatch, ModuleNotFoundError("No module named 'toad'", name="toad"))
    assert "did not expect" in fail("workloads")


@pytest.mark.parametrize(
    "error", [click.UsageError("not so"), click.Abort(), BrokenPipeError(errno.EPIPE, "Broken")]
)
def test_ends_that_are_clicks_own_pass(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failing(monkeypatch, error)
    result = invoke("workloads")
    assert "did not expect" not in result.output
    assert result.exit_code == (2 if isinstance(error, click.UsageError) else 1)


def test_a_message_is_of_a_readable_length_and_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, PlacerError(f"a{ESCAPE}b{'x' * 10_000}the fix"))
    line = fail("workloads")
    assert len(line) <= MOST_CHARACTERS + len("placer: ")
    assert line.startswith(r"placer: a\x1b]0;owned\x07\u202eb")
    assert line.endswith("the fix")
    assert shortened("one\ntwo") == "one two"


def test_cells_of_csv_are_no_formulas() -> None:
    rows = [{"name": "=cmd()", "change": -3, "other": "-3"}, {"name": "a=b", "change": 2.5}]
    assert rows_to_csv(rows) == "name,change,other\n'=cmd(),-3,'-3\na=b,2.5,\n"


_PRINTED = "from placer.report import failures as f\nwith f.one_line_errors():\n    print('a' * 99)"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command",
    [
        command_line("--help"),
        pytest.param([sys.executable, "-c", _PRINTED], marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_behind_stdout_is_one_line(command: list[str]) -> None:
    """Whether it is written at once, or when the command ends."""
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "placer: cannot write the result: No space left on device\n"


def test_a_command_may_have_no_stdout_and_no_stderr(tmp_path: Path) -> None:
    machine = tmp_path / "machine.yaml"
    words = shlex.join(command_line("topology", "1xt4", "-o", machine, "--format", "csv"))
    result = subprocess.run(f"{words} >&- 2>&-", shell=True)
    assert result.returncode == 0
    assert machine.exists()


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_a_terminal_may_lack_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run_process("topology", "2x8xh100")
    assert result.returncode == 0, result.stderr
    bad = os.fsdecode(b"no-\xff-such\xc3.json")
    result = run_process("show", tmp_path / bad)
    assert result.returncode == 1
    assert re.fullmatch(r"placer: there is no plan at .*\n", result.stderr)


def test_what_a_command_reads_is_not_overwritten(workbench: Workbench, tmp_path: Path) -> None:
    folder = copytree(workbench.folder, tmp_path / "copy")
    plan, log, profile = (folder / name for name in ("plan.json", "log.tsv", "profile"))
    machine = folder / "machine.yaml"
    before = files_of(folder)
    for line, file, words in (
        (["report", plan], plan, "it is what"),
        (["export", plan, "--to", "torchrec"], plan, "it is what"),
        (["export", "--plan", plan, "--to", "torchrec"], folder / "up" / ".." / plan.name, "it is"),
        (["plan", "--profile", profile], profile / "profile.json", f"it is in {profile}, which is"),
        (["plan", "--profile", profile, "--topology", machine], machine, "it is what"),
        (["plan", "--profile", profile, "--cost-model", f"calibrated:{plan}"], plan, "it is what"),
        (["merge", profile, profile], profile, "it is what"),
        (["profile", log, "--like", profile], profile, "it is what"),
    ):
        (folder / "up").mkdir(exist_ok=True)
        assert f"cannot write {file}: {words}" in fail(*line, "-o", file)
    (folder / "up").rmdir()
    assert f"cannot write {log}: it is what" in fail("profile", log, "--infer", log)
    training = ("train", plan, "--data", log, "--steps", "1")
    assert f"cannot write {log}: it is what" in fail(*training, "--metrics", log)
    assert files_of(folder) == before
    # A plan may follow the one that it is made from, and a folder of logs may have other files.
    few = ("--time-limit", "1", "--steps", "1")
    succeed("replan", plan, "--profile", profile, *few, "-o", plan)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "log.csv").write_text("user,item\n" + "1,2\n" * 9)
    for _ in range(2):
        succeed("profile", logs / "log.csv", "--infer", logs / "schema.toml")
