"""Checkpoints of split and sharded models in the layout of the model that they were made from."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from placer.adapters.torchrec.parts import Part
from placer.errors import CheckpointError
from placer.plan.order import Ranks

if TYPE_CHECKING:
    from torch import Tensor

_KEY = re.compile(
    r"(?P<path>.*?)placed_tables\.(?P<kind>embedding_bags|embeddings)\."
    r"(?P<table>[^.]+)\.(?P<what>.+)"
)


def merge_state_dict(state_dict: Mapping[str, Any], module: Any) -> dict[str, "Tensor"]:
    """A state as the model before `split_tables` has it: whole tables, rows in id order.

    Collective where values are sharded: all ranks call it, and rank 0 gets the tables, which have
    to fit its host's memory; the others get an empty dict.

    Parameters
    ----------
    state_dict : mapping
        ``model.state_dict()`` of a split model, sharded by TorchRec or not.
    module : nn.Module
        That model, which knows how its tables were split.

    Raises
    ------
    CheckpointError
        If a part of a table is missing.
    """
    whole = {key: _whole(value) for key, value in state_dict.items()}
    if any(value is None for value in whole.values()):
        return {}
    orders = dict(_orders(module))
    source_of = {part.name: name for name, (parts, _) in orders.items() for part in parts}
    merged: dict[str, Tensor] = {}
    for key, value in whole.items():
        match = _KEY.fullmatch(key)
        if match is None:
            merged[key] = value
            continue
        path, kind, table, what = match.groups()
        source = source_of.get(table, table)
        name = f"{path}{kind}.{source}.{what}"
        if name in merged:
            continue
        if source == table and table not in source_of:
            merged[name] = value
            continue
        parts, ranks = orders[source]
        keys = {part: f"{path}placed_tables.{kind}.{part.name}.{what}" for part in parts}
        for key in keys.values():
            if key not in whole:
                raise CheckpointError(f"the state lacks {key!r}, a part of table {source!r}")
        merged[name] = _joined({part: whole[key] for part, key in keys.items()}, ranks)
    return merged


def split_state_dict(state_dict: Mapping[str, Any], module: Any) -> dict[str, "Tensor"]:
    """The state of the model before `split_tables`, as the split one has it.

    Parameters
    ----------
    state_dict : mapping
        Of whole tables, rows in id order.
    module : nn.Module
        The split model, sharded or not.
    """
    import torch

    state = dict(state_dict)
    keys = module.state_dict().keys()
    orders = dict(_orders(module))
    source_of = {part.name: (part, ranks) for parts, ranks in orders.values() for part in parts}
    split: dict[str, Tensor] = {}
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is None:
            name = key
        else:
            path, kind, table, what = match.groups()
            source = source_of[table][0].source if table in source_of else table
            name = f"{path}{kind}.{source}.{what}"
        if name not in state:
            raise CheckpointError(f"the state lacks {name!r}")
        value = state[name]
        if match is not None and table in source_of:
            part, ranks = source_of[table]
            value = value[torch.from_numpy(_ids(part, ranks)).to(value.device)]
        split[key] = value
    return split


def load_state_dict(module: Any, state_dict: Mapping[str, Any]) -> None:
    """Fill a model from the state of the one before `split_tables`, each rank its own shards.

    Parameters
    ----------
    module : nn.Module
        Split or not, sharded by TorchRec or not. TorchRec draws the weights of tables that it
        shards anew, so this also copies those of the model that it was called with.
    state_dict : mapping
        Of whole tables, rows in id order; all of it, on every rank.

    Raises
    ------
    CheckpointError
        If something is missing, or of another shape.
    """
    import torch

    own = module.state_dict()
    with torch.no_grad():
        for key, value in split_state_dict(state_dict, module).items():
            _fill(key, own[key], value)


def merge_optimizer_state_dict(
    state_dict: Mapping[str, Any], module: Any
) -> dict[str, dict[str, dict[str, "Tensor"]]]:
    """The state of TorchRec's fused optimizers for whole tables, rows in id order.

    Collective, and for rank 0 alone, like `merge_state_dict`.

    Parameters
    ----------
    state_dict : mapping
        ``model.fused_optimizer.state_dict()``.
    module : nn.Module
        The model, which knows how its tables were split.

    Returns
    -------
    dict
        As TorchRec has it: ``{"state": {key of a weight: {"C3.momentum1": tensor}}}``.
    """
    # As keys of weights beside them, parts are joined like the weights.
    flat = {
        f"{key}.{name.removeprefix(key.split('.')[-2] + '.')}": value
        for key, slots in state_dict["state"].items()
        for name, value in slots.items()
    }
    merged: dict[str, dict[str, dict[str, Tensor]]] = {"state": {}}
    for key, value in merge_state_dict(_gathered(flat), module).items():
        weight, _, slot = key.rpartition(".")
        own = merged["state"].setdefault(weight, {})
        own[f"{weight.split('.')[-2]}.{slot}"] = value
    return merged


def load_optimizer_state_dict(module: Any, state_dict: Mapping[str, Any]) -> None:
    """Fill the fused optimizers of a sharded model from the state for whole tables.

    Parameters
    ----------
    module : DistributedModelParallel
    state_dict : mapping
        Of `merge_optimizer_state_dict`; all of it, on every rank.

    Raises
    ------
    CheckpointError
        If something is missing, or of another shape.
    """
    import torch

    orders = {
        part.name: (part, ranks) for ps, ranks in dict(_orders(module)).values() for part in ps
    }
    with torch.no_grad():
        for key, slots in module.fused_optimizer.state_dict()["state"].items():
            table = key.split(".")[-2]
            match = _KEY.fullmatch(key)
            source = orders[table][0].source if table in orders else table
            weight = key
            if match is not None:
                weight = f"{match['path']}{match['kind']}.{source}.{match['what']}"
            for name, own in slots.items():
                known = state_dict["state"].get(weight, {})
                whole = name.replace(f"{table}.", f"{source}.", 1)
                if whole not in known:
                    raise CheckpointError(f"the optimizer's state lacks {whole!r} of {weight!r}")
                value = known[whole]
                if table in orders:
                    value = value[torch.from_numpy(_ids(*orders[table])).to(value.device)]
                _fill(name, own, value)


def _ids(part: Part, ranks: Ranks) -> Any:
    """The ids of a part's rows, in its order, int64, shape (rows of the part,)."""
    if not part.remapped:
        return np.arange(part.stop, dtype=np.int64)
    unlisted = np.arange(max(part.start, ranks.listed.size), part.stop, dtype=np.int64)
    return np.concatenate((ranks.listed[part.start : part.stop], ranks.unlisted_ids(unlisted)))


