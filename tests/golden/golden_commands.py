"""Outputs of every command, recorded to be compared with.

Record anew, after a change that is meant to change them::

    python tests/golden/golden_commands.py

which writes ``data/commands.json.gz``; `test_golden_commands.py` holds the code to it. Keys that
differ from run to run or from machine to machine are left out.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import golden_store
from golden_files import VOLATILE, sha256, stable, tensors_in
from golden_inputs import arguments_of, invoke, named_lines, workbench

from cli import main

CASES = """
profile: {LOG}
profile csv: profile items.parquet {ITEMS} -o out --format csv
profile hashed: {LOG} --id-mapping hash --rows 300 --dtype float16
profile rare: {LOG} --id-mapping vocabulary --min-count 3 --optimizer adam
profile sampled: {LOG} --sample 0.7 --seed 1
profile of two logs: profile monday.tsv tuesday.tsv -o out
profile of parquet: profile items.parquet {ITEMS} -o out
profile of parquet hashed: profile items.parquet {ITEMS} -o out --id-mapping hash --rows 64
profile of counts: profile counts.parquet --log-format counts --samples 100000 -o out
merge: merge hashed hashed-monday -o out
workloads: workloads
workloads csv: workloads --format csv
workloads criteo-kaggle: workloads criteo-kaggle
workloads mlperf-dcnv2: workloads mlperf-dcnv2
topology 8xh100 -> h100.yaml: topology 8xh100 --hbm 8GiB -o h100.yaml
topology 2x8xa100-80: topology 2x8xa100-80 --dram 512GiB
topology 4xt4: topology 4xt4 --format csv
topology of a file: topology four.yaml
plan greedy-size -> new.json: plan {ROOMY} --solver greedy-size {FEW}
plan greedy-lookup -> new.json: plan {ROOMY} --solver greedy-lookup {FEW}
plan greedy-size-lookup -> new.json: plan {ROOMY} --solver greedy-size-lookup {FEW}
plan greedy-dim -> new.json: plan {ROOMY} --solver greedy-dim {FEW}
plan greedy-cost -> new.json: plan {PLACED} --solver greedy-cost {FEW}
plan beam -> new.json: plan {PLACED} --solver beam {FEW}
plan dp -> new.json: plan {PLACED} --solver dp {FEW}
plan csv: plan {FEW_TABLES} {GREEDY} --format csv
plan with constraints -> new.json: plan {PLACED} {GREEDY} --constraints rules.yaml
plan for other tables: plan {FEW_TABLES} {GREEDY} --dim 16 --dtype bfloat16 --optimizer adam
plan on two hosts: plan --profile profile --topology four.yaml --hbm 160KiB --batch-size 16 {GREEDY}
plan of a workload: plan --workload criteo-kaggle --topology 8xh100 --hbm 1GiB {GREEDY}
plan by torchrec: plan {FEW_TABLES} {GREEDY} --cost-model torchrec
compare: compare {ROOMY} {SEARCH} --solvers {CLASSIC}
compare csv: compare {BUDGETS} --solvers greedy-size,greedy-cost --format csv
compare models: compare {BUDGETS} --solvers {CLASSIC} --cost-models roofline,torchrec
compare priced machines: compare --profile profile --topology 1xt4,2xt4,8xh100 \
  --solvers greedy-cost --batch-size 64 {SEARCH} --price 1xt4=0.5,2xt4=1.0
compare where nothing fits: compare {NO_ROOM} --solvers greedy-size
show: show plan.json
show csv: show plan.json --format csv
show top: show plan.json --top 3
show torchrec: show by-size.json --cost-model torchrec
show explained: show plan.json --explain C10
show explained with constraints: show plan.json --explain C3 --constraints rules.yaml
show of drifted accesses: show hashed.json --profile hashed
show profile: show profile
verify: verify plan.json
verify constraints: verify plan.json --constraints rules.yaml
verify constraints csv: verify plan.json --constraints rules.yaml --format csv
diff: diff plan.json tight.json
diff csv: diff plan.json tight.json --format csv
diff of other solvers: diff by-size.json tight.json
replan unchanged: replan --from of-items.json {FEW_TABLES} {GREEDY}
replan tighter -> new.json: replan --from plan.json {TIGHT} --horizon-steps 1000 {GREEDY}
replan drifted 0: replan {DRIFTED} --horizon-steps 0 {GREEDY}
replan drifted 100000000: replan {DRIFTED} --horizon-steps 100000000 {GREEDY}
whatif: whatif {FEW_TABLES} {SEARCH}
whatif budgets: whatif {FEW_TABLES} --hbm-steps 16KiB,24KiB,64KiB --solver beam --steps 10 {SEARCH}
export plan to torchrec -> exported.json: {EXPORT} plan.json --to torchrec
export plan to torchrec as uva -> exported.json: {EXPORT} plan.json --to torchrec --staged-as uva
export by-size to torchrec -> exported.json: {EXPORT} by-size.json --to torchrec
export by-size to torchrec as uva -> exported.json: {EXPORT} by-size.json --to torchrec \
  --staged-as uva
