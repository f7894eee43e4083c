"""Checkpoints of whole models: their placed tables, and all that is beside them."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from placer.adapters.pytorch.stand_in import StandIn
from placer.errors import CheckpointError
from placer.executor.embeddings import Embeddings
from placer.executor.growing_keys import GrowingKeys
from placer.executor.id_order import IdOrder, TableTensor
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

MODEL, STATE = "model", "table_optimizer"
"""Groups of a checkpoint: what `nn.Module.state_dict` has, and the optimizer state of tables."""


def save_model(
    folder: str | os.PathLike[str],
    model: nn.Module,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Save a model with placed tables in the format of `torch.distributed.checkpoint`.

    The tables are saved as the unplaced model has them, whatever the plan. So
    ``torch.distributed.checkpoint.load({"model": plain_model}, checkpoint_id=folder)`` loads them,
    and `load_model` does so under any plan, with any number of ranks. Every rank writes its part,
    a block of rows at a time; none has a table whole. The folder appears when all is written.

    Parameters
    ----------
    folder : path
        One that all ranks see, and that is not there yet.
    model : nn.Module
        With `PlacedEmbeddings` or `ShardedEmbeddings` in it or as itself, or after
        `placer.apply_plan`. Saved as ``model.<key of its state dict>``; the optimizer state of the
        tables as ``table_optimizer.<key, with the state's name for "weight">``. All ranks must
        call this with the same model; the first one writes what is no table.
    tensors : mapping of str to Tensor, optional
        What else shall be kept, such as the state of the dense layers' optimizer. Names must not
        begin with ``model.`` or ``table_optimizer.``.

    Raises
    ------
    CheckpointError
        On all ranks, if the folder is there already or cannot be written; if the model has no
        placed table, or a state that is no plain tensor.
    BackendError
        If a rank is lost; there is no such folder then, or a complete one.

    Examples
    --------
    >>> import tempfile
    >>> from placer import Plan, Shard, Table, Topology
    >>> from placer.executor import PlacedEmbeddings
    >>> shard = Shard("t", (0, 6, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("t", 6, 2),), Topology.parse("1xh100"), (shard,))
    >>> model, other = (PlacedEmbeddings(plan, seed=seed, backend="torch") for seed in (0, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/model", model, {"epoch": torch.tensor(3)})
    ...     load_model(f"{folder}/model", other)
    {'epoch': tensor(3)}
    >>> torch.equal(other.state_dict()["t.weight"], model.state_dict()["t.weight"])
    True
    """
    parts = _parts_of(model)
    kept: dict[Name, AnyTensor] = {
        (MODEL, key): tensor.detach() for key, tensor in parts.dense.items()
    }
    for key, tensor in (tensors or {}).items():
        if key.split(".")[0] in (MODEL, STATE):
            raise CheckpointError(f"the name {key!r} is one of the model's own; use another")
        kept[(key,)] = tensor
    for prefix, tables in parts.counted.items():
        kept[STATE, f"{prefix}{UPDATES}"] = torch.tensor(tables.update_count())
    for prefix, (keys, _, cut) in parts.keys.items():
        for name, values in keys.state().items():
            kept[MODEL, f"{prefix}{name.removeprefix(cut)}"] = values

    save_folder(folder, parts.named, kept, if_there="save to another folder")
    for module in model.modules():
        if isinstance(module, StandIn):
            module.table.saves.all_saved()


