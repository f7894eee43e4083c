"""Resharding: the same as writing the newer plan's shards anew, and no more moves than must."""

import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_cases import files_of
from fast_and_full import examples
from hypothesis import given
from plan_cases import in_dram, in_hbm, machine, plan_of
from shard_cases import checkpoint_of, ids_of, scratch, successive_plans

from placer import Plan, Table
from placer.errors import CheckpointError, PlanMismatchError
from placer.plan.diff import diff
from placer.plan.fields import RowOrder
from placer.report.moves import reshard_report
from placer.storage import tensor_rows
from placer.storage.shards import open_shards, reshard, write_shards
from placer.storage.shards.shard_folder import ShardFile, ShardFolder
from placer.storage.tensor_rows import StoredTensor

TABLE = Table("t", 100, 8, optimizer="rowwise_adagrad")


@examples(25)
@given(successive_plans())
def test_the_result_is_that_of_a_new_export(plans: tuple[Plan, Plan]) -> None:
    old, new = plans
    with scratch() as folder:
        checkpoint = checkpoint_of(old)
        write_shards(old, checkpoint, folder / "old")
        write_shards(new, checkpoint, folder / "new")
        before = files_of(folder / "old")
        found = reshard(folder / "old", new, folder / "resharded", old=old)
        assert files_of(folder / "resharded") == files_of(folder / "new")
        assert files_of(folder / "old") == before
        assert found.difference == diff(old, new)
        check_kept(old, new, folder)


def check_kept(old: Plan, new: Plan, folder: Path) -> None:
    """Whatever file has the rows of an older one in their order is that file."""

    def contents(plan: Plan) -> list[tuple[object, ...]]:
        return [(shard.table, shard.cols, ids_of(plan, shard)) for shard in plan.shards]

    known = contents(old)
    inodes = {path.stat().st_ino for path in (folder / "old").glob("*/*.safetensors")}
    for index, content in enumerate(contents(new)):
        (path, *_) = (folder / "resharded").glob(f"*/{index:05d}-*")
        assert (path.stat().st_ino in inodes) == (content in known)


def hot_cold(split: int, devices: tuple[str, str], listed: list[int]) -> Plan:
    """The listed rows first; so many in HBM and the rest in DRAM."""
    plan = plan_of(
        TABLE,
        in_hbm("t", (0, split, 1), (0, 8), devices[0]),
        in_dram("t", (split, 100, 1), (0, 8), devices[1]),
    )
    return replace(
        plan, row_order={"t": RowOrder("profile")}, hot_ids={"t": np.array(listed, np.int64)}
    )


def test_a_device_that_takes_over_rows_gets_the_files(tmp_path: Path) -> None:
    old = hot_cold(10, ("gpu:0", "gpu:1"), list(range(10)))
    new = hot_cold(10, ("gpu:1", "gpu:0"), list(range(10)))
    write_shards(old, checkpoint_of(old), tmp_path / "old")
    found = reshard(tmp_path / "old", new, tmp_path / "new")
    assert {(one.kind, one.size_bytes) for one in found.difference.moves} == {
        ("HBM to HBM", 10 * 36),
        ("served elsewhere", 90 * 36),
    }
    assert (found.kept_files, found.written_files, found.written_file_bytes) == (2, 0, 0)
    assert found.kept_file_bytes > 100 * 36
    source = tmp_path / "old" / "gpu%3A0.hbm" / "00000-t.safetensors"
    assert (tmp_path / "new" / "gpu%3A1.hbm" / "00000-t.safetensors").samefile(source)


def test_files_are_copied_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    old = hot_cold(10, ("gpu:0", "gpu:1"), list(range(10)))
    write_shards(old, checkpoint_of(old), tmp_path / "old")
    monkeypatch.setattr(Path, "hardlink_to", refused)
    found = reshard(tmp_path / "old", old, tmp_path / "new")
    assert files_of(tmp_path / "new") == files_of(tmp_path / "old")
    assert (found.kept_files, found.kept_file_bytes) == (2, 0)
    assert found.written_file_bytes > 100 * 36


