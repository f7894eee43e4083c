"""Schemas: what columns were taken for, written to a file, and read with the log again."""

import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import misuse, succeed
from data_cases import refused

from placer import Profile
from placer.data import Schema, open_log
from placer.data.files.stores import find, store_of
from placer.errors import DataError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "day_0.csv"
    lines = [f"{i % 2},{i % 9},{i % 4}|{i % 5},u{i % 3},{i / 4}" for i in range(60)]
    path.write_text("clk;user;seen;city;x y\n".replace(";", ",") + "\n".join(lines) + "\n")
    return path


def test_what_is_inferred_is_written_and_read_alike(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    assert "schema written to" in succeed("profile", log, "--infer", file).stderr
    text = file.read_text()
    assert 'clk = "label"' in text
    assert "# it is called clk" in text
    assert 'seen = {as = "sparse", type = "integer", separator = "|"}' in text
    assert '"x y" = "dense"' in text
    schema = Schema.load(file)
    assert (schema.sparse, schema.dense) == (("user", "seen", "city"), ("x y",))
    assert schema.label == "clk"
    assert schema.open(log).encoding == open_log(log, headroom=0.1).encoding


def test_an_inferred_schema_keeps_what_options_say(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    tables = ("--id-mapping", "hash", "--rows", "9", "--rows", "id=50", "--dim", "id=8")
    tables += ("--id-mapping", "seen=auto")
    columns = ("--feature-table", "user=id", "--pooling", "mean", "--pooling", "seen=max")
    columns += ("--label", "clk")
    succeed(
        "profile", log, "--infer", file, *tables, *columns, "--min-count", "2", "--headroom", "0.5"
    )
    assert "# it is called clk" not in file.read_text()  # Its label was named.
    schema = Schema.load(file)
    assert (schema.rows, schema.dims) == ({"*": 9, "id": 50}, {"id": 8})
    assert (schema.id_mappings, schema.min_counts) == ({"*": "hash", "seen": "auto"}, {"*": 2})
    assert (schema.feature_tables, schema.headroom) == ({"user": "id"}, 0.5)
    assert schema.poolings == {"user": "mean", "seen": "max", "city": "mean"}


def test_a_schema_says_all_of_tables_and_flags_say_more(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    file.write_text(
        '[columns]\nclk = "label"\nuser = {as = "sparse", table = "id"}\n'
        'seen = {as = "sparse", type = "integer", separator = "|", table = "id"}\n'
        '[tables.id]\nrows = 50\ndim = 8\n[tables."*"]\nid_mapping = "hash"\nrows = 7\n'
    )
    notes = succeed("profile", log, "--schema", file, "-o", tmp_path / "p").stderr
    assert "left out: city (it was not named), x y (it was not named)" in notes
    profile = Profile.load(tmp_path / "p")
    assert [(t.table.name, t.table.rows, t.table.dim) for t in profile] == [("id", 50, 8)]
    flags = "--dim 16 --dim city=4 --rows u=30 --ignore seen --feature-table user=u"
    flags += " --id-mapping u=hash"
    succeed("profile", log, *flags.split(), "-o", tmp_path / "q")
    profile = Profile.load(tmp_path / "q")
    found = {t.table.name: (t.table.rows, t.table.dim) for t in profile}
    assert found == {"u": (30, 16), "city": (4, 4)}
    # The next file of the kind is read by what the profile has recorded.
    next_day = log.rename(tmp_path / "no-suffix")
    assert profile.encoding is not None
    assert open_log(next_day, encoding=profile.encoding).tables == {"u": 30, "city": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[columns]\nuser = "dence"\n', r"columns.user.as: 'dence'"),
        ("[tables.a]\nrow = 3\n", r"tables.a.row: no such field; .* mean rows\?"),
        ("[tables.user]\nrows = 99999999999999999999\n", r"tables.user.rows: 99999999999999999999"),
        ("[tables.user]\nrows = true\n", "tables.user.rows: True: it must be a number"),
        ('[columns]\nuser = {as = "sparse", table = ""}\n', r"columns.user.table: ''"),
        ('[columns]\na = "label"\nb = "label"\n', "a log has one label, not a, b"),
        ('[columns]\nnone = "sparse"\n', "day_0.csv has no column 'none'; it has clk, user"),
    ],
)
def test_a_wrong_schema_is_refused(log: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(DataError, match=message):
        Schema.load(tmp_path / "schema.toml").open(log)


def test_folders_patterns_and_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for day, country in ((2, "DE"), (10, "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / "log" / f"day={day}" / f"country={country}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"user": np.arange(3) + day}), folder / "part-0.parquet")
        (folder / "_SUCCESS").touch()
    log = open_log(tmp_path / "log")
    held = "(names of folders hold it)"
    assert log.notes[0] == f"left out: day {held}, country {held}"
    pattern = str(tmp_path / "log" / "*" / "**" / "*.parquet")
    log = open_log(pattern, sparse=["user", "day", "country"])
    (chunk,) = log.chunks()
    assert chunk.features["day"].ids.tolist() == [2, 2, 2, 10, 10, 10]
    assert chunk.features["country"].ids.tolist() == [1, 1, 1, 2, 2, 2]
    part = tmp_path / "log" / "day=2" / "country=DE" / "part-0.parquet"
    again = open_log([tmp_path / "log", part])
    assert again.samples == 9
    assert again.notes[0].startswith("read as often as they are named")
    with pytest.raises(DataError, match="no file matches"):
        find(str(tmp_path / "*.csv"))
    refused(r"files at ftp:// cannot be read; .* s3://", "ftp://host/log.csv")
    monkeypatch.chdir(tmp_path)
    train = ["train", "--plan", "plan.json", "--data", "log", "--checkpoints", "s3://bucket/run"]
    assert "s3://bucket/run is on a store: write it here, and copy it there" in misuse(*train)
    assert not (tmp_path / "s3:").exists()


def test_a_column_of_folders_that_some_files_have_themselves(tmp_path: Path) -> None:
    for day, columns in ((1, {"user": [1], "day": [9]}), (2, {"user": [1]})):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table(columns), tmp_path / f"day={day}" / "0.parquet")
    (chunk,) = open_log(tmp_path, sparse=["user", "day"]).chunks()
    assert chunk.features["day"].ids.tolist() == [9, 2]


def test_folders_whose_names_are_not_all_integers_are_texts(tmp_path: Path) -> None:
    for run in ("123456789012345678901", "7", "night"):
        (tmp_path / f"run={run}").mkdir()
        pq.write_table(pa.table({"user": [1, 2]}), tmp_path / f"run={run}" / "part-0.parquet")
    (chunk,) = open_log(tmp_path, sparse=["user", "run"]).chunks()
    assert sorted(chunk.features["run"].ids.tolist()) == [1, 1, 2, 2, 3, 3]


def test_standard_input_and_stores_of_fsspec(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = open_log(log, label="clk", sparse=["user"])
    with log.open("rb") as stream:
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stream}))
        piped = open_log("-", label="clk", sparse=["user"])
    assert piped.description == "stdin"
    system, path = store_of("memory://bucket/day_0.csv")
    system.create_dir("bucket")
    with system.open_output_stream(path) as file:
        file.write(log.read_bytes())
    stored = open_log("memory://bucket", label="clk", sparse=["user"])
    assert stored.description == "memory://bucket/day_0.csv"
    for other in (piped, stored):
        assert other.encoding == expected.encoding
        (one,), (two,) = expected.chunks(), other.chunks()
        np.testing.assert_array_equal(one.features["user"].ids, two.features["user"].ids)
    assert stored.identity() == expected.identity()


