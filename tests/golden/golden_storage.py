"""Bytes of every kind of file, recorded to be compared with.

Record anew, after a change that is meant to change them::

    python tests/golden/golden_storage.py

which writes ``data/storage.json.gz``; `test_golden_storage.py` holds the code to it. `pinned` has
what depends on the versions of other packages.
"""

import contextlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import golden_store
import numpy as np
import torch
from golden_files import all_bits, folder_bits, pinned, read_dcp, sha256
from golden_inputs import write_inputs, written
from torch import Tensor, nn

from placer import Feature, Plan, Profile, Shard, Table, Topology, apply_plan, remove_plan
from placer.executor import BagBatch, PlacedEmbeddings
from placer.plan.fields import RowOrder
from placer.storage.checkpoint import load_model, save_model
from placer.training.checkpoint import Checkpoint, Position, load_embeddings
from placer.training.checkpoint import save as save_checkpoint

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
        first, parts = replace(whole, rows=(0, half, 1)), ((0, left), (left, table.dim))
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
                shards += [replace(whole, cols=parts[i], devices=(f"gpu:{i}",)) for i in (0, 1)]
            case "grid":
                shards.append(first)
                shards += [replace(cold, cols=parts[i], devices=(f"gpu:{1 - i}",)) for i in (0, 1)]
            case "replicas":
                shards.append(replace(whole, devices=("gpu:0", "gpu:1")))
            case "staged":
                shards += [first, replace(cold, lookup="staged", staging_rows=half)]
            case "cached":
                shards += [first, replace(cold, lookup="cached", cache_rows=5, staging_rows=2)]
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


def exact_weights(tables: Sequence[Table]) -> dict[str, Tensor]:
    return {
        table.name: dyadic((table.rows, table.dim), number).to(TORCH_DTYPES[table.dtype])
        for number, table in enumerate(tables)
    }


def some_state(tables: Sequence[Table]) -> dict[str, Tensor]:
    """Optimizer state of exact numbers, which no update has made."""
    found: dict[str, Tensor] = {}
    for table in tables:
        for name in STATE.get(table.optimizer, ()):
            by_row = table.optimizer == "rowwise_adagrad"
            shape = (table.rows,) if by_row else (table.rows, table.dim)
            found[f"{table.name}.{name}"] = dyadic(shape, len(found)).abs()
    if any(table.optimizer == "adam" for table in tables):
        found["updates"] = torch.tensor(7)
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
    model = PlacedEmbeddings(placed(tables, 2), weights=exact_weights(tables), backend="torch")
    model.load_optimizer_state_dict(some_state(tables))
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
    tensors = {
        "dense": {"w": dyadic((3, 4), 0)},
        "embeddings": {f"{name}.weight": held for name, held in exact_weights(tables).items()},
        "embedding_optimizer": some_state(tables),
    }
    save_checkpoint(folder, Checkpoint(Position(7, 1, 64), {"lr": 0.5, "mlp": [8, 1]}, tensors))


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


def tables_of(optimizer: str | None, dtype: str | None) -> dict[str, Any]:
    """Tables of a checkpoint, exported, and loaded under another plan and saved."""
    tables = some_tables(optimizer, dtype)
    placed(tables).save("old.json")
    placed(tables, 3).save("new.json")
    checkpoint_for(tables, Path("runs"))
    written("export old.json --to safetensors --checkpoint runs -o tables.safetensors")
    written("export new.json --to safetensors --checkpoint runs --with-optimizer "
            "-o all.safetensors")  # fmt: skip
    model = PlacedEmbeddings(placed(tables, 7), seed=1, backend="torch")
    load_embeddings("runs", model)
    save_model("saved", model)
    return {
        "saved": folder_bits(Path("saved")),
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


def profile_folder(line: str) -> dict[str, Any]:
    """A profile's folder, and the same after it was read and saved again."""
    written(f"{line} -o made")
    Profile.load("made").save("again")
    return {"made": folder_bits(Path("made")), "again": folder_bits(Path("again"))}


def machine_file(words: str) -> dict[str, Any]:
    """A machine as a file to edit, and what it becomes when it is read."""
    written(f"topology {words} -o one.yaml")
    written("topology one.yaml -o two.yaml")
    return {name: sha256(Path(name).read_bytes()) for name in ("one.yaml", "two.yaml")}


def untrained() -> dict[str, Any]:
    """The tables that `placer train` starts from; dense layers are drawn by torch's own rules."""
    written("profile monday.tsv --dim 8 --dtype float16 --optimizer adam -o profile")
    written("plan {PLACED} --hbm 256KiB --solver greedy-size {SEARCH} -o plan.json")
    written("{TRAIN} --steps 0 --backend torch --checkpoints runs")
    (step,) = Path("runs").iterdir()
    tensors = read_dcp(step)
    known = {name: held for name, held in tensors.items() if name.startswith("embedding")}
    return {"names": sorted(tensors), "tables": all_bits(known), "step": step.name}


def storage() -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes each kind of file, by name of the case; each runs in a folder of its own."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for backend in ("torch", "tiered"):
        found[f"drawn tables, {backend}"] = partial(drawn_tables, backend)
    for optimizer, dtype in itertools.product(OPTIMIZERS, TORCH_DTYPES):
        found[f"state of {optimizer}, {dtype}"] = partial(tables_with_state, optimizer, dtype)
    for dtype, backend in itertools.product(TORCH_DTYPES, ("torch", "tiered", "numba")):
        found[f"steps of sgd, {dtype}, {backend}"] = partial(stepped_tables, dtype, backend)
    for dtype in ("float16", "bfloat16"):
        made = partial(stepped_tables, dtype, "torch", "stochastic")
        found[f"steps of sgd rounded at random, {dtype}"] = made
    found["a plan applied"] = applied_tables
    found["a checkpoint of training"] = training_checkpoint
    found["tables before training"] = untrained
    found["tables of all kinds"] = partial(tables_of, None, None)
    for optimizer, dtype in zip(OPTIMIZERS, (*TORCH_DTYPES, "float32"), strict=True):
        found[f"tables of {optimizer}, {dtype}"] = partial(tables_of, optimizer, dtype)
    for how in ("all", *HOW):
        found[f"a plan, {how}"] = partial(plan_files, how)
    log, items = "profile monday.tsv --dim 8", "profile items.parquet {ITEMS}"
    for name, line in {
        "vocabulary": log,
        "hash": f"{log} --id-mapping hash --rows 300 --dtype bfloat16",
        "rare": f"{log} --id-mapping vocabulary --min-count 3",
        "sample": f"{log} --sample 0.7 --seed 1",
        "parquet": items,
        "parquet hashed": f"{items} --id-mapping hash --rows 64",
        "counts": "profile counts.parquet --log-format counts --samples 100000",
    }.items():
        found[f"a profile, {name}"] = partial(profile_folder, line)
    for words in ("8xh100 --hbm 8GiB", "2x4xa100-80 --dram 64GiB", "four.yaml"):
        found[f"a machine, {words.split()[0]}"] = partial(machine_file, words)
    return found


def stored(name: str) -> dict[str, Any]:
    """What is recorded of one kind of files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs(Path.cwd())
        return storage()[name]()


def record() -> None:
    """Write the recordings."""
    made = {name: stored(name) for name in storage()}
    golden_store.record("storage", {"pinned": pinned(), "cases": made}, compress=True)


if __name__ == "__main__":
    record()
