"""A log is read to its end, or refused: one log in many encodings, and each of them damaged.

What placer reads is compared with the rows that were written, sample by sample. A damaged file
gives the same, or a DataError.
"""

import io
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fast_and_full import fewer, mostly_slow

sys.path.append(str(Path(__file__).resolve().parent))
from log_encodings import (
    ENCODINGS,
    PACKINGS,
    PARTS,
    ROWS,
    Encoding,
    Written,
    content_of,
    read_content,
    read_lookups,
    tensors,
)

from placer.data import open_log
from placer.errors import DataError

WHOLE = content_of(ROWS)
DRAWN = random.Random(40).sample(sorted(ENCODINGS), 14)
"""Encodings of the fast tests."""
GARBAGE = (b"x", b"\0", b"\0\0\0", b"1,u1,2,3,t1,4\n", b"BZh9", b"\x1f\x8b", b"\xfd7zXZ", bytes(64))
Damage = Callable[[Written, random.Random], bytes]


def _cut(written: Written, choose: random.Random) -> bytes:
    """A file without its end; not where it is a whole one of fewer streams."""
    content = written.content
    if not written.cuts:
        return content
    place = choose.randrange(1, len(content))
    # Padding behind a stream belongs to no stream.
    while content[:place].rstrip(b"\0") in {
        content[:start].rstrip(b"\0") for start in written.streams
    }:
        place = choose.randrange(1, len(content))
    return content[:place]


def _flip(written: Written, choose: random.Random) -> bytes:
    return _flipped(written, choose, choose.choice(written.flips)) if written.flips else b""


def _flip_in_header(written: Written, choose: random.Random) -> bytes:
    """A bit of the first four bytes of a stream, the last one as often as all others."""
    if not written.closed:
        return b""
    start = choose.choice([written.streams[-1], choose.choice(written.streams)])
    return _flipped(written, choose, start + choose.randrange(4))


def _flipped(written: Written, choose: random.Random, at: int) -> bytes:
    content = bytearray(written.content)
    content[at] ^= 1 << choose.randrange(8)
    return bytes(content)


def _append(written: Written, choose: random.Random) -> bytes:
    garbage = choose.choice([*GARBAGE, choose.randbytes(choose.randrange(1, 40))])
    return written.content + garbage if written.closed else b""


def _double(written: Written, _: random.Random) -> bytes:
    """A file joined with itself, where a format does not allow that."""
    is_container = written.closed and len(written.streams) == 1 and written.content[:1] in b"PA\xff"
    return written.content * 2 if is_container else b""


DAMAGES: tuple[Damage, ...] = (_cut, _flip, _flip_in_header, _append, _double)


def _is_same_or_refused(paths: object, encoding: Encoding) -> bool:
    try:
        return read_content(paths, names=encoding.names) == WHOLE
    except DataError:
        return True


def _write_parts(encoding: Encoding, folder: Path) -> list[Path]:
    folder.mkdir()
    files = [folder / f"part-{number}{encoding.suffix}" for number in range(len(PARTS))]
    for file, rows in zip(files, PARTS, strict=True):
        file.write_bytes(encoding.write(rows).content)
    return files


def test_there_are_many_encodings() -> None:
    assert len(ENCODINGS) >= 60
    assert {name.partition(".")[2] for name in ENCODINGS} >= set(PACKINGS)


@pytest.mark.parametrize("name", mostly_slow(ENCODINGS, *DRAWN))
def test_every_encoding_holds_the_same(tmp_path: Path, name: str) -> None:
    """As one file, three files and a folder."""
    encoding = ENCODINGS[name]
    one = tmp_path / f"log{encoding.suffix}"
    one.write_bytes(encoding.write(ROWS).content)
    assert read_content(one, names=encoding.names) == WHOLE
    if "without-header" not in name or "plain" in name:
        parts = _write_parts(encoding, tmp_path / "parts")
        assert read_content(parts, names=encoding.names) == WHOLE
        assert read_content(tmp_path / "parts", names=encoding.names) == WHOLE


@pytest.mark.parametrize("name", mostly_slow(ENCODINGS, *DRAWN))
def test_damages_are_refused_or_do_no_harm(tmp_path: Path, name: str) -> None:
    encoding, choose = ENCODINGS[name], random.Random(name)
    written = encoding.write(ROWS)
    file = tmp_path / f"log{encoding.suffix}"
    parts = _write_parts(encoding, tmp_path / "parts")
    for number in range(fewer(2, 1) * len(DAMAGES)):
        damage = DAMAGES[number % len(DAMAGES)]
        damaged = damage(written, choose)
        if damaged:
            file.write_bytes(damaged)
            assert _is_same_or_refused(file, encoding), (damage, number, len(damaged))
        # One of several files; the last one, where a loss would be noticed by nothing else.
        rows = encoding.write(PARTS[-1])
        damaged = damage(rows, choose)
        if damaged:
            parts[-1].write_bytes(damaged)
            assert _is_same_or_refused(parts, encoding), (damage, number, "of several")
            parts[-1].write_bytes(rows.content)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"csv.{packing}" for packing in PACKINGS if packing != "plain"])
