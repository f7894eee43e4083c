"""The command and the package as processes: exit codes, full disks, what is imported."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_cases import Workbench, command_line, files_of, run_process, succeed
from fast_and_full import mostly_slow

import placer
from placer.files.atomic import replacing
from placer.interrupt import deferred_interrupt, end_by_signals
from placer.plan.verify import violations
from placer.report.failures import one_line_errors

HEAVY = (
    *("solvers", "cost_models", "ortools", "click", "torch", "matplotlib", "numba", "cli"),
    *("torchrec", "scipy", "placer.measurement"),
)


@pytest.mark.slow
def test_results_can_be_piped_away(workbench: Workbench) -> None:
    """A reader that stops early, as `head` does, is no error worth a traceback."""
    process = subprocess.Popen(
        command_line("show", workbench.plan, "--format", "json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    notes = process.stderr.read()
    process.wait(timeout=60)
    process.stderr.close()
    assert "Traceback" not in notes


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_plan(workbench: Workbench, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    command = ("plan", *workbench.problem(), "--solver", "greedy-cost", "-o", file)
    check_full_disk(run_process(*command, file_limit_bytes=100), tmp_path)
    assert not file.exists()
    assert not hidden_files(tmp_path)
    succeed(*command)
    made = placer.Plan.load(file)
    check_full_disk(run_process(*command, "--hbm", "1MiB", file_limit_bytes=100), tmp_path)
    assert placer.Plan.load(file).shards == made.shards
    assert not hidden_files(tmp_path)


def check_full_disk(result: subprocess.CompletedProcess[str], named: Path) -> None:
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("placer: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "cannot write" in lines[0]
    assert str(named) in lines[0]
    assert "File too large" in lines[0]


def hidden_files(folder: Path) -> list[str]:
    return [name for name in files_of(folder) if Path(name).name.startswith(".")]


@pytest.mark.parametrize(
    ("lines", "needed"),
    [
        ("import placer", []),
        ("import placer.plan.verify", []),
        # Of the solvers, `auto` alone needs the compiler.
        ("import solvers; solvers.solver('greedy-cost')", ["solvers", "cost_models"]),
        ("import cost_models; cost_models.cost_model('torchrec')", ["cost_models"]),
        ("import placer.adapters.torchrec, placer.adapters.hugectr", []),
        pytest.param(
            "from placer.executor import PlacedEmbeddings; from placer.training import train",
            ["torch"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_runtime_alone_is_imported(lines: str, needed: list[str]) -> None:
    code = f"import sys; {lines}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == needed


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.parametrize(
    "number", mostly_slow([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIGINT)
)
def test_a_signal_ends_a_search_with_the_best_plan_so_far(tmp_path: Path, number: int) -> None:
    file = tmp_path / "plan.json"
    process = subprocess.Popen(
        command_line(
            "plan", "--workload", "random-30@7", "--topology", "4xt4", "--hbm", "1GiB",
            "--solver", "auto", "--gap", "0", "--time-limit", "600", "-o", file,
            "--format", "json",
        ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not handles(process, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    output, notes = process.communicate(timeout=60)
    assert process.returncode == 0, notes
    shown = json.loads(output)
    assert (shown["status"], shown["limit"]) == ("feasible", "stop")
    assert notes.splitlines()[0] == "stopped: the best plan so far"
    plan = placer.Plan.load(file)
    assert violations(plan) == []
    assert plan.solver.step_time_s == shown["step_time_s"]


def handles(process: "subprocess.Popen[str]", number: int) -> bool:
    """Whether a process handles a signal by itself; of SIGTERM only while it searches."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "\nAborted!\n"),
        (signal.SIGTERM, "placer: Terminated\n"),
        pytest.param(signal.SIGHUP, "placer: Hangup\n", marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_nothing_is_trained_ends_the_command(
    tmp_path: Path, number: int, line: str
) -> None:
    fifo = tmp_path / "log.tsv"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [sys.executable, "-m", "placer", "profile", fifo, "-o", tmp_path / "profile"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # What runs in a shell's background ignores Ctrl-C, and so does what it starts.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    # Opening a pipe waits for its reader, so that the command is at its log from here on.
    with fifo.open("w"):
        for _ in range(6):
            # A signal just before it waits for bytes would be seen after the wait.
            time.sleep(0.5)
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, notes = process.communicate(timeout=10)
                break
    assert (process.returncode, output, notes) == (128 + number, "", line)
    assert not (tmp_path / "profile").exists()


def test_a_command_that_is_ended_removes_its_temporary_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        with one_line_errors(), replacing(tmp_path / "plan.json") as temporary:
            assert temporary.exists()
            os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        end_by_signals()
        with pytest.raises(SystemExit, match="143"):
            write()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the next one ends at once"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == "placer: Terminated\n"
    assert files_of(tmp_path) == {}


def test_a_warning_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    lines = "import sys, warnings; sys.argv[1:] = ['--version']; import placer.__main__ as command"
    told = "sys.exit = lambda code: warnings.warn('rows are moved'); command.main()"
    subprocess.run([sys.executable, "-c", f"{lines}; {told}"], check=True)
    assert capfd.readouterr().err == "warning: rows are moved\n"


def test_signals_of_other_programs_and_of_ranks_are_not_taken() -> None:
    code = "import signal, sys, placer, placer.__main__; sys.argv[1:] = ['--version']\n{}\n"
    code += "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL"
    calls = "try:\n    placer.__main__.main()\nexcept SystemExit:\n    pass"
    for lines, environment in (("", {}), (calls, {"WORLD_SIZE": "2"})):
        subprocess.run(
            [sys.executable, "-c", code.format(lines)],
            check=True,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
        )


_INTERRUPTED_IMPORT = """
import sys
class Interrupts:
    def find_spec(name, path=None, target=None):
        if name == "solvers":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts)
import placer.__main__
sys.meta_path.sort(key=lambda finder: finder is not Interrupts)
placer.__main__.main()
"""


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (130, "\nAborted!\n")


def test_a_closed_terminal_does_not_end_what_nohup_runs() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with deferred_interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)
