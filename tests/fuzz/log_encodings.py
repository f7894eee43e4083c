"""One log in many encodings, compressions and divisions into files, and what it holds."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import torch

from placer.data import open_log
from placer.data.layout import Layout

COLUMNS = ("label", "user", "item", "shop", "tags", "price")
SPARSE = ("user", "item", "shop", "tags")
Row = dict[str, Any]


def _rows(count: int) -> list[Row]:
    choose = random.Random(0)
    return [
        {
            "label": choose.randrange(2),
            "user": f"u{choose.randrange(30)}",
            "item": choose.randrange(1, 40),
            "shop": choose.choice([None, choose.randrange(1, 5)]),
            "tags": [f"t{choose.randrange(20)}" for _ in range(choose.randrange(1, 4))],
            "price": choose.choice([None, choose.randrange(1, 80) / 4]),
        }
        for _ in range(count)
    ]


ROWS = _rows(60)
PARTS = (ROWS[:25], ROWS[25:26], ROWS[26:])
"""The same rows in three files."""

Content = list[tuple[Any, ...]]
"""Of each sample the label, the price and the ids of each feature, by number."""


def content_of(rows: Sequence[Row]) -> Content:
    """What reading rows has to give: ids are numbered as they first appear."""
    numbers = _Numbers()
    found = []
    for row in rows:
        bags = []
        for name in SPARSE:
            value = row[name]
            ids = value if isinstance(value, list) else [] if value is None else [value]
            bags.append(numbers.of(name, ids))
        found.append((float(row["label"]), row["price"], *bags))
    return found


class _Numbers:
    """Numbers of a feature's ids, from 0 on, as they first appear."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Any, int]] = {name: {} for name in SPARSE}

    def of(self, name: str, ids: Sequence[Any]) -> list[int]:
        known = self._known[name]
        return [known.setdefault(one, len(known)) for one in ids]


def read_content(paths: Any, *, names: Sequence[str] = COLUMNS) -> Content:
    """What placer reads; a DataError if it refuses to."""
    own = dict(zip(COLUMNS, names, strict=True))
    log = open_log(
        paths,
        sparse=[own[name] for name in SPARSE],
        dense=[own["price"]],
        label=own["label"],
        missing="empty",
        id_mapping="vocabulary",
        layout=Layout(lists={own["tags"]: "|"}),
    )
    numbers = _Numbers()
    found: Content = []
    for chunk in log.chunks(16):
        assert chunk.labels is not None
        for sample in range(chunk.samples):
            price = float(chunk.dense[sample, 0])
            bags = []
            for name in SPARSE:
                held = chunk.features[own[name]]
                first, last = (
                    (sample, sample + 1)
                    if held.offsets is None
                    else held.offsets[sample : sample + 2].tolist()
                )
                bags.append(numbers.of(name, held.ids[first:last].tolist()))
            label = float(chunk.labels[sample])
            found.append((label, None if price != price else price, *bags))
    return found


@dataclass(frozen=True)
class Written:
    """A file's bytes, and what a damage to them can be noticed by."""

    content: bytes
    # Where streams begin; a file that is cut there is a whole one of fewer samples.
    streams: tuple[int, ...] = (0,)
    # Bytes of which every bit is under a checksum, or such that a reader cannot do without.
    flips: range = range(0)
    cuts: bool = True  # Whether its format says where it ends.
    closed: bool = True  # Whether nothing may follow it.


def _delimited(
    separator: str = ",",
    *,
    header: bool = True,
    line: str = "\n",
    mark: str = "",
    quoting: int = csv.QUOTE_MINIMAL,
    last: bool = True,
) -> Callable[[Sequence[Row]], bytes]:
    def write(rows: Sequence[Row]) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator=line, quoting=quoting)
        if header:
            writer.writerow(COLUMNS)
        for row in rows:
            flat = {**row, "tags": "|".join(row["tags"])}
            writer.writerow(["" if flat[name] is None else flat[name] for name in COLUMNS])
        content = mark + text.getvalue()
        return (content if last else content.removesuffix(line)).encode()

    return write


def _json_lines(absent: bool = False, last: bool = True) -> Callable[[Sequence[Row]], bytes]:
    def write(rows: Sequence[Row]) -> bytes:
        # The first object has all fields: types are found from the first samples.
        kept = [
            {name: value for name, value in row.items() if value is not None or not absent}
            for row in rows
        ]
        text = "\n".join(map(json.dumps, kept))
        return (text + "\n" * last).encode()

    return write


TEXTS: dict[str, tuple[str, Callable[[Sequence[Row]], bytes]]] = {
    "csv": ("csv", _delimited()),
    "csv-without-header": ("csv", _delimited(header=False)),
    "csv-quoted": ("csv", _delimited(quoting=csv.QUOTE_ALL)),
    "csv-crlf": ("csv", _delimited(line="\r\n")),
    "csv-mark": ("csv", _delimited(mark="\ufeff")),
    "csv-without-last-newline": ("csv", _delimited(last=False)),
    "csv-semicolons": ("csv", _delimited(";")),
    "tsv": ("tsv", _delimited("\t")),
    "tsv-without-header": ("tsv", _delimited("\t", header=False)),
    "jsonl": ("jsonl", _json_lines()),
    "jsonl-absent": ("jsonl", _json_lines(absent=True)),
    "jsonl-without-last-newline": ("jsonl", _json_lines(last=False)),
}
"""The suffix of each kind of text, and what writes it."""


