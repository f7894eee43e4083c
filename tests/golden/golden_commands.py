"""Outputs of every command and bytes of every kind of file, recorded to be compared with.

Record anew, after a change that is meant to change them::

    python tests/golden/golden_commands.py

which writes ``data/commands.json.gz`` and ``data/storage.json.gz``. `test_golden_commands.py` and
`test_golden_storage.py` hold the code to them.

What differs from run to run or from machine to machine is left out: see `VOLATILE`, the cases'
own `drop`, and `pinned` for what depends on the versions of other packages.
"""

import contextlib
import csv
import functools
import hashlib
import io
import itertools
import json
import math
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import golden_store
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors import safe_open
from torch import Tensor, nn

# What a rename has to change is here, and nowhere below.
from cli import main
from placer import Feature, Plan, Profile, Shard, Table, Topology, apply_plan, remove_plan
from placer.executor import BagBatch, PlacedEmbeddings
from placer.plan.fields import RowOrder
from placer.storage.checkpoint import load_model, save_model
from placer.storage.shards import load_shards
from placer.training.checkpoint import Checkpoint, Position
from placer.training.checkpoint import save as save_checkpoint

VOLATILE = frozenset({"seconds", "created", "placer_version", "stats", "solve_s", "search_space"})
"""Keys whose values are measured times, dates, versions or sentences; or whose keys may change."""

# Recordings -------------------------------------------------------------------------------------


def stable(value: Any, drop: frozenset[str] = VOLATILE) -> Any:
    """A value of JSON without the keys that are left out."""
    if isinstance(value, dict):
        # A plan's own hash is of its dates, too.
        left_out = drop | {"sha256"} if "provenance" in value else drop
        return {key: stable(held, drop) for key, held in value.items() if key not in left_out}
    if isinstance(value, list):
        return [stable(held, drop) for held in value]
    return value


def shape_of(value: Any) -> Any:
    """The keys and types of a value of JSON; of a list, those of its entries without repeats."""
    if isinstance(value, dict):
        return {key: shape_of(held) for key, held in value.items()}
    if isinstance(value, list):
        found: list[Any] = []
        for held in map(shape_of, value):
            if held not in found:
                found.append(held)
        return found
    return "number" if type(value) in (int, float) else type(value).__name__


# Inputs -----------------------------------------------------------------------------------------

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
    (folder / "rules.yaml").write_text(RULES)
    write_log(folder / "monday.tsv", 600, 1)
    write_log(folder / "tuesday.tsv", 400, 2, shift=0.3)
    write_items(folder / "items.parquet")
    write_counts(folder / "counts.parquet")
    shutil.copy(golden_store.DATA / MEASURED, folder / MEASURED)
    (folder / "cut.json").write_text('{"schema_version": 1, "tab')
    (folder / "empty.tsv").write_text("")


@contextlib.contextmanager
def workbench() -> Iterator[Path]:
    """A temporary folder with all inputs, as the working folder: no path in an output is absolute.

    Commands print their tables 160 columns wide, whatever the terminal is.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path.cwd()
        write_inputs(folder)
        for arguments in PREPARATION:
            prepared = invoke(*arguments)
            assert prepared.exit_code == 0, (arguments, prepared.output, prepared.exception)
        cache_cold_rows(Plan.load("plan.json")).save("cached.json")
        unsound = json.loads(Path("plan.json").read_text())
        del unsound["shards"][0], unsound["sha256"]
        Path("unsound.json").write_text(json.dumps(unsound))
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


# Commands ---------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    """Run a command in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CliRunner().invoke(main, list(arguments))


# What a search finds must depend on its steps alone.
SEARCH = ("--time-limit", "600", "--seed", "3")
FEW = (*SEARCH, "--steps", "20")
SMALL = ("--topology", "machine.yaml", "--hbm", "64KiB", "--batch-size", "8")
PLACED = ("--profile", "profile", *SMALL)
TIGHT = ("--profile", "profile", "--topology", "machine.yaml", "--hbm", "48KiB")
TIGHT_8 = (*TIGHT, "--batch-size", "8")
TRAIN = ("train", "--plan", "plan.json", "--data", "monday.tsv", "--batch-size", "64")
FEW_TABLES = (
    "--profile",
    "items",
    "--topology",
    "machine.yaml",
    "--hbm",
    "24KiB",
    "--batch-size",
    "8",
)
ROOMY = (
    "--profile",
    "profile",
    "--topology",
    "machine.yaml",
    "--hbm",
    "128KiB",
    "--batch-size",
    "8",
)
ITEMS = ("--label", "click", "--ignore", "id")
GREEDY = "greedy-size,greedy-lookup,greedy-size-lookup,greedy-dim,greedy-cost"

