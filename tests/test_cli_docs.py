"""docs/cli.md has every command and option; `test_docs.py` runs its examples."""

import re
from pathlib import Path

import click
import pytest
from cli_cases import COMMANDS

from cli import main

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")


def blocks(page: str, language: str = "") -> list[str]:
    """The code blocks of a page in a language, or those that name none."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def examples() -> list[str]:
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("placer ") and "COMMAND" not in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_section_with_its_options(command: str) -> None:
    assert any(example.split()[1] == command for example in examples())
    section = re.search(rf"^## {command}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    options = {option for option in main.commands[command].params if is_option(option)}
    # What a command shares with `plan` is explained there, and what all have at the page's top.
    elsewhere = set() if command == "plan" else names_of(main.commands["plan"])
    elsewhere |= {"--format", "--plan", "-q"}
    for option in options:
        told = any(re.search(rf"{name}\b", section[1]) for name in option.opts)
        assert told or elsewhere & set(option.opts), option.opts


def is_option(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option)


def names_of(command: click.Command) -> set[str]:
    return {name for option in command.params if is_option(option) for name in option.opts}


def test_the_page_names_the_commands_without_csv() -> None:
    shown = re.search(r"\((`placer [^()]*) have no CSV\.\)", PAGE)
    assert shown is not None
    formats = {
        command: option.type.choices
        for command in COMMANDS
        for option in main.commands[command].params
        if "--format" in option.opts and isinstance(option.type, click.Choice)
    }
    without = {command for command, choices in formats.items() if "csv" not in choices}
    assert set(re.findall(r"`placer (\w+)`", shown[1])) == without


def test_the_page_names_every_exit_code() -> None:
    codes = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "4", "130"]
