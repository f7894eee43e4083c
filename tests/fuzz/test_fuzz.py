"""Changed files end in a clear error or are read: the corpus, and a few of each format anew."""

import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))
from fuzz_run import CORPUS, change, outcome
from more_cases import COMMANDS, FORMATS, SLOW

ENTRIES = sorted(path.name for path in CORPUS.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    for name, format_ in FORMATS.items():
        (folder / name).mkdir()
        format_.write(folder / name)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FORMATS]
)
def test_sound_files_are_read(sound: Path, name: str) -> None:
    assert outcome(FORMATS[name], sound / name / FORMATS[name].name) == "read"


@pytest.mark.parametrize("entry", ENTRIES)
def test_files_that_were_trouble_once(sound: Path, tmp_path: Path, entry: str) -> None:
    """A folder of the corpus has the changed file, in whose name % stands for /."""
    name = entry.partition(".")[0]
    shutil.copytree(sound / name, tmp_path / "changed")
    for file in (CORPUS / entry).iterdir():
        shutil.copy(file, tmp_path / "changed" / file.name.replace("%", "/"))
    result = outcome(FORMATS[name], tmp_path / "changed" / FORMATS[name].name)
    assert result in ("read", "refused")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMMANDS)) for name in FORMATS]
)
def test_a_few_changed_files(sound: Path, tmp_path: Path, name: str) -> None:
    choose = random.Random(name)
    for number in range(6):
        changed = tmp_path / str(number)
        shutil.copytree(sound / name, changed)
        change(FORMATS[name], changed, choose)
        assert outcome(FORMATS[name], changed / FORMATS[name].name) in ("read", "refused")
