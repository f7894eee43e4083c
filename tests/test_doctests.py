"""Examples in docstrings run, and give what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
from docs_cases import REPOSITORY
from fast_and_full import mostly_slow
from test_layers import PACKAGES

WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for package in PACKAGES
    for path in (REPOSITORY / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
LONG = {"solvers.analysis.compare", "solvers.analysis.whatif"}
"""Modules whose examples solve many problems."""
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize(
    "module", mostly_slow(WITH_EXAMPLES, *(one for one in WITH_EXAMPLES if one not in LONG))
)
def test_examples_of_a_module(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(import_module(module), optionflags=OPTIONS)
    assert tried
    assert failed == 0
