"""Files and folders: whole or not there, whoever writes, reads or is killed beside."""

import json
import lzma
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from cli_cases import fail

from placer.data.files.opening import head
from placer.errors import PlacerError
from placer.files.atomic import (
    HashedFile,
    check_place,
    read_parts,
    replacing,
    replacing_parts,
    write_text,
)
from placer.files.folders import HiddenFolder, exchange
from placer.files.locks import locked_folder, one_run

STARTS = "import sys, time\nfrom pathlib import Path\n"


def killed_in(code: str, *arguments: object) -> None:
    """Run code in a process of its own and kill it when it has printed a line."""
    running = subprocess.Popen(
        [sys.executable, "-c", STARTS + code, *map(str, arguments)], stdout=subprocess.PIPE
    )
    assert running.stdout.readline()
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What there was before --------------------------------------------------------------------------


def test_a_pipe_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        kind = path.stat().st_mode
        with pytest.raises(PlacerError, match=rf"cannot write {path}: it is a"):
            write_text(path, "plan")
        assert path.stat().st_mode == kind


def test_a_full_disk_leaves_no_folder(tmp_path: Path) -> None:
    """A limit of a file's size stands for a full disk: both end a write with an error."""
    log = tmp_path / "log.csv"
    log.write_text("user,item\n" + "1,2\n" * 99)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for name in ("one/two/plan.json", "one"):
            with pytest.raises(PlacerError, match=r"cannot write .*File too large"):
                write_text(tmp_path / name, "a" * 1000)
        assert "File too large" in fail("-q", "profile", log, "-o", tmp_path / "profile")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(tmp_path) == ["log.csv"]


def test_a_result_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    for place in ("pipe", "file/plan.json", "n" * 300, "."):
        problem = ("--workload", "recshard-rm1", "--topology", "2x8xh100", "--solver", "ilp")
        line = fail("plan", *problem, "-o", tmp_path / place)
        assert line.startswith("placer: cannot write")
    with pytest.raises(PlacerError, match=r"Not a directory"):
        check_place(tmp_path / "file" / "profile")
    with pytest.raises(PlacerError, match=r"File name too long"):
        check_place("n" * 300)
    check_place(tmp_path, "folder")
    with pytest.raises(PlacerError, match="it is a file; name a folder"):
        check_place(tmp_path / "file", "folder")
    for what in ("file", "folder"):
        with pytest.raises(PlacerError, match=rf"no folder {tmp_path}/new; make it: mkdir -p"):
            check_place(tmp_path / "new" / "plan.json", what)  # type: ignore[arg-type]
    check_place(tmp_path / "new" / "runs", "folder", makes_folders=True)
    assert names_in(tmp_path) == ["file", "pipe"]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "plan.json"
    link.symlink_to(target)
    for text in ("new", "newer"):  # First without anything at its end.
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert names_in(tmp_path) == ["elsewhere", "link"]


