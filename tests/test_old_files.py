"""Files of earlier versions are read as they were meant; `old_files/README.md` has their origin."""

import shutil
from pathlib import Path

import pytest
from cli_cases import fail, succeed

from cost_models.calibrated.calibration import Calibration
from placer import Plan, Profile, Topology
from placer.errors import CheckpointError, PlacerError
from placer.plan.verify import violations
from placer.storage.shards import open_shards
from placer.training.checkpoint import load

OLD = Path(__file__).resolve().parent / "old_files"
VERSIONS = sorted(path.name for path in OLD.iterdir() if path.is_dir())


@pytest.mark.parametrize("version", VERSIONS)
def test_plans_and_profiles(version: str) -> None:
    profile = Profile.load(OLD / version / "profile")
    assert {one.name: one.table.rows for one in profile} == {"item": 21, "word": 8}
    assert [one.lookups for one in profile] == [96, 96]
    assert profile.encoding is not None
    for name in ("plan.json", "split.json"):
        plan = Plan.load(OLD / version / name)
        assert not violations(plan)
        assert [table.rows for table in plan.tables] == [21, 8]
    assert {name: len(ids) for name, ids in plan.hot_ids.items()} == {"item": 3, "word": 3}
    assert plan.hot_ids["item"].tolist() == profile["item"].counts.hottest(3).tolist()
    assert len(Topology.load(OLD / version / "machine.yaml").gpus) == 2


def test_checkpoints_and_shards() -> None:
    found = load(OLD / "last" / "run")
    assert (found.position.step, found.position.samples) == (2, 64)
    assert found.data == {}
    weights = found.tensors["embeddings"]
    assert {name: tuple(one.shape) for name, one in weights.items()} == {
        "item.weight": (21, 4),
        "word.weight": (8, 4),
    }
    assert open_shards(OLD / "last" / "shards").step == 2


def test_constants_that_stood_for_other_things_are_refused_by_name() -> None:
    with pytest.raises(PlacerError, match=r"of version 1; .* version 2: run .* with --budget 0s"):
        Calibration.load(OLD / "last" / "machine.json")


def test_a_checkpoint_of_the_first_format_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"format version 1 and this placer reads 2; train a"):
        load(OLD / "first" / "run")


@pytest.mark.slow
def test_an_old_training_goes_on(tmp_path: Path) -> None:
    shutil.copytree(OLD / "last", tmp_path / "last")
    folder = tmp_path / "last"
    training = ("train", "--plan", folder / "plan.json", "--data", folder / "log.parquet")
    more = ("--batch-size", "32", "--checkpoints", folder / "run", "--resume", "--steps", "3")
    assert "step-000000000003" in succeed(*training, *more).stdout
    succeed("replan", "--from", folder / "split.json", "--profile", folder / "profile",
            "--solver", "greedy-cost", "-o", folder / "new.json")  # fmt: skip
    assert "resume from it, or save" in fail(
        *training, "--checkpoints", folder / "run", "--steps", "4"
    )
