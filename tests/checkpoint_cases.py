"""Checkpoints in memory, and pairs of plans of the same tables."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from hypothesis import strategies as st
from plan_cases import machine, placed, tables

from placer import Plan
from placer.errors import CheckpointError
from placer.storage import tensor_rows
from placer.storage.manifest import latest
from placer.storage.tensor_rows import TensorRows
from placer.training.checkpoint import Checkpoint, Position, open_checkpoint

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STATE = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}


def load(path: Path) -> Checkpoint:
    """A checkpoint, or the newest complete one in a folder, in memory."""
    while True:
        chosen = latest(path)
        try:
            opened = open_checkpoint(chosen)
            tensors = {
                group: {name: TensorRows.of(tensor).whole() for name, tensor in held.items()}
                for group, held in opened.tensors.items()
            }
        except CheckpointError:
            # A training that runs may have removed it, as there are newer ones.
            if chosen == path or chosen.exists():
                raise
        else:
            return replace(opened, tensors=tensors)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder; in it, tables take several chunks. Waiting for the disk would show nothing."""
    small = mock.patch.object(tensor_rows, "CHUNK_BYTES", 64)
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"), small:
        yield Path(name)


def checkpoint_of(plan: Plan, seed: int = 0) -> Checkpoint:
    """A checkpoint of a plan's tables, with random weights and optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    weights, states = {}, {}
    for table in plan.tables:
        shape = (table.rows, table.dim)
        drawn = torch.randn(shape, generator=generator).to(DTYPES[table.dtype])
        weights[f"{table.name}.weight"] = drawn
        for name in STATE[table.optimizer]:
            held = shape[:1] if table.optimizer == "rowwise_adagrad" else shape
            states[f"{table.name}.{name}"] = torch.rand(held, generator=generator)
    if any(table.optimizer == "adam" for table in plan.tables):
        states["updates"] = torch.tensor(7)
    return Checkpoint(
        Position(7, 1, 64), {}, {"embeddings": weights, "embedding_optimizer": states}
    )


@st.composite
def successive_plans(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Two sound placements of the same tables; the second may keep some as they were."""
    chosen = tuple(draw(tables(name)) for name in draw(st.sampled_from([("a",), ("a", "b/ä")])))
    topology = machine(draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    old, new = draw(placed(chosen, topology)), draw(placed(chosen, topology))
    stays = [table.name for table in chosen if draw(st.booleans())]
    shards = [shard for shard in new.shards if shard.table not in stays]
    shards += [shard for shard in old.shards if shard.table in stays]
    orders = {
        table.name: (old if table.name in stays else new).row_order[table.name]
        for table in chosen
        if table.name in (old if table.name in stays else new).row_order
    }
    hot_ids = {name: (old if name in stays else new).hot_ids[name] for name in orders}
    return old, Plan(chosen, topology, tuple(shards), orders, hot_ids)