export of-items to torchrec -> exported.json: {EXPORT} of-items.json --to torchrec
export of-items to torchrec as uva -> exported.json: {EXPORT} of-items.json --to torchrec \
  --staged-as uva
export plan to hugectr -> exported.json: {EXPORT} plan.json --to hugectr
export by-size to hugectr -> exported.json: {EXPORT} by-size.json --to hugectr
export of-items to hugectr -> exported.json: {EXPORT} of-items.json --to hugectr
export with a module -> exported.json: {EXPORT} by-size.json --to torchrec --staged-as cached \
  --module model.sparse
train: {TRAIN} --steps 6
train with a checkpoint: {TRAIN} --steps 3 --checkpoints other-runs
train other settings: {TRAIN} --steps 4 --lr 0.05 --embedding-lr 0.1 --dense-optimizer adam \
  --seed 2 --backend torch --epochs 2
train tiered: {TRAIN} --steps 5 --backend tiered --cache-policy rank
train and evaluate: {TRAIN} --steps 2 --eval-data tuesday.tsv
calibrate -> machine.json: {CALIBRATE} -o machine.json
calibrate csv: {CALIBRATE} -o machine.json --format csv
show calibrated: show plan.json {CALIBRATED}
plan calibrated: plan {PLACED} {GREEDY} {CALIBRATED}
simulate calibrated: simulate plan.json --batches 6 {CALIBRATED}
simulate: simulate plan.json --data monday.tsv
simulate drawn: simulate plan.json --batches 6 --seed 3
simulate one at a time: simulate plan.json --batches 5 --no-look-ahead
simulate windows: simulate hashed.json {TWO_DAYS} --windows 3 --batches 12
simulate against: simulate plan.json {TWO_DAYS} --against tight.json --windows 2 --batches 16
simulate caching lfu: {CACHING} lfu
simulate caching rank: {CACHING} rank
sweep: sweep --platform big-basin,zion --vary sparse=4,64
sweep csv: sweep --platform 8xh200 --vary pooling=1,20 --format csv
sweep a grid: sweep --platform big-basin,16xcpu --vary rows=1e5,1e7 --vary pooling=1,10 --grid
sweep a model: sweep --model m3 --platform zion --set pooling=20 --vary rows=1e5,1e6 --hbm 16GiB \
  --parameter-servers 4
plan of every kind -> new.json: plan --profile items {EVERY} {GREEDY}
compare of every kind: compare --profile items {EVERY} --solvers greedy-size,greedy-cost {SEARCH}
show of every kind: show every.json
show of every kind explained: show every.json --explain item
replan of every kind -> new.json: replan --from every.json --profile items {SHORT} \
  --horizon-steps 1000 {GREEDY}
simulate of every kind: simulate every.json --batches 12 --profile items
diff of every kind: diff every.json of-items.json
fleet: fleet --profile items --topology 8xh100,1xt4,2x8xl4 --price 1xt4=0.5 --within 5h \
  --batch-size 512 --time-limit 600 --steps 5
"""
"""Every command that prints a result, by name of the case.

It prints JSON where it does not say otherwise. A file after an arrow is recorded, too.
"""

_TIMED = VOLATILE | {"train_s", "read_s", "samples_per_s", "step_s"}


@dataclass(frozen=True)
class Case:
    """A command, and what of it is recorded."""

    line: str  # Its words.
    # Files that it writes: JSON and safetensors are recorded by content, others by hash.
    files: Sequence[str] = ()
    relative: float = 1e-9  # By how much floats may differ.
    drop: frozenset[str] = VOLATILE  # Keys that are left out, wherever they are.

    def run(self) -> dict[str, Any]:
        """Run the command in the working folder; what is recorded of it."""
        for name in self.files:
            Path(name).unlink(missing_ok=True)
        result = invoke(self.line)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        said: Any
        try:
            said = json.loads(result.stdout)
        except ValueError:
            said = None
        if said is None and "csv" in arguments_of(self.line):
            said = cells_of(result.stdout, self.drop)
        kept = {name: content_of(Path(name)) for name in self.files}
        return {"exit_code": result.exit_code, **stable({"said": said, "files": kept}, self.drop)}


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


def cases() -> dict[str, Case]:
    """What is recorded of `CASES`, by their names."""
    found = {}
    for text, line in named_lines(CASES).items():
        name, *files = text.split(" -> ")
        command = line if "--format" in line or "{EXPORT}" in line else f"{line} --format json"
        if name.startswith("train"):
            # Sums of floats in other orders: what a model computes in float32 is no exact number.
            found[name] = Case(command, files, 1e-4, _TIMED)
        else:
            found[name] = Case(command, files, 1e-6 if "calibrate" in name else 1e-9)
    return found


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


def record() -> None:
    """Write the recordings."""
    with workbench():
        found = {
            "cases": {name: case.run() for name, case in cases().items()},
            "options": options(),
        }
    golden_store.record("commands", found, compress=True)


if __name__ == "__main__":
    record()
