"""Which rank writes which rows of which table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from placer.executor.id_order import IdOrder, Span, TableTensor
from placer.executor.memory.initial_weights import CHUNK_ROWS

BLOCK_BYTES = 16 << 20
"""At most so much of a tensor is in memory at a time, on the rank that writes it."""

Name = tuple[str, ...]
"""A tensor's place in a nested state dict; joined by dots it is its name in the checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedTables:
    """Tables, and what their tensors are called in a checkpoint.

    Attributes
    ----------
    tables : IdOrder
    tensors : mapping of Name to TableTensor
    """

    tables: IdOrder
    tensors: Mapping[Name, TableTensor]


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """What each rank asks at one time of those that hold the tables.

    Attributes
    ----------
    tables : IdOrder
    names : tuple of Name or None, length world
        The tensors of which each rank writes a block.
    asked : tuple of Span or None, length world
        The blocks.
    """

    tables: IdOrder
    names: tuple[Name | None, ...]
    asked: tuple[Span | None, ...]


def block_rows(row_bytes: int) -> int:
    """Rows of a block: a power of two, so that the chunks in which others read are whole blocks."""
    most = min(CHUNK_ROWS, BLOCK_BYTES // max(row_bytes, 1))
    return 1 << max(most.bit_length() - 1, 0)


def spans_of(tensor: TableTensor) -> Iterator[Span]:
    """A tensor cut into blocks of ids; none if it has no rows."""
    step = block_rows(tensor.row_bytes)
    for start in range(0, tensor.shape[0], step):
        yield Span(tensor, start, min(start + step, tensor.shape[0]))


def rounds_of(named: Sequence[NamedTables]) -> list[Round]:
    """All blocks of all tables, dealt to the ranks: at most one for each of them in a round.

    A block goes to a rank that holds some of its table, so that a whole table does not travel,
    and each rank writes about as many bytes of a table as it holds: to whom most is owed so far.
    All ranks come to the same result.
    """
    rounds: list[Round] = []
    owed = np.zeros(max((each.tables.world for each in named), default=1))
    for each in named:
        dealt: list[list[tuple[Name, Span]]] = [[] for _ in range(each.tables.world)]
        for name, tensor in each.tensors.items():
            if not tensor.shape[0]:
                continue
            shares = np.array(each.tables.shares(tensor.table))
            holders = np.flatnonzero(shares)
            if not holders.size:  # A table without columns.
                holders, shares[0] = np.zeros(1, dtype=np.intp), 1.0
            for span in spans_of(tensor):
                owed[holders] += shares[holders] * span.nbytes
                writer = int(holders[np.argmax(owed[holders])])
                owed[writer] -= span.nbytes
                dealt[writer].append((name, span))
        for number in range(max(map(len, dealt))):
            now = [mine[number] if number < len(mine) else (None, None) for mine in dealt]
            names, asked = zip(*now, strict=True)
            rounds.append(Round(each.tables, names, asked))
    return rounds
