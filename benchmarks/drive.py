"""Rows on a drive: placer's records beside RocksDB, LMDB and what the drive gives.

    pip install rocksdict lmdb
    python benchmarks/drive.py /mnt/ssd [--steps]

Each turn all sides read the distinct rows of a batch, whose ids are Zipf(1.05) in the order of
frequency. Nothing is cached: reads are direct, and what LMDB and placer keep is dropped before each
turn. Keys of the others are made before the time begins. Writes results/drive-*.json; with
``--steps`` times of training steps with most rows on the drive, and in DRAM.
"""

import argparse
import ctypes
import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from _machine import markdown, write_results

from placer import Feature, Plan, Shard, Table, Topology
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.executor.drive import DriveRecords
from placer.training import Dlrm

BLOCK, RECORD, CHUNK, LOOKUPS = 4096, 516, 500_000, 262_144
TABLE_ROWS, WIDTH, SAMPLES = 500_000, 64, 2048
PACKAGES = ("torch", "numba", "rocksdict", "lmdb")
TABLES = tuple(Table(f"t{n}", TABLE_ROWS, WIDTH, features=(Feature(f"t{n}"),)) for n in range(8))
Side = Callable[[np.ndarray[Any, Any]], Callable[[], Any]]
"""Gets ready for rows, and returns what is timed."""

pread: Any = ctypes.CDLL(None).pread
pread.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
pread.restype = ctypes.c_ssize_t


@numba.njit(nogil=True)
def read_all(file, address, offsets):  # type: ignore[no-untyped-def]
    """Read blocks one after the other, as C does."""
    for offset in offsets:
        pread(file, address, BLOCK, offset)


