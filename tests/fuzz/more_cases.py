"""More formats: files that people write, cost models, and files as commands use them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from calibration_cases import calibration
from click.testing import CliRunner
from fuzz_cases import FORMATS, Format, _log, _plan, _read_log, _saved
from option_cases import change_line, read_line, write_inputs

from cli import main
from cost_models.calibrated.model import Calibration
from placer import Topology
from placer.data import open_log
from placer.data.schema import Schema
from placer.dense.layers import read as read_dense
from placer.errors import PlacerError
from placer.profile.count import profile_log
from placer.profile.from_counts import profile_counts
from placer.workloads import named_workload


def command(*arguments: object) -> None:
    """Run a command in this process; what it refuses is an error of placer's."""
    with mock.patch.dict(os.environ, {"PLACER_DEBUG": "1"}):
        result = CliRunner().invoke(main, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 3, 4):
        raise PlacerError(result.stderr.strip() or result.stdout.strip())


def _rows() -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    return [
        {
            "label": int(rng.integers(2)),
            "item": int(rng.integers(9)),
            "word": "ab"[n % 2],
            "x": 0.5,
            "user": {"id": n % 5, "geo": {"country": "AT"}} if n % 4 else None,
            "seen": [{"sku": f"S{n % 3}"}][: n % 2],
        }
        for n in range(20)
    ]


def _csv(folder: Path) -> None:
    lines = ["label,item,word,tags,x"]
    lines += [f'{n % 2},{n % 7},"w, {n % 3}",{n % 4}|{n % 5},{n / 8}' for n in range(20)]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")


def _lines(folder: Path) -> None:
    rows = [row | {"tags": [1, 2][: n % 3]} for n, row in enumerate(_rows())]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _arrow(folder: Path) -> None:
    table = pa.Table.from_pylist(_rows()).append_column("tags", pa.array([[1, 2], []] * 10))
    feather.write_feather(table, folder / "log.arrow", compression="uncompressed")


def _written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


_DENSE = {"top": [64, 1], "bottom": [8, 4], "dense_features": 2, "interaction": "dot"}
_SCHEMA = {
    "format": "csv",
    "separator": ",",
    "header": True,
    "columns": {
        "label": {"as": "label"},
        "item": {"as": "sparse", "table": "items"},
        "x": {"as": "dense"},
    },
    "tables": {"items": {"rows": 90, "dim": 8, "id_mapping": "hash"}},
}
_SCHEMA_TOML = """format = "csv"
separator = ","
header = true
[columns]
label = {as = "label"}
item = {as = "sparse", table = "items"}
[tables]
items = {rows = 90, dim = 8, id_mapping = "hash"}
"""
_RULES = {
    "tables": {"t2": {"devices": ["gpu:0"], "tier": "hbm"}, "t1": {"forbid": ["staged"]}},
    "together": [["t2", "t3"]],
    "reserve": {"gpu": "1GiB"},
}


def _with_log(name: str, content: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        _csv(folder)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)

    return write


def _read_schema(path: Path) -> None:
    Schema.load(path).open([str(path.parent / "log.csv")])


def _like(folder: Path) -> None:
    log = open_log(_log(folder), id_mapping="vocabulary")
    profile_log(log).save(folder / "profile")
    (folder / "new.tsv").write_bytes((folder / "log.tsv").read_bytes())


def _small_profile(folder: Path) -> None:
    _csv(folder)
    log = open_log(folder / "log.csv", id_mapping="vocabulary")
    profile_log(log, dim=4).save(folder / "profile")
    (folder / "log.csv").unlink()


def _plan_and_profile(folder: Path) -> None:
    _plan(folder)
    columns = {"table": ["t"] * 12, "id": list(range(12)), "count": list(range(12, 0, -1))}
    pq.write_table(pa.table(columns), folder / "counts.parquet")
    profile_counts(folder / "counts.parquet", samples=99, dim=4).save(folder / "profile")
    (folder / "counts.parquet").unlink()


