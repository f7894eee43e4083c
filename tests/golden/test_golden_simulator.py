"""What `placer simulate` counts and times is what was recorded."""

from pathlib import Path

import pytest
from golden_replays import REPLAYS, make_replay_folder, replayed
from golden_store import assert_same, recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_replay_folder(tmp_path_factory.mktemp("replays"))


@pytest.mark.parametrize("name", REPLAYS)
def test_replays_are_as_recorded(name: str, folder: Path) -> None:
    assert_same(replayed(folder, name), recorded("simulator")[name], name)
