"""Files that are huge, deep or strange: one clear error."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from placer import Constraints, Plan, Profile, Topology
from placer.config_file import MOST_BYTES, MOST_DEPTH
from placer.errors import PlacerError, PlanError, TopologyError
from placer.files.atomic import sha256_file
from placer.files.reading import LimitError, read_json, read_limited
from placer.measurement.machine import Dataset
from placer.storage.checkpoint.dcp_reader import Block, _Files, read_metadata
from placer.storage.manifest import read_manifest
from placer.training.growing import _ids_of
from placer.training.metrics import JsonLines
from placer.units import parse_bytes

MACHINE = """
name: machine
hosts:
- {id: "host:0", memory: 1GiB, dram_bandwidth: 50GB/s}
gpus:
- {id: "gpu:[0-1]", host: "host:0", memory: 1GiB, hbm_bandwidth: 200GB/s}
links:
- {a: "gpu:[0-1]", b: "host:0", kind: pcie, bandwidth: 1GB/s}
"""
BOMB = "a: &a [" + ",".join("1" * 9) + "]\n"
BOMB += "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh"))  # noqa: B905
LONG = "9" * 400


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.yaml", MACHINE, ""),
        ("m.yaml", BOMB, r"more than \d+ values, its aliases written out"),
        ("m.yaml", "a: &a [*a]", r"a value is a part of itself"),
        ("m.yaml", "[" * MOST_DEPTH + "]" * MOST_DEPTH, r"holds a list"),
        ("m.yaml", "[" * (MOST_DEPTH + 1), rf"nested deeper than {MOST_DEPTH} levels"),
        ("m.json", "[" * 200_000, r"nested too deeply"),
        ("m.toml", "a=" + "[" * 3_000, r"nested too deeply"),
        ("m.yaml", MACHINE + "name: other", r"'name' is written twice"),
        ("m.json", '{"name": "a", "name": "b"}', r"the key 'name' is there twice"),
        ("m.yaml", MACHINE.replace("1GiB", LONG), r"Input should be less than 9223372036854776000"),
        ("m.yaml", MACHINE.replace("1GiB", f"{LONG}GiB"), r"less than 8 EiB"),
        ("m.json", f'{{"name": {LONG}}}', r"a number has 400 digits"),
        ("m.json", '{"name": 1e999}', r"the number 1e999 is too large"),
        ("m.json", '{"name": NaN}', r"NaN is no number of JSON"),
        ("m.json", b'{"name": "\xff"}', r"it is not UTF-8 from byte 10 on"),
        ("m.yaml", b"name: \xff", r"can't decode byte 0xff"),
        ("m.yaml", "name: 2020-99-99", r"month must be in 1..12"),
        ("m.yaml", "#" * (MOST_BYTES + 1), r"at most 4194304 are read"),
        ("m.yaml", MACHINE.replace("0-1", "0-65535").replace('b: "host:0"', 'b: "h:[0-65535]"'),
         r"it has 4294967296 links, and at most 65536"),
        ("m.yaml", MACHINE.replace("0-1", "0-" + LONG), r"not an id"),
        ("m.yaml", MACHINE.replace("links:", '- {id: "gpu:0", host: "host:0", memory: 1GiB, '
         'hbm_bandwidth: 1GB/s}\nlinks:'), r"names devices more than once: \['gpu:0'\]"),
    ],
)  # fmt: skip
def test_files_that_people_write(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    if not message:
        Topology.load(path)
        return
    with pytest.raises(TopologyError, match=message):
        Topology.load(path)


def test_a_large_file_of_constraints_is_within_the_limits(tmp_path: Path) -> None:
    rules = "".join(f"  table-{i}: {{tier: hbm}}\n" for i in range(2_000))
    (tmp_path / "rules.yaml").write_text(f"tables:\n{rules}")
    assert len(Constraints.load(tmp_path / "rules.yaml").tables) == 2_000


LOADS: dict[str, Callable[[Path], object]] = {
    "plan": Plan.load,
    "profile": Profile.load,
    "manifest": read_manifest,
}


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"schema_version": 1, "format_version": 2, "a": ' + b"9" * 400 + b"}",
        b'{"schema_version": 1, "schema_version": 1}',
        b'{"schema_version": 1e999}',
        b"\xff\xfe",
        b"",
        b"null",
        b"[]",
        b'{"schema_version": true, "format_version": []}',
    ],
    ids=range(10),
)
def test_json_that_is_none_of_ours(tmp_path: Path, kind: str, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(PlacerError):
        LOADS[kind](path)


@pytest.mark.parametrize("kind", LOADS)
def test_a_pipe_and_a_device_are_no_files(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(PlacerError, match=r"it is a device, a pipe or a folder, and no file"):
            LOADS[kind](path)


SAID = {
    "pipe": "it is a device, a pipe or a folder, and no file",
    "device": "it is a device, a pipe or a folder, and no file",
    "socket": "No such device or address",
    "folder": "Is a directory",
}
OTHERS: dict[str, Callable[[Path], object]] = {
    "sha256": sha256_file,
    "measurements": Dataset.load,
    "metadata of a checkpoint": lambda path: read_metadata(path.parent),
    "part of a checkpoint": lambda path: _Files(path.parent).block(
        Block((0,), (1,), path.name, 0, 0), "w", torch.float32
    ),
    "ids to keep": lambda path: _ids_of(f"table={path}"),
    "metrics of a run": JsonLines,
}


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
@pytest.mark.parametrize("read", OTHERS.values(), ids=OTHERS)
def test_every_other_input_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, read: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ".metadata"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    else:
        path.mkdir()
    with pytest.raises(
        (PlacerError, OSError), match=f"{SAID[kind]}|cannot write .*: .*; name a file"
    ):
        read(path)


def test_more_bytes_or_values_than_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps(list(range(100))))
    with pytest.raises(LimitError, match=r"it has 390 bytes, and at most 389 are read"):
        read_limited(path, 389)
    assert read_json(path, 390) == list(range(100))
    monkeypatch.setattr("placer.files.reading.MOST_VALUES", 99)
    with pytest.raises(LimitError, match=r"about 100 values, and at most 99"):
        read_json(path)


def test_a_plan_says_why_it_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema_version": 1, "schema_version": 2}')
    with pytest.raises(PlanError, match=r"is not JSON of a plan \(the key 'schema_version' is"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["8", "24", " 512 "])
def test_a_memory_of_a_few_bytes_needs_its_unit(text: str) -> None:
    number = text.strip()
    with pytest.raises(
        PlacerError, match=rf"{number} has no unit: write {number}GiB, or {number}B"
    ):
        parse_bytes(text)
    assert parse_bytes(f"{number}B") == int(number)
    assert parse_bytes("0") == 0
    assert parse_bytes("1048576") == 1 << 20
    assert parse_bytes(8) == 8