def _planned(path: Path) -> None:
    command(
        "plan", "--profile", path, "--topology", "1xh100", "--solver", "greedy-cost",
        "--batch-size", 64, "-o", path.with_name("made.json"),
    )  # fmt: skip


def _followed(path: Path) -> None:
    if not (path.parent / "old-profile").exists():
        named_workload("random-3@1").save(path.parent / "old-profile")
    command(
        "replan", "--from", path, "--profile", path.parent / "old-profile", "--topology", "1xh100",
        "--solver", "greedy-cost", "--steps", 0, "--other-data", "-o", path.with_name("new.json"),
    )  # fmt: skip


def _machine(path: Path) -> None:
    command("topology", path)


def _constrained(path: Path) -> None:
    command(
        "plan", "--workload", "random-3@1", "--topology", "2xh100", "--solver", "greedy-size",
        "--constraints", path, "-o", path.with_name("made.json"),
    )  # fmt: skip


def _exported(path: Path) -> None:
    made = path.parent / "made.safetensors"
    made.unlink(missing_ok=True)
    plan = path.parent / "plan.json"
    command("export", plan, "--to", "safetensors", "--checkpoint", path, "-o", made)


def _plan_and_checkpoint(folder: Path) -> None:
    _plan(folder)
    _saved(folder)


FORMATS |= {
    "csv": Format("log.csv", _csv, _read_log),
    "jsonl": Format("log.jsonl", _lines, _read_log),
    "arrow": Format("log.arrow", _arrow, _read_log),
    "calibration": Format(
        "machine.json", lambda folder: calibration().save(folder / "machine.json"), Calibration.load
    ),
    "schema": Format("schema.toml", _with_log("schema.toml", _SCHEMA_TOML), _read_schema),
    "schema-json": Format("schema.json", _with_log("schema.json", _SCHEMA), _read_schema),
    "dense": Format("dense.json", _written("dense.json", json.dumps(_DENSE)), read_dense),
    "like": Format(
        "profile",
        _like,
        lambda path: command(
            "profile", path.parent / "new.tsv", "--like", path, "-o", path.parent / "made"
        ),
    ),
    "show-plan": Format("plan.json", _plan, lambda path: command("show", path)),
    "verify-plan": Format("plan.json", _plan, lambda path: command("verify", path)),
    "replan": Format("plan.json", _plan, _followed),
    "report": Format(
        "plan.json",
        _plan_and_profile,
        lambda path: command(
            "report", path, "--profile", path.with_name("profile"), "-o", path.with_name("a.html")
        ),
    ),
    "export-plan": Format(
        "plan.json",
        _plan,
        lambda path: command(
            "export", path, "--to", "torchrec", "--staged-as", "uva", "-o", path.with_name("t.json")
        ),
    ),
    "show-profile": Format("profile", _small_profile, lambda path: command("show", path)),
    "plan-profile": Format("profile", _small_profile, _planned),
    "merge": Format(
        "profile",
        _small_profile,
        lambda path: command("merge", path, "-o", path.parent / "made"),
    ),
    "show-machine": Format(
        "machine.yaml",
        lambda folder: Topology.parse("2x2xh100").save(folder / "machine.yaml"),
        _machine,
    ),
    "constrain": Format("rules.json", _written("rules.json", json.dumps(_RULES)), _constrained),
    "export-checkpoint": Format("step-000000000003", _plan_and_checkpoint, _exported),
    "line": Format("line.txt", write_inputs, read_line, change_line),
}
SLOW = {
    "line",
    "report",
    "replan",
    "plan-profile",
    "constrain",
    "show-plan",
    "show-profile",
    "merge",
}
"""Formats whose readers take tenths of a second, and which are read less often."""

COMMANDS = SLOW | {
    "like",
    "verify-plan",
    "export-plan",
    "show-machine",
    "export-checkpoint",
}
"""Formats that a command reads and uses."""

__all__ = ["COMMANDS", "FORMATS", "SLOW", "Format"]
