"""The placed tables of a model in a folder of their own, beside a trainer's checkpoint."""

import os
from pathlib import Path

import torch

from placer.adapters.pytorch.applied import EPS, LR, AppliedPlan
from placer.executor.id_order import TableTensor
from placer.executor.tensor_names import UPDATES
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.checkpoint.dcp_writer import save_folder
from placer.storage.checkpoint.table_blocks import (
    Name,
    NamedTables,
    key_states,
    load_stored,
)
from placer.storage.tensor_rows import AnyTensor

GROUP = "tables"
"""First part of the names of a folder's tensors."""


def save_tables(
    folder: str | os.PathLike[str], applied: AppliedPlan, *, replace: bool = False
) -> None:
    """Save the placed tables of a model, weights and optimizer state, without gathering them.

    The folder is in the format of `torch.distributed.checkpoint`, by the tables' names:
    ``tables.<table>.weight``, ``tables.<table>.<state>``. All ranks that share the tables must call
    this; each writes its part, a block of rows at a time. The folder appears when all is written.

    Parameters
    ----------
    folder : path
        One that all ranks see.
    applied : AppliedPlan
        What `placer.apply_plan` returned. Call its `leave_state_dict` where the model's state
        dict shall not have the weights a second time.
    replace : bool
        Whether a folder that is there already makes room, once the new one is complete.

    Raises
    ------
    CheckpointError
        On all ranks, if the folder is there and not to be replaced, or cannot be written.
    BackendError
        If a rank is lost; there is no such folder then, or a complete one.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> from placer import Plan, Shard, Table, Topology, apply_plan
    >>> whole = Shard("0", (0, 9, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("0", rows=9, dim=2),), Topology.parse("1xh100"), (whole,))
    >>> model = nn.Sequential(nn.EmbeddingBag(9, 2), nn.Linear(2, 1))
    >>> applied = apply_plan(model, plan, lr=0.1, backend="torch")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tables(f"{folder}/tables", applied)
    ...     load_tables(f"{folder}/tables", applied)
    """
    kept: dict[Name, AnyTensor] = {}
    kept |= {(GROUP, name): constant for name, constant in applied.constants().items()}
    for name, table in applied.tables.items():
        if table.embeddings.counts_updates:
            updates = table.embeddings.id_order().update_count()
            kept[GROUP, f"{name}.{UPDATES}"] = torch.tensor(updates)
        kept |= {(GROUP, key): values for key, values in table.embeddings.keys.state().items()}

    advice = "" if replace else "save to another folder, or pass replace=True"
    save_folder(folder, _named(applied), kept, if_there=advice)
    for table in applied.tables.values():
        table.saves.all_saved()


def load_tables(folder: str | os.PathLike[str], applied: AppliedPlan) -> None:
    """Load what `save_tables` saved, under any plan, with any number of ranks.

    Each rank reads the rows that it holds.

    Raises CheckpointError if the folder is missing or damaged, or lacks a tensor of the tables or
    has it in another shape or type. That is checked before anything is changed.
    """
    stored = read_tensors(Path(folder))
    counts = {
        f"{GROUP}.{name}.{UPDATES}": table.embeddings.id_order()
        for name, table in applied.tables.items()
        if table.embeddings.counts_updates
    }
    numbers = [f"{GROUP}.{name}" for name in applied.constants()]
    what = f"{folder} does not fit the tables"
    named = _named(applied)
    states = [
        (table.embeddings.keys, key_states(what, stored, table.embeddings.keys, own, f"{GROUP}."))
        for table, own in zip(applied.tables.values(), named, strict=True)
    ]
    load_stored(what, named, stored, counts=counts, numbers=numbers)
    for keys, state in states:
        keys.load_state(state)
    for name, table in applied.tables.items():
        table.weight_changes()
        table.set_lr(float(stored[f"{GROUP}.{name}.{LR}"].whole()))
        table.set_eps(float(stored[f"{GROUP}.{name}.{EPS}"].whole()))
        table.saves.all_saved()


def _named(applied: AppliedPlan) -> list[NamedTables]:
    named = []
    for name, table in applied.tables.items():
        order = table.embeddings.id_order()
        tensors: dict[Name, TableTensor] = {
            (GROUP, f"{name}.{tensor.name}"): tensor for tensor in order.tensors()
        }
        named.append(NamedTables(order, tensors))
    return named
