"""Records in a file on a drive, beside a dict of them."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.drive import DEPTH, READ, BlockFile, BlockQueue, DriveRecords, KeptBlocks

BLOCK = 4096


@contextmanager
def opened(folder: Path, rows: int, record_bytes: int) -> Iterator[DriveRecords]:
    records = DriveRecords(folder, rows, record_bytes)
    try:
        yield records
    finally:
        records._file.close()


def file_of(records: DriveRecords) -> Path:
    """The file without a name, which Linux shows there."""
    return Path(f"/proc/self/fd/{records._file.descriptor}")


def drawn(count: int, record_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, record_bytes), dtype=torch.uint8, generator=generator)


def change(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


SIZES = st.one_of(
    st.sampled_from([1, 2, 516, 2046, 2047, 4091, 4092, 4093, 4096, 8188, 8189, 12000]),
    st.integers(1, 9000),
)


@given(st.data(), SIZES, st.integers(1, 400))
def test_reads_what_a_dict_would_have(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    record_bytes: int,
    rows: int,
) -> None:
    folder = tmp_path_factory.mktemp("records")
    some = st.lists(st.integers(0, rows - 1), max_size=60)
    expected: dict[int, Tensor] = {}
    records = DriveRecords(folder, rows, record_bytes)
    for seed in range(data.draw(st.integers(1, 6))):
        written = data.draw(st.one_of(some, st.just(list(range(rows)))))
        written = list(dict.fromkeys(written))
        values = drawn(len(written), record_bytes, seed)
        records.write(torch.tensor(written, dtype=torch.int64), values)
        expected |= dict(zip(written, values, strict=True))
        asked = data.draw(some)
        found = records.read(torch.tensor(asked, dtype=torch.int64))
        assert found.shape == (len(asked), record_bytes)
        for row, record in zip(asked, found, strict=True):
            assert torch.equal(record, expected.get(row, torch.zeros_like(record)))
    everything = records.read(torch.arange(rows))
    for row, record in enumerate(everything):
        assert torch.equal(record, expected.get(row, torch.zeros_like(record)))
    records._file.close()
    assert list(folder.iterdir()) == []
    shutil.rmtree(folder)


def test_hundreds_of_files_share_what_the_system_has(tmp_path: Path) -> None:
    """It has 65,536 asynchronous requests at a time, for all processes."""
    tables = [DriveRecords(tmp_path, 10, 516) for _ in range(200)]
    for seed, records in enumerate(tables):
        records.write(torch.arange(10), drawn(10, 516, seed))
    for seed, records in enumerate(tables):
        assert torch.equal(records.read(torch.arange(10)), drawn(10, 516, seed))
        records._file.close()


def test_a_forked_process_reads_too(tmp_path: Path) -> None:
    """And what it reads leaves alone the blocks that the other has read since."""
    with opened(tmp_path, 70, 516) as records:
        rows, values = torch.arange(70), drawn(70, 516)
        records.write(rows, values)
        go, come = os.pipe()
        child = os.fork()
        if not child:
            os.read(go, 1)
            found = records.read(rows[49:55]).numpy()
            os._exit(0 if found.tobytes() == values[49:55].numpy().tobytes() else 1)
        assert torch.equal(records.read(rows[:6]), values[:6])
        os.write(come, b"1")
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(records.read(rows[:6]), values[:6])
        os.close(go)
        os.close(come)


def test_a_file_has_no_more_than_its_blocks(tmp_path: Path) -> None:
    for rows, record_bytes, blocks in [(7, 516, 1), (8, 516, 2), (3, 4100, 6), (0, 8, 1)]:
        with opened(tmp_path, rows, record_bytes) as records:
            assert records.read(torch.arange(rows)).sum() == 0
            held = os.fstat(records._file.descriptor)
            assert held.st_size == blocks * BLOCK
            assert held.st_blocks * 512 >= blocks * BLOCK  # Reserved, not only promised.
            # And written, so that later writes split nothing.
            with file_of(records).open("rb") as file:
                assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == blocks * BLOCK


def test_reads_beside_writes_of_the_same_blocks(tmp_path: Path) -> None:
    """Two threads write the even rows and the odd ones, and two read: no record is a mixture."""
    rows, turns = 700, 60
    with opened(tmp_path, rows, 516) as records:
        records.write(torch.arange(rows), torch.zeros(rows, 516, dtype=torch.uint8))

        def write(first: int) -> None:
            mine = torch.arange(first, rows, 2)
            for turn in range(turns):
                values = torch.full((len(mine), 516), turn, dtype=torch.uint8)
                records.write(mine, values)
                assert torch.equal(records.read(mine), values)

        def read() -> None:
            seen = torch.zeros(rows, dtype=torch.uint8)
            for _ in range(turns):
                found = records.read(torch.arange(rows))
                assert (found == found[:, :1]).all()
                assert (found[:, 0] >= seen).all()
                seen = found[:, 0]

        with ThreadPoolExecutor(4) as threads:
            works = [threads.submit(write, 0), threads.submit(write, 1)]
            works += [threads.submit(read), threads.submit(read)]
            for work in works:
                work.result()


def test_a_block_that_was_read_lately_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch's rows are written about ten batches later."""
    reads: list[int] = []
    submit = BlockQueue.submit

    def counted(queue, operation, file, size, addresses, offsets) -> None:
        reads.append(len(offsets) if operation == READ else 0)
        submit(queue, operation, file, size, addresses, offsets)

    rows, per_block, later = 56_000, 7, 9
    batches = [torch.arange(at * per_block, rows, 80 * per_block) for at in range(30)]
    with opened(tmp_path, rows, 516) as records:
        expected = drawn(rows, 516)
        records.write(torch.arange(rows), expected)
        monkeypatch.setattr(BlockQueue, "submit", counted)

        def needed(operation, *arguments) -> int:
            reads.clear()
            operation(*arguments)
            return sum(reads)

        for at, batch in enumerate(batches):
            if at >= later:
                before = batches[at - later]
                expected[before] = drawn(len(before), 516, seed=at)
                assert needed(records.write, before, expected[before]) == 0
            assert needed(records.read, batch) == len(batch)
        assert needed(records.read, batches[29] + 1) == 0  # Of the same blocks.
        once = batches[29][:9]
        for seed in range(2):
            expected[once] = drawn(9, 516, seed)
            assert needed(records.write, once, expected[once]) == 0
        expected[batches[0]] = drawn(100, 516)
        assert needed(records.write, batches[0], expected[batches[0]]) == 100  # Others came.
        assert needed(records.read, torch.arange(rows)) < rows / per_block - 800
        assert torch.equal(records.read(torch.arange(rows)), expected)
        assert needed(records.read, batches[29]) == 0  # Reading all rows moved none out.


