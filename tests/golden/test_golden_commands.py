"""Every command prints and writes what it did when it was recorded."""

import re
from collections.abc import Iterator

import golden_commands
import golden_store
import pytest
from fast_and_full import mostly_slow
from golden_files import stable
from golden_inputs import workbench

RECORDED = golden_store.recorded("commands")
FIRST = {name.split()[0]: name for name in reversed(RECORDED["cases"])}
"""A case of each command."""
QUICK = re.compile(
    "profile|topology|simulate|verify|show (?!torchrec)|sweep|diff|replan|compare priced"
    "|export (plan|by-size) to torchrec|.* of every kind"
)
"""Begins of other cases that take a moment."""


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    """The inputs, in the working folder."""
    with workbench():
        yield


def test_the_same_cases_are_recorded() -> None:
    assert list(golden_commands.cases()) == list(RECORDED["cases"])


@pytest.mark.parametrize(
    "name", mostly_slow(RECORDED["cases"], *FIRST.values(), *filter(QUICK.match, RECORDED["cases"]))
)
def test_a_command_prints_what_it_did(name: str) -> None:
    case = golden_commands.cases()[name]
    found, recorded = (stable(one) for one in (case.run(), RECORDED["cases"][name]))
    golden_store.assert_same(found, recorded, relative=case.relative)


def test_there_are_the_same_commands() -> None:
    assert golden_commands.options().keys() == RECORDED["options"].keys()


@pytest.mark.parametrize("command", RECORDED["options"])
def test_a_command_has_the_options_that_it_had(command: str) -> None:
    golden_store.assert_same(golden_commands.options()[command], RECORDED["options"][command])
