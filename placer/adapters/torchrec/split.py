"""Split tables of a model into parts that TorchRec can hold, and save them as whole tables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from placer.adapters.torchrec.export import require_tables, require_torchrec
from placer.adapters.torchrec.sharding import Part, Staged, parts_of
from placer.errors import CheckpointError
from placer.plan.plan import Plan, Ranks

_KEY = re.compile(
    r"(?P<path>.*?)placed_tables\.(?P<kind>embedding_bags|embeddings)\."
    r"(?P<table>[^.]+)\.(?P<what>.+)"
)


def split_tables(module: Any, plan: Plan, *, staged_as: Staged | None = None) -> Any:
    """Split the model's tables that the plan needs in parts, and return the model.

    Call it before `to_sharding_plan`, before the model is sharded, and before optimizers are
    applied. An embedding collection with such a table is replaced in place by a `SplitCollection`.
    Weights are copied, unless they are on the meta device. If the model itself is an embedding
    collection, the returned collection replaces it. `staged_as` is as in `to_sharding_plan`.

    Raises PlanMismatchError if TorchRec has no such placement, or a table cannot be split.
    Raises BackendError if torchrec is not installed.
    """
    with require_torchrec():
        from placer.adapters.torchrec.modules import SplitCollection, collections_of, tables_of
    parts = {table.name: parts_of(plan, table, staged_as=staged_as) for table in plan.tables}
    split = {name: own for name, own in parts.items() if any(part.remapped for part in own)}
    tables = tables_of(module)
    require_tables({name: plan.tables_by_name[name] for name in split}, tables)
    # Make all collections before installing one, so an error leaves the model unchanged.
    made = []
    for path, collection in collections_of(module):
        here = {name: own for name, own in split.items() if tables[name].path == path}
        if not here:
            continue
        new = SplitCollection(collection, here, {name: Ranks.in_plan(plan, name) for name in here})
        if not next(collection.parameters()).is_meta:
            load_state_dict(new, collection.state_dict())
        made.append((path, new))
    for path, new in made:
        if not path:
            return new
        module.set_submodule(path, new)
    return module


def managed_collisions(
    options: Mapping[str, Mapping[str, Any]], configs: Sequence[Any], device: Any
) -> Any:
    """Return TorchRec's `ManagedCollisionCollection` for tables that grow.

    `options` is ``managed_collisions`` of `document`, or of the file that
    `placer export --to torchrec` writes. `configs` has the `EmbeddingBagConfig` or
    `EmbeddingConfig` of each of these tables, with ``num_embeddings`` equal to its ``zch_size``.

    Raises BackendError if torchrec is not installed.
    """
    with require_torchrec():
        from torchrec.modules import hash_mc_evictions as evictions
        from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
        from torchrec.modules.mc_modules import ManagedCollisionCollection
    modules = {}
    for name, own in options.items():
        policy = evictions.HashZchEvictionPolicyName(own["eviction_policy_name"])
        config = evictions.HashZchEvictionConfig(**own["eviction_config"])
        how = {**own, "eviction_policy_name": policy, "eviction_config": config}
        modules[name] = HashZchManagedCollisionModule(**how, device=device)
    return ManagedCollisionCollection(modules, configs)


def merge_state_dict(state_dict: Mapping[str, Any], module: Any) -> dict[str, Tensor]:
    """Return the state that the unsplit model would have: whole tables, rows in id order.

    `state_dict` is the state of the split model `module`. If TorchRec has sharded the model, all
    ranks must call this. Rank 0 gets the tables, which must fit in its host's memory. Other ranks
    get an empty dict. Raises CheckpointError if a part of a table is missing.
    """
    whole = {key: _whole(value) for key, value in state_dict.items()}
    if any(value is None for value in whole.values()):
        return {}
    split = split_tables_of(module)
    merged: dict[str, Tensor] = {}
    for key, value in whole.items():
        name, own = _whole_key(key, split)
        if own is None:
            merged[name] = value
            continue
        if name not in merged:
            merged[name] = value.new_empty((own.rows, *value.shape[1:]))
            for part in own.parts:
                other = key.replace(f".{own.part.name}.", f".{part.name}.")
                if other not in whole:
                    raise CheckpointError(
                        f"the state lacks {other!r}, a part of table {part.source!r}"
                    )
        merged[name][own.ids(value.device)] = value
    return merged


def load_state_dict(module: Any, state_dict: Mapping[str, Any]) -> None:
    """Load the state of the unsplit model; each rank loads its own shards.

    The model may be split or not, sharded by TorchRec or not. Every rank passes the whole state:
    whole tables, rows in id order. TorchRec initializes weights again when it shards a model, so
    use this also to give a sharded model its earlier weights. Raises CheckpointError if a value is
    missing or has another shape.
    """
    _load(module.state_dict(), state_dict, module)


def merge_optimizer_state_dict(
    state_dict: Mapping[str, Any], module: Any
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Return the state of TorchRec's fused optimizers for whole tables, rows in id order.

    `state_dict` is ``model.fused_optimizer.state_dict()``. The returned state has the same form,
    ``{"state": {key of a weight: {"C3.momentum1": tensor}}}``. As with `merge_state_dict`, all
    ranks must call this and only rank 0 gets the state.
    """
    merged: dict[str, dict[str, dict[str, Tensor]]] = {"state": {}}
    state = _gathered(_flat(state_dict))
    for key, value in merge_state_dict(state, module).items():
        weight, _, slot = key.rpartition(".")
        own = merged["state"].setdefault(weight, {})
        own[f"{weight.split('.')[-2]}.{slot}"] = value
    return merged