def test_rows_of_a_gpu_that_is_gone_are_read_once_more(tmp_path: Path) -> None:
    old = plan_of(TABLE, *(in_hbm("t", (i, 100, 3), (0, 8), f"gpu:{i}") for i in range(3)),
                  topology=machine(3))  # fmt: skip
    new = plan_of(TABLE, *(in_hbm("t", (i, 100, 2), (0, 8), f"gpu:{i}") for i in range(2)))
    checkpoint = checkpoint_of(old)
    write_shards(old, checkpoint, tmp_path / "old")
    write_shards(new, checkpoint, tmp_path / "new")
    found = reshard(tmp_path / "old", new, tmp_path / "resharded")
    assert files_of(tmp_path / "resharded") == files_of(tmp_path / "new")
    assert "gpu:2 hbm" in {str(one.source) for one in found.difference.moves}


def test_tables_that_are_gone_are_dropped_and_named(tmp_path: Path) -> None:
    other = Table("u", 5, 2)
    old = Plan(
        (TABLE, other),
        machine(),
        (in_hbm("t", (0, 100, 1), (0, 8)), in_hbm("u", (0, 5, 1), (0, 2))),
    )
    new = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)))
    write_shards(old, checkpoint_of(old), tmp_path / "old")
    found = reshard(tmp_path / "old", new, tmp_path / "new")
    assert found.difference.dropped_tables == ("u",)
    assert [path.name for path in (tmp_path / "new").glob("*/*")] == ["00000-t.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 90}, r"table 't' has another shape: rows 100 → 90"),
        ({"dim": 16}, r"table 't' has another shape: dim 8 → 16"),
        ({"dtype": "bfloat16"}, r"dtype float32 → bfloat16"),
        ({"optimizer": "adam"}, r"optimizer rowwise_adagrad → adam"),
        ({"name": "u"}, r"table 'u' is new"),
    ],
)
def test_tables_without_rows_for_them_are_an_error(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    old = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)))
    table = replace(TABLE, **change)
    new = plan_of(table, in_hbm(table.name, (0, table.rows, 1), (0, table.dim)))
    write_shards(old, checkpoint_of(old), tmp_path / "old")
    with pytest.raises(PlanMismatchError, match=message):
        reshard(tmp_path / "old", new, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_rows_of_a_host_without_a_link_move_by_files_alone(tmp_path: Path) -> None:
    old = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8), "gpu:1"), topology=machine(1, 2))
    new = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)), topology=machine(1, 1))
    write_shards(old, checkpoint_of(old), tmp_path / "old")
    found = reshard(tmp_path / "old", new, tmp_path / "new")
    assert found.difference.moved_bytes == 3600
    report = reshard_report(found.difference, found)
    assert report.facts["migration_s"] is None
    assert "between hosts that no network link joins" in report.headline[0]


SPLIT = hot_cold(10, ("gpu:0", "gpu:1"), list(range(10)))
WIDER = hot_cold(20, ("gpu:0", "gpu:1"), list(range(10)))


