"""Replays by `placer simulate` whose counts and times are recorded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from click.testing import CliRunner
from golden_costs import random_shards, vary, write_plan
from golden_problems import CALIBRATED

from cli import main
from placer import Plan


@dataclass(frozen=True)
class Replay:
    """A plan, and the other options of `placer simulate`; "LATER" and such stand for files."""

    plan: str
    options: tuple[str, ...]


_DAY = ("--data", "DAY")
_DRIFT = ("--data", "DAY", "--then", "NEXT")

EVERY_KIND = "--ssd 1MiB --widths int8,bfloat16 --exchange float16 --dense measured:20us"

REPLAYS: dict[str, Replay] = {
    **{
        f"cached-{policy}": Replay("cached", (*_DAY, "--cache-policy", policy))
        for policy in ("lfu", "rank")
    },
    **{
        f"random-{policy}": Replay(f"random-{number}", (*_DAY, "--cache-policy", policy))
        for number, policy in enumerate(("lfu", "rank"))
    },
    "planned": Replay("planned", _DAY),
    "planned-alone": Replay("planned", (*_DAY, "--no-look-ahead")),
    "planned-calibrated": Replay("planned", (*_DAY, "--cost-model", CALIBRATED)),
    "drawn": Replay("planned", ("--batches", "12", "--seed", "4")),
    "drawn-random": Replay("random-5", ("--batches", "9", "--seed", "1", "--batch-size", "5")),
    "drift": Replay("planned", (*_DRIFT, "--windows", "3")),
    "drift-rank": Replay("random-6", (*_DRIFT, "--windows", "2", "--cache-policy", "rank")),
    "against": Replay("planned", (*_DRIFT, "--against", "roomy", "--windows", "2")),
    "against-random": Replay(
        "random-7", (*_DRIFT, "--against", "cached", "--no-look-ahead", "--batches", "8")
    ),
    "two-hosts": Replay("hosts", _DAY),
    "two-hosts-random": Replay("random-hosts", (*_DAY, "--cache-policy", "rank")),
    "growing": Replay("growing", _DAY),
    "drives": Replay("drives", _DAY),
    "drives-random": Replay("random-drives", (*_DRIFT, "--windows", "2")),
    "drives-alone": Replay("random-drives", (*_DAY, "--no-look-ahead", "--cost-model", CALIBRATED)),
}

_SAMPLES = 600


def _write_log(path: Path, seed: int, shift: int) -> None:
    """A Parquet log of five features, of which one has bags; `shift` moves the hot rows."""
    rng = np.random.default_rng(seed)

    def ids(rows: int, number: int) -> np.ndarray:
        hot = (rows * rng.random(number) ** 3).astype(np.int64)
        return (hot * 7 + shift) % rows

    lengths = rng.integers(0, 5, _SAMPLES)
    flat = ids(400, int(lengths.sum())).tolist()
    ends = np.cumsum(lengths).tolist()
    bags = [flat[end - size : end] for end, size in zip(ends, lengths.tolist(), strict=True)]
    columns: dict[str, Any] = {"label": rng.integers(0, 2, _SAMPLES).astype(np.float32)}
    columns |= {f"C{n}": ids(rows, _SAMPLES) for n, rows in enumerate((800, 300, 60, 9))}
    columns["bags"] = pa.array(bags, pa.list_(pa.int64()))
    pq.write_table(pa.table(columns), path)


def make_replay_folder(folder: Path) -> Path:
    """Two logs, a profile of the first one, and plans for `REPLAYS`."""
    _write_log(folder / "day.parquet", 1, 0)
    _write_log(folder / "next.parquet", 2, 37)
    _run("profile", folder / "day.parquet", "--id-mapping", "hash", "--rows", "500",
         "--dim", "8", "-o", folder / "profile")  # fmt: skip
    _write_machine(folder / "one.yaml", hosts=1)
    _write_machine(folder / "two.yaml", hosts=2)
    _write_machine(folder / "served.yaml", hosts=2, servers=1)
    made = {
        "planned": ("one.yaml", "40KiB", ()),
        "roomy": ("one.yaml", "70KiB", ()),
        "cached": ("one.yaml", "44KiB", ("--constraints", folder / "cached.yaml")),
        "hosts": ("two.yaml", "30KiB", ()),
        "growing": ("two.yaml", "30KiB", ["--growing", "C0=90", "--growing", "bags=60:lru"]),
        "drives": ("served.yaml", "30KiB", EVERY_KIND.split()),
    }
    (folder / "cached.yaml").write_text(
        yaml.safe_dump({"tables": {"*": {"forbid": ["staged", "host", "split"]}}}),
        encoding="utf-8",
    )
    for name, (topology, hbm, more) in made.items():
        _run("plan", "--profile", folder / "profile", "--topology", folder / topology,
             "--hbm", hbm, "--batch-size", "16", "--solver", "greedy-cost", "--steps", "20",
             "--time-limit", "3600", *more, "-o", folder / f"{name}.json")  # fmt: skip
    for number in range(8):
        _write_random(folder, "planned", f"random-{number}", number)
    _write_random(folder, "hosts", "random-hosts", 8)
    _write_random(folder, "drives", "random-drives", 9)
    return folder


def _write_machine(path: Path, hosts: int, servers: int = 0) -> None:
    every = f"host:[0-{hosts + servers - 1}]"
    lines: dict[str, Any] = {
        "name": "golden",
        "hosts": [{"id": every, "memory": "1GiB", "dram_bandwidth": "50GB/s"}],
        "gpus": [
            {"id": f"gpu:[{2 * h}-{2 * h + 1}]", "host": f"host:{h}", "memory": "1GiB",
             "hbm_bandwidth": "200GB/s", "launch_s": 1e-8}
            for h in range(hosts)
        ],
        "links": [
            {"a": f"gpu:[{2 * h}-{2 * h + 1}]", "b": f"host:{h}", "kind": "pcie",
             "bandwidth": "0.1GB/s"}
            for h in range(hosts)
        ],
    }  # fmt: skip
    if hosts > 1:
        lines["links"].append({"a": every, "b": "network", "kind": "network",
                               "bandwidth": "1GB/s"})  # fmt: skip
    path.write_text(yaml.safe_dump(lines), encoding="utf-8")


def _write_random(folder: Path, base: str, name: str, seed: int) -> None:
    plan = Plan.load(folder / f"{base}.json")
    shards = random_shards(plan.tables, plan.topology, np.random.default_rng([99, seed]))
    vary(shards, plan.tables, plan.topology, plan.widths, np.random.default_rng(seed))
    write_plan(plan, shards, folder / f"{name}.json")


def _run(*arguments: str | Path) -> str:
    """What a command prints, in this process; it has to end well."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def replayed(folder: Path, name: str) -> dict[str, Any]:
    """What `placer simulate` counts and times, of steps in a compact form."""
    replay = REPLAYS[name]
    files = {"DAY": "day.parquet", "NEXT": "next.parquet", "roomy": "roomy.json",
             "cached": "cached.json"}  # fmt: skip
    options = [folder / files[text] if text in files else text for text in replay.options]
    printed = _run("simulate", folder / f"{replay.plan}.json", *options, "--format", "json")
    found: dict[str, Any] = json.loads(printed)
    steps = found.pop("steps_in_order")
    found["step_keys"] = list(steps[0])
    found["steps_in_order"] = [list(step.values()) for step in steps]
    for window in found.get("windows", []):
        del window["window"]
    return found
