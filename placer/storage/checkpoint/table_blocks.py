"""Blocks of tables: which process writes which of them to a checkpoint, and which it reads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import numpy as np
from torch import Tensor

from placer.executor.id_order import IdOrder, IdRange, TableTensor
from placer.executor.tensor_names import UPDATES, check_shapes
from placer.storage.tensor_rows import TensorRows, block_rows, row_blocks

Name = tuple[str, ...]
"""A tensor's place in a nested state dict; joined by dots it is its name in the checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedTables:
    """Tables, and what their tensors are called in a checkpoint."""

    tables: IdOrder
    tensors: Mapping[Name, TableTensor]


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """What each process fetches at one time from those that hold the tables."""

    tables: IdOrder
    names: tuple[Name | None, ...]  # The tensors of which each process writes a block.
    requests: tuple[IdRange | None, ...]  # The blocks.


def blocks_of(tensors: Iterable[tuple[Name, TableTensor]]) -> Iterator[tuple[Name, IdRange]]:
    """Yield tensors of one table as blocks of the same ids, one tensor after the other of each.

    Who reads rows of a drive then reads each once, for weights and optimizer state.
    """
    members = list(tensors)
    rows = max(tensor.shape[0] for _, tensor in members)
    step = block_rows(max(tensor.row_bytes for _, tensor in members))
    for start, stop in row_blocks(rows, step):
        for name, tensor in members:
            yield name, IdRange(tensor, start, stop)


def rounds_of(named: Sequence[NamedTables]) -> list[Round]:
    """Return all blocks of all tables, at most one for each process in a round.

    A block goes to a process that holds some of its table, so that a whole table does not travel,
    and each process writes about as many bytes of a table as it holds: a block goes to the one
    with the most bytes left to write. All processes come to the same result.
    """
    rounds: list[Round] = []
    unwritten = np.zeros(max((each.tables.world for each in named), default=1))
    for each in named:
        assigned: list[list[tuple[Name, IdRange]]] = [[] for _ in range(each.tables.world)]
        for table, members in groupby(each.tensors.items(), lambda item: item[1].table):
            shares = np.array(each.tables.shares(table))
            holders = np.flatnonzero(shares)
            if not holders.size:  # A table without columns.
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


def load_stored(
    what: str,
    named: Sequence[NamedTables],
    stored: Mapping[str, TensorRows],
    *,
    counts: Mapping[str, IdOrder] = MappingProxyType({}),
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
    numbers: Iterable[str] = (),
) -> None:
    """Overwrite weights, optimizer state and numbers of updates; each process reads its own rows.

    Names, shapes and types of all that a checkpoint holds are checked first, `tensors` and
    `numbers` included, which the caller loads; an error begins with `what`. If a file is damaged,
    rows before it are changed. `counts` has the tables of which it matters how many updates there
    have been: where it does under some plans alone, which round narrow rows, a checkpoint may lack
    the number.
    """
    expected = {".".join(name): tensor for each in named for name, tensor in each.tensors.items()}
    described: dict[str, TableTensor | Tensor] = {**expected, **tensors}
    shapes = {name: tuple(tensor.shape) for name, tensor in described.items()}
    dtypes = {name: tensor.dtype for name, tensor in described.items()}
    counts = {key: of for key, of in counts.items() if key in stored or not _may_lack(of)}
    known = {*described, *counts, *numbers}
    stored = {
        key: rows for key, rows in stored.items() if key in known or key.split(".")[-1] != UPDATES
    }
    check_shapes(what, stored, shapes | dict.fromkeys((*counts, *numbers), ()), dtypes)
    for each in named:
        each.tables.synchronize()
        for item in each.tensors.items():
            for name, block in blocks_of([item]):
                if each.tables.holds(block):
                    values = stored[".".join(name)].read(block.start, block.stop)
                    each.tables.write(block, values)
    for key, tables in counts.items():
        tables.set_update_count(int(stored[key].whole()))


def _may_lack(tables: IdOrder) -> bool:
    """Return whether other plans of the same tables do not count updates."""
    wide = all(table.dtype == "float32" for table in tables.plan.tables)
    return wide and "adam" not in tables.optimizers.values()
