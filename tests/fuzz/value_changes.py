"""Changes of a file's values: what is written is sound JSON, Parquet, tensors, of unsound content.

Hashes are recomputed by `resealed`, so that nothing but the readers' own checks stands between the
values and whoever uses them.
"""

import copy
import csv
import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import torch
import yaml
from safetensors import numpy as tensors_of

from placer.files.atomic import sha256_file, sha256_json

NUMBERS = (
    -1, 0, 1, 2, 0.5, -0.0, 1 << 31, (1 << 53) + 1, 1 << 63, -(1 << 63), 1 << 64, 10**39,
    1e308, 5e-324, -1e300, 65_537, 1 << 40,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "\0", "\x1b[2J", "ﬀull\u202e", "e\u0301", "\ud800", "9" * 30, "..", "../../x",
    "/dev/zero", "gpu:9", "gpu:[0-65535]", "host:0", "hbm", "x" * 5000, "=1+1", "nan", "1e3", "-1",
    "\u2028", "t\n", "%s{0}", "*", "1GiB", "-5GB/s", "٣",
)  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _weird(choose: random.Random) -> Any:
    kinds = (NUMBERS, TEXTS, (None, True, False, [], {}, [[]], [0, 0], {"a": 1}, _nested(70)))
    return copy.deepcopy(choose.choice(choose.choice(kinds)))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a document, or of an object's attributes, with every key in it."""
    found, waiting, seen = [], [value], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            keys = list(one)
        elif isinstance(one, list):
            keys = list(range(len(one)))
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            one, keys = vars(one), list(vars(one))
        else:
            continue
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


def change_document(document: Any, choose: random.Random) -> Any:
    """The document with a few values swapped, changed, doubled, renamed or gone."""
    for _ in range(choose.choice([1, 1, 1, 2, 3])):
        places = _places(document)
        if not places:
            return _weird(choose)
        inside, key = choose.choice(places)
        match choose.choice(["value", "value", "number", "swap", "gone", "twice", "name", "kind"]):
            case "value":
                inside[key] = _weird(choose)
            case "number":
                numbers = [at for at in places if type(at[0][at[1]]) in (int, float)]
                if numbers:
                    inside, key = choose.choice(numbers)
                    change = choose.choice([-1, 1, -inside[key], inside[key], *NUMBERS])
                    inside[key] = choose.choice([change, inside[key] + change])
            case "swap":
                other, its = choose.choice(places)
                inside[key], other[its] = copy.deepcopy((other[its], inside[key]))
            case "gone":
                del inside[key]
            case "twice" if isinstance(inside, list):
                inside.insert(choose.randrange(len(inside) + 1), copy.deepcopy(inside[key]))
            case "twice" | "name":
                if isinstance(inside, dict) and isinstance(key, str):
                    inside[choose.choice(TEXTS)] = copy.deepcopy(inside[key])
            case _:
                value = inside[key]
                changed = [[value], {"a": value}, str(value), value == 1, [value] * 300]
                inside[key] = choose.choice(changed)
    return document


def change_array(array: np.ndarray, choose: random.Random) -> np.ndarray:
    """An array of other values, another type or another shape."""
    if not array.size:
        return np.ones(3, choose.choice(["i8", "f4", "u1"]))
    array = array.copy()
    with np.errstate(all="ignore"):
        match choose.choice(["values", "values", "type", "shape", "order", "length"]):
            case "values":
                at = choose.randrange(array.size)
                extremes = [-1, 0, 1, np.iinfo("i8").max, np.iinfo("i8").min, 1 << 40, array.size]
                if array.dtype.kind == "f":
                    extremes += [np.nan, np.inf, -np.inf, 1e300]  # type: ignore[list-item]
                array.reshape(-1)[at] = np.asarray(choose.choice(extremes)).astype(array.dtype)
            case "type":
                kinds = ["i1", "i4", "i8", "u8", "f2", "f4", "f8", "?"]
                return array.astype(choose.choice(kinds))
            case "shape":
                shapes = [(1, *array.shape), (array.size, 1), (1, array.size), (array.size,)]
                return array.reshape(choose.choice(shapes))
            case "order":
                return np.ascontiguousarray(array[::-1])
            case _:
                rows = array[: choose.choice([0, 1, max(len(array) - 1, 0)])]
                return choose.choice([rows, np.concatenate([array, array])])
    return array


