"""Every code block of the README and of docs/ runs as it stands, in the order of its page."""

import shutil
from pathlib import Path

import pytest
from cli_cases import Workbench
from docs_cases import LANGUAGES, PAGES, REPOSITORY, Shell, blocks_of

from cli import main
from solvers import solve

SLOW = frozenset(
    {"README", "adapters", "calibration", "cli", "constraints", "cost-model", "data", "distributed"}
    | {"executor", "growing", "instances", "memory", "profile", "pytorch", "questions", "replan"}
    | {"report", "simulate", "solvers", "start", "sweep", "training"}
)


def _marked(page: str) -> object:
    return pytest.param(page, marks=pytest.mark.slow) if Path(page).stem in SLOW else page


@pytest.fixture
def folder(workbench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the blocks of a page run: small logs of two days, a profile, a plan, a machine."""
    shutil.copy(workbench.log, tmp_path / "day_0.tsv")
    shutil.copy(workbench.log, tmp_path / "day_1.tsv")
    shutil.copytree(workbench.profile, tmp_path / "profile")
    shutil.copy(workbench.folder / "machine.yaml", tmp_path)
    for path in workbench.folder.glob("plan.json*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    monkeypatch.chdir(tmp_path)
    # Pages leave limits out where the usual 20 seconds are right for their readers.
    limits = dict.fromkeys(("plan", "compare", "replan", "report"), 0.5) | {"whatif": 4.0}
    defaults = {(command, "time_limit"): seconds for command, seconds in limits.items()}
    for (command, name), value in {**defaults, ("report", "explained"): 0}.items():
        [one] = [one for one in main.commands[command].params if one.name == name]
        monkeypatch.setattr(one, "default", value)
    monkeypatch.setitem(solve.__kwdefaults__, "time_limit_s", 0.5)
    return tmp_path


@pytest.mark.parametrize("page", [_marked(page) for page in PAGES if blocks_of(page)])
def test_the_blocks_run(page: str, folder: Path) -> None:
    shell = Shell()
    for block in blocks_of(page):
        try:
            shell.run(block)
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            error.add_note(f"in {block}")
            raise


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block}: one of {', '.join(LANGUAGES)}"
        if block.reason is not None:
            assert len(block.reason.split()) >= 2, f"{block}: say why it is not run"
        if block.language == "text":
            assert not block.text.startswith(("placer ", "$ ", "pip ")), f"{block} is a command"
