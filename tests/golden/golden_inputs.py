"""The inputs of recorded commands, and a folder in which these are run."""

import contextlib
import random
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_store
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

from cli import main
from placer import Plan

MACHINE = """
name: two small GPUs
hosts:
- {id: "host:0", memory: 1GiB, dram_bandwidth: 50GB/s}
gpus:
- {id: "gpu:[0-1]", host: "host:0", memory: 1GiB, hbm_bandwidth: 200GB/s, launch_s: 1.0e-8}
links:
- {a: "gpu:[0-1]", b: "host:0", kind: pcie, bandwidth: 0.1GB/s}
"""
FOUR = """
name: two hosts of two GPUs
hosts:
- {id: "host:[0-1]", memory: 1GiB, dram_bandwidth: 50GB/s}
gpus:
- {id: "gpu:[0-1]", host: "host:0", memory: 1GiB, hbm_bandwidth: 200GB/s, launch_s: 1.0e-6}
- {id: "gpu:[2-3]", host: "host:1", memory: 1GiB, hbm_bandwidth: 200GB/s, launch_s: 1.0e-6}
links:
- {a: "gpu:[0-1]", b: "host:0", kind: pcie, bandwidth: 1GB/s}
- {a: "gpu:[2-3]", b: "host:1", kind: pcie, bandwidth: 1GB/s}
- {a: "host:[0-1]", b: network, kind: network, bandwidth: 1GB/s}
"""
SERVED = """
name: two GPUs of a host with a drive, and a server
hosts:
- {id: "host:0", memory: 2KiB, dram_bandwidth: 50GB/s, drive: {memory: 1MiB}}
- {id: "host:1", memory: 12KiB, dram_bandwidth: 20GB/s}
gpus:
- {id: "gpu:[0-1]", host: "host:0", memory: 12KiB, hbm_bandwidth: 200GB/s, launch_s: 1.0e-7}
links:
- {a: "gpu:[0-1]", b: "host:0", kind: pcie, bandwidth: 1GB/s}
- {a: "host:[0-1]", b: network, kind: network, bandwidth: 1GB/s}
"""
RULES = """
tables:
  C3: {devices: ["gpu:0"]}
  C7: {tier: hbm}
  "C1*": {forbid: [row-wise, column-wise, replicated]}
together:
- [C1, C2]
reserve:
  gpu: 4KiB
"""
MEASURED = "machine.measurements.jsonl"
"""What `placer calibrate --backend torch` measured once: from it, constants are fitted anew."""
_ROWS = (3, 700, 40, 900, 12, 250, 90, 5, 400, 1200, 60, 150, 30)


def write_log(path: Path, samples: int, seed: int, shift: float = 0.0) -> None:
    """A log in Criteo's format: 13 numbers and 26 columns of skewed ids, some of them missing."""
    draw = random.Random(seed).random
    lines = []
    for _ in range(samples):
        numbers = ["" if draw() < 0.1 else str(int(draw() * draw() * 100)) for _ in range(13)]
        ids, first = [], 0
        for column in range(26):
            rows, u = _ROWS[column % 13], draw()
            row = (int(u * u * u * rows) + int(shift * rows)) % rows
            first += row % 3 == 0
            missing = draw() < 0.03
            ids.append("" if missing else f"{(row * 2654435761 + column * 97) % 2**32:08x}")
        label = "1" if first > 9 + 4 * draw() else "0"
        lines.append("\t".join([label, *numbers, *ids]))
    path.write_text("".join(f"{line}\n" for line in lines))


def write_items(path: Path) -> None:
    """A log in Parquet: integers, texts, and bags of several ids."""
    draw = random.Random(5).random
    count = 400
    pq.write_table(
        pa.table(
            {
                "click": pa.array([int(draw() < 0.3) for _ in range(count)], pa.int64()),
                "id": pa.array(range(count), pa.int64()),
                "item": pa.array([int(draw() * draw() * 300) for _ in range(count)], pa.int64()),
                "shop": pa.array([f"shop {int(draw() * draw() * 40)}" for _ in range(count)]),
                "tags": pa.array(
                    [[int(draw() * 25) for _ in range(int(draw() * 5))] for _ in range(count)],
                    pa.list_(pa.int64()),
                ),
            }
        ),
        path,
    )