def test_blocks_in_use_stay_while_others_come() -> None:
    """Two calls at a time, as two queues have; of so few slots each is used again and again."""
    generator, blocks = np.random.default_rng(0), 10 * DEPTH
    kept = KeptBlocks(blocks, BLOCK)
    held: list[tuple[np.ndarray, np.ndarray]] = []
    hits = 0
    for turn in range(200):
        own = generator.choice(blocks, generator.integers(DEPTH + 1), replace=False)
        own = np.setdiff1d(own, [block for other, _ in held for block in other])
        passing = generator.random(own.size) < 0.3
        slots, known = kept.use(own, passing, turn % 2)
        for other, places in (*held, (own[known], slots[known])):
            assert np.array_equal(kept.content[places].view(np.int64)[:, 0], other)
        assert np.unique(slots).size == slots.size
        kept.content.view(np.int64)[slots] = own[:, None]
        hits += int(known.sum())
        held.append((own, slots))
        if len(held) == 2:
            kept.release(held.pop(0)[1])
    assert hits > 1000
    kept.forget()
    assert not kept.use(np.arange(9), np.zeros(9, bool), 0)[1].any()


DAMAGE = {
    "a bit": lambda path: change(path, BLOCK + 100, b"\x01"),
    "a bit of the checksum": lambda path: change(path, 2 * BLOCK - 1, bytes([_last(path) ^ 128])),
    "padding": lambda path: change(path, BLOCK + 7 * 516 + 3, b"\x01"),
    "half": lambda path: change(path, BLOCK, bytes(BLOCK // 2)),
    "another block": lambda path: change(path, BLOCK, path.read_bytes()[:BLOCK]),
    "noise": lambda path: change(path, BLOCK, np.random.default_rng(0).bytes(BLOCK)),
}


def _last(path: Path) -> int:
    return path.read_bytes()[2 * BLOCK - 1]


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("is_write", [False, True])
def test_a_damaged_block_is_named(tmp_path: Path, kind: str, is_write: bool) -> None:
    rows, values = torch.arange(700), torch.zeros(700, 516, dtype=torch.uint8)
    values[:, 0] = 9
    with opened(tmp_path, 700, 516) as records:
        records.write(torch.arange(700), values)
        DAMAGE[kind](file_of(records))
        says = rf"block 1 of {tmp_path} \(rows 7 to 13\) is damaged.*from a checkpoint"
        with pytest.raises(PlacerError, match=says):
            _ = records.write(torch.tensor([3, 8]), values[:2]) if is_write else records.read(rows)
        others = torch.cat((torch.arange(7), torch.arange(14, 700)))
        assert torch.equal(records.read(others), values[others])
        records.write(torch.arange(7, 14), values[7:14])  # All of it is new.
        assert torch.equal(records.read(torch.arange(700)), values)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    with opened(tmp_path, 70, 516) as records:
        records.write(torch.arange(70), drawn(70, 516))
        os.truncate(file_of(records), 4 * BLOCK + 1024)
        with pytest.raises(PlacerError, match=r"block [4-9] of .* was not read: it ended after"):
            records.read(torch.arange(70))
        assert torch.equal(records.read(torch.arange(28)), drawn(70, 516)[:28])


def test_a_drive_that_refuses_writes(tmp_path: Path) -> None:
    """As when it is full, or went read-only: here a limit of the size of files."""
    values = drawn(70, 516)
    with opened(tmp_path, 70, 516) as records:
        records.write(torch.arange(70), values)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, hard))
        try:
            with pytest.raises(PlacerError, match=r"(block 2 of .* was not written|cannot use).*"):
                records.write(torch.tensor([14]), drawn(1, 516, 5))
            with pytest.raises(PlacerError, match=r"cannot reserve 40 KiB in .*: File too large"):
                DriveRecords(tmp_path, 70, 516)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert torch.equal(records.read(torch.arange(70)), values)
    assert list(tmp_path.iterdir()) == []


