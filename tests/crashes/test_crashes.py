"""The crash matrix: each call of each write path fails, stops half-way, or is the last one.

Afterwards a reader finds the old version or the new one, and the next write works and leaves only
what belongs there. A loss of power is simulated from the calls that were made: see `disk`.
"""

import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))
import write_paths
from disk import Disk
from fast_and_full import mostly_slow
from file_calls import Fate, Fault, FileCalls, Killed
from training_cases import QUICK, plan_for, small_log
from write_paths import WRITE_PATHS, WritePath

from placer.errors import PlacerError
from placer.files.atomic import write_text
from placer.training import checkpoint
from placer.training.checkpoint import exist
from placer.training.config import CheckpointPolicy
from placer.training.loop import train

LOG = small_log(320)

FATES: tuple[Fate, ...] = ("error", "full", "short", "killed", "torn")


def names_in(folder: Path) -> list[str]:
    """What lies in a folder, without the hashes in names."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(name.split("-")[0] for name in found)


class Scene:
    """A folder with the first version, and what is in it when later ones are written."""

    def __init__(self, folder: Path, path: WritePath) -> None:
        self.path, self.folder = path, folder
        self.template, self.now = folder / "template", folder / "now"
        self.template.mkdir()
        path.write(self.template, 1)
        self.first = path.read(self.template)
        self.renew()
        with FileCalls(self.now).watched() as calls:
            path.write(self.now, 2)
        self.calls = calls.names
        self.second = path.read(self.now)
        path.write(self.now, 3)
        self.names = names_in(self.now)
        self.third = path.read(self.now)
        assert self.second != self.first

    def renew(self) -> None:
        shutil.rmtree(self.now, ignore_errors=True)
        shutil.copytree(self.template, self.now, symlinks=True)

    def check(self, fault: Fault) -> None:
        """Write the second version with a fault, and then the third without."""
        self.renew()
        said = f"call {fault.number} ({self.calls[fault.number]}), {fault.fate}"
        with FileCalls(self.now, fault).watched():
            try:
                self.path.write(self.now, 2)
                ended = True
            except (PlacerError, Killed):  # Nothing else is raised.
                ended = False
        found = self.path.read(self.now)
        assert found in (self.first, self.second), said
        if ended:
            assert found == self.second, said
            assert fault.fate not in ("killed", "torn"), said
        self.path.write(self.now, 3)
        assert self.path.read(self.now) == self.third, said
        assert names_in(self.now) == self.names, said

    def faults(self) -> list[Fault]:
        """Of each call what can become of it: a full disk where it takes space."""
        fates = {"write": FATES, "open": FATES[:2] + FATES[3:4], "mkdir": FATES[1:4:2]}
        return [
            Fault(number, fate)
            for number, name in enumerate(self.calls)
            for fate in fates.get(name, ("error", "killed"))
        ]


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    return Scene(tmp_path, WRITE_PATHS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("scene", WRITE_PATHS, indirect=True)
def test_every_call_that_fails_leaves_the_old_version_or_the_new(scene: Scene) -> None:
    faults = scene.faults()
    assert len(faults) > 20
    for fault in faults:
        scene.check(fault)


@pytest.mark.parametrize("scene", ["plan", "checkpoint"], indirect=True)
def test_some_calls_that_fail(scene: Scene) -> None:
    """Of each kind of call the last one, with one fate."""
    last = {name: number for number, name in enumerate(scene.calls)}
    for turn, number in enumerate(last.values()):
        scene.check(Fault(number, FATES[turn % 2 * 3]))


def power_lost(scene: Scene) -> int:
    """Check what a loss of power at any time may leave; how many states that are."""
    scene.renew()
    disk = Disk(scene.now)
    with FileCalls(scene.now, disk=disk).watched():
        scene.path.write(scene.now, 2)
    states = 0
    for state in disk.states():
        states += 1
        shutil.rmtree(scene.now)
        state.write(scene.now)
        assert scene.path.read(scene.now) in (scene.first, scene.second)
    shutil.rmtree(scene.now)
    disk.flushed().write(scene.now)
    assert scene.path.read(scene.now) == scene.second, "it was not on disk when the write ended"
    return states


@pytest.mark.slow
@pytest.mark.parametrize("scene", WRITE_PATHS, indirect=True)
def test_a_loss_of_power_leaves_the_old_version_or_the_new(scene: Scene) -> None:
    assert power_lost(scene) > 3


@pytest.mark.parametrize("scene", ["plan"], indirect=True)
def test_a_plan_survives_a_loss_of_power(scene: Scene) -> None:
    assert power_lost(scene) > 3


def test_a_new_folder_is_there_after_a_loss_of_power(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    disk = Disk(tmp_path / "now")
    with FileCalls(tmp_path / "now", disk=disk).watched():
        write_text(tmp_path / "now" / "a" / "b" / "file", "new")
    disk.flushed().write(tmp_path / "then")
    assert (tmp_path / "then" / "a" / "b" / "file").read_text() == "new"


@pytest.mark.parametrize("killed", mostly_slow(["early", "late"], "early"))
def test_a_training_that_was_killed_while_it_saved_resumes_bit_equal(
    tmp_path: Path, killed: str
) -> None:
    """Killed at calls of its first and its later checkpoints."""
    plan, config = plan_for(LOG, "split"), replace(QUICK, max_steps=6, report_every=1)
    policy = CheckpointPolicy(tmp_path / "run", every_steps=2, keep=1)
    with FileCalls(tmp_path).watched() as calls:
        whole = train(plan, LOG, config, checkpoints=policy)
    shutil.rmtree(tmp_path / "run")
    numbers = range(1, len(calls.names), 11)
    for number in numbers[:1] if killed == "early" else numbers[1:]:
        with FileCalls(tmp_path, Fault(number, "killed")).watched(), pytest.raises(Killed):
            train(plan, LOG, config, checkpoints=policy)
        resume = policy.folder if exist(policy.folder) else None
        rest = train(plan, LOG, config, checkpoints=policy, resume=resume)
        assert rest.losses == whole.losses[whole.steps - len(rest.losses) :]
        assert rest.steps == whole.steps
        assert [path.name for path in policy.folder.iterdir()] == ["step-000000000006"]
        shutil.rmtree(policy.folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calibration", "checkpoint"])
def test_readers_beside_a_writer_find_whole_versions(tmp_path: Path, name: str) -> None:
    """150 rounds."""
    path, faults = WRITE_PATHS[name], []
    path.write(tmp_path, 1)
    done = threading.Event()

    def read() -> None:
        last = 0
        while not done.is_set():
            try:
                found = path.read(tmp_path) or last
                if found < last:
                    faults.append(f"{found} after {last}")
                last = found
            except Exception as error:  # What is raised in a thread would be lost.
                faults.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for version in range(2, 152):
            if name == "checkpoint":
                checkpoint.save(tmp_path / "run", write_paths._checkpoint(version), keep=2)
            else:
                path.write(tmp_path, version)
    finally:
        done.set()
        reader.join()
    assert not faults


def test_a_disk_drops_what_was_not_flushed(tmp_path: Path) -> None:
    """A file that is renamed before it is flushed may be empty or gone."""
    (tmp_path / "now").mkdir()
    file = tmp_path / "now" / "file"
    file.write_text("old")
    disk = Disk(tmp_path / "now")
    with FileCalls(tmp_path / "now", disk=disk).watched():
        with (tmp_path / "now" / "new").open("w") as new:
            new.write("new")
        (tmp_path / "now" / "new").rename(file)
    found = set()
    for number, state in enumerate(disk.states()):
        state.write(tmp_path / str(number))
        names = {path.name: path.read_text() for path in (tmp_path / str(number)).iterdir()}
        found.add(tuple(sorted(names.items())))
    assert found >= {(("file", "old"),), (("file", ""),), (("file", "new"),)}