def write_counts(path: Path) -> None:
    """What a database counted of two tables."""
    pairs = [("items", row, 1 + 5000 // (row + 1)) for row in range(0, 300, 3)]
    pairs += [("shops", row, 40 - row) for row in range(40)]
    names, ids, counts = zip(*pairs, strict=True)
    table = {"table": pa.array(names), "id": pa.array(ids), "count": pa.array(counts)}
    pq.write_table(pa.table(table), path)


def write_inputs(folder: Path) -> None:
    """All files that commands are given."""
    (folder / "machine.yaml").write_text(MACHINE)
    (folder / "four.yaml").write_text(FOUR)
    (folder / "served.yaml").write_text(SERVED)
    (folder / "rules.yaml").write_text(RULES)
    write_log(folder / "monday.tsv", 600, 1)
    write_log(folder / "tuesday.tsv", 400, 2, shift=0.3)
    write_items(folder / "items.parquet")
    write_counts(folder / "counts.parquet")
    shutil.copy(golden_store.DATA / MEASURED, folder / MEASURED)


# What a search finds must depend on its steps alone.
SEARCH = "--time-limit 600 --seed 3"
ON_TWO = "--topology machine.yaml --batch-size 8"
SMALL = f"{ON_TWO} --hbm 64KiB"
WORDS = {
    "SEARCH": SEARCH,
    "GREEDY": f"--solver greedy-cost {SEARCH} -o new.json",
    "CLASSIC": "greedy-size,greedy-lookup,greedy-size-lookup,greedy-dim,greedy-cost",
    "SMALL": SMALL,
    "PLACED": f"--profile profile {SMALL}",
    "TIGHT": f"--profile profile {ON_TWO} --hbm 48KiB",
    "ROOMY": f"--profile profile {ON_TWO} --hbm 128KiB",
    "FEW_TABLES": f"--profile items {ON_TWO} --hbm 24KiB",
    "BUDGETS": f"--profile items {ON_TWO} --hbm 16KiB,24KiB,1MiB {SEARCH}",
    "NO_ROOM": "--profile profile --topology 2xt4 --hbm 1KiB",
    "ITEMS": "--label click --ignore id",
    "FEW": f"{SEARCH} --steps 20 -o new.json",
    "DRIFTED": f"--from hashed.json --profile hashed {SMALL}",
    "TWO_DAYS": "--data monday.tsv --then tuesday.tsv",
    "CACHING": "simulate cached.json --data monday.tsv --profile profile --batches 10 "
    "--cache-policy",
    "EVERY": "--topology served.yaml --batch-size 8 --widths int8,bfloat16 --exchange bfloat16 "
    "--pipeline serial --dense measured:20us",
    "SHORT": "--hbm 16KiB",
    "EXPORT": "export -o exported.json",
    "LOG": "profile monday.tsv -o out --dim 8",
    "TRAIN": "train --plan plan.json --data monday.tsv --batch-size 64",
    "CALIBRATE": "calibrate --backend torch --clock cpu --budget 0s",
    "CALIBRATED": "--cost-model calibrated:machine.json",
}
"""What several commands have in common: their lines name it in braces."""

PREPARATION = """
profile monday.tsv --dim 8 -o profile
profile tuesday.tsv --dim 8 --id-mapping hash --rows 500 -o hashed
profile monday.tsv --dim 8 --id-mapping hash --rows 500 -o hashed-monday
profile items.parquet {ITEMS} --dim 16 -o items
plan {PLACED} --solver greedy-cost {SEARCH} -o plan.json
plan {FEW_TABLES} --solver greedy-cost {SEARCH} -o of-items.json
plan {TIGHT} --solver greedy-cost {SEARCH} -o tight.json
plan {PLACED} --hbm 128KiB --solver greedy-size {SEARCH} -o by-size.json
plan --profile hashed-monday {SMALL} --solver greedy-cost {SEARCH} -o hashed.json
plan --profile items {EVERY} --solver greedy-cost {SEARCH} -o every.json
{TRAIN} --steps 2 --checkpoints runs
{CALIBRATE} -o machine.json
"""


def arguments_of(line: str) -> list[str]:
    """The words of a command, with those of `WORDS` written out."""
    return shlex.split(line.format_map(WORDS))


def named_lines(text: str) -> dict[str, str]:
    """What follows each name, of lines such as ``name: command``."""
    lines = text.strip().splitlines()
    found = {name: line for name, _, line in (each.partition(": ") for each in lines)}
    assert len(found) == len(lines)
    return found


@contextlib.contextmanager
def workbench() -> Iterator[Path]:
    """A temporary folder with all inputs, as the working folder: no path in an output is absolute.

    Commands print their tables 160 columns wide, whatever the terminal is.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path.cwd()
        write_inputs(folder)
        for line in PREPARATION.strip().splitlines():
            written(line)
        cache_cold_rows(Plan.load("plan.json")).save("cached.json")
        yield folder


def cache_cold_rows(plan: Plan) -> Plan:
    """The same placement, with a small cache in HBM over the rows that are not there."""
    shards = [
        replace(shard, lookup="cached", cache_rows=shard.row_count // 4 + 1,
                staging_rows=min(8, shard.row_count))
        if shard.memory == "dram" and shard.lookup != "host" and shard.row_count > 1
        else shard
        for shard in plan.shards
    ]  # fmt: skip
    return replace(plan, shards=tuple(shards))


def invoke(line: str) -> Any:
    """Run a command in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CliRunner().invoke(main, arguments_of(line))


def written(line: str) -> None:
    """Run a command that writes files; it has to end well."""
    result = invoke(line)
    assert result.exit_code == 0, (line, result.output, result.exception)