FULL = """
import sys, torch
from pathlib import Path
from placer.errors import PlacerError
from placer.executor.drive import DriveRecords
place = Path(sys.argv[1])
first = DriveRecords(place, 700, 516)
for rows in (1400, 1100):
    try:
        DriveRecords(place, rows, 516)
    except PlacerError as error:
        print(error)
print([path.name for path in place.iterdir()])
first.write(torch.arange(700), torch.ones(700, 516, dtype=torch.uint8))
print(int(first.read(torch.arange(700)).sum()))
"""


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """On a disk of 1 MiB of its own; what was reserved before goes on."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], check=False).returncode:
        pytest.skip("this system lets us mount no disk")
    script = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    done = subprocess.run(
        [*unshare, script, sys.executable, FULL], check=True, capture_output=True, text=True
    )
    second, third, names, total = done.stdout.splitlines()
    assert "cannot reserve 800 KiB in" in second, second
    assert ": 624 KiB are free; free space" in third, third
    assert (names, total) == ("[]", str(700 * 516))


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        with pytest.raises(PlacerError, match=rf"cannot write .*/{place}: .*name another place"):
            DriveRecords(tmp_path / place, 7, 516)
    with pytest.raises(PlacerError, match=r"cannot reserve 5,322 TiB in .*: .* are free"):
        DriveRecords(tmp_path, 10**13, 516)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_rows_and_records_that_are_wrong(tmp_path: Path) -> None:
    with opened(tmp_path, 10, 4) as records:
        values = drawn(10, 4)
        records.write(torch.arange(10), values)
        for wrong in (-1, 10):
            with pytest.raises(PlacerError, match=rf"has rows 0 to 9, and not {wrong}"):
                records.read(torch.tensor([3, wrong]))
        with pytest.raises(PlacerError, match="row 3 is to be written twice"):
            records.write(torch.tensor([3, 4, 3]), values[:3])
        assert torch.equal(records.read(torch.tensor([3, 4, 3])), values[[3, 4, 3]])
        assert torch.equal(records.read(torch.arange(10)), values)


@pytest.mark.parametrize("is_direct", [True, False])
def test_more_blocks_than_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """Also on a file system without direct reads: through the cache of the system."""
    if not is_direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
        file = BlockFile(tmp_path, 7, 516)
        os.preadv(file.descriptor, [bytearray(10)], 3)  # Direct reads have to be aligned.
        file.close()
    with opened(tmp_path, 20_000, 516) as records:
        assert list(tmp_path.iterdir()) == []  # So that a process that is killed leaves nothing.
        values = drawn(20_000, 516)
        order = torch.randperm(20_000)
        records.write(order[:15_000], values[order[:15_000]])
        records.write(order[15_000:], values[order[15_000:]])
        asked = torch.randperm(20_000)
        assert torch.equal(records.read(asked), values[asked])