def raw_of(path: Path, threads: int) -> Side:
    """The same blocks and nothing else."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = np.frombuffer(mmap.mmap(-1, threads * BLOCK), np.uint8)
    workers = ThreadPoolExecutor(threads)

    def side(rows: np.ndarray[Any, Any]) -> Callable[[], Any]:
        offsets = np.unique(rows // ((BLOCK - 4) // RECORD)) * BLOCK
        parts = [offsets[at::threads] for at in range(threads)]
        places = memory.ctypes.data + BLOCK * np.arange(threads)
        return lambda: list(workers.map(read_all, [file] * threads, places, parts))

    return side


def divided(get: Callable[[list[bytes]], list[bytes]], threads: int) -> Side:
    """Values of sorted keys, each thread a range of them."""
    workers = ThreadPoolExecutor(threads)

    def side(rows: np.ndarray[Any, Any]) -> Callable[[], Any]:
        parts = [keys_of(part) for part in np.array_split(rows, threads)]
        return lambda: [value for values in workers.map(get, parts) for value in values]

    return side


def rocksdb_of(folder: Path, rows: int) -> Callable[[list[bytes]], list[bytes]]:
    """MultiGet from sorted tables without compression, whose index is in memory."""
    import rocksdict as rocksdb

    options, table = rocksdb.Options(raw_mode=True), rocksdb.BlockBasedOptions()
    table.set_block_size(BLOCK)
    table.set_block_cache(rocksdb.Cache(8 << 20))
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocksdb.DBCompressionType.none())
    options.set_use_direct_reads(True)
    reads = rocksdb.ReadOptions()
    reads.set_async_io(True)
    paths = [str(folder / f"{first}.sst") for first in range(0, rows, CHUNK)]
    for first, path in zip(range(0, rows, CHUNK), paths, strict=True):
        writer = rocksdb.SstFileWriter(options)
        writer.open(path)
        for key, value in pairs_of(first, rows):
            writer[key] = value
        writer.finish()
    store = rocksdb.Rdict(str(folder / "rocksdb"), options)
    store.ingest_external_file(paths, rocksdb.IngestExternalFileOptions())
    return lambda keys: store.get(keys, read_opt=reads)


class Lmdb:
    def __init__(self, folder: Path, rows: int) -> None:
        import lmdb

        self.path, self.open = folder / "lmdb", lmdb.open
        self.store = lmdb.open(str(self.path), map_size=rows * 2 * RECORD + (1 << 20))
        for first in range(0, rows, CHUNK):
            with self.store.begin(write=True) as change, change.cursor() as cursor:
                cursor.putmulti(pairs_of(first, rows), append=True)

    def drop(self) -> None:
        """Take its pages out of memory, which works when none are mapped."""
        self.store.close()
        with (self.path / "data.mdb").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.store = self.open(str(self.path), readonly=True, lock=False, readahead=False)

    def get(self, keys: list[bytes]) -> list[bytes]:
        with self.store.begin() as look, look.cursor() as cursor:
            return [value for _, value in cursor.getmulti(keys)]


def keys_of(rows: np.ndarray[Any, Any]) -> list[bytes]:
    return [row.to_bytes(8, "big") for row in rows.tolist()]


def pairs_of(first: int, rows: int) -> list[tuple[bytes, bytes]]:
    last = min(first + CHUNK, rows)
    values = np.random.default_rng(first).bytes((last - first) * RECORD)
    parts = [values[at : at + RECORD] for at in range(0, len(values), RECORD)]
    return list(zip(keys_of(np.arange(first, last)), parts, strict=True))


def trained(folder: Path, edge: int) -> Callable[[list[BagBatch], bool], list[float]]:
    """A hundredth of each table in HBM, rows to `edge` in DRAM: seconds of its steps."""
    homes = (
        ("hbm", "device", 0, TABLE_ROWS // 100, 0),
        ("dram", "staged", TABLE_ROWS // 100, edge, 2 * SAMPLES),
        ("ssd", "staged", edge, TABLE_ROWS, SAMPLES),
    )
    shards = tuple(
        Shard(one.name, (first, last, 1), (0, WIDTH), ("gpu:0",), memory, lookup, staging_rows=room)
        for one in TABLES
        for memory, lookup, first, last, room in homes
        if first < last
    )
    plan = Plan(TABLES, Topology.parse("1xh100", ssd="1TiB"), shards)
    rows = PlacedEmbeddings(plan, backend="tiered", drive=folder, seed=None)
    dlrm = Dlrm(dict.fromkeys(rows.feature_names, WIDTH), 13, bottom=(512, 256), top=(1024, 512))

    def run(batches: list[BagBatch], has_dense: bool) -> list[float]:
        ends = []
        for batch in look_ahead(batches, rows):
            ends.append(time.perf_counter())
            pooled = rows(batch)
            stacked = torch.stack([*pooled.values()])
            (dlrm(torch.ones(SAMPLES, 13), pooled) if has_dense else stacked).mean().backward()
        return np.diff(ends)[2:].tolist()

    return run


def steps(sides: dict[str, Any], turns: int) -> dict[str, list[float]]:
    """Seconds of steps with look-ahead, without and with dense layers, the sides taking turns."""
    found: dict[str, list[float]] = {}
    ends = torch.arange(len(TABLES) * SAMPLES + 1)
    for turn, dense in itertools.product(range(turns), (False, True)):
        ids = (drawn(16 * turn + at, ends.numel() - 1, TABLE_ROWS) for at in range(16))
        batches = [BagBatch(torch.from_numpy(each), ends, SAMPLES) for each in ids]
        for name in sorted(sides, reverse=bool(turn % 2)):
            found.setdefault(f"{name}{', DLRM' * dense}", []).extend(sides[name](batches, dense))
    print(markdown(["step", "ms"], [[k, f"{median(v) * 1e3:.1f}"] for k, v in found.items()]))
    return found


def drawn(seed: int, lookups: int, rows: int) -> np.ndarray[Any, Any]:
    """Ids of Zipf's law with exponent 1.05."""
    part = np.random.default_rng(seed).random(lookups) * (1 - rows**-0.05)
    return np.minimum(((1 - part) ** -20).astype(np.int64) - 1, rows - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", action="store_true", help="training steps instead of reads")
    asked = parser.parse_args()
    if asked.steps:
        edges = {"DRAM": TABLE_ROWS, "drive": TABLE_ROWS * 11 // 100}
        models = {name: trained(asked.folder, edge) for name, edge in edges.items()}
        write_results("drive-steps", PACKAGES, {"steps_s": steps(models, asked.turns)})
        return
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        records = DriveRecords(folder, asked.rows, RECORD)
        for first in range(0, asked.rows, CHUNK):
            values = bytearray(b"".join(dict(pairs_of(first, asked.rows)).values()))
            content = torch.frombuffer(values, dtype=torch.uint8).view(-1, RECORD)
            records.write(torch.arange(first, first + len(content)), content)
        multi_get, pages = rocksdb_of(folder, asked.rows), Lmdb(folder, asked.rows)
        os.sync()
        file = Path(f"/proc/self/fd/{records._file.descriptor}")  # It has no other name.
        sides: dict[str, Side] = {
            "blocks alone, 64 threads": raw_of(file, 64),
            "placer": lambda rows: lambda: records.read(torch.from_numpy(rows)),
            "RocksDB MultiGet": divided(multi_get, 1),
            "RocksDB MultiGet, 16 threads": divided(multi_get, 16),
            "LMDB getmulti": divided(pages.get, 1),
            "LMDB getmulti, 16 threads": divided(pages.get, 16),
        }
        turns: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(asked.turns):
            rows = np.unique(drawn(turn, LOOKUPS, asked.rows))
            for name in (*list(sides)[turn % 6 :], *list(sides)[: turn % 6]):
                pages.drop()
                records._kept.forget()
                run = sides[name](rows)
                began = time.perf_counter()
                found = run()
                turns[name].append(rows.size / (time.perf_counter() - began))
                if isinstance(found[0], bytes):
                    assert b"".join(found) == records.read(torch.from_numpy(rows)).numpy().tobytes()
    speeds = {name: median(speed) for name, speed in turns.items()}
    lines = [
        [name, f"{speed:,.0f}", f"{speed * RECORD / 1e6:.1f}", f"{speeds['placer'] / speed:.2f}"]
        for name, speed in speeds.items()
    ]
    print(markdown(["side", "rows/s", "MB/s", "placer's speed over it"], lines))
    write_results("drive", PACKAGES, {"rows": asked.rows, "rows_per_s": turns})


if __name__ == "__main__":
    main()