def load_model(
    folder: str | os.PathLike[str], model: nn.Module, *, optimizer_state: bool = True
) -> dict[str, Tensor]:
    """Load what `save_model` saved, into a model under any plan, with any number of ranks.

    A model that was saved by ``torch.distributed.checkpoint.save({"model": plain_model})`` loads
    too, without optimizer state. Each rank reads the rows that it holds; ranks need not do so
    together, except that no one may train before all have loaded.

    Parameters
    ----------
    folder : path
    model : nn.Module
    optimizer_state : bool
        Whether the tables' optimizer state is loaded too; else it stays as it is.

    Returns
    -------
    mapping of str to Tensor
        The other tensors that were saved.

    Raises
    ------
    CheckpointError
        If the folder is damaged, or tensors of the model are missing or have another shape or
        type. Names, shapes and types are checked before anything is changed.
    """
    stored, parts = read_tensors(Path(folder)), _parts_of(model)
    groups = (MODEL, STATE) if optimizer_state else (MODEL,)
    named = [
        NamedTables(each.tables, {n: t for n, t in each.tensors.items() if n[0] in groups})
        for each in parts.named
    ]
    dense = {f"{MODEL}.{key}": tensor for key, tensor in parts.dense.items()}
    counts = {f"{STATE}.{prefix}{UPDATES}": tables for prefix, tables in parts.counted.items()}
    if not optimizer_state:
        counts = {}
    known = {key: rows for key, rows in stored.items() if key.split(".")[0] in groups}
    what = f"{folder} does not fit the model"
    states = [
        (keys, key_states(what, known, keys, tables, f"{MODEL}.{prefix}", cut))
        for prefix, (keys, tables, cut) in parts.keys.items()
    ]
    load_stored(what, named, known, counts=counts, tensors=dense)
    for keys, state in states:
        keys.load_state(state)
    with torch.no_grad():
        for key, tensor in dense.items():
            tensor.copy_(stored[key].whole())
    for module in model.modules():
        if isinstance(module, StandIn):
            module.table.weight_changes()
            module.table.saves.all_saved()
    others = sorted(key for key in stored if key.split(".")[0] not in (MODEL, STATE))
    return {key: stored[key].whole() for key in others}


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What a model is made of."""

    named: list[NamedTables]
    counted: Mapping[str, IdOrder]  # Where it matters how many updates there have been.
    # Of modules with tables that grow; their tables; and with what a name of its state begins that
    # the model's state dict leaves out.
    keys: Mapping[str, tuple[GrowingKeys, NamedTables, str]]
    # Parameters and buffers themselves, by their key in the state dict.
    dense: Mapping[str, Tensor]


def _parts_of(model: nn.Module) -> _Parts:
    named: list[NamedTables] = []
    counted: dict[str, IdOrder] = {}
    keys: dict[str, tuple[GrowingKeys, NamedTables, str]] = {}
    dense: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        tables = _tables_in(module)
        if tables is None:
            dense.update(_own_tensors(module, prefix))
            continue
        embeddings, weight_key = tables
        order = embeddings.id_order()
        tensors: dict[Name, TableTensor] = {}
        for tensor in order.tensors():
            key = f"{prefix}{weight_key(tensor.table.name)}"
            if tensor.name == "weight":
                tensors[MODEL, key] = tensor
            elif id(embeddings) not in seen:  # The state of tied modules is kept once.
                tensors[STATE, f"{key.removesuffix('weight')}{tensor.name}"] = tensor
        named.append(NamedTables(order, tensors))
        if order.counts_updates and id(embeddings) not in seen:
            counted[prefix] = order
        if embeddings.keys.maps:
            cut = f"{module.table.name}." if isinstance(module, StandIn) else ""
            keys[prefix] = embeddings.keys, named[-1], cut
        seen.add(id(embeddings))
    if not named:
        raise CheckpointError(
            "the model has no placed tables; save it with torch.distributed.checkpoint itself"
        )
    return _Parts(named, counted, keys, dense)


def _tables_in(module: nn.Module) -> tuple[Embeddings, Callable[[str], str]] | None:
    """Return the tables that a module stands for, and how its state dict calls their weights."""
    if isinstance(module, StandIn):
        return module.table.embeddings, lambda _: "weight"
    if isinstance(module, Embeddings):
        return module, lambda table: f"{table}.weight"
    return None


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what a module itself adds to a state dict."""
    own: dict[str, object] = {}
    module._save_to_state_dict(own, prefix, keep_vars=True)
    for key, value in own.items():
        if not isinstance(value, Tensor) or hasattr(value, "__get_tensor_shard__"):
            raise CheckpointError(
                f"{key} is a {type(value).__name__}, which is not saved here; save the tables' "
                "module alone, and the rest with torch.distributed.checkpoint"
            )
        yield key, value