def _streams(content: bytes, count: int, pack: Callable[[bytes], bytes]) -> list[bytes]:
    size = -(-len(content) // count)
    return [pack(content[first : first + size]) for first in range(0, len(content), size)]


def _joined(streams: Sequence[bytes], padding: bytes = b"") -> Written:
    content, starts = b"", []
    for stream in streams:
        starts.append(len(content))
        content += stream + padding
    return Written(content, tuple(starts), range(len(content)))


def _zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


def _zstd_frames(content: bytes, count: int = 1, between: bytes = b"") -> Written:
    # Arrow writes frames without checksums: bits that are flipped within cannot be noticed.
    # A frame that is skipped is one, too: a file may end before it.
    frames = [part for one in _streams(content, count, _zstd) for part in (one, between) if part]
    written = _joined(frames)
    return Written(written.content, written.streams, range(0))


_SKIPPED = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"

PACKINGS: dict[str, tuple[str, Callable[[bytes], Written]]] = {
    "plain": ("", lambda content: Written(content, cuts=False, closed=False)),
    "gz": (".gz", lambda content: _joined([gzip.compress(content)])),
    "gz-members": (".gz", lambda content: _joined(_streams(content, 5, gzip.compress))),
    "gz-padded": (".gz", lambda content: _joined(_streams(content, 3, gzip.compress), bytes(7))),
    "bz2": (".bz2", lambda content: _joined([bz2.compress(content)])),
    "bz2-streams": (".bz2", lambda content: _joined(_streams(content, 10, bz2.compress))),
    "xz": (".xz", lambda content: _joined([lzma.compress(content)])),
    "xz-streams": (".xz", lambda content: _joined(_streams(content, 5, lzma.compress))),
    "xz-padded": (".xz", lambda content: _joined(_streams(content, 3, lzma.compress), bytes(8))),
    "zst": (".zst", _zstd_frames),
    "zst-frames": (".zst", lambda content: _zstd_frames(content, 5)),
    "zst-skipped": (".zst", lambda content: _zstd_frames(content, 3, _SKIPPED)),
}
"""The suffix of each compression, and what writes it."""

_TYPES = pa.schema(
    [
        ("label", pa.int64()),
        ("user", pa.string()),
        ("item", pa.int64()),
        ("shop", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("price", pa.float64()),
    ]
)


def _table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=_TYPES)


def _parquet(rows: Sequence[Row], **options: Any) -> Written:
    sink = io.BytesIO()
    pq.write_table(_table(rows), sink, row_group_size=7, **options)
    content = sink.getvalue()
    # Within the footer, Arrow ends the process for some bits (its sizes of levels, say).
    footer = pq.read_metadata(pa.BufferReader(content)).serialized_size + 8
    checked = options.get("write_page_checksum", False)
    return Written(content, flips=range(4, len(content) - footer) if checked else range(0))


def _arrow(rows: Sequence[Row], make: Callable[..., Any]) -> Written:
    sink = io.BytesIO()
    with make(sink, _TYPES) as writer:
        for batch in _table(rows).to_batches(max_chunksize=7):
            writer.write_batch(batch)
    return Written(sink.getvalue())


def _feather(rows: Sequence[Row]) -> Written:
    sink = io.BytesIO()
    feather.write_feather(_table(rows), sink, compression="zstd", chunksize=7)
    return Written(sink.getvalue())


BINARIES: dict[str, tuple[str, Callable[[Sequence[Row]], Written]]] = {
    "parquet": ("parquet", _parquet),
    "parquet-checked": ("parquet", lambda rows: _parquet(rows, write_page_checksum=True)),
    "parquet-v2": (
        "parquet",
        lambda rows: _parquet(
            rows,
            data_page_version="2.0",
            compression="zstd",
            write_page_index=True,
            write_page_checksum=True,
        ),
    ),
    "arrow-file": ("arrow", lambda rows: _arrow(rows, pa.ipc.new_file)),
    "arrow-stream": ("arrows", lambda rows: _arrow(rows, pa.ipc.new_stream)),
    "feather": ("feather", _feather),
}


@dataclass(frozen=True)
class Encoding:
    """A way to write the log: into a file with a suffix, whose columns are called `names`."""

    suffix: str
    write: Callable[[Sequence[Row]], Written]
    names: tuple[str, ...] = COLUMNS


def _encoding(text: str, packing: str) -> Encoding:
    (suffix, lines), (packed, pack) = TEXTS[text], PACKINGS[packing]
    names = tuple(f"c{n}" for n in range(6)) if "without-header" in text else COLUMNS
    return Encoding(f".{suffix}{packed}", lambda rows: pack(lines(rows)), names)


def _encodings() -> dict[str, Encoding]:
    """Every text with every fourth compression, so that each pair of neighbours occurs."""
    found = {
        f"{text}.{packing}": _encoding(text, packing)
        for at, text in enumerate(TEXTS)
        for number, packing in enumerate(PACKINGS)
        if packing == "plain" or text == "csv" or (at + number) % 3 == 0
    }
    found |= {name: Encoding(f".{end}", write) for name, (end, write) in BINARIES.items()}
    return found


ENCODINGS = _encodings()


def tensors(samples: int = 12) -> tuple[bytes, int]:
    """A file of dlrm_datasets, and its lookups."""
    sink = io.BytesIO()
    lengths = torch.arange(2 * samples).reshape(2, samples) % 4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    lookups = int(offsets[-1])
    torch.save((torch.arange(lookups) % 9, offsets, lengths), sink)
    return sink.getvalue(), lookups


def read_lookups(path: Path) -> list[list[int]]:
    """The ids of each table of such a file."""
    held: dict[str, list[int]] = {}
    for chunk in open_log(path, id_mapping="identity", rows=9).chunks():
        for name, bags in chunk.features.items():
            held.setdefault(name, []).extend(bags.ids.tolist())
    return list(held.values())