def change_table(table: pa.Table, choose: random.Random) -> pa.Table:
    """A table with a column of another name, type, length of lists, or other values."""
    at = choose.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at).combine_chunks()
    match choose.choice(["name", "type", "null", "gone", "twice", "list", "rows", "value", "text"]):
        case "name":
            names = [*table.column_names]
            names[at] = choose.choice([*TEXTS[:6], *TEXTS[8:], names[0], "label", "id"])
            return table.rename_columns([one.encode("utf-8", "replace").decode() for one in names])
        case "type":
            kinds = [
                pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_(), pa.string(),
                pa.large_string(), pa.binary(), pa.timestamp("ns"), pa.date32(), pa.duration("s"),
                pa.decimal128(30, 4), pa.null(), pa.dictionary(pa.int8(), pa.string()),
            ]  # fmt: skip
            try:
                changed = column.cast(choose.choice(kinds), safe=False)
            except pa.ArrowException:
                changed = pa.nulls(table.num_rows, choose.choice(kinds))
        case "null":
            changed = pa.nulls(table.num_rows, column.type)
        case "gone":
            return table.remove_column(at) if table.num_columns > 1 else table
        case "twice":
            return table.append_column(name, column)
        case "list":
            changed = pa.array([[one] * choose.randrange(3) for one in column.to_pylist()])
        case "rows":
            return table.slice(0, choose.choice([0, 1]))
        case "value":
            numbers = [choose.choice(NUMBERS[:10]) for _ in range(table.num_rows)]
            changed = pa.array(np.array(numbers, float))
            with_whole = [min(max(int(one), -(1 << 63)), (1 << 63) - 1) for one in numbers]
            changed = choose.choice([changed, pa.array(with_whole)])
        case _:
            texts = [choose.choice(TEXTS) for _ in range(table.num_rows)]
            changed = pa.array([one.encode("utf-8", "replace").decode() for one in texts])
    return table.set_column(at, name, changed)


def _json(path: Path, choose: random.Random) -> None:
    path.write_text(json.dumps(change_document(json.loads(path.read_text()), choose)))


def _lines(path: Path, choose: random.Random) -> None:
    lines = path.read_text().splitlines()
    at = choose.randrange(len(lines))
    lines[at] = json.dumps(change_document(json.loads(lines[at]), choose))
    path.write_text("\n".join(lines) + choose.choice(["\n", "", "\n\n", "\r\n"]))


def _yaml(path: Path, choose: random.Random) -> None:
    document = yaml.safe_load(path.read_text())
    changed = change_document(document, choose)
    if choose.random() < 0.1:
        inside, key = choose.choice(_places(changed) or [({"a": 1}, "a")])
        inside[key] = choose.choice([float("nan"), float("inf"), b"\xff"])
    path.write_text(yaml.safe_dump(changed), errors="surrogatepass")


def _safetensors(path: Path, choose: random.Random) -> None:
    content = path.read_bytes()
    arrays = tensors_of.load(content)
    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size]).get("__metadata__")
    name, other = choose.choice(list(arrays)), choose.choice(list(arrays))
    match choose.choice(["change", "change", "change", "swap", "gone", "name"]):
        case "change":
            arrays[name] = np.ascontiguousarray(change_array(arrays[name], choose))
        case "swap":
            arrays[name], arrays[other] = arrays[other], arrays[name]
        case "gone":
            del arrays[name]
        case _:
            arrays[choose.choice(["", "t", "0.dense", "9.gaps"])] = arrays.pop(name)
    path.write_bytes(tensors_of.save(arrays, about))


def _parquet(path: Path, choose: random.Random) -> None:
    table = pq.read_table(path)
    try:
        pq.write_table(change_table(table, choose), path)
    except pa.ArrowException:  # Not every type can be stored.
        pq.write_table(table.slice(1), path)


def _arrow(path: Path, choose: random.Random) -> None:
    table = feather.read_table(path, memory_map=False)
    feather.write_feather(change_table(table, choose), path, compression="uncompressed")


