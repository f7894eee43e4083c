"""Which log and which vocabulary: what differs from what is on record is refused."""

import os
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_cases import load

from placer import Plan, Profile, Shard, Topology
from placer.data import open_log
from placer.data.files.opening import FileIdentity, identify
from placer.data.reader import EncodedLog
from placer.errors import CheckpointError, DataError, PlanMismatchError
from placer.plan.fields import Provenance
from placer.plan.origin import open_log_of, profile_of, save_with_profile
from placer.profile.count import profile_log
from placer.storage.manifest import Checkpoint, Position
from placer.training.checkpoint import check_data, save
from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.loop import train

CONFIG = TrainConfig(
    batch_size=16, bottom_mlp=(4,), top_mlp=(4,), holdout_every=0, max_steps=2, backend="torch"
)


def write(path: Path, first_id: int = 0, samples: int = 64) -> Path:
    """A log of 8 distinct items; logs of other first ids have a vocabulary of the same size."""
    rng = np.random.default_rng(0)
    items = first_id + np.concatenate([np.arange(8), rng.integers(0, 8, samples - 8)])
    columns = {"label": rng.integers(0, 2, samples), "item": items, "x": rng.random(samples)}
    pq.write_table(pa.table(columns), path)
    return path


def opened(path: Path, **how: Any) -> EncodedLog:
    return open_log(path, id_mapping="vocabulary", **how)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Plan, EncodedLog]:
    """A log, its profile, and a plan that names both."""
    log = opened(write(tmp_path / "log.parquet"))
    profile = profile_log(log, dim=2)
    profile.save(tmp_path / "profile")
    table = profile.tables[0].table
    shard = Shard(table.name, (0, table.rows, 1), (0, 2), ("gpu:0",), "hbm", "device")
    plan = Plan(
        (table,),
        Topology.parse("1xh100"),
        (shard,),
        provenance=Provenance(ids_sha256=profile.ids_sha256),
    )
    plan = save_with_profile(plan, tmp_path / "plan.json", tmp_path / "profile")
    return tmp_path, plan, log


def test_the_hash_is_in_the_plan_and_depends_on_the_vocabulary_alone(
    made: tuple[Path, Plan, EncodedLog],
) -> None:
    folder, _, log = made
    ids = log.encoding.ids_sha256
    assert Plan.load(folder / "plan.json").provenance.ids_sha256 == ids
    assert Profile.load(folder / "profile").ids_sha256 == ids
    assert opened(write(folder / "more.parquet", samples=80)).encoding.ids_sha256 == ids
    assert opened(write(folder / "other.parquet", 100)).encoding.tables == log.encoding.tables
    assert opened(folder / "other.parquet").encoding.ids_sha256 != ids
    assert open_log(folder / "log.parquet", rows=20).encoding.ids_sha256 != ids


def test_another_vocabulary_of_the_same_size_is_refused(
    made: tuple[Path, Plan, EncodedLog],
) -> None:
    folder, plan, _ = made
    other = opened(write(folder / "other.parquet", 100))
    profile_log(other, dim=2).save(folder / "other")
    with pytest.raises(PlanMismatchError, match=r"the profile maps the ids of item to other rows"):
        open_log_of(plan, folder / "plan.json", [folder / "log.parquet"], None, folder / "other")
    with pytest.raises(PlanMismatchError, match=r"the log's encoding maps the ids of item"):
        train(plan, other, CONFIG)
    assert profile_of(plan, folder / "plan.json", folder / "other", other_data=True) is not None
    assert train(plan, other, replace(CONFIG, other_data=True)).steps == 2
    (known,) = Profile.load(folder / "profile").tables
    Profile((replace(known, table=replace(known.table, name="page")),)).save(folder / "page")
    with pytest.raises(PlanMismatchError, match=r"'item' is missing; .* --like it$"):
        profile_of(plan, folder / "plan.json", folder / "page", other_data=True)
    unknown = replace(plan, provenance=Provenance())  # As of earlier versions.
    assert train(unknown, other, CONFIG).steps == 2


