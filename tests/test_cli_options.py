"""What holds of every option of every command: variables, keys of files, outputs, headings."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from cli_cases import COMMANDS, fail, invoke, misuse, succeed

from cli import main
from placer.click_options import CommandOption
from placer.click_types import OutputPath

OPTIONS = [
    (name, option)
    for name in COMMANDS
    for option in main.commands[name].params
    if isinstance(option, CommandOption) and option.name != "print_config"
]


def mostly_slow(cases: list[tuple[str, click.Option]]) -> list[object]:
    """All cases slow but for the first option of each command and the first of each type."""
    seen: set[object] = set()
    found = []
    for command, option in cases:
        kind = (type(option.type), option.is_flag, option.multiple, bool(option.secondary_opts))
        new = {command, kind} - seen
        seen |= new
        found.append(pytest.param(command, option, marks=() if new else pytest.mark.slow))
    return found


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHECKED = {
    **dict.fromkeys(("hbm", "dram", "ssd", "hbm_steps"), "7GiB"),
    "pooling": "mean",
    "topology": "8xh100",
    "dense": "none",
    "feature_table": "a=b",
    "id_mapping": "hash",
    "compared": "ilp,dp",
    "solver": "ilp",
}
"""Values of options whose texts are checked, by name."""


def flag_of(option: click.Option) -> str:
    """The last long flag."""
    return next(flag for flag in reversed(option.opts) if flag.startswith("--"))


def example(option: click.Option) -> str:
    """A value that an option takes."""
    kind = option.type
    if option.is_flag:
        return "true"
    if isinstance(kind, click.Choice):
        return str(kind.choices[-1])
    if isinstance(kind, OutputPath):
        return "new.png"
    if isinstance(kind, click.types.FloatRange | click.types.IntRange | click.types.FloatParamType):
        return "1000" if isinstance(kind, click.types.IntRange) else "0.5"
    known = {"solver": "ilp", "cost model": "torchrec", "backend": "torch", "placement": "cpu",
             "type": "int8", "seconds": "3s"}  # fmt: skip
    return CHECKED.get(str(option.name)) or known.get(kind.name, "7")


def shown(config: str, flag: str) -> str:
    """The line of an option in what `--print-config` prints."""
    [line] = [one for one in config.splitlines() if one.removeprefix("# ").startswith(f"{flag} =")]
    return line


@pytest.mark.parametrize(
    ("command", "option"), mostly_slow(OPTIONS), ids=lambda one: getattr(one, "name", one)
)
def test_a_variable_and_a_key_do_what_the_flag_does(
    command: str, option: click.Option, monkeypatch: pytest.MonkeyPatch, in_folder: Path
) -> None:
    flag, value = flag_of(option), example(option)
    given = [flag] if option.is_flag else [flag, value]
    by_flag = succeed(command, *given, "--print-config").stdout
    assert not shown(by_flag, flag[2:]).startswith("#")
    variable = f"PLACER_{command}_{flag[2:]}".replace("-", "_").upper()
    monkeypatch.setenv(variable, value)
    assert succeed(command, "--print-config").stdout == by_flag
    monkeypatch.setenv(variable, "")
    quoted = value if option.is_flag else f'"{value}"'
    (in_folder / "placer.toml").write_text(f"[{command}]\n{flag[2:]} = {quoted}\n")
    assert succeed(command, "--print-config").stdout == by_flag
    # What is printed gives the same again.
    (in_folder / "placer.toml").write_text(by_flag)
    assert succeed(command, "--print-config").stdout == by_flag


@pytest.mark.parametrize(
    ("command", "option"),
    mostly_slow(
        [
            (command, option)
            for command, option in OPTIONS
            if option.is_flag
            or isinstance(option.type, click.Choice | click.types.IntRange | click.types.FloatRange)
        ]
    ),
    ids=lambda one: getattr(one, "name", one),
)
def test_a_variable_and_a_key_are_checked_as_the_flag_is(
    command: str, option: click.Option, monkeypatch: pytest.MonkeyPatch, in_folder: Path
) -> None:
    flag = flag_of(option)
    variable = f"PLACER_{command}_{flag[2:]}".replace("-", "_").upper()
    monkeypatch.setenv(variable, "maybe")
    assert f"'{flag}' of the environment: " in misuse(command, "--print-config")
    monkeypatch.delenv(variable)
    (in_folder / "placer.toml").write_text(f'[{command}]\n{flag[2:]} = "maybe"\n')
    assert f"'{flag}' of placer.toml: " in misuse(command, "--print-config")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PLACER_PLAN_COST_MODLE", "PLACER_PLAN_COST_MODEL"),
        ("PLACER_PLAN_COMPARE_OUTPUT", ""),
        ("PLACER_SHOW_HBM", ""),
    ],
)
def test_an_unknown_variable_is_an_error(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_PLAN_TOPOLOGY", "8xh100")  # Of another command: it is right.
    succeed("topology", "8xh100")
    monkeypatch.setenv(name, "1")
    result = invoke("topology", "8xh100")
    assert result.exit_code == 2
    assert name in result.stderr
    assert meant in result.stderr
    assert "Usage" in succeed("topology", "--help").stdout


def test_values_between_blanks_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACER_PROFILE_IGNORE", shlex.join(["a b", "c"]))
    assert 'ignore = ["a b", "c"]' in succeed("profile", "--print-config").stdout


OUTPUTS = [(name, option) for name, option in OPTIONS if isinstance(option.type, OutputPath)]


def needed(command: str, but: click.Option) -> Iterator[str]:
    """Values for what a command needs besides an option."""
    for one in main.commands[command].params:
        if isinstance(one, click.Argument):
            if one.required or one.metavar == "PLAN":
                yield "nowhere"
        elif one.required and one is not but:
            yield from (flag_of(one), example(one))  # type: ignore[arg-type]


def test_every_command_that_writes_has_an_output() -> None:
    writing = {command for command, _ in OUTPUTS}
    assert set(COMMANDS) - writing == {
        "diff", "estimate-memory", "pilot", "show", "verify", "workloads", "simulate"
    }  # fmt: skip


@pytest.mark.parametrize(("command", "option"), OUTPUTS, ids=lambda one: getattr(one, "name", one))
def test_an_output_is_checked_before_the_work(
    command: str, option: click.Option, in_folder: Path
) -> None:
    """Before the work: the inputs are nowhere, and nobody says so."""
    (in_folder / "file.png").write_text("mine")
    (in_folder / "folder.png").mkdir()
    kind: Any = option.type
    wrong = "file.png" if "folder" in (kind._what, option.name) else "folder.png"
    ending = (kind._endings or ("",))[0]
    places = ["file.png/inside" + ending]
    if not kind._endings or wrong.endswith(kind._endings):
        places.append(wrong)
    if not kind._makes_folders:
        places.append("new/folder/x" + ending)
    for place in places:
        line = fail(command, *needed(command, option), flag_of(option), place)
        assert f"cannot write {place}" in line
        if place.startswith("new"):
            assert "there is no folder" in line
            assert "mkdir -p" in line
    assert sorted(one.name for one in in_folder.iterdir()) == ["file.png", "folder.png"]


@pytest.mark.parametrize("command", COMMANDS)
def test_notes_are_left_out_before_and_after_a_command(command: str) -> None:
    assert "quiet = true" in succeed(command, "--print-config", "-q").stdout
    assert {"-q", "-v"} <= {flag for one in main.commands[command].params for flag in one.opts}


def test_a_command_says_how_long_it_took_wherever_it_is_asked() -> None:
    for words in (("-v", "topology", "8xh100"), ("topology", "8xh100", "-v")):
        assert " s, placer " in succeed(*words).stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("diff", "grow")])
def test_a_plan_may_stand_with_its_flag_or_without(command: str) -> None:
    if not any("--plan" in one.opts for one in main.commands[command].params):
        return
    by_place = succeed(command, "a.json", "--print-config").stdout
    assert 'plan = "a.json"' in by_place
    assert succeed(command, "--plan", "a.json", "--print-config").stdout == by_place
    assert "given twice" in fail_usage(command, "a.json", "--plan", "b.json")


def fail_usage(*words: str) -> str:
    """What a command that is used wrongly says."""
    required = needed(words[0], main.commands[words[0]].params[0])  # type: ignore[arg-type]
    more = [word for word in required if word != "nowhere"]
    result = invoke(*words, *more)
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("plan", "--solver", "greedy-sise"), "greedy-size"),
        (("compare", "--solvers", "auto,ipl"), "ilp"),
        (("plan", "--cost-model", "rooflin"), "roofline"),
        (("train", "--backend", "numbo"), "numba"),
        (("calibrate", "--backend", "numbo"), "numba"),
        (("profile", "--log-format", "parket"), "parquet"),
        (("plan", "--format", "jsn"), "json"),
        (("sweep", "--placements", "gpus"), "gpu"),
        (("workloads", "mlperf-dcnv"), "mlperf-dcnv2"),
        (("topology", "8xh10"), "h100"),
        (("topology", "big-basn"), "big-basin"),
    ],
)
def test_a_wrong_value_says_which_was_meant(words: tuple[str, ...], meant: str) -> None:
    result = invoke(*words)
    assert result.exit_code in (1, 2)
    assert f"did you mean {meant}?" in result.stderr


def test_help_says_all_in_sentences() -> None:
    for command, option in OPTIONS:
        assert option.help, (command, option.name)
        assert not option.help.startswith("Of "), (command, option.name)
        assert option.heading