def _tensors(path: Path, choose: random.Random) -> None:
    parts = list(torch.load(path))
    at = choose.randrange(len(parts))
    one = torch.from_numpy(change_array(parts[at].numpy(), choose))
    kinds: list[Callable[[], Any]] = [
        lambda: one.bfloat16(),
        lambda: one.to("meta"),
        lambda: one.to_sparse(),
        lambda: one.reshape(-1)[:1].expand(1 << 40) if one.numel() else one,
        lambda: one.reshape(-1)[::2],
        lambda: torch.nn.Parameter(one.float()),
        lambda: [one],
        lambda: _weird(choose),
    ]
    parts[at] = choose.choice(kinds)() if choose.random() < 0.4 else one
    if choose.random() < 0.1:
        del parts[choose.randrange(len(parts))]
    torch.save(tuple(parts), path)


def _metadata(path: Path, choose: random.Random) -> None:
    # Written by ourselves a moment ago.
    changed = change_document(pickle.loads(path.read_bytes()), choose)
    path.write_bytes(pickle.dumps(changed))


def _text(path: Path, choose: random.Random) -> None:
    """Other rows: weird fields, one more, one less, another separator, a mark of byte order."""
    separator = "\t" if path.suffix == ".tsv" else ","
    rows = list(csv.reader(io.StringIO(path.read_text()), delimiter=separator))
    row = choose.choice([rows[0], choose.choice(rows)])
    match choose.choice(["field", "field", "more", "less", "swap", "line", "separator", "mark"]):
        case "field":
            row[choose.randrange(len(row))] = str(choose.choice([*NUMBERS, *TEXTS]))
        case "more":
            row += [choose.choice(row)] * choose.choice([1, 300])
        case "less":
            del row[choose.randrange(len(row)) :]
        case "swap":
            choose.shuffle(row)
        case "line":
            rows.insert(choose.randrange(len(rows)), choose.choice([[], [""], ["a"], rows[0]]))
        case "separator":
            separator = choose.choice([";", "|", ",", "\t", " ", "\x01", "."])
        case _:
            rows[0][0] = "\ufeff" + rows[0][0]
    text = io.StringIO()
    writer = csv.writer(
        text,
        delimiter=separator,
        quoting=choose.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
        lineterminator=choose.choice(["\n", "\n", "\r\n", "\r", "\n\n"]),
    )
    try:
        writer.writerows(rows)
    except csv.Error:
        text.write("a,b\n1\n")
    encoding = choose.choice(["utf-8", "utf-8", "utf-8", "utf-16", "latin-1"])
    path.write_bytes(text.getvalue().encode(encoding, "replace"))


CHANGES: dict[str, Callable[[Path, random.Random], None]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".yaml": _yaml,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".pt": _tensors,
    ".metadata": _metadata,
    ".tsv": _text,
    ".csv": _text,
}
"""What changes values, by the end of a file's name."""


def change_values(path: Path, choose: random.Random) -> bool:
    """Change a file's values; whether it is of a kind that has some."""
    change = CHANGES.get(path.suffix or path.name)
    if change is not None:
        change(path, choose)
    return change is not None


def resealed(folder: Path) -> None:
    """Recompute sizes and hashes that the JSON files of a folder hold of others, and of them."""
    for path in sorted(folder.rglob("*.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError:
            continue
        if not isinstance(document, dict):
            continue
        _rehash(document, path.parent)
        if "sha256" in document:
            content = {name: value for name, value in document.items() if name != "sha256"}
            document["sha256"] = sha256_json(content)
        path.write_text(json.dumps(document))


def _rehash(value: Any, folder: Path, name: object = None) -> None:
    """Of every object of a document that stands for a file: by its key, or by what it names."""
    if isinstance(value, list):
        for one in value:
            _rehash(one, folder)
    if not isinstance(value, dict):
        return
    for key, one in value.items():
        _rehash(one, folder, key)
    for file in (value.get("name"), value.get("file"), name):
        try:
            there = isinstance(file, str) and "sha256" in value and (folder / file).is_file()
        except (OSError, ValueError):
            continue
        if there:
            path = folder / str(file)
            value["sha256"] = sha256_file(path)
            value |= {k: path.stat().st_size for k in ("bytes", "size_bytes") if k in value}