def test_the_mode_is_kept_and_that_of_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    before = os.umask(0o027)
    try:
        write_text(path, "1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_text(path, "2")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("n" * 255), "1")
    assert names_in(tmp_path) == ["n" * 255]


# Killed -----------------------------------------------------------------------------------------


def test_what_a_killed_process_left_goes_with_the_next_file(tmp_path: Path) -> None:
    code = """
from placer.files.atomic import replacing
with replacing(Path(sys.argv[1])):
    print(1, flush=True)
    time.sleep(60)
"""
    killed_in(code, tmp_path / "plan.json")
    (left,) = names_in(tmp_path)
    assert left.startswith(".plan.json.")
    (tmp_path / ".other.abcdefgh.placer-partial").mkdir()
    with replacing(tmp_path / "first") as living:
        write_text(tmp_path / "other", "1")
        assert living.exists()
    assert names_in(tmp_path) == [".other.abcdefgh.placer-partial", "first", "other"]


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    code = """
from placer.files.locks import one_run
with one_run(Path(sys.argv[1])):
    print(1, flush=True)
    time.sleep(60)
"""
    killed_in(code, tmp_path / "run")
    with one_run(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_second_run_is_told_who_the_first_is(tmp_path: Path) -> None:
    with (
        one_run(tmp_path / "run"),
        pytest.raises(PlacerError, match=rf"in use by another run: process {os.getpid()} on .* si"),
        one_run(tmp_path / "run"),
    ):
        pass
    assert not (tmp_path / "run").exists()


# Two at once ------------------------------------------------------------------------------------


def test_a_folder_that_another_writes_is_left_alone(tmp_path: Path) -> None:
    first = HiddenFolder(tmp_path / "step")
    first.begin()
    (first.partial / "part").write_text("1")
    with pytest.raises(PlacerError, match=r"another process is writing .*step"):
        HiddenFolder(tmp_path / "step").begin()
    assert (first.partial / "part").exists()
    first.publish()
    assert (tmp_path / "step" / "part").read_text() == "1"
    assert names_in(tmp_path) == ["step"]


def test_a_folder_is_replaced_in_one_step(tmp_path: Path) -> None:
    for text in ("old", "new"):
        hidden = HiddenFolder(tmp_path / "step")
        hidden.begin()
        (hidden.partial / "part").write_text(text)
        hidden.publish()
        hidden.discard()
    assert (tmp_path / "step" / "part").read_text() == "new"
    assert names_in(tmp_path) == ["step"]
    write_text(tmp_path / "a", "a")
    write_text(tmp_path / "b", "b")
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_text() == "b"


def test_a_writer_waits_for_another_of_the_same_folder(tmp_path: Path) -> None:
    order = []

    def write() -> None:
        with locked_folder(tmp_path):
            order.append("second")

    second = threading.Thread(target=write)
    with locked_folder(tmp_path):
        second.start()
        time.sleep(0.03)
        order.append("first")
    second.join()
    assert order == ["first", "second"]
    with (
        locked_folder(tmp_path),
        pytest.raises(PlacerError, match=r"another process has been writing"),
        locked_folder(tmp_path, wait_s=0),
    ):
        pass


def save(folder: Path, text: str) -> None:
    """A file that names a part, as plans and profiles do."""
    file = folder / "main"
    with replacing_parts(file, lambda: folder.glob("part-*")) as names:
        names.add(f"part-{text}")
        write_text(folder / f"part-{text}", text)
        write_text(file, text)


def test_readers_beside_writers_see_one_version(tmp_path: Path) -> None:
    """Two writers and a reader, of files as plans and profiles are."""
    save(tmp_path, "begin")
    file, stop, faults = tmp_path / "main", threading.Event(), []

    def write(who: int) -> None:
        for number in range(8):
            save(tmp_path, f"{who}-{number % 3}")

    def read_both() -> str:
        text = file.read_text()
        try:
            return (tmp_path / f"part-{text}").read_text()
        except OSError as error:
            raise PlacerError(str(error)) from error

    def read() -> None:
        while not stop.is_set():
            try:
                read_parts(file, read_both)
            except Exception as error:  # What is raised in a thread would be lost.
                faults.append(error)

    writers = [threading.Thread(target=write, args=(who,)) for who in range(2)]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert not faults
    assert len(list(tmp_path.glob("part-*"))) == 1


def test_bytes_of_a_name_that_are_no_utf8_are_written_as_json_has_them(tmp_path: Path) -> None:
    name = os.fsdecode(b"log-\xff")
    write_text(tmp_path / "file", json.dumps({"name": name}, ensure_ascii=False))
    assert json.loads((tmp_path / "file").read_text()) == {"name": name}


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ".lz4"])
def test_the_start_of_a_compressed_file_may_be_all_that_is_read(
    tmp_path: Path, suffix: str
) -> None:
    """A reader that has enough asks for no byte more, which is no error of the stream."""
    content = random.Random(1).randbytes(300_000)
    file = tmp_path / f"log.csv{suffix}"
    packing = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}.get(suffix)
    with pa.output_stream(str(file), compression=packing) as stream:
        stream.write(lzma.compress(content) if suffix == ".xz" else content)
    for size in (1, 100_000, 200_000, 300_000, 400_000):
        assert head(str(file), size) == content[:size]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("size", [1, 1 << 20])  # Written when the file is closed, and at once.
def test_a_hashed_file_says_at_its_end_that_the_disk_was_full(size: int) -> None:
    file = HashedFile(Path("/dev/full"))
    assert file.write(bytes(size)) == file.tell() == size
    with pytest.raises(OSError, match="No space left"):
        file.finish()
