"""Logs at hf://, read by Hugging Face's own client from a server on this machine."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from placer import Profile

pytest.importorskip("huggingface_hub", reason="logs at hf:// are read with huggingface_hub")
pytestmark = pytest.mark.slow

DATASET = "someone/clicks"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What the client asks the hub for to list and read one dataset: the files of a folder."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, *args: Any) -> None:
        self.folder = folder
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        listed = re.fullmatch(rf"/api/datasets/{DATASET}/tree/\w+/?(.*)", path)
        content = re.fullmatch(rf"/datasets/{DATASET}/resolve/\w+/(.*)", path)
        if re.fullmatch(rf"/api/datasets/{DATASET}(/revision/\w+)?", path):
            self._answer_json({"id": DATASET, "sha": COMMIT, "private": False, "tags": []})
        elif listed and (self.folder / listed[1]).is_dir():
            self._answer_json([self._entry(file) for file in (self.folder / listed[1]).iterdir()])
        elif content and (self.folder / content[1]).is_file():
            self._answer_file((self.folder / content[1]).read_bytes())
        else:
            missing = "EntryNotFound" if listed or content else "RepoNotFound"
            self._answer(b"", 404, {"X-Error-Code": missing})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        files = [self.folder / name for name in ([asked] if isinstance(asked, str) else asked)]
        self._answer_json([self._entry(file) for file in files if file.exists()])

    def _entry(self, file: Path) -> dict[str, object]:
        path = file.relative_to(self.folder).as_posix()
        kind = "directory" if file.is_dir() else "file"
        size = 0 if file.is_dir() else file.stat().st_size
        return {"type": kind, "path": path, "size": size, "oid": _digest(path.encode())}

    def _answer_file(self, content: bytes) -> None:
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(content, 200, headers)
            return
        first = int(asked[1])
        part = content[first : int(asked[2] or len(content)) + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self._answer(part, 206, headers)

    def _answer_json(self, value: object) -> None:
        self._answer(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a hub that has a dataset of two days."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    for day in range(2):
        columns = {
            "user": rng.integers(0, 500, 1000),
            "item": [f"i{number}" for number in rng.integers(0, 40, 1000)],
            "label": rng.integers(0, 2, 1000),
        }
        pq.write_table(pa.table(columns), folder / "data" / f"day_{day}.parquet")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


_RUN = """
import json, sys
from click.testing import CliRunner
from cli import main
for command in sys.argv[1:]:
    result = CliRunner().invoke(main, command.split())
    print(json.dumps([result.exit_code, result.stderr]))
"""


def placer(folder: Path, hub: str, *commands: str) -> list[tuple[int, str]]:
    """Exit codes and stderr of commands, in a process of their own: the client reads its settings
    when it is imported."""
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *commands],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_dataset_of_the_hub_is_profiled_planned_and_trained(tmp_path: Path, hub: str) -> None:
    days = f"hf://datasets/{DATASET}/data/*.parquet"
    for code, notes in placer(
        tmp_path,
        hub,
        f"profile {days} --label label -o far",
        "profile dataset/data --label label -o near",
        "plan --profile far --topology 1xa10 --hbm 1GiB --batch-size 64 -o plan.json",
        f"train --plan plan.json --data {days} --steps 2",
    ):
        assert code == 0, notes
    far, near = Profile.load(tmp_path / "far"), Profile.load(tmp_path / "near")
    assert far.samples == near.samples == 2000
    assert far.ids_sha256 == near.ids_sha256
    for one, other in zip(far, near, strict=True):
        np.testing.assert_array_equal(one.counts.ids, other.counts.ids)
        np.testing.assert_array_equal(one.counts.counts, other.counts.counts)


def test_what_the_hub_lacks_is_said_in_a_line(tmp_path: Path, hub: str) -> None:
    paths = [f"{DATASET}/data/day_9.parquet", "someone/else/day_0.parquet"]
    commands = [f"profile hf://datasets/{path} -o profile" for path in paths]
    for path, (code, notes) in zip(paths, placer(tmp_path, hub, *commands), strict=True):
        assert code == 1
        line = f"placer: cannot open hf://datasets/{path}: no such file"
        assert notes.strip().splitlines()[-1] == line
