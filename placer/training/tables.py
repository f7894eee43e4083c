"""The tables of a run in its checkpoints: what they are called, and what is checked."""

from collections.abc import Mapping
from dataclasses import astuple

import torch

from placer.executor import PlacedEmbeddings
from placer.executor.id_order import TableTensor, tensors_of
from placer.executor.local.hit_rates import HitRates
from placer.executor.memory.row_cache import RowCacheStats
from placer.executor.tensor_names import UPDATES
from placer.storage.checkpoint.load import check_tensors, fill
from placer.storage.checkpoint.table_blocks import Name, NamedTables
from placer.storage.checkpoint.whole_model import AnyEmbeddings, id_order_of
from placer.storage.tensor_rows import AnyTensor, in_rows
from placer.training.distributed import Ranks

WEIGHTS, STATES = "embeddings", "embedding_optimizer"
"""Groups of a checkpoint: ``<table>.weight``, and ``<table>.<name of the state>``."""


def named_tables(embeddings: AnyEmbeddings) -> NamedTables:
    """Tables and their names in a checkpoint."""
    tables = id_order_of(embeddings)
    return NamedTables(tables, {_name(tensor): tensor for tensor in tensors_of(tables)})


def update_counts(named: NamedTables) -> dict[str, AnyTensor]:
    """The number of updates, where it matters; all ranks must ask."""
    if not named.tables.counts_updates:
        return {}
    return {UPDATES: torch.tensor(named.tables.update_count())}


def load_tables(embeddings: AnyEmbeddings, groups: Mapping[str, Mapping[str, AnyTensor]]) -> None:
    """Overwrite weights and optimizer state; each rank reads the rows that it holds.

    Raises
    ------
    CheckpointError
        If a tensor is missing, of no table, of another shape or of another type; nothing is
        changed then.
    """
    named = named_tables(embeddings)
    counted = named.tables.counts_updates
    for group in (WEIGHTS, STATES):
        own = {name[1]: tensor for name, tensor in named.tensors.items() if name[0] == group}
        shapes = {name: tensor.shape for name, tensor in own.items()}
        dtypes = {name: tensor.dtype for name, tensor in own.items()}
        if group == STATES and counted:
            shapes[UPDATES] = ()
        found = {name: in_rows(tensor) for name, tensor in groups.get(group, {}).items()}
        check_tensors(f"{group} do not fit the plan", found, shapes, dtypes)
    rows = {
        f"{group}.{name}": in_rows(tensor)
        for group in (WEIGHTS, STATES)
        for name, tensor in groups.get(group, {}).items()
    }
    fill([named], rows)
    if counted:
        named.tables.set_update_count(int(rows[f"{STATES}.{UPDATES}"].whole()))


def hit_rates(embeddings: AnyEmbeddings, ranks: Ranks) -> HitRates | None:
    """Lookups that HBM served, on all ranks, which must ask together; waits for the device.

    None for backends that read all rows where they are.
    """
    found = embeddings.hit_rates()
    if isinstance(embeddings, PlacedEmbeddings):
        return found
    if not ranks.any(found is not None):
        return None
    here = found or HitRates(0, 0, RowCacheStats())
    own = [here.lookups, here.home_lookups, *astuple(here.row_cache)]
    lookups, home, *rest = ranks.total(torch.tensor(own)).tolist()
    return HitRates(lookups, home, RowCacheStats(*rest))


def _name(tensor: TableTensor) -> Name:
    group = WEIGHTS if tensor.name == "weight" else STATES
    return group, f"{tensor.table.name}.{tensor.name}"