PREPARATION: tuple[tuple[str, ...], ...] = (
    ("profile", "monday.tsv", "--dim", "8", "-o", "profile"),
    ("profile", "tuesday.tsv", "--dim", "8", "--id-mapping", "hash", "--rows", "500",
     "-o", "hashed"),
    ("profile", "monday.tsv", "--dim", "8", "--id-mapping", "hash", "--rows", "500",
     "-o", "hashed-monday"),
    ("profile", "items.parquet", "--label", "click", "--ignore", "id", "--dim", "16",
     "-o", "items"),
    ("plan", *PLACED, "--solver", "greedy-cost", *SEARCH, "-o", "plan.json"),
    ("plan", *FEW_TABLES, "--solver", "greedy-cost", *SEARCH, "-o", "of-items.json"),
    ("plan", *TIGHT_8, "--solver", "greedy-cost", *SEARCH, "-o", "tight.json"),
    ("plan", *PLACED, "--hbm", "128KiB", "--solver", "greedy-size", *SEARCH, "-o", "by-size.json"),
    ("plan", "--profile", "hashed-monday", *SMALL, "--solver", "greedy-cost", *SEARCH,
     "-o", "hashed.json"),
    (*TRAIN, "--steps", "2", "--checkpoints", "runs"),
    ("calibrate", "--backend", "torch", "--clock", "cpu", "--budget", "0s", "-o", "machine.json"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command, and what of it is recorded.

    Attributes
    ----------
    arguments : sequence of str
    files : sequence of str
        Files that it writes: JSON and safetensors are recorded by content, others by hash.
    relative : float
        By how much floats may differ.
    drop : frozenset of str
        Keys that are left out, wherever they are.
    only_shape : bool
        Whether keys and types are recorded alone: values are measured.
    """

    arguments: Sequence[str]
    files: Sequence[str] = ()
    relative: float = 1e-9
    drop: frozenset[str] = VOLATILE
    only_shape: bool = False

    def run(self) -> dict[str, Any]:
        """Run the command in the working folder; what is recorded of it."""
        for name in self.files:
            Path(name).unlink(missing_ok=True)
        result = invoke(*self.arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        said: Any
        try:
            said = json.loads(result.stdout)
        except ValueError:
            said = None
        if said is None and "csv" in self.arguments:
            said = cells_of(result.stdout, self.drop)
        kept = {name: content_of(Path(name)) for name in self.files}
        found = stable({"said": said, "files": kept}, self.drop)
        return {"exit_code": result.exit_code, **(shape_of(found) if self.only_shape else found)}


def cells_of(text: str, drop: frozenset[str]) -> list[list[str | float]]:
    """The rows of CSV, without the columns that are left out."""
    rows = list(csv.reader(io.StringIO(text)))
    kept = [column for column, name in enumerate(rows[0]) if name not in drop]
    return [[number(row[column]) for column in kept] for row in rows]


def number(cell: str) -> str | float:
    """A cell of CSV, as a number where it is one."""
    try:
        return float(cell)
    except ValueError:
        return cell


def content_of(path: Path) -> Any:
    """A file's content, parsed where it can be; None if a command that was refused wrote none."""
    if not path.exists():
        return None
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".safetensors":
        return tensors_in(path)
    return sha256(path.read_bytes())


_TIMED = VOLATILE | {"train_s", "read_s", "samples_per_s", "step_s"}
# Sums of floats in other orders: what a model computes in float32 is no exact number.
_trained = functools.partial(Case, relative=1e-4, drop=_TIMED)


def cases() -> dict[str, Case]:
    """Every command that prints a result, by name of the case."""
    found: dict[str, Case] = {}

    def add(name: str, *arguments: str, kind: Callable[..., Case] = Case, **options: Any) -> None:
        assert name not in found, name
        found[name] = kind(arguments, **options)

    as_json, as_csv = ("--format", "json"), ("--format", "csv")
    # Profiles.
    log = ("profile", "monday.tsv", "-o", "out", "--dim", "8", *as_json)
    add("profile", *log)
    add("profile csv", "profile", "items.parquet", *ITEMS, "-o", "out", *as_csv)
    add("profile hashed", *log, "--id-mapping", "hash", "--rows", "300", "--dtype", "float16")
    add("profile rare", *log, "--id-mapping", "vocabulary", "--min-count", "3",
        "--optimizer", "adam")  # fmt: skip
    add("profile sampled", *log, "--sample", "0.7", "--seed", "1")
    add("profile of two logs", "profile", "monday.tsv", "tuesday.tsv", "-o", "out", *as_json)
    add("profile of parquet", "profile", "items.parquet", *ITEMS, "-o", "out", *as_json)
    add("profile of parquet hashed", "profile", "items.parquet", *ITEMS, "-o", "out",
        "--id-mapping", "hash", "--rows", "64", *as_json)  # fmt: skip
    add("profile of counts", "profile", "counts.parquet", "--log-format", "counts", "--samples",
        "100000", "-o", "out", *as_json)  # fmt: skip
    add("merge", "merge", "hashed", "hashed-monday", "-o", "out", *as_json)
    # Workloads and machines.
    add("workloads", "workloads", *as_json)
    add("workloads csv", "workloads", *as_csv)
    for name in ("criteo-kaggle", "mlperf-dcnv2"):
        add(f"workloads {name}", "workloads", name, *as_json)
    add("topology 8xh100", "topology", "8xh100", "--hbm", "8GiB", *as_json, "-o", "h100.yaml",
        files=("h100.yaml",))  # fmt: skip
    add("topology 2x8xa100-80", "topology", "2x8xa100-80", "--dram", "512GiB", *as_json)
    add("topology 4xt4", "topology", "4xt4", *as_csv)
    add("topology of a file", "topology", "four.yaml", *as_json)
    # Plans.
    classic = tuple(GREEDY.split(",")[:4])
    for solver in (*classic, "greedy-cost", "beam", "dp"):
        problem = ROOMY if solver in classic else PLACED
        add(f"plan {solver}", "plan", *problem, "--solver", solver, *FEW, *as_json,
            "-o", "new.json", files=("new.json",))  # fmt: skip
    greedy = ("--solver", "greedy-cost", *SEARCH, "-o", "new.json")
    add("plan csv", "plan", *FEW_TABLES, *greedy, *as_csv)
    add("plan with constraints", "plan", *PLACED, *greedy, "--constraints", "rules.yaml", *as_json,
        files=("new.json",))  # fmt: skip
    add("plan for other tables", "plan", *FEW_TABLES, *greedy, "--dim", "16", "--dtype", "bfloat16",
        "--optimizer", "adam", *as_json)  # fmt: skip
    add("plan on two hosts", "plan", "--profile", "profile", "--topology", "four.yaml", "--hbm",
        "160KiB", "--batch-size", "16", *greedy, *as_json)  # fmt: skip
    add("plan of a workload", "plan", "--workload", "criteo-kaggle", "--topology", "8xh100",
        "--hbm", "1GiB", *greedy, *as_json)  # fmt: skip
    add("plan by torchrec", "plan", *FEW_TABLES, *greedy, "--cost-model", "torchrec", *as_json)
    # Comparisons.
    compare = ("compare", "--profile", "items", "--topology", "machine.yaml", "--batch-size",
               "8", "--hbm", "16KiB,24KiB,1MiB", *SEARCH)  # fmt: skip
    add("compare", "compare", *ROOMY, *SEARCH, "--solvers", GREEDY, *as_json)
    add("compare csv", *compare, "--solvers", "greedy-size,greedy-cost", *as_csv)
    add("compare models", *compare, "--solvers", GREEDY, "--cost-models",
        "roofline,torchrec", *as_json)  # fmt: skip
    add("compare priced machines", "compare", "--profile", "profile", "--topology",
        "1xt4,2xt4,8xh100", "--solvers", "greedy-cost", "--batch-size", "64", *SEARCH, "--price",
        "1xt4=0.5,2xt4=1.0", *as_json)  # fmt: skip
    add("compare where nothing fits", "compare", "--profile", "profile", "--topology", "2xt4",
        "--hbm", "1KiB", "--solvers", "greedy-size", *as_json)  # fmt: skip
    # Plans shown, verified and explained.
    add("show", "show", "plan.json", *as_json)
    add("show csv", "show", "plan.json", *as_csv)
    add("show top", "show", "plan.json", "--top", "3", *as_json)
    add("show torchrec", "show", "by-size.json", "--cost-model", "torchrec", *as_json)
    add("show explained", "show", "plan.json", "--explain", "C10", *as_json)
    add("show explained with constraints", "show", "plan.json", "--explain", "C3",
        "--constraints", "rules.yaml", *as_json)  # fmt: skip
    add("show of drifted accesses", "show", "hashed.json", "--profile", "hashed", *as_json)
    add("show profile", "show", "profile", *as_json)
    add("verify", "verify", "plan.json", *as_json)
    add("verify constraints", "verify", "plan.json", "--constraints", "rules.yaml", *as_json)
    add("verify constraints csv", "verify", "plan.json", "--constraints", "rules.yaml", *as_csv)
    add("diff", "diff", "plan.json", "tight.json", *as_json)
    add("diff csv", "diff", "plan.json", "tight.json", *as_csv)
    add("diff of other solvers", "diff", "by-size.json", "tight.json", *as_json)
    # Questions.
    replan = ("--solver", "greedy-cost", *SEARCH, "-o", "new.json", *as_json)
    add("replan unchanged", "replan", "--from", "of-items.json", *FEW_TABLES, *replan)
    add("replan tighter", "replan", "--from", "plan.json", *TIGHT_8, "--horizon-steps", "1000",
        *replan, files=("new.json",))  # fmt: skip
    for horizon in ("0", "100000000"):
        add(f"replan drifted {horizon}", "replan", "--from", "hashed.json", "--profile", "hashed",
            *SMALL, "--horizon-steps", horizon, *replan)  # fmt: skip
    add("whatif", "whatif", *FEW_TABLES, *SEARCH, *as_json)
    add("whatif budgets", "whatif", *FEW_TABLES, "--hbm-steps", "16KiB,24KiB,64KiB", "--solver",
        "beam", "--steps", "10", *SEARCH, *as_json)  # fmt: skip
    # Shards and other trainers.
    add("reshard told", "reshard", "plan.json", "tight.json", *as_json)
    add("reshard told csv", "reshard", "plan.json", "tight.json", *as_csv)
    for target in ("torchrec", "hugectr"):
        for plan, staged in itertools.product(
            ("plan", "by-size", "of-items"), ((), ("--staged-as", "uva"))
        ):
            if staged and target != "torchrec":
                continue
            name = f"export {plan} to {target}" + (" as uva" if staged else "")
            add(name, "export", f"{plan}.json", "--to", target, *staged, "-o", "exported.json",
                files=("exported.json",))  # fmt: skip
    add("export with a module", "export", "by-size.json", "--to", "torchrec", "--staged-as",
        "cached", "--module", "model.sparse", "-o", "exported.json",
        files=("exported.json",))  # fmt: skip
    # Training: losses are sums of float32.
    add("train", *TRAIN, "--steps", "6", *as_json, kind=_trained)
    add("train with a checkpoint", *TRAIN, "--steps", "3", "--checkpoints", "other-runs",
        *as_json, kind=_trained)  # fmt: skip
    add("train other settings", *TRAIN, "--steps", "4", "--lr", "0.05", "--embedding-lr", "0.1",
        "--dense-optimizer", "adam", "--seed", "2", "--backend", "torch", "--epochs", "2",
        *as_json, kind=_trained)  # fmt: skip
    add("train tiered", *TRAIN, "--steps", "5", "--backend", "tiered", "--cache-policy", "rank",
        *as_json, kind=_trained)  # fmt: skip
    add("train and evaluate", *TRAIN, "--steps", "2", "--eval-data", "tuesday.tsv", *as_json,
        kind=_trained)  # fmt: skip
    # Constants: none of them is measured again.
    calibrate = ("calibrate", "--backend", "torch", "--clock", "cpu", "--budget", "0s")
    fitted = functools.partial(Case, relative=1e-6)
    add("calibrate", *calibrate, "-o", "machine.json", *as_json, files=("machine.json",),
        kind=fitted)  # fmt: skip
    add("calibrate csv", *calibrate, "-o", "machine.json", *as_csv, kind=fitted)
    calibrated = ("--cost-model", "calibrated:machine.json")
    add("show calibrated", "show", "plan.json", *calibrated, *as_json, kind=fitted)
    add("plan calibrated", "plan", *PLACED, *greedy, *calibrated, *as_json, kind=fitted)
    add("simulate calibrated", "simulate", "plan.json", "--batches", "6", *calibrated, *as_json,
        kind=fitted)  # fmt: skip
    # Simulations.
    data = ("--data", "monday.tsv")
    add("simulate", "simulate", "plan.json", *data, *as_json)
    add("simulate drawn", "simulate", "plan.json", "--batches", "6", "--seed", "3", *as_json)
    add("simulate one at a time", "simulate", "plan.json", "--batches", "5", "--no-look-ahead",
        *as_json)  # fmt: skip
    add("simulate windows", "simulate", "hashed.json", *data, "--then", "tuesday.tsv", "--windows",
        "3", "--batches", "12", *as_json)  # fmt: skip
    add("simulate against", "simulate", "plan.json", *data, "--then", "tuesday.tsv", "--against",
        "tight.json", "--windows", "2", "--batches", "16", *as_json)  # fmt: skip
    policy = next(each for each in main.commands["simulate"].params if each.name == "cache_policy")
    assert isinstance(policy.type, click.Choice)
    for choice in policy.type.choices:
        add(f"simulate caching {choice}", "simulate", "cached.json", "--data", "monday.tsv",
            "--profile", "profile", "--batches", "10", "--cache-policy", choice,
            *as_json)  # fmt: skip
    # Sweeps.
    add("sweep", "sweep", "--platform", "big-basin,zion", "--vary", "sparse=4,64", *as_json)
    add("sweep csv", "sweep", "--platform", "8xh200", "--vary", "pooling=1,20", *as_csv)
    add("sweep a grid", "sweep", "--platform", "big-basin,16xcpu", "--vary", "rows=1e5,1e7",
        "--vary", "pooling=1,10", "--grid", *as_json)  # fmt: skip
    add("sweep a model", "sweep", "--model", "m3", "--platform", "zion", "--set", "pooling=20",
        "--vary", "rows=1e5,1e6", "--hbm", "16GiB", "--parameter-servers", "4",
        *as_json)  # fmt: skip
    return found


def failing() -> dict[str, tuple[str, ...]]:
    """Commands that have to fail; their exit codes are recorded, their words are not."""
    plan = ("plan", *PLACED, "-o", "failed.json")
    return {
        "no command": ("paint",),
        "no arguments": ("plan",),
        "no log": ("profile", "nowhere.tsv", "-o", "failed"),
        "an empty log": ("profile", "empty.tsv", "-o", "failed"),
        "counts without samples": (
            "profile", "counts.parquet", "--log-format", "counts", "-o", "x",
        ),
        "a hash without rows": ("profile", "monday.tsv", "--id-mapping", "hash", "-o", "failed"),
        "an unknown column": ("profile", "items.parquet", "--label", "sold", "-o", "failed"),
        "an unknown workload": ("workloads", "nothing"),
        "an unknown machine": ("topology", "8xabacus"),
        "a profile and a workload": (*plan, "--workload", "criteo-kaggle"),
        "an unknown solver": (*plan, "--solver", "magic"),
        "an unknown cost model": (*plan, "--cost-model", "magic"),
        "no file of constants": (*plan, "--cost-model", "calibrated:nowhere.json"),
        "a budget that is no size": (*plan, "--hbm", "much"),
        "nothing fits": ("plan", "--profile", "profile", "--topology", "2xt4", "--hbm", "1KiB",
                         "--solver", "greedy-cost", "-o", "failed.json"),
        "nothing fits anywhere": ("compare", "--profile", "profile", "--topology", "2xt4", "--hbm",
                                  "1KiB", "--solvers", "greedy-size"),
        "nothing fits to ask about": ("whatif", "--profile", "profile", "--topology", "2xt4",
                                      "--hbm", "1KiB"),
        "an unknown solver compared": ("compare", *PLACED, "--solvers", "magic"),
        "a price without a machine": ("compare", *PLACED, "--price", "8xh100=3"),
        "a plan cut short": ("show", "cut.json"),
        "no plan to verify": ("verify", "nowhere.json"),
        "an unsound plan": ("verify", "unsound.json"),
        "an unknown table explained": ("show", "plan.json", "--explain", "C99"),
        "a profile explained": ("show", "profile", "--explain", "C1"),
        "a plan of another profile": ("show", "plan.json", "--profile", "hashed"),
        "a demo of no log": ("demo", "--data", "nowhere.tsv", "-o", "failed"),
        "shards without a checkpoint": ("export", "plan.json", "--to", "shards", "-o", "failed"),
        "a checkpoint that is none": ("export", "plan.json", "--to", "shards", "--checkpoint",
                                      "profile", "-o", "failed"),
        "shards without a folder": ("reshard", "plan.json", "tight.json", "--shards", "runs"),
        "shards that are none": ("reshard", "plan.json", "tight.json", "--shards", "runs", "-o",
                                 "failed"),
        "a simulation of nothing": ("simulate", "plan.json"),
        "too many windows": ("simulate", "plan.json", "--batches", "2", "--windows", "3"),
        "a picture of no budgets": ("whatif", *PLACED, "--plot", "failed.png"),
        "an unknown placement": ("sweep", "--placements", "magic"),
        "an unknown axis": ("sweep", "--vary", "colour=1,2"),
        "a trace without a file": (*TRAIN, "--trace-steps", "3"),
        "an unknown backend": (*TRAIN, "--backend", "magic"),
        "an unknown device": (*TRAIN, "--device", "abacus"),
        "resuming from nowhere": (*TRAIN, "--resume"),
        "a learning rate of 0": (*TRAIN, "--lr", "0"),
        "a budget that is no time": ("calibrate", "--budget", "soon", "-o", "failed.json"),
        "no time to calibrate": ("calibrate", "--backend", "torch", "--budget", "0s", "-o",
                                 "failed.json"),
    }  # fmt: skip


def exit_codes() -> dict[str, int]:
    """The exit code of each command that has to fail."""
    return {name: invoke(*arguments).exit_code for name, arguments in failing().items()}


# Options ----------------------------------------------------------------------------------------


def options() -> dict[str, Any]:
    """The arguments and options of each command; help texts are left out."""
    return {
        name: [_parameter(each) for each in command.params]
        for name, command in sorted(main.commands.items())
    }


def _parameter(parameter: click.Parameter) -> dict[str, Any]:
    kind, default = parameter.type, parameter.default
    # Newer versions of click mark defaults that are not given; older ones have None.
    if type(default).__name__ == "Sentinel" or "UNSET" in repr(default):
        default = None
    found: dict[str, Any] = {
        "kind": parameter.param_type_name,
        "name": parameter.name,
        "spelt": [*parameter.opts],
        "spelt_off": [*parameter.secondary_opts],
        "type": kind.name,
        "required": parameter.required,
        "multiple": bool(getattr(parameter, "multiple", False)),
        "nargs": parameter.nargs,
        "is_flag": bool(getattr(parameter, "is_flag", False)),
        "hidden": bool(getattr(parameter, "hidden", False)),
        "default": str(default) if isinstance(default, Path) else default,
        "metavar": parameter.metavar,
    }
    if isinstance(kind, click.Choice):
        found["choices"] = list(kind.choices)
    for bound in ("min", "max", "min_open", "max_open", "clamp"):
        if hasattr(kind, bound):
            found[bound] = getattr(kind, bound)
    return found


# The parts of files -----------------------------------------------------------------------------


def sha256(content: bytes) -> str:
    """The hash of some bytes."""
    return hashlib.sha256(content).hexdigest()


def bits_of(tensor: Tensor) -> dict[str, Any]:
    """A tensor's type, shape, and hash of its bytes."""
    held = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "sha256": sha256(held)}


def all_bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`bits_of` by name."""
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def tensors_in(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: bits_of(file.get_tensor(name)) for name in sorted(file.keys())}


def pinned() -> dict[str, str]:
    """Versions of what writes the bytes around tensors: with others, those may differ."""
    return {"torch": torch.__version__.partition("+")[0], "pyarrow": pa.__version__}


def folder_bits(folder: Path) -> dict[str, Any]:
    """Every file of a folder: its hash, or its content where some of it is volatile.

    - ``.metadata`` of a checkpoint is a pickle with a random id and the folder's path: what it
      says of tensors is taken instead.
    - ``checkpoint.json`` lists that file's size and hash, and has a hash over itself: without.
    - ``*.distcp`` has the frame of torch's files around the tensors: its hash is compared where
      torch is the version that it was recorded with; the tensors in it always are.
    - ``vocabulary-*.parquet`` names pyarrow's version: its rows are taken, and ``profile.json``
      goes without its name, size and hash, and with numbers instead of bytes, as an exponent in it
      is a fit.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name, content = path.relative_to(folder).as_posix(), path.read_bytes()
        if path.name == ".metadata":
            found[name] = _metadata(path.parent)
            found[f"{name}: tensors"] = all_bits(read_dcp(path.parent))
        elif path.name == "checkpoint.json":
            document = json.loads(content)
            del document["sha256"], document["files"][".metadata"]
            for each in document["files"].values():
                each["torch sha256"] = each.pop("sha256")
            found[name] = document
        elif path.suffix == ".distcp":
            found[name] = {"torch sha256": sha256(content)}
        elif path.name.startswith("vocabulary-"):
            rows = pq.read_table(path).to_pydict()
            found["vocabulary-*.parquet"] = sha256(json.dumps(rows).encode())
        elif path.name == "profile.json":
            document = json.loads(content)
            del document["sha256"]
            document["files"].pop("vocabulary", None)
            found[name] = document
        else:
            found[name] = sha256(content)
    return found


def _metadata(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its tensors, and where their bytes are."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        name: {
            "dtype": str(held.properties.dtype),
            "size": list(held.size),
            "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in held.chunks],
        }
        for name, held in metadata.state_dict_metadata.items()
    }
    stored = [
        [index.fqn, None if index.offset is None else list(index.offset), at.relative_path]
        for index, at in metadata.storage_data.items()
    ]
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
    return {"tensors": tensors, "stored": stored, "paths": paths}