def test_devices_and_pipes_larger_than_the_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("/dev/zero", "/dev/urandom"):
        refused("is a device, not a log", device)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A limit of a file's size stands for a full disk: both end a write with an error.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    reads, writes = os.pipe()
    os.write(writes, b"\0" * 4000)
    os.close(writes)
    with os.fdopen(reads, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stream}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            refused(r"cannot copy stdin, .* set TMPDIR", "-")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_larger_id_of_a_later_log_is_found_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"user": [1, 99]}), path)
    log = open_log(path, headroom=0.1)
    assert log.tables == {"user": 110}
    for headroom in (1e9, float(1 << 63), float("inf"), float("nan")):
        refused(r"table 'user' .* headroom", path, headroom=headroom)
    pq.write_table(pa.table({"user": [1, 110]}), path)
    refused(r"feature 'user' has ids up to 110, but .* rows 0..109", path, encoding=log.encoding)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bucket of an S3 server on this machine, found as users' servers are."""
    moto = pytest.importorskip("moto.server")
    from pyarrow import fs

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    at = {"endpoint_override": f"127.0.0.1:{port}", "scheme": "http"}
    store = fs.S3FileSystem(**at, access_key="k", secret_key="s", allow_bucket_creation=True)
    store.create_dir("logs")
    yield store
    server.stop()


@pytest.mark.slow
def test_a_partitioned_log_on_s3_from_schema_to_resumed_training(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for day in (1, 2):
        click, user = rng.integers(0, 2, 400), rng.integers(0, 50, 400)
        seen = pa.array([rng.integers(0, 20, 2).tolist() for _ in range(400)])
        table = pa.table({"click": click, "user": user, "seen": seen})
        with bucket.open_output_stream(f"logs/clicks/day={day}/part 0.parquet") as file:
            pq.write_table(table, file, row_group_size=100)
    monkeypatch.chdir(tmp_path)
    log, profile, plan = "s3://logs/clicks", "profile", "plan.json"
    succeed("profile", log, "--infer", "schema.toml", "--dim", "8", "-o", profile)
    assert 'day = "ignore"' in Path("schema.toml").read_text()
    assert Profile.load(profile).samples == 800
    machine = ("--topology", "1xh100", "--hbm", "64MiB", "--batch-size", "64")
    search = ("--solver", "greedy-cost")
    succeed("plan", "--profile", profile, *machine, *search, "-o", plan)
    train = ("train", "--plan", plan, "--data", log, "--checkpoints", "run")
    succeed(*train, "--steps", "3")
    succeed(*train, "--steps", "5", "--resume")
    assert max(path.name for path in Path("run").glob("step-*")).endswith("05")
    refused(r"cannot open s3://logs/none: no such file", "s3://logs/none")
