"""`--help` of every command imports nothing heavy, and says what the packages do."""

import re
import subprocess
import sys

import click
import pytest
from cli_cases import COMMANDS, Workbench, succeed

import cost_models
import solvers
from cli import main
from cost_models.sweep import AXES, MODELS, PARAMETER_SERVERS, PLACEMENTS
from placer.topology.presets import preset_help
from solvers.analysis.compare import CLASSIC
from solvers.analysis.replan import HORIZON_STEPS

HEAVY = ("torch", "ortools", "pyarrow", "scipy", "pydantic", "networkx", "numpy", "rich")

_HELP = f"""
import sys
from click.testing import CliRunner
from cli import main
for command in sys.argv[1:]:
    result = CliRunner().invoke(main, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output
    print(command or "placer", *(name for name in {HEAVY!r} if name in sys.modules))
"""


def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _HELP, "", *COMMANDS], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["placer", *COMMANDS]


def test_a_file_that_is_missing_is_said_before_torch_is_imported(workbench: Workbench) -> None:
    missing = (
        "simulate --batches 1 no.json",
        "train --data no.tsv no.json",
        "grow no.json new.json --checkpoint run -o larger",
        "pilot --profile no --data no.tsv",
        f"export {workbench.plan} --to safetensors --checkpoint no -o no.safetensors",
        f"grow {workbench.plan} {workbench.plan} --checkpoint no -o larger",
    )
    code = _HELP.replace(', "--help"', "").replace("exit_code == 0", "exit_code == 1")
    result = subprocess.run(
        [sys.executable, "-c", code, *missing], capture_output=True, text=True, check=True
    )
    assert "torch" not in result.stdout.split()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    for flag in ("--help", "-h"):
        text = succeed(command, flag).stdout
        assert re.search(rf"^  placer {command} ?", text, re.MULTILINE)


def default(command: str, option: str) -> object:
    """The default of a command's option."""
    [found] = [one.default for one in main.commands[command].params if option in one.opts]
    return found


def test_what_the_command_line_spells_out_is_what_the_packages_have() -> None:
    assert default("sweep", "--placements") == ",".join(PLACEMENTS)
    assert default("sweep", "--parameter-servers") == PARAMETER_SERVERS
    assert default("replan", "--horizon-steps") == HORIZON_STEPS
    assert default("compare", "--solvers") == ",".join([*CLASSIC, "greedy-cost", "ilp", "auto"])
    shown = " ".join(succeed("sweep", "--help").stdout.split())
    assert f"Axes: {', '.join(AXES)} Placements: {', '.join(PLACEMENTS)}" in shown
    assert "|".join(MODELS) in shown
    presets = " ".join(succeed("topology", "--help").stdout.split())
    assert " ".join(preset_help().split()) in presets
    assert f"[{cost_models.model_names()}]" in " ".join(succeed("plan", "--help").stdout.split())
    assert set(solvers.SOLVERS) == {*default_choices("plan", "--solver")}


@pytest.mark.parametrize(
    ("command", "option", "words"),
    [
        ("plan", "--exchange", "by default float32."),
        ("plan", "--pooling", "by default the profile's."),
        *(
            ("replan", one, "by default the old plan's.")
            for one in ("--exchange", "--dim", "--dense")
        ),
        ("fleet", "--topology", "in fleet twenty types."),
        ("train", "--steps", "those before a resumed checkpoint included."),
        ("pilot", "--steps", "Stop each run after this many steps."),
        ("train", "--amp", "tables keep theirs."),
    ],
)
def test_help_says_what_holds_without_an_option(command: str, option: str, words: str) -> None:
    [found] = [one for one in main.commands[command].params if option in one.opts]
    assert isinstance(found, click.Option)
    assert (found.help or "").endswith(words)


def default_choices(command: str, option: str) -> list[str]:
    """The choices of a command's option."""
    [kind] = [one.type for one in main.commands[command].params if option in one.opts]
    return list(kind.choices)  # type: ignore[attr-defined]
