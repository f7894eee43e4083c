"""Checkpoints of whole models, and of their placed tables in a folder of their own."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from placer.adapters.pytorch.applied import EPS, LR, AppliedPlan
from placer.adapters.pytorch.stand_in import StandIn
from placer.errors import CheckpointError
from placer.executor.embeddings import Embeddings
from placer.executor.growing_keys import GrowingKeys
from placer.executor.id_order import IdOrder, TableTensor, rows_from
from placer.executor.tensor_names import UPDATES
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.checkpoint.dcp_writer import save_folder
from placer.storage.checkpoint.table_blocks import Name, NamedTables, load_stored
from placer.storage.tensor_rows import AnyTensor, TensorRows

MODEL, STATE = "model", "table_optimizer"
"""Groups of a whole model: what `nn.Module.state_dict` has, and the optimizer state of tables."""
TABLES = "tables"
"""First part of the names of what `save_tables` saves."""


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
    save_folder(folder, parts.named, kept | parts.kept(), if_there="save to another folder")
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
    stored, parts = read_tensors(Path(folder)), _parts_of(model, optimizer_state)
    groups = (MODEL, STATE) if optimizer_state else (MODEL,)
    dense = {f"{MODEL}.{key}": tensor for key, tensor in parts.dense.items()}
    known = {key: rows for key, rows in stored.items() if key.split(".")[0] in groups}
    parts.load(f"{folder} does not fit the model", known, tensors=dense)
    with torch.no_grad():
        for key, tensor in dense.items():
            tensor.copy_(stored[key].whole())
    for module in model.modules():
        if isinstance(module, StandIn):
            module.table.weight_changes()
            module.table.saves.all_saved()
    others = sorted(key for key in stored if key.split(".")[0] not in (MODEL, STATE))
    return {key: stored[key].whole() for key in others}


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
    parts = _parts_of_tables(applied)
    kept: dict[Name, AnyTensor] = {
        (TABLES, name): constant for name, constant in applied.constants().items()
    }
    advice = "" if replace else "save to another folder, or pass replace=True"
    save_folder(folder, parts.named, kept | parts.kept(), if_there=advice)
    for table in applied.tables.values():
        table.saves.all_saved()


def load_tables(folder: str | os.PathLike[str], applied: AppliedPlan) -> None:
    """Load what `save_tables` saved, under any plan, with any number of ranks.

    Each rank reads the rows that it holds.

    Raises CheckpointError if the folder is missing or damaged, or lacks a tensor of the tables or
    has it in another shape or type. That is checked before anything is changed.
    """
    stored = read_tensors(Path(folder))
    numbers = [f"{TABLES}.{name}" for name in applied.constants()]
    parts = _parts_of_tables(applied)
    parts.load(f"{folder} does not fit the tables", stored, numbers=numbers)
    for name, table in applied.tables.items():
        table.weight_changes()
        table.set_lr(float(stored[f"{TABLES}.{name}.{LR}"].whole()))
        table.set_eps(float(stored[f"{TABLES}.{name}.{EPS}"].whole()))
        table.saves.all_saved()


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What of a model is saved."""

    named: list[NamedTables] = field(default_factory=list)
    # Where it matters how many updates there have been, by the name of that number.
    counted: dict[Name, IdOrder] = field(default_factory=dict)
    # Of modules with tables that grow; their tables; and what tensors of `keys.state` are called.
    keys: list[tuple[GrowingKeys, NamedTables, dict[str, Name]]] = field(default_factory=list)
    # Parameters and buffers themselves, by their key in the state dict.
    dense: dict[str, Tensor] = field(default_factory=dict)

    def add(
        self, embeddings: Embeddings, prefix: str, cut: str, group: str, state_group: str | None
    ) -> None:
        """Add tables, whose tensors are called with `prefix` in place of `cut`.

        Weights and keys go to one group, optimizer state to another one, if there is one.
        """

        def name(key: str) -> str:
            return f"{prefix}{key.removeprefix(cut)}"

        order = embeddings.id_order()
        tensors: dict[Name, TableTensor] = {}
        for tensor in order.tensors():
            own_group = group if tensor.name == "weight" else state_group
            if own_group is not None:
                tensors[own_group, name(f"{tensor.table.name}.{tensor.name}")] = tensor
        self.named.append(NamedTables(order, tensors))
        if order.counts_updates and state_group is not None:
            self.counted[state_group, f"{prefix}{UPDATES}"] = order
        if embeddings.keys.maps:
            names: dict[str, Name] = {key: (group, name(key)) for key in embeddings.keys.names()}
            self.keys.append((embeddings.keys, self.named[-1], names))

    def kept(self) -> dict[Name, AnyTensor]:
        """Return what is saved of the tables besides their rows; all processes must call it."""
        kept: dict[Name, AnyTensor] = {
            name: torch.tensor(tables.update_count()) for name, tables in self.counted.items()
        }
        for keys, _, names in self.keys:
            kept |= {names[name]: values for name, values in keys.state().items()}
        return kept

    def load(
        self,
        what: str,
        stored: dict[str, TensorRows],
        *,
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
        numbers: Sequence[str] = (),
    ) -> None:
        """Overwrite tables, their keys and numbers of updates; see `load_stored`."""
        stored = dict(stored)
        states = [_key_state(what, stored, *own) for own in self.keys]
        counts = {".".join(name): tables for name, tables in self.counted.items()}
        load_stored(what, self.named, stored, counts=counts, tensors=tensors, numbers=numbers)
        for (keys, *_), state in zip(self.keys, states, strict=True):
            keys.load_state(state)


def _key_state(
    what: str,
    stored: dict[str, TensorRows],
    keys: GrowingKeys,
    named: NamedTables,
    names: Mapping[str, Name],
) -> Mapping[str, Tensor]:
    """Take the state of key maps out of what a folder holds.

    Tensors of tables with another capacity there become what they are with this one.
    """
    maps = {name: ".".join(full) for name, full in names.items()}
    for full in maps.values():
        if full not in stored:
            raise CheckpointError(f"{what}: {full} is missing")
    state, earlier = keys.resized({name: stored.pop(full).whole() for name, full in maps.items()})
    for name, tensor in named.tensors.items():
        rows, of_rows = earlier.get(tensor.table.name, (0, None))
        held = stored.get(".".join(name))
        if of_rows is not None and held is not None and held.rows == rows:
            read = rows_from(tensor, held.read, of_rows, keys.seed)
            shape = (tensor.table.rows, *held.shape[1:])
            stored[".".join(name)] = TensorRows(shape, held.dtype, read)
    return state


def _parts_of_tables(applied: AppliedPlan) -> _Parts:
    parts = _Parts()
    for name, table in applied.tables.items():
        parts.add(table.embeddings, f"{name}.", f"{name}.", TABLES, TABLES)
    return parts


def _parts_of(model: nn.Module, optimizer_state: bool = True) -> _Parts:
    parts, seen = _Parts(), set[int]()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(module, StandIn):  # Its state dict has its only table without a name.
            embeddings, cut = module.table.embeddings, f"{module.table.name}."
        elif isinstance(module, Embeddings):
            embeddings, cut = module, ""
        else:
            parts.dense.update(_own_tensors(module, prefix))
            continue
        # The state of tied modules is kept once.
        has_state = optimizer_state and id(embeddings) not in seen
        parts.add(embeddings, prefix, cut, MODEL, STATE if has_state else None)
        seen.add(id(embeddings))
    if not parts.named:
        raise CheckpointError(
            "the model has no placed tables; save it with torch.distributed.checkpoint itself"
        )
    return parts


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