def test_every_cut_and_every_bit_of_headers(tmp_path: Path, name: str) -> None:
    encoding = ENCODINGS[name]
    written = encoding.write(ROWS[:12])
    file, whole = tmp_path / f"log{encoding.suffix}", content_of(ROWS[:12])
    starts = {written.content[:start].rstrip(b"\0") for start in written.streams}
    cuts = [written.content[:place] for place in range(1, len(written.content))]
    damaged = [cut for cut in cuts if cut.rstrip(b"\0") not in starts]
    for start in written.streams:
        for bit in range(8 * 4):
            content = bytearray(written.content)
            content[start + bit // 8] ^= 1 << bit % 8
            damaged.append(bytes(content))
    for content in damaged:
        file.write_bytes(content)
        try:
            assert read_content(file) == whole
        except DataError:
            continue


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_refusal_names_the_file_and_the_byte(tmp_path: Path, suffix: str) -> None:
    packing = next(name for name, (end, _) in PACKINGS.items() if end == suffix and "s" in name[3:])
    written = ENCODINGS[f"csv.{packing}"].write(ROWS)
    damaged = bytearray(written.content)
    damaged[written.streams[2]] ^= 0x40
    file = tmp_path / f"log.csv{suffix}"
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=rf"log\.csv{suffix}: .*byte [0-9]+"):
        read_content(file)
    file.write_bytes(written.content[:-3])
    with pytest.raises(DataError, match=rf"log\.csv{suffix}: .*byte {len(written.content) - 3}"):
        read_content(file)


def test_padding_of_xz_is_of_whole_words(tmp_path: Path) -> None:
    file = tmp_path / "log.csv.xz"
    written = ENCODINGS["csv.xz-streams"].write(ROWS)
    second = written.streams[1]
    for zeros in range(1, 13):
        file.write_bytes(written.content[:second] + bytes(zeros) + written.content[second:])
        if zeros % 4 == 0:
            assert read_content(file) == WHOLE
        else:
            with pytest.raises(DataError, match=f"{zeros} zero bytes from byte {second} on"):
                read_content(file)


@pytest.mark.parametrize(
    "packing", mostly_slow(["bz2-streams", "xz-padded", "gz-members", "zst-frames"], "xz-padded")
)
def test_pipes_stores_and_names_without_suffix(
    tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What opens a file in another way reads it to its end, too, or refuses it."""
    fsspec = pytest.importorskip("fsspec")
    written = ENCODINGS[f"csv.{packing}"].write(ROWS)
    damaged = bytearray(written.content)
    damaged[written.streams[-1]] ^= 0x10
    for content, is_whole in ((written.content, True), (bytes(damaged), False)):
        fsspec.filesystem("memory").pipe("/oracle/part-00000", content)
        (tmp_path / "part-00000").write_bytes(content)
        fifo = tmp_path / f"fifo-{is_whole}"
        os.mkfifo(fifo)
        writer = threading.Thread(target=fifo.write_bytes, args=(content,))
        writer.start()
        stdin = SimpleNamespace(buffer=io.BytesIO(content))
        monkeypatch.setattr(sys, "stdin", stdin)
        for paths in ("memory://oracle/", tmp_path / "part-00000", fifo, "-"):
            if is_whole:
                assert read_content(paths) == WHOLE
            else:
                with pytest.raises(DataError, match="byte"):
                    read_content(paths)
        writer.join()


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
def test_tensors_are_read_whole_or_refused(tmp_path: Path, suffix: str) -> None:
    content, lookups = tensors()
    pack = dict(reversed(PACKINGS.values()))[suffix]
    written, file = pack(content), tmp_path / f"log.pt{suffix}"
    file.write_bytes(written.content)
    whole = read_lookups(file)
    assert sum(map(len, whole)) == lookups
    choose = random.Random(1)
    for _ in range(12):
        place = choose.randrange(len(written.content))
        flipped = bytearray(written.content)
        flipped[place] ^= 1 << choose.randrange(8)
        for damaged in (written.content[:place], flipped, written.content + b"x"):
            file.write_bytes(damaged)
            try:
                assert read_lookups(file) == whole
            except DataError:
                continue
    # Two files in one: the first would be passed over.
    file.write_bytes(content * 2 if not suffix else pack(content * 2).content)
    with pytest.raises(DataError, match=r"log\.pt"):
        read_lookups(file)


def _data_set(folder: Path) -> list[Path]:
    metadata: list[pq.FileMetaData] = []
    table = pa.table({"label": [0, 1] * 30, "item": list(range(60)), "day": [1, 2, 3] * 20})
    pq.write_to_dataset(table, folder, partition_cols=["day"], metadata_collector=metadata)
    schema = table.drop(["day"]).schema
    pq.write_metadata(schema, folder / "_metadata", metadata_collector=metadata)
    return sorted(folder.rglob("*.parquet"))


def _samples(path: object) -> int:
    return sum(chunk.samples for chunk in open_log(path, id_mapping="hash", rows=9).chunks())


@pytest.mark.parametrize("store", [False, True])
def test_a_data_set_has_all_that_its_metadata_lists(tmp_path: Path, store: bool) -> None:
    folder = tmp_path / "log"
    files = _data_set(folder)
    content = files[1].read_bytes()

    def named() -> object:
        if not store:
            return folder
        system = pytest.importorskip("fsspec").filesystem("memory")
        if system.exists("/parts"):
            system.rm("/parts", recursive=True)
        system.put(str(folder), "/parts", recursive=True)
        return "memory://parts"

    assert _samples(named()) == 60
    assert _samples(files[0]) == 20, "a part by itself lacks nothing"
    files[1].unlink()
    with pytest.raises(DataError, match=rf"{files[1].name} is missing .*_metadata lists it"):
        _samples(named())
    pq.write_table(pq.read_table(files[0], partitioning=None).slice(3), files[1])
    with pytest.raises(DataError, match=rf"{files[1].name} has 17 rows, and .*_metadata lists"):
        _samples(named())
    files[1].write_bytes(content)
    (folder / "_metadata").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="_metadata as Parquet"):
        _samples(named())
    for file in files:
        file.unlink()
    with pytest.raises(DataError, match="_metadata lists files, and none is there"):
        _samples(named())
