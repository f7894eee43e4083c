"""Rate moves and swaps of blocks between two GPUs by sums of priced costs, all at once."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cost_models.arenas import Arena
from solvers.model.assignment import Assignment, Change
from solvers.model.instance import Block
from solvers.model.knapsack import Float, phases_of_swaps
from solvers.model.shared_costs import total


class _Served:
    """The blocks of a GPU as arrays for swaps; the last block is empty.

    - `tables`: of each block.
    - `open_gpus`, bool, shape (blocks, GPUs): where each may be served.
    - `arenas`, `every_arena`, int64, shapes (blocks, arenas) and (arenas,): shards of each block in
      each arena, by `numbers`; and all shards, replicas included.
    """

    def __init__(self, assignment: Assignment, gpu: int, numbers: dict[Arena, int]) -> None:
        instance = self._instance = assignment.instance
        self._shards, self._replicas = assignment.shards[gpu], assignment.replicas
        self.blocks: list[Block] = [*instance.blocks(self._shards), ()]
        self.tables = [frozenset(shard.table for shard in block) for block in self.blocks]
        self.every_table = frozenset[int]().union(*self.tables)
        self.open_gpus = np.array([instance.open_gpus(block) for block in self.blocks])
        members = [Counter(map(instance.arena_of, block)) for block in self.blocks]
        members.append(instance.replicated(self._replicas).arenas)
        for arena in itertools.chain(*members):
            numbers.setdefault(arena, len(numbers))
        counts = np.zeros((len(members), len(numbers)), dtype=np.int64)
        for row, arenas in zip(counts, members, strict=True):
            for arena, count in arenas.items():
                row[numbers[arena]] = count
        self.arenas, self.every_arena = counts[:-1], counts.sum(axis=0)
        self._costs: dict[int, Float] = {}

    def is_of(self, assignment: Assignment, gpu: int) -> bool:
        """Return whether the GPU still serves this list of shards: changes replace lists."""
        return self._shards is assignment.shards[gpu] and self._replicas is assignment.replicas

    def costs(self, kind: int) -> Float:
        """Return costs of blocks on a kind of GPU, shape (blocks, 2 + phases, prices)."""
        if kind not in self._costs:
            gpu = self._instance.kinds[kind]
            costs = np.array([total(self._instance, block, gpu) for block in self.blocks])
            self._costs[kind] = costs
        return self._costs[kind]


class Exchanges:
    """Moves and swaps of an assignment, which may change between calls."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._numbers: dict[Arena, int] = {}
        self._known: dict[int, _Served] = {}

    def best(self, slow: int, others: Sequence[int], key_s: float, most: int) -> Iterator[Change]:
        """Yield at most this many of the best exchanges of one GPU with some others.

        `key_s`: limit of the rated objective.
        """
        mine = self._served(slow)
        if len(mine.blocks) == 1:
            return
        candidates: list[tuple[float, int, int, int]] = []
        for other in others:
            rated = self._rated(slow, other)
            rated[rated >= key_s] = np.inf
            # Keep the best swap of each block of the slow GPU, so that finalists differ.
            back = rated.argmin(axis=1)
            best = rated[np.arange(len(back)), back]
            candidates += [
                (float(best[i]), other, i, int(back[i]))
                for i in np.flatnonzero(np.isfinite(best)).tolist()
            ]
        shards = self._assignment.shards
        for _, other, i, j in sorted(candidates)[:most]:
            leaving, arriving = mine.blocks[i], self._served(other).blocks[j]
            yield {
                slow: sorted([*(p for p in shards[slow] if p not in leaving), *arriving]),
                other: sorted([*(p for p in shards[other] if p not in arriving), *leaving]),
            }

    def _served(self, gpu: int) -> _Served:
        known = self._known.get(gpu)
        if known is None or not known.is_of(self._assignment, gpu):
            known = self._known[gpu] = _Served(self._assignment, gpu, self._numbers)
        return known

    def _rated(self, slow: int, other: int) -> Float:
        """Rate the objective for each swap of blocks of two GPUs, shape (mine, theirs + 1).

        The last column is for moves without a block in return. Swaps that are not allowed are
        infinite.
        """
        objective, phase_s = self._assignment.instance.objective, self._assignment.phase_s
        mine, theirs, scale_s = self._served(slow), self._served(other), objective.scale_s(phase_s)
        changed = objective.powers(self._phase_s(slow, mine, theirs), scale_s)
        changed += np.swapaxes(objective.powers(self._phase_s(other, theirs, mine), scale_s), 0, 1)
        rest = objective.powers(np.delete(phase_s, [slow, other], axis=0), scale_s)
        keys = objective.norm_s(scale_s, rest.sum(axis=0) + changed)[:-1]
        keys[~(_may_swap(mine, theirs, slow, other) & np.isfinite(keys))] = np.inf
        return keys

    def _phase_s(self, gpu: int, leaving: _Served, arriving: _Served) -> Float:
        """Return a GPU's phases after each swap of its blocks, (leaving, arriving, phases)."""
        assignment, instance = self._assignment, self._assignment.instance
        kind = instance.kind_of_gpu[gpu]
        kept = assignment.sums[gpu] - leaving.costs(kind)
        phase_s = phases_of_swaps(kept, arriving.costs(kind), instance.hbm_bytes[gpu])
        gone, every, coming = (
            # Arenas may be unknown when a GPU's arrays are made.
            np.pad(one, [*[(0, 0)] * (one.ndim - 1), (0, len(self._numbers) - one.shape[-1])])
            for one in (leaving.arenas, leaving.every_arena, arriving.arenas)
        )
        arenas = np.count_nonzero((every - gone)[:, None] + coming, axis=-1)
        phase_s += arenas[..., None] * np.array(instance.launches_s[gpu])
        return phase_s + assignment.arena_s([gpu])


def _may_swap(mine: _Served, theirs: _Served, slow: int, other: int) -> npt.NDArray[np.bool_]:
    """Return which swaps keep shards of one table apart and each where it may be served."""
    allowed: npt.NDArray[np.bool_] = mine.open_gpus[:-1, other, None] & theirs.open_gpus[:, slow]
    for i, tables in enumerate(mine.tables[:-1]):
        if twice := tables & theirs.every_table:
            allowed[i] &= [twice <= back for back in theirs.tables]
    for j, tables in enumerate(theirs.tables[:-1]):
        if twice := tables & mine.every_table:
            allowed[:, j] &= [twice <= arriving for arriving in mine.tables[:-1]]
    return allowed