def read_dcp(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder in torch's own format, read by torch alone."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        name: torch.empty(held.size, dtype=held.properties.dtype)
        for name, held in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def without_pinned(value: Any, recorded: dict[str, str]) -> Any:
    """A recording without what other versions of other packages write otherwise."""
    return stable(value, frozenset(f"{n} sha256" for n, v in pinned().items() if recorded[n] != v))


# Storage ----------------------------------------------------------------------------------------

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
STATE = {"adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HOW = ("whole", "host", "rows", "hot", "grid", "columns", "replicas", "staged", "cached")
"""How a table is cut and read."""


def placed(tables: Sequence[Table], shift: int = 0, how: str | None = None) -> Plan:
    """A plan of two GPUs for some tables, each cut in another way; all in one way, if told."""
    shards: list[Shard] = []
    hot_ids: dict[str, Any] = {}
    for number, table in enumerate(tables):
        cut = how or HOW[(number + shift) % len(HOW)]
        rows, half, left = table.rows, table.rows // 2, table.dim // 2
        whole = Shard(table.name, (0, rows, 1), (0, table.dim), ("gpu:0",), "hbm", "device")
        cold = replace(whole, rows=(half, rows, 1), devices=("gpu:1",), memory="dram", lookup="uva")
        first = replace(whole, rows=(0, half, 1))
        match cut:
            case "whole":
                shards.append(whole)
            case "host":
                shards.append(replace(whole, memory="dram", lookup="host"))
            case "rows":
                shards += [replace(whole, rows=(i, rows, 2), devices=(f"gpu:{i}",)) for i in (0, 1)]
            case "hot":
                shards += [first, cold]
            case "columns":
                shards += [
                    replace(whole, cols=(0, left)),
                    replace(whole, cols=(left, table.dim), devices=("gpu:1",)),
                ]
            case "grid":
                shards += [
                    first,
                    replace(cold, cols=(0, left)),
                    replace(cold, cols=(left, table.dim), devices=("gpu:0",)),
                ]
            case "replicas":
                shards.append(replace(whole, devices=("gpu:0", "gpu:1")))
            case "staged":
                shards += [first, replace(cold, lookup="staged", staging_rows=half)]
            case "cached":
                shards += [
                    first,
                    replace(cold, lookup="cached", cache_rows=5, staging_rows=2),
                ]
        if cut in ("hot", "grid", "staged", "cached"):
            order = sorted(range(rows), key=lambda row: (row * 37 + 11 * shift) % 101)
            hot_ids[table.name] = np.array(order[: rows // 3], np.int64)
    orders = {name: RowOrder("profile") for name in hot_ids}
    return Plan(tuple(tables), Topology.parse("machine.yaml"), tuple(shards), orders, hot_ids, 8)


def some_tables(optimizer: str | None = None, dtype: str | None = None) -> list[Table]:
    """A table for each way to cut it; optimizers and types take turns where none is told."""
    dtypes = tuple(TORCH_DTYPES)
    return [
        Table(
            f"{how}/{number}",
            41 + number,
            6,
            dtype or dtypes[number % 3],
            optimizer or OPTIMIZERS[number % 4],
            (Feature(f"f{number}"), Feature(f"g{number}", pooling="none")),
        )
        for number, how in enumerate(HOW)
    ]


def dyadic(shape: Sequence[int], start: int) -> Tensor:
    """Float32 numbers that every type of weights holds exactly."""
    count = math.prod(shape)
    held = (torch.arange(start, start + count, dtype=torch.int64) * 29) % 127
    return ((held - 63).float() / 64).reshape(list(shape))


def some_state(tables: Sequence[Table]) -> dict[str, Tensor]:
    """Optimizer state of exact numbers, which no update has made."""
    found: dict[str, Tensor] = {}
    for table in tables:
        for name in STATE.get(table.optimizer, ()):
            by_row = table.optimizer == "rowwise_adagrad"
            shape = (table.rows,) if by_row else (table.rows, table.dim)
            found[f"{table.name}.{name}"] = dyadic(shape, len(found)).abs()
    return found


def exact_steps(model: PlacedEmbeddings, steps: int = 2) -> None:
    """Steps whose gradients are small integers: with SGD and a rate of ½, one rounding each."""
    for step in range(steps):
        features = {}
        for table in model.plan.tables:
            for number, feature in enumerate(table.features):
                ids = (torch.arange(12) * (5 + number) + step * 3) % table.rows
                features[feature.name] = (ids, torch.arange(0, 13, 3), None)
        order = model.feature_names
        bags = BagBatch.from_features({name: features[name] for name in order}, order)
        outputs = model(bags)
        torch.autograd.backward(list(outputs.values()), [
            (torch.arange(held.numel()) % 5 - 2).float().reshape(held.shape).to(held.dtype)
            for held in outputs.values()
        ])  # fmt: skip


def held_by(model: PlacedEmbeddings) -> dict[str, Any]:
    """Weights and optimizer state of a model by id."""
    return {**all_bits(model.state_dict()), **all_bits(model.optimizer_state_dict())}


def saved_and_again(model: PlacedEmbeddings, other: PlacedEmbeddings) -> dict[str, Any]:
    """A model saved, loaded under another plan, and saved again."""
    save_model("saved", model, {"epoch": torch.tensor(3)})
    rest = load_model("saved", other)
    save_model("again", other)
    return {
        "held": held_by(model),
        "saved": folder_bits(Path("saved")),
        "rest": all_bits(rest),
        "held by the other": held_by(other),
        "again": folder_bits(Path("again")),
    }


def drawn_tables(backend: str) -> dict[str, Any]:
    """Tables as they are drawn, with every optimizer and type."""
    tables = some_tables()
    model = PlacedEmbeddings(placed(tables), seed=4, backend=backend)
    other = PlacedEmbeddings(placed(tables, 4), seed=5, backend=backend)
    return saved_and_again(model, other)


def tables_with_state(optimizer: str, dtype: str) -> dict[str, Any]:
    """Weights and state of exact numbers."""
    tables = some_tables(optimizer, dtype)
    weights = {
        table.name: dyadic((table.rows, table.dim), number).to(TORCH_DTYPES[dtype])
        for number, table in enumerate(tables)
    }
    model = PlacedEmbeddings(placed(tables, 2), weights=weights, backend="torch")
    state = some_state(tables)
    if optimizer == "adam":
        state["updates"] = torch.tensor(7)
    model.load_optimizer_state_dict(state)
    return saved_and_again(model, PlacedEmbeddings(placed(tables, 6), seed=9, backend="torch"))


def stepped_tables(dtype: str, backend: str, rounding: Any = "nearest") -> dict[str, Any]:
    """Tables after some steps of SGD."""
    tables = some_tables("sgd", dtype)
    options: dict[str, Any] = {"lr": 0.5, "backend": backend, "rounding": rounding}
    model = PlacedEmbeddings(placed(tables, 1), seed=2, **options)
    exact_steps(model)
    other = PlacedEmbeddings(placed(tables, 5), seed=3, **options)
    found = saved_and_again(model, other)
    exact_steps(other)
    return {**found, "after another two steps": held_by(other)}


def applied_tables() -> dict[str, Any]:
    """A model with a plan applied, saved, and given back its own modules."""
    model = nn.ModuleDict(
        {"bag": nn.EmbeddingBag(61, 8, mode="sum"), "item": nn.Embedding(40, 4),
         "dense": nn.Linear(4, 2)}
    )  # fmt: skip
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(dyadic(parameter.shape, number))
    tables = [
        Table("bag", 61, 8, optimizer="sgd", features=(Feature("bag"),)),
        Table("item", 40, 4, optimizer="sgd", features=(Feature("item", pooling="none"),)),
    ]
    apply_plan(model, placed(tables, 3), lr=0.5, backend="torch")
    bag, item = model["bag"], model["item"]
    (bag(torch.arange(12).view(4, 3)).sum() + item(torch.arange(7)).sum()).backward()
    save_model("saved", model)
    state = remove_plan(model)
    return {
        "saved": folder_bits(Path("saved")),
        "state": all_bits(state),
        "model": all_bits(dict(model.state_dict())),
    }


def checkpoint_for(tables: Sequence[Table], folder: Path) -> None:
    """Write a checkpoint of training: tables, state, dense layers of exact numbers."""
    weights = {
        f"{table.name}.weight": dyadic((table.rows, table.dim), number).to(
            TORCH_DTYPES[table.dtype]
        )
        for number, table in enumerate(tables)
    }
    state = some_state(tables)
    if any(table.optimizer == "adam" for table in tables):
        state["updates"] = torch.tensor(7)
    tensors = {
        "dense": {"w": dyadic((3, 4), 0)},
        "embeddings": weights,
        "embedding_optimizer": state,
    }
    save_checkpoint(folder, Checkpoint(Position(7, 1, 64), {"lr": 0.5, "mlp": [8, 1]}, tensors))


def written(*arguments: str) -> dict[str, Any]:
    """Run a command that writes files."""
    result = invoke(*arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return {"exit_code": 0}


def training_checkpoint() -> dict[str, Any]:
    """The folder that training saves, and saving a newer one over it."""
    tables = some_tables()
    checkpoint_for(tables, Path("runs"))
    written_once = folder_bits(Path("runs"))
    checkpoint_for(tables, Path("runs"))
    return {"once": written_once, "twice": folder_bits(Path("runs"))}


def _tables_sha256(path: Path) -> str:
    """Of tables without the hash of their checkpoint, which other versions of torch write."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    assert set(header.pop("__metadata__")) == {"checkpoint", "step"}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return sha256(len(text).to_bytes(8, "little") + text + content[end:])


def shards_of(optimizer: str | None, dtype: str | None) -> dict[str, Any]:
    """Shards of a checkpoint, brought to another plan, written anew, loaded and saved."""
    tables = some_tables(optimizer, dtype)
    old, new = placed(tables), placed(tables, 3)
    old.save("old.json")
    new.save("new.json")
    checkpoint_for(tables, Path("runs"))
    from_runs = ("--checkpoint", "runs")
    written("export", "old.json", "--to", "shards", *from_runs, "-o", "old")
    written("export", "new.json", "--to", "shards", *from_runs, "-o", "new")
    written("reshard", "old.json", "new.json", "--shards", "old", "-o", "resharded")
    written("reshard", "new.json", "old.json", "--shards", "resharded", "--no-verify", "-o", "back")
    written("export", "old.json", "--to", "safetensors", *from_runs, "-o", "tables.safetensors")
    written("export", "new.json", "--to", "safetensors", *from_runs, "--with-optimizer", "-o",
            "all.safetensors")  # fmt: skip
    model = PlacedEmbeddings(placed(tables, 7), seed=1, backend="torch")
    load_shards(model, "resharded")
    save_model("saved", model)
    return {
        **{name: folder_bits(Path(name)) for name in ("old", "new", "resharded", "back", "saved")},
        **{name: _tables_sha256(Path(name)) for name in ("tables.safetensors", "all.safetensors")},
        "loaded": held_by(model),
    }


def plan_files(how: str) -> dict[str, Any]:
    """A plan and the row order beside it, saved, read and saved again."""
    tables = [*some_tables("adam", "float16")[:4], *some_tables("sgd")[4:]]
    Path("a").mkdir()
    Path("b").mkdir()
    placed(tables, 2, None if how == "all" else how).save("a/plan.json")
    Plan.load("a/plan.json").save("b/plan.json")
    return {"once": folder_bits(Path("a")), "twice": folder_bits(Path("b"))}


def profile_folder(*arguments: str) -> dict[str, Any]:
    """A profile's folder, and the same after it was read and saved again."""
    written(*arguments, "-o", "made")
    Profile.load("made").save("again")
    return {"made": folder_bits(Path("made")), "again": folder_bits(Path("again"))}


def machine_file(*arguments: str) -> dict[str, Any]:
    """A machine as a file to edit, and what it becomes when it is read."""
    written("topology", *arguments, "-o", "one.yaml")
    written("topology", "one.yaml", "-o", "two.yaml")
    return {name: sha256(Path(name).read_bytes()) for name in ("one.yaml", "two.yaml")}


def untrained(folder: str = "runs") -> dict[str, Any]:
    """The tables that `placer train` starts from; dense layers are drawn by torch's own rules."""
    written("profile", "monday.tsv", "--dim", "8", "--dtype", "float16", "--optimizer", "adam",
            "-o", "profile")  # fmt: skip
    written(
        "plan", *PLACED, "--hbm", "256KiB", "--solver", "greedy-size", *SEARCH, "-o", "plan.json"
    )
    written(*TRAIN, "--steps", "0", "--backend", "torch", "--checkpoints", folder)
    (step,) = Path(folder).iterdir()
    tensors = read_dcp(step)
    known = {name: held for name, held in tensors.items() if name.startswith("embedding")}
    return {"names": sorted(tensors), "tables": all_bits(known), "step": step.name}


def storage() -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes each kind of file, by name of the case; each runs in a folder of its own."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        f"drawn tables, {backend}": functools.partial(drawn_tables, backend)
        for backend in ("torch", "tiered")
    }
    for optimizer, dtype in itertools.product(OPTIMIZERS, TORCH_DTYPES):
        found[f"state of {optimizer}, {dtype}"] = functools.partial(
            tables_with_state, optimizer, dtype
        )
    for dtype, backend in itertools.product(TORCH_DTYPES, ("torch", "tiered", "numba")):
        found[f"steps of sgd, {dtype}, {backend}"] = functools.partial(
            stepped_tables, dtype, backend
        )
    for dtype in ("float16", "bfloat16"):
        found[f"steps of sgd rounded at random, {dtype}"] = functools.partial(
            stepped_tables, dtype, "torch", "stochastic"
        )
    found["a plan applied"] = applied_tables
    found["a checkpoint of training"] = training_checkpoint
    found["tables before training"] = untrained
    found["shards of all kinds"] = functools.partial(shards_of, None, None)
    for optimizer, dtype in zip(OPTIMIZERS, (*TORCH_DTYPES, "float32"), strict=True):
        found[f"shards of {optimizer}, {dtype}"] = functools.partial(shards_of, optimizer, dtype)
    for how in ("all", *HOW):
        found[f"a plan, {how}"] = functools.partial(plan_files, how)
    log = ("profile", "monday.tsv", "--dim", "8")
    items = ("profile", "items.parquet", *ITEMS)
    for name, arguments in {
        "vocabulary": log,
        "hash": (*log, "--id-mapping", "hash", "--rows", "300", "--dtype", "bfloat16"),
        "rare": (*log, "--id-mapping", "vocabulary", "--min-count", "3"),
        "sample": (*log, "--sample", "0.7", "--seed", "1"),
        "parquet": items,
        "parquet hashed": (*items, "--id-mapping", "hash", "--rows", "64"),
        "counts": ("profile", "counts.parquet", "--log-format", "counts", "--samples", "100000"),
    }.items():
        found[f"a profile, {name}"] = functools.partial(profile_folder, *arguments)
    for arguments in (("8xh100", "--hbm", "8GiB"), ("2x4xa100-80", "--dram", "64GiB"),
                      ("four.yaml",)):  # fmt: skip
        found[f"a machine, {arguments[0]}"] = functools.partial(machine_file, *arguments)
    return found


def stored(name: str) -> dict[str, Any]:
    """What is recorded of one kind of files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs(Path.cwd())
        return storage()[name]()


# Recording --------------------------------------------------------------------------------------


def record() -> None:
    """Write both recordings."""
    with workbench():
        found = {
            "cases": {name: case.run() for name, case in cases().items()},
            "exit_codes": exit_codes(),
            "options": options(),
        }
    golden_store.record("commands", found, compress=True)
    made = {name: stored(name) for name in storage()}
    golden_store.record("storage", {"pinned": pinned(), "cases": made}, compress=True)


if __name__ == "__main__":
    record()
