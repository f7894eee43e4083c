"""Arenas: shards of one element type, optimizer and width, which one kernel of a GPU serves.

Each arena of a GPU costs its launches (`cost_models.CostModel.launches`), however many shards it
has, so that shards of equal width are best together.
"""

from collections import Counter

from cost_models.arenas import Arena
from solvers.model.assignment import Assignment
from solvers.model.instance import TableShard

Block = tuple[TableShard, ...]


def arena_counts(assignment: Assignment, gpu: int, without: int | None = None) -> Counter[Arena]:
    """Shards of each arena on a GPU, replicas included; those of table `without` aside."""
    held = (*assignment.shards[gpu], *assignment.replicas)
    return Counter(assignment.instance.arena_of(s) for s in held if s.table != without)