@pytest.mark.parametrize("new", [SPLIT, WIDER], ids=["kept", "rewritten"])
def test_a_damaged_file_is_refused(tmp_path: Path, new: Plan) -> None:
    write_shards(SPLIT, checkpoint_of(SPLIT), tmp_path / "old")
    path = tmp_path / "old" / "gpu%3A1.dram" / "00001-t.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"gpu%3A1.dram/00001-t.safetensors was altered"):
        reshard(tmp_path / "old", new, tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["old"]
    # Without the look at every byte it is found by whoever loads it.
    reshard(tmp_path / "old", SPLIT, tmp_path / "new", verify_files=False)
    opened = open_shards(tmp_path / "new")
    with pytest.raises(CheckpointError, match="was altered"):
        opened.check(opened.files["t"][1][0])


def test_files_of_tables_that_stay_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[tuple[str, str]] = set()

    def recorded(
        folder: ShardFolder, file: ShardFile, tensor: StoredTensor, positions: np.ndarray
    ) -> np.ndarray:
        read.add((file.name.partition("/")[0], tensor.name))
        return rows(folder, file, tensor, positions)

    write_shards(SPLIT, checkpoint_of(SPLIT), tmp_path / "old")
    rows = ShardFolder.rows
    monkeypatch.setattr(ShardFolder, "rows", recorded)
    assert reshard(tmp_path / "old", SPLIT, tmp_path / "same").kept_files == 2
    assert not read
    reshard(tmp_path / "old", WIDER, tmp_path / "new")
    folders = ("gpu%3A0.hbm", "gpu%3A1.dram")
    assert read == {(folder, name) for folder in folders for name in ("weight", "sum")}


def test_a_file_is_kept_only_if_every_row_is_the_same(tmp_path: Path) -> None:
    table = Table("t", 1000, 2)
    listed = list(range(1, 701))
    swapped = [*listed[:600], listed[601], listed[600], *listed[602:]]
    old, new = (
        replace(
            plan_of(table, in_dram("t", (0, 1000, 1), (0, 2))),
            row_order={"t": RowOrder("profile")},
            hot_ids={"t": np.array(ids, np.int64)},
        )
        for ids in (listed, swapped)
    )
    checkpoint = checkpoint_of(old)
    write_shards(old, checkpoint, tmp_path / "old")
    write_shards(new, checkpoint, tmp_path / "new")
    found = reshard(tmp_path / "old", new, tmp_path / "resharded")
    assert files_of(tmp_path / "resharded") == files_of(tmp_path / "new")
    assert (found.kept_files, found.written_files, found.difference.moved_bytes) == (0, 1, 0)


@pytest.mark.slow
def test_a_killed_reshard_leaves_no_folder_and_the_next_one_works(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(SPLIT)
    write_shards(SPLIT, checkpoint, tmp_path / "old")
    write_shards(WIDER, checkpoint, tmp_path / "expected")
    WIDER.save(tmp_path / "wider.json")
    killed = (
        "import os, signal, sys\n"
        "from placer import Plan\n"
        "from placer.storage.shards import reshard, writing\n"
        "write, calls = writing._write_rows, []\n"
        "def last(*arguments):\n"
        "    write(*arguments)\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "writing._write_rows = last\n"
        "reshard(sys.argv[1], Plan.load(sys.argv[2]), sys.argv[3])\n"
    )
    paths = [str(tmp_path / name) for name in ("old", "wider.json", "new")]
    done = subprocess.run([sys.executable, "-c", killed, *paths], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".new.partial").is_dir()
    assert not (tmp_path / "new").exists()
    reshard(tmp_path / "old", WIDER, tmp_path / "new")
    assert files_of(tmp_path / "new") == files_of(tmp_path / "expected")
    assert not (tmp_path / ".new.partial").exists()


def test_memory_is_bounded_by_chunks_not_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_rows, "CHUNK_BYTES", 1 << 16)
    table = Table("t", 60_000, 32, optimizer="adagrad")
    hot = np.random.default_rng(0).permutation(table.rows)[:2000]
    orders = {"row_order": {"t": RowOrder("profile")}, "hot_ids": {"t": hot}}
    old = replace(plan_of(table, in_dram("t", (0, 60_000, 1), (0, 32))), **orders)
    new = replace(
        plan_of(table, *(in_dram("t", (i, 60_000, 2), (0, 32), f"gpu:{i}") for i in range(2))),
        **orders,
    )
    write_shards(old, checkpoint_of(old), tmp_path / "old")
    shards = open_shards(tmp_path / "old")
    tracemalloc.start()
    try:
        found = reshard(shards, new, tmp_path / "new")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.written_file_bytes > table.total_bytes == 60_000 * 256
    assert peak_bytes < 4 << 20  # Of which 1 MiB is a part of a file that is being hashed.