def _joined(tensors: Mapping[Part, "Tensor"], ranks: Ranks) -> "Tensor":
    import torch

    first = next(iter(tensors.values()))
    rows = max(part.stop for part in tensors)
    table = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
    for part, tensor in tensors.items():
        table[torch.from_numpy(_ids(part, ranks)).to(tensor.device)] = tensor
    return table


def _fill(name: str, target: Any, value: "Tensor") -> None:
    """Copy a whole tensor into what this rank has of it."""
    if tuple(value.shape) != tuple(target.shape):
        raise CheckpointError(
            f"{name!r} is {tuple(value.shape)} in the state but {tuple(target.shape)} in the model"
        )
    for tensor, offsets in _local(target):
        span = tuple(
            slice(first, first + size) for first, size in zip(offsets, tensor.shape, strict=True)
        )
        tensor.copy_(value[span])


def _orders(module: Any) -> Iterator[tuple[str, tuple[tuple[Part, ...], Ranks]]]:
    """Parts and row order of each table that a model has split."""
    from placer.adapters.torchrec.modules import SplitCollection

    for child in module.modules():
        if isinstance(child, SplitCollection):
            for name, parts in child.parts.items():
                yield name, (parts, child.ranks[name])


def _whole(value: Any) -> Any:
    """A tensor with all its shards, on rank 0; None on other ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if not isinstance(value, ShardedTensor):
        return value
    out = None
    if dist.get_rank(value._process_group) == 0:
        shards = value.local_shards()
        device = shards[0].tensor.device if shards else torch.device("cpu")
        out = torch.empty(value.size(), dtype=value.dtype, device=device)
    value.gather(0, out)
    return out


def _gathered(flat: Mapping[str, Any]) -> dict[str, "Tensor"]:
    """The tensors of all ranks, whole, on rank 0; nothing on others.

    A rank has no entry for a table of which it has no shard, so each sends what it has.
    """
    import torch
    import torch.distributed as dist

    mine = [
        (key, tuple(value.shape), offsets, tensor.cpu())
        for key, value in flat.items()
        for tensor, offsets in _local(value)
    ]
    ranks = dist.get_world_size()
    received: list[Any] | None = [None] * ranks if dist.get_rank() == 0 else None
    dist.gather_object(mine, received)
    whole: dict[str, Tensor] = {}
    for key, shape, offsets, tensor in (own for sent in received or () for own in sent):
        if key not in whole:
            whole[key] = torch.empty(shape, dtype=tensor.dtype)
        span = tuple(
            slice(first, first + size) for first, size in zip(offsets, tensor.shape, strict=True)
        )
        whole[key][span] = tensor
    return whole


def _local(value: Any) -> list[tuple[Any, Any]]:
    """The shards of a tensor that this rank has, and their offsets."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    if isinstance(value, ShardedTensor):
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
    return [(value, [0] * value.dim())]
