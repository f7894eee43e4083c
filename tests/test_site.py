"""The site of docs/ is built strictly: every link and anchor holds, and the reference is whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_cases import REPOSITORY

import cost_models
import placer
import solvers
from cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for package in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("package", [placer, solvers, cost_models])
def test_every_public_name_is_in_the_reference(package: object, site: Path) -> None:
    name: str = package.__name__  # type: ignore[attr-defined]
    page = _page(site, f"reference/{name}.html")
    for public in package.__all__:  # type: ignore[attr-defined]
        if not public.startswith("__"):
            assert f'id="{name}.{public}"' in page, public


def test_every_command_is_in_the_reference(site: Path) -> None:
    page = _page(site, "reference/commands.html")
    for name in main.commands:
        assert f'id="{name}"' in page
        assert f"Usage: placer {name} [OPTIONS]" in page


def test_every_page_and_example_is_on_the_site(site: Path) -> None:
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file(), page
    for example in (REPOSITORY / "examples").glob("*.py"):
        assert (site / "files" / "examples" / f"{example.name}.html").is_file(), example


def test_a_reader_asks_nobody_else(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"https?:|<link[^>]+stylesheet[^>]+https?:"
    )
    for page in site.rglob("*.html"):
        assert loaded.search(page.read_text(encoding="utf-8")) is None, page


def test_marks_for_the_tests_are_not_shown_as_they_stand(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "testing.html"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "no-run:" not in text, page
        assert "set-up:" not in text, page
    assert "installs for minutes</span>" in _page(site, "start.html")


def test_titles_of_blocks_are_for_readers(site: Path) -> None:
    """What tests run in a block's place is nothing that a reader of the page looks for."""
    titles = re.compile(r'<span class="filename">([^<]*)</span>')
    of_tests = {
        (page.name, title)
        for page in site.rglob("*.html")
        for title in titles.findall(page.read_text(encoding="utf-8"))
        if ("tests/" in title or "benchmarks/" in title) and "files" not in page.parts
    }
    assert not of_tests