def load_optimizer_state_dict(module: Any, state_dict: Mapping[str, Any]) -> None:
    """Load the state of `merge_optimizer_state_dict` into a sharded model's fused optimizers.

    Every rank passes the whole state. Raises CheckpointError if a value is missing or has another
    shape.
    """
    _load(_flat(module.fused_optimizer.state_dict()), _flat(state_dict), module)


class Split(NamedTuple):
    """A part of a split table, all parts of the table, and the order of its rows."""

    part: Part
    parts: tuple[Part, ...]
    ranks: Ranks

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return self.parts[-1].stop

    def ids(self, device: torch.device) -> Tensor:
        """Return the ids of the part's rows in the part's order, int64, shape (rows,)."""
        ids = self.ranks.ids(np.arange(self.part.start, self.part.stop, dtype=np.int64))
        return torch.from_numpy(ids).to(device)


def split_tables_of(module: Any) -> dict[str, Split]:
    """Return the parts that a model's tables were split into, by the name of the part."""
    from placer.adapters.torchrec.modules import SplitCollection

    return {
        part.name: Split(part, parts, child.ranks[name])
        for child in module.modules()
        if isinstance(child, SplitCollection)
        for name, parts in child.parts.items()
        for part in parts
    }


def _whole_key(key: str, split: Mapping[str, Split]) -> tuple[str, Split | None]:
    """Return a value's key in the unsplit model, and its part of a split table, if any."""
    match = _KEY.fullmatch(key)
    if match is None:
        return key, None
    path, kind, table, what = match.groups()
    own = split.get(table)
    return f"{path}{kind}.{own.part.source if own else table}.{what}", own


def _flat(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return optimizer state by keys like those of weights: ``….C3.momentum1``."""
    return {
        f"{key}.{name.removeprefix(key.split('.')[-2] + '.')}": value
        for key, slots in state_dict["state"].items()
        for name, value in slots.items()
    }


def _load(targets: Mapping[str, Any], state: Mapping[str, Any], module: Any) -> None:
    """Copy this rank's shards out of whole tensors into `targets`."""
    split = split_tables_of(module)
    with torch.no_grad():
        for key, target in targets.items():
            name, own = _whole_key(key, split)
            if name not in state:
                raise CheckpointError(f"the state lacks {name!r}")
            value = state[name]
            if own is not None:
                value = value[own.ids(value.device)]
            if tuple(value.shape) != tuple(target.shape):
                raise CheckpointError(
                    f"{key!r} is {tuple(value.shape)} in the state but {tuple(target.shape)} in "
                    "the model"
                )
            for tensor, offsets in _local(target):
                tensor.copy_(value[_span(tensor, offsets)])


def _span(tensor: Tensor, offsets: Iterable[int]) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that a shard with these offsets covers."""
    return tuple(
        slice(first, first + size) for first, size in zip(offsets, tensor.shape, strict=True)
    )


def _whole(value: Any) -> Any:
    """Gather a sharded tensor: whole on rank 0, None on other ranks."""
    if not isinstance(value, ShardedTensor):
        return value
    out = None
    if dist.get_rank(value._process_group) == 0:
        shards = value.local_shards()
        device = shards[0].tensor.device if shards else torch.device("cpu")
        out = torch.empty(value.size(), dtype=value.dtype, device=device)
    value.gather(0, out)
    return out


def _gathered(flat: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gather the tensors of all ranks: whole tensors on rank 0, an empty dict on other ranks.

    A rank without a shard of a table has no entry for it, so each rank sends the entries it has.
    """
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
        whole[key][_span(tensor, offsets)] = tensor
    return whole


def _local(value: Any) -> list[tuple[Any, Any]]:
    """Return the shards of a tensor that this rank has, and their offsets."""
    if isinstance(value, ShardedTensor):
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
    return [(value, [0] * value.dim())]