def test_another_log_is_refused_where_a_run_goes_on(made: tuple[Path, Plan, EncodedLog]) -> None:
    folder, plan, log = made
    policy, more = CheckpointPolicy(folder / "run"), replace(CONFIG, max_steps=3)
    train(plan, log, CONFIG, checkpoints=policy)
    assert load(folder / "run").data["log"][0]["name"] == "log.parquet"
    shorter = write(folder / "shorter.parquet", samples=40)
    content = bytearray((folder / "log.parquet").read_bytes())
    content[content.rindex(b"parquet-cpp")] ^= 1  # It says who wrote it.
    altered = folder / "altered.parquet"
    altered.write_bytes(content)
    for path, what in ((shorter, r"\d+ bytes instead of \d+"), (altered, r"other bytes")):
        other = open_log(path, encoding=log.encoding)
        message = rf"its file 1 was log.parquet, and {path.name} has {what}; resume with the log"
        with pytest.raises(CheckpointError, match=message):
            train(plan, other, more, checkpoints=policy, resume=policy.folder)
    accepted = replace(more, other_data=True)
    result = train(plan, other, accepted, checkpoints=policy, resume=policy.folder)
    assert result.steps == 3


def test_a_moved_log_is_the_same(made: tuple[Path, Plan, EncodedLog]) -> None:
    folder, plan, log = made
    policy = CheckpointPolicy(folder / "run")
    train(plan, log, CONFIG, checkpoints=policy)
    (folder / "moved").mkdir()
    (folder / "log.parquet").rename(folder / "moved" / "day.parquet")
    moved = open_log(folder / "moved" / "day.parquet", encoding=log.encoding)
    more = replace(CONFIG, max_steps=3)
    assert train(plan, moved, more, checkpoints=policy, resume=policy.folder).steps == 3


FILE = {"name": "a", "size_bytes": 3, "sha256": "1"}


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"log": [FILE, FILE]}, r"a log of 1 files, this one has 2"),
        ({"log": [FILE | {"size_bytes": 4}]}, r"file 1 was a, and a has 4 bytes instead of 3"),
        ({"log": [FILE | {"sha256": "2"}]}, r"file 1 was a, and a has other bytes"),
        ({"log": [FILE], "ids_sha256": {"t": "2"}}, r"maps the ids of t to other rows"),
    ],
)
def test_the_message_says_what_differs(now: dict[str, Any], message: str) -> None:
    saved = {"log": [FILE], "ids_sha256": {"t": "1"}}
    with pytest.raises(CheckpointError, match=message):
        check_data(saved, now)


def test_what_nobody_knows_is_not_compared(tmp_path: Path) -> None:
    known = {"log": [FILE], "ids_sha256": {"t": "1"}}
    check_data({}, known)
    check_data(known, {})
    check_data(known, known)
    save(tmp_path, Checkpoint(Position(1), {}, {}))
    assert load(tmp_path).data == {}
    assert '"data"' not in (tmp_path / "step-000000000001" / "checkpoint.json").read_text()


def test_a_file_is_known_by_bytes_all_over_it(tmp_path: Path) -> None:
    path, size, block = tmp_path / "log", 8 << 20, 1 << 16
    content = np.random.default_rng(1).bytes(size)
    path.write_bytes(content)
    places = [(size - block) * sample // 15 for sample in range(16)]
    assert places[0] == 0
    assert places[-1] == size - block
    sampled = b"".join(content[place : place + block] for place in places)
    assert identify(str(path)) == FileIdentity("log", size, sha256(sampled).hexdigest())


@pytest.mark.parametrize("when", ["between", "within"])
def test_a_log_that_changes_while_it_is_read_is_refused(tmp_path: Path, when: str) -> None:
    log = opened(write(tmp_path / "log.parquet"))
    if when == "between":
        write(tmp_path / "new.parquet", 100).rename(tmp_path / "log.parquet")
        with pytest.raises(DataError, match=r"log.parquet was changed while it was read"):
            profile_log(log, dim=2)
        return
    chunks = log.chunks(16)
    next(chunks)
    os.utime(tmp_path / "log.parquet", ns=(1, 1))
    with pytest.raises(DataError, match=r"log.parquet was changed while it was read"):
        list(chunks)
