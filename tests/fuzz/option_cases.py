"""Lines of every command with one value changed: a format whose file is a command line.

The options are click's own, so that a new one is tried without a change here.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
from click.testing import CliRunner
from fuzz_cases import _log, _plan, _saved
from value_changes import NUMBERS, TEXTS

from cli import main
from placer.data import open_log
from placer.errors import PlacerError
from placer.profile.count import profile_log

LINES = tuple(
    line.split()
    for line in (
        "profile log.tsv -o made",
        "profile log.tsv --sample 0.9 --id-mapping vocabulary --dim 4 -o made --format json",
        "profile log.csv --infer schema.toml",
        "profile log.tsv --like profile -o made",
        "merge profile -o made",
        "workloads mlperf-dcnv2",
        "topology 2x2xh100 --hbm 8GiB -o machine.yaml",
        "plan --profile profile --topology 1xh100 --solver greedy-size --batch-size 64 -o a.json",
        "plan --workload random-3@1 --topology 2xh100 --hbm 1GiB --solver greedy-size -o made.json",
        "compare --workload random-3@1 --topology 2xh100 --solvers greedy-size,greedy-cost",
        "fleet --workload random-3@1 --topology 2xh100 --solver greedy-size",
        "show plan.json --top 2",
        "show profile",
        "report log-plan.json --profile profile -o made.html --steps 0",
        "verify plan.json",
        "diff plan.json plan.json",
        "replan --from plan.json --workload random-3@1 --topology 1xh100 --steps 0"
        " --solver greedy-cost -o made.json",
        "whatif --workload random-3@1 --topology 2xh100 --hbm 1GiB --solver greedy-size",
        "train --plan log-plan.json --data log.tsv --profile profile --batch-size 10 --steps 1",
        "simulate log-plan.json --data log.tsv --profile profile --batch-size 10 --batches 1",
        "export plan.json --to torchrec --staged-as uva -o made.json",
        "export plan.json --to safetensors --checkpoint step-000000000003 -o made.safetensors",
        "grow plan.json plan.json --checkpoint step-000000000003 -o made",
        "sweep --vary pooling=1,2 --platform cpu",
    )
)
"""Sound command lines, all of them on what `write_inputs` writes."""

_WORK = {
    "steps", "epochs", "time_limit", "batches", "threads", "timeout", "hbm_steps",
    "windows", "scale", "batch_size", "top", "trace_steps",
}  # fmt: skip
"""Parameters for which a large number rightly means much work."""

_OUTPUTS = {"output", "infer", "plot", "trace", "checkpoints", "schema"}
"""Parameters that name what is written: nothing is to be written outside the folder."""

_STEP = "step-000000000003"
_PATHS = ("absent", "profile", "plan.json", "log.tsv", "x" * 5000, "a/" * 3000, _STEP, ".")


def write_inputs(folder: Path) -> None:
    """Write all that lines read, and a line."""
    _log(folder)
    profile = profile_log(open_log(folder / "log.tsv", id_mapping="vocabulary"), dim=4)
    profile.save(folder / "profile")
    _plan(folder)
    _saved(folder)
    (folder / "log.csv").write_text("label,item\n" + "1,7\n0,8\n" * 9)
    with _inside(folder):
        arguments = "--topology 1xh100 --solver greedy-cost --batch-size 10 -o log-plan.json"
        result = CliRunner().invoke(main, ["plan", "--profile", "profile", *arguments.split()])
    assert result.exit_code == 0, result.output
    write_line(folder, LINES[0])


def write_line(folder: Path, line: list[str]) -> None:
    """Write a command line, a word a line."""
    # Lines end at line feeds only, so that words may hold all other characters.
    text = "\n".join(word.replace("\n", "\u2424") for word in line)
    (folder / "line.txt").write_bytes(text.encode(errors="surrogateescape"))


def read_line(path: Path) -> None:
    """Run a command line in its folder; what it refuses is an error of placer's."""
    words = path.read_bytes().decode(errors="surrogateescape").split("\n")
    line = [word.replace("\u2424", "\n") for word in words]
    with _inside(path.parent):
        result = CliRunner().invoke(main, line)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if any(mark in result.stderr for mark in "\x1b\r\0"):
        raise ValueError(f"a message commands the terminal: {result.stderr!r}")
    if result.exit_code not in (0, 3, 4):
        raise PlacerError(result.stderr.strip() or result.stdout.strip())


def change_line(folder: Path, choose: random.Random) -> None:
    """Take a sound line, and change, add, double or drop one of its options or arguments."""
    command, *words = choose.choice(LINES)
    known = [one for one in main.commands[command].params if isinstance(one, click.Option)]
    flags = {flag: one for one in known for flag in (*one.opts, *one.secondary_opts)}
    at = choose.randrange(len(words))
    kind = choose.random()
    if kind < 0.45:
        flag = choose.choice(list(flags))
        words += [flag] if flags[flag].is_flag else [flag, _value(flags[flag], choose)]
    elif kind < 0.9:
        if words[at] in flags and at + 1 < len(words):
            at += 1
        words[at] = _value(flags.get(words[at - 1]), choose)
    elif kind < 0.95:
        words.insert(at, words[at])
    else:
        del words[at]
    write_line(folder, [command, *words])


def _value(option: click.Option | None, choose: random.Random) -> str:
    """Any value, as far as the option does not do harm or honest work with it."""
    name = "" if option is None else str(option.name)
    numbers = [str(n) for n in NUMBERS if name not in _WORK or n < 2]
    spelt = [f"{choose.choice(numbers)}{unit}" for unit in ("GiB", "min", "%", "e400", ",1")]
    drawn = "".join(chr(choose.randrange(1, 0x300)) for _ in range(choose.randrange(1, 12)))
    # A process is given no arguments with a null character, nor what is no text at all.
    texts = [text for text in (*TEXTS, drawn) if not set(text) & {"\0", "\ud800"}]
    if name in _OUTPUTS or option is None:
        texts = [text for text in texts if "/" not in text and ".." not in text]
        return choose.choice((*texts, *_PATHS))
    hostile = [*numbers, *texts, "9" * 400, "inf", "-inf", *_PATHS]
    return choose.choice(hostile if name in _WORK else hostile + spelt)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In a folder, and errors that nobody expected raised."""
    with contextlib.chdir(folder), mock.patch.dict(os.environ, {"PLACER_DEBUG": "1"}):
        yield
