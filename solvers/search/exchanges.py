"""Rate moves and swaps of blocks between GPUs by sums of priced costs, many at once."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cost_models.arenas import Arena
from solvers.model.assignment import Assignment, Change
from solvers.model.instance import Block
from solvers.model.knapsack import Float, Int, phases_of_swaps
from solvers.model.shared_costs import total

_MOST_SWAPS = 4000
"""Rate at most this many swaps together, so that arrays stay in a processor's cache."""


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
        for some in self._batches(mine, others):
            for other, rated in zip(some, self._rated(slow, some), strict=True):
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

    def _batches(self, mine: _Served, others: Sequence[int]) -> Iterator[list[int]]:
        """Yield the other GPUs in batches that are rated together."""
        some: list[int] = []
        swaps = 0
        for other in others:
            more = len(mine.blocks) * len(self._served(other).blocks)
            if some and swaps + more > _MOST_SWAPS:
                yield some
                some, swaps = [], 0
            some.append(other)
            swaps += more
        if some:
            yield some

    def _rated(self, slow: int, others: Sequence[int]) -> Iterator[Float]:
        """Rate the objective for each swap of blocks, shape (mine, theirs + 1) for each other GPU.

        The last column is for moves without a block in return. Swaps that are not allowed are
        infinite.
        """
        assignment, instance = self._assignment, self._assignment.instance
        objective, kinds = instance.objective, instance.kind_of_gpu
        mine, theirs = self._served(slow), [self._served(other) for other in others]
        counts = [len(served.blocks) for served in theirs]
        # For each block of `others`, its GPU.
        at = np.repeat(np.arange(len(others)), counts)
        here = mine.costs(kinds[slow])[:-1]
        there = np.concatenate(
            [served.costs(kinds[gpu]) for served, gpu in zip(theirs, others, strict=True)]
        )
        alike = all(kinds[other] == kinds[slow] for other in others)
        there_here = there
        if not alike:
            there_here = np.concatenate([served.costs(kinds[slow]) for served in theirs])
        hbm, gpus = instance.hbm_bytes, np.array(others)[at]
        of_slow = phases_of_swaps(assignment.sums[slow] - here, there_here, hbm[slow])
        here_there = here if alike else _by_leaving(mine, [kinds[gpu] for gpu in others], at)
        of_others = phases_of_swaps(assignment.sums[gpus] - there, here_there, hbm[gpus, None])
        arenas, arenas_of_others = self._arenas(mine, theirs, at)
        launches_s = np.array(instance.launches_s)
        of_slow += arenas[..., None] * launches_s[slow] + assignment.arena_s([slow])
        of_others += (
            arenas_of_others[..., None] * launches_s[gpus, None]
            + assignment.arena_s(others)[at, None]
        )
        phase_s = assignment.phase_s
        scale_s = objective.scale_s(phase_s)
        changed = objective.powers(of_slow, scale_s)
        changed += objective.powers(np.swapaxes(of_others, 0, 1), scale_s)
        first = 0
        for other, served in zip(others, theirs, strict=True):
            last = first + len(served.blocks)
            rest = objective.powers(np.delete(phase_s, [slow, other], axis=0), scale_s)
            keys = objective.norm_s(scale_s, rest.sum(axis=0) + changed[:, first:last])
            allowed = _may_swap(mine, served, slow, other)
            keys[~(allowed & np.isfinite(keys))] = np.inf
            yield keys
            first = last

    def _arenas(self, mine: _Served, theirs: Sequence[_Served], at: Int) -> tuple[Int, Int]:
        """Count arenas after swaps: (mine, theirs) of the slow GPU, (theirs, mine) of others."""

        def wide(arenas: Int) -> Int:  # Arenas that were unknown when this GPU's arrays were made.
            more = len(self._numbers) - arenas.shape[-1]
            return np.pad(arenas, [*[(0, 0)] * (arenas.ndim - 1), (0, more)])

        leaving, arriving = wide(mine.arenas[:-1]), np.concatenate([wide(s.arenas) for s in theirs])
        every = np.array([wide(served.every_arena) for served in theirs])[at]
        kept, kept_of_others = wide(mine.every_arena) - leaving, every - arriving
        return (
            np.count_nonzero(kept[:, None] + arriving, axis=-1),
            np.count_nonzero(kept_of_others[:, None] + leaving, axis=-1),
        )


def _by_leaving(mine: _Served, kinds: Sequence[int], at: Int) -> Float:
    """Return costs of a GPU's blocks on other GPUs, (theirs, mine, 2 + phases, prices)."""
    return np.array([mine.costs(kind)[:-1] for kind in kinds])[at]


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
