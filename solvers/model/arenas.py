"""Arenas: shards of one element type, optimizer and width, which one kernel of a GPU serves.

Each arena of a GPU costs its launches (`cost_models.CostModel.launches`), however many shards it
has, so that shards of equal width are best together.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from cost_models.arenas import Arena
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, TableShard
from solvers.model.knapsack import Int

Block = tuple[TableShard, ...]


def arena_counts(assignment: Assignment, gpu: int, without: int | None = None) -> Counter[Arena]:
    """Shards of each arena on a GPU, replicas included; those of table `without` aside."""
    held = (*assignment.shards[gpu], *assignment.replicas)
    return Counter(assignment.instance.arena_of(s) for s in held if s.table != without)


def arena_changes(
    instance: Instance,
    counts: Counter[Arena],
    leaving: Sequence[Block],
    arriving: Sequence[Block],
) -> Int:
    """How many arenas more a GPU has when one block leaves it and another arrives.

    Parameters
    ----------
    counts : Counter
        Shards of each arena that the GPU has.
    leaving, arriving : sequence of Block
        May be empty blocks.

    Returns
    -------
    int64, shape (leaving, arriving)
    """
    gone, gone_at = _kinds(instance, leaving)
    come, come_at = _kinds(instance, arriving)
    changes = np.empty((len(gone), len(come)), dtype=np.int64)
    for i, left in enumerate(gone):
        for j, arrived in enumerate(come):
            after = counts.copy()
            after.subtract(left)
            after.update(arrived)
            changes[i, j] = len(+after) - len(counts)
    return changes[np.ix_(gone_at, come_at)]


def _kinds(
    instance: Instance, blocks: Iterable[Block]
) -> tuple[list[tuple[Arena, ...]], list[int]]:
    """The different arenas of blocks, and for each block which of these are its own."""
    number_of: dict[tuple[Arena, ...], int] = {}
    numbers = []
    for block in blocks:
        arenas = tuple(sorted(instance.arena_of(shard) for shard in block))
        numbers.append(number_of.setdefault(arenas, len(number_of)))
    return list(number_of), numbers
