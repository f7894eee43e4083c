"""Divide tables into blocks, and choose the process that writes each to a checkpoint."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from placer.errors import CheckpointError
from placer.executor.embeddings import Embeddings
from placer.executor.growing_keys import GrowingKeys
from placer.executor.id_order import IdOrder, IdRange, TableTensor, rows_from
from placer.executor.tensor_names import UPDATES, check_shapes
from placer.storage.tensor_rows import AnyTensor, TensorRows, block_rows, row_blocks

Name = tuple[str, ...]
"""Path of a tensor in a nested state dict. Joined by dots, it is its name in the checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedTables:
    """Tables, and the names of their tensors in a checkpoint."""

    tables: IdOrder
    tensors: Mapping[Name, TableTensor]


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A block for each process, fetched together from the processes that hold the tables."""

    tables: IdOrder
    names: tuple[Name | None, ...]  # Name of the tensor whose block each process writes.
    requests: tuple[IdRange | None, ...]  # The block of each process.


def blocks_of(tensors: Iterable[tuple[Name, TableTensor]]) -> Iterator[tuple[Name, IdRange]]:
    """Yield blocks of one table's tensors: for each range of ids, the blocks of all tensors.

    So rows on a drive are read once for both weights and optimizer state.
    """
    members = list(tensors)
    rows = max(tensor.shape[0] for _, tensor in members)
    step = block_rows(max(tensor.row_bytes for _, tensor in members))
    for start, stop in row_blocks(rows, step):
        for name, tensor in members:
            yield name, IdRange(tensor, start, stop)


def rounds_of(named: Sequence[NamedTables]) -> list[Round]:
    """Assign all blocks of all tables to rounds, at most one block for each process in a round.

    Only processes that hold rows of a table write its blocks, so whole tables are not sent around.
    Each writes about as many bytes of a table as it holds: a block goes to the process with the
    most bytes left to write. All processes compute the same rounds.
    """
    rounds: list[Round] = []
    unwritten = np.zeros(max((each.tables.world for each in named), default=1))
    for each in named:
        assigned: list[list[tuple[Name, IdRange]]] = [[] for _ in range(each.tables.world)]
        for table, members in groupby(each.tensors.items(), lambda item: item[1].table):
            shares = np.array(each.tables.shares(table))
            holders = np.flatnonzero(shares)
            if not holders.size:  # The table has no columns.
                holders, shares[0] = np.zeros(1, dtype=np.intp), 1.0
            for name, block in blocks_of(members):
                unwritten[holders] += shares[holders] * block.nbytes
                writer = int(holders[np.argmax(unwritten[holders])])
                unwritten[writer] -= block.nbytes
                assigned[writer].append((name, block))
        for number in range(max(map(len, assigned))):
            now = [own[number] if number < len(own) else (None, None) for own in assigned]
            names, requests = zip(*now, strict=True)
            rounds.append(Round(each.tables, names, requests))
    return rounds


@dataclass(frozen=True, slots=True, eq=False)
class SavedTables:
    """The tables of a checkpoint, with the names of all their tensors there."""

    named: list[NamedTables] = field(default_factory=list)
    # Tables that count their updates, by the name of this number in the checkpoint.
    counted: dict[Name, IdOrder] = field(default_factory=dict)
    # For modules with tables that grow: keys, tables, and the names of the tensors of `keys.state`.
    keys: list[tuple[GrowingKeys, NamedTables, dict[str, Name]]] = field(default_factory=list)

    def add(
        self,
        embeddings: Embeddings,
        group: str,
        state_group: str | None,
        key_group: str = "",
        *,
        prefix: str = "",
        cut: str = "",
    ) -> None:
        """Add tables. In the names of their tensors, `prefix` replaces a leading `cut`.

        Weights go to `group`. Optimizer state goes to `state_group`, or is left out if that is
        None. Keys go to `key_group`, by default `group`.
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
            names: dict[str, Name] = {
                key: (key_group or group, name(key)) for key in embeddings.keys.names()
            }
            self.keys.append((embeddings.keys, self.named[-1], names))

    def kept(self) -> dict[Name, AnyTensor]:
        """Return numbers of updates and key maps to save; all processes must call this."""
        kept: dict[Name, AnyTensor] = {
            name: torch.tensor(tables.update_count()) for name, tables in self.counted.items()
        }
        for keys, _, names in self.keys:
            kept |= {names[name]: values for name, values in keys.state().items()}
        return kept

    def load(
        self,
        what: str,
        stored: Mapping[str, TensorRows],
        *,
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
        numbers: Iterable[str] = (),
    ) -> None:
        """Overwrite tables, their keys and numbers of updates; each process reads its own rows.

        First check names, shapes and types of everything in the checkpoint, also of `tensors` and
        `numbers`, which the caller loads. Errors begin with `what`. If a file is damaged, rows
        before it are already overwritten. A checkpoint may lack a number of updates that only some
        plans need, such as those that round narrow rows.
        """
        stored = dict(stored)
        states = [_take_keys(what, stored, *own) for own in self.keys]
        expected = {
            ".".join(name): tensor for each in self.named for name, tensor in each.tensors.items()
        }
        described: dict[str, TableTensor | Tensor] = {**expected, **tensors}
        shapes = {name: tuple(tensor.shape) for name, tensor in described.items()}
        dtypes = {name: tensor.dtype for name, tensor in described.items()}
        counted = {".".join(name): tables for name, tables in self.counted.items()}
        counts = {key: of for key, of in counted.items() if key in stored or not _may_lack(of)}
        known = {*described, *counts, *numbers}
        stored = {
            key: rows
            for key, rows in stored.items()
            if key in known or key.split(".")[-1] != UPDATES
        }
        check_shapes(what, stored, shapes | dict.fromkeys((*counts, *numbers), ()), dtypes)
        for each in self.named:
            each.tables.synchronize()
            for item in each.tensors.items():
                for name, block in blocks_of([item]):
                    if each.tables.holds(block):
                        values = stored[".".join(name)].read(block.start, block.stop)
                        each.tables.write(block, values)
        for key, tables in counts.items():
            tables.set_update_count(int(stored[key].whole()))
        for (keys, *_), state in zip(self.keys, states, strict=True):
            keys.load_state(state)


def _take_keys(
    what: str,
    stored: dict[str, TensorRows],
    keys: GrowingKeys,
    named: NamedTables,
    names: Mapping[str, Name],
) -> Mapping[str, Tensor]:
    """Remove the state of key maps from `stored`, and return it for the present capacity.

    Other tensors of tables with another capacity in the checkpoint are fitted to the present one.
    """
    maps = {name: ".".join(full) for name, full in names.items()}
    for full in maps.values():
        if full not in stored:
            raise CheckpointError(f"{what}: {full} is missing, of a table that grows")
    state, earlier = keys.resized({name: stored.pop(full).whole() for name, full in maps.items()})
    for full, tensor in ((".".join(own), tensor) for own, tensor in named.tensors.items()):
        rows, of_rows = earlier.get(tensor.table.name, (0, None))
        held = stored.get(full)
        if of_rows is not None and held is not None and held.rows == rows:
            read = rows_from(tensor, held.read, of_rows, keys.seed)
            stored[full] = TensorRows((tensor.table.rows, *held.shape[1:]), held.dtype, read)
    return state


def _may_lack(tables: IdOrder) -> bool:
    """Return whether other plans of the same tables do not count updates."""
    wide = all(table.dtype == "float32" for table in tables.plan.tables)
    return wide and "adam" not in tables.optimizers.values()
