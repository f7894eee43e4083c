"""The tables of a run in its checkpoints: what they are called, and what is checked."""

from collections.abc import Mapping
from dataclasses import astuple

import torch

from placer.executor.embeddings import Embeddings
from placer.executor.id_order import TableTensor
from placer.executor.local.hit_rates import HitRates
from placer.executor.memory.directory import RowCacheStats
from placer.executor.tensor_names import UPDATES
from placer.storage.checkpoint.table_blocks import Name, NamedTables, load_stored
from placer.storage.run_state import STATES, WEIGHTS
from placer.storage.tensor_rows import AnyTensor, TensorRows
from placer.training.distributed import Ranks


def named_tables(embeddings: Embeddings) -> NamedTables:
    """Return tables and their names in a checkpoint."""
    tables = embeddings.id_order()
    return NamedTables(tables, {_name(tensor): tensor for tensor in tables.tensors()})


def update_counts(named: NamedTables) -> dict[str, AnyTensor]:
    """Return the number of updates, where it matters; all processes must call it."""
    if not named.tables.counts_updates:
        return {}
    return {UPDATES: torch.tensor(named.tables.update_count())}


def load_tables(embeddings: Embeddings, groups: Mapping[str, Mapping[str, AnyTensor]]) -> None:
    """Overwrite weights and optimizer state; each process reads the rows that it holds.

    Raises CheckpointError if a tensor is missing, of no table, of another shape or of another type;
    nothing is changed then.
    """
    named = named_tables(embeddings)
    stored = {
        f"{group}.{name}": TensorRows.of(tensor)
        for group in (WEIGHTS, STATES)
        for name, tensor in groups.get(group, {}).items()
    }
    counts = {f"{STATES}.{UPDATES}": named.tables} if named.tables.counts_updates else {}
    load_stored("the checkpoint's tables do not fit the plan", [named], stored, counts=counts)


def hit_rates(embeddings: Embeddings, ranks: Ranks) -> HitRates | None:
    """Return lookups that HBM served on all ranks, which call it together; wait for the device.

    None for backends that read all rows where they are.
    """
    own_rates = embeddings.hit_rates()
    if embeddings.world == 1:
        return own_rates
    if not ranks.any(own_rates is not None):
        return None
    rates = own_rates or HitRates(0, 0, RowCacheStats())
    numbers = [rates.lookups, rates.home_lookups, *astuple(rates.row_cache)]
    lookups, home, *rest = ranks.total(torch.tensor(numbers)).tolist()
    return HitRates(lookups, home, RowCacheStats(*rest))


def _name(tensor: TableTensor) -> Name:
    group = WEIGHTS if tensor.name == "weight" else STATES
    return group, f"{tensor.table.name}.{tensor.name}"
