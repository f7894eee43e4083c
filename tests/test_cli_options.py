"""What holds of every option of every command: values, outputs, headings; notes; completion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from cli_cases import COMMANDS, fail, invoke, misuse, succeed
from click.shell_completion import ShellComplete

from cli import main
from placer.click_options import HeadedOption
from placer.click_types import OutputPath

OPTIONS = [
    (name, option)
    for name in COMMANDS
    for option in main.commands[name].params
    if isinstance(option, HeadedOption)
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


@pytest.mark.parametrize(
    ("command", "option"),
    mostly_slow(
        [
            (command, option)
            for command, option in OPTIONS
            if isinstance(option.type, click.Choice | click.types.IntRange | click.types.FloatRange)
        ]
    ),
    ids=lambda one: getattr(one, "name", one),
)
def test_a_value_that_an_option_cannot_have_is_refused(command: str, option: click.Option) -> None:
    flag = flag_of(option)
    assert f"'{flag}'" in misuse(command, flag, "maybe")


@pytest.mark.parametrize(
    ("text", "named"), [("0s", "not more than 0 seconds"), ("2 weeks", "not a duration")]
)
def test_durations_have_units(text: str, named: str) -> None:
    plan = ("plan", "--workload", "criteo-kaggle", "--topology", "2xh100", "-o", "p.json")
    assert named in invoke(*plan, "--time-limit", text).stderr
    succeed(*plan, "--solver", "greedy-size", "--time-limit", "0.5min")


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
        "diff", "pilot", "show", "verify", "workloads", "simulate"
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
def test_every_command_has_an_option_that_leaves_notes_out(command: str) -> None:
    assert ["-q", "--quiet"] in [one.opts for one in main.commands[command].params]


def test_quiet_leaves_notes_out_and_errors_in() -> None:
    arguments = ("topology", "8xh100", "-o", "machine.yaml")
    for is_quiet in (("-q", *arguments), (*arguments, "-q")):
        assert "written" in succeed(*arguments).stderr
        assert succeed(*is_quiet).stderr == ""
    assert "9xh100" in invoke("-q", "topology", "9xh100").stderr


def test_quiet_leaves_warnings_out(in_folder: Path) -> None:
    days = [in_folder / f"{day}.csv" for day in range(2)]
    days[0].write_text("label,user\n0,a\n1,b\n")
    days[1].write_text("label,user\n0,a\n1,c\n")
    succeed("profile", days[0], "-o", "first")
    succeed("-q", "profile", days[1], "--like", "first", "-o", "later")
    plan = ("plan", "--profile", "later", "--topology", "1xh100", "--solver", "greedy-size")
    assert "lookups of ids that the vocabularies lack" in succeed(*plan).stderr
    assert succeed(*plan, "-q").stderr == ""


PLANNED = [
    name for name in COMMANDS if any("--plan" in one.opts for one in main.commands[name].params)
]


@pytest.mark.parametrize("command", PLANNED)
def test_a_plan_may_stand_with_its_flag_or_without(command: str) -> None:
    params = main.commands[command].params
    more = [word for word in needed(command, params[0]) if word != "nowhere"]  # type: ignore[arg-type]
    more += ["--batches", "1"] if command == "simulate" else []
    by_place = fail(command, "a.json", *more)
    assert "a.json" in by_place
    assert fail(command, "--plan", "a.json", *more) == by_place
    assert "given twice" in misuse(command, "a.json", "--plan", "b.json", *more)
    assert "Missing option '--plan'" in misuse(command, *more)


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


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("--workload criteo-k", ["criteo-kaggle"]),
        ("--topology 8xh1", ["8xh100"]),
        ("--solver greedy-d", ["greedy-dim"]),
    ],
)
def test_a_shell_completes_values(typed: str, suggested: list[str]) -> None:
    option, begun = typed.split()
    complete = ShellComplete(main, {}, "placer", "_PLACER_COMPLETE")
    items = complete.get_completions(["plan", option], begun)
    assert [item.value for item in items] == suggested
