"""Costs of very many shards at once, by any model of the step equation.

For searches that cost whole populations of placements: hundreds of thousands of shards a second,
where `CostModel.evaluate` takes one plan at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from cost_models.base import Float, Int
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.exchanged_bytes import (
    ID_BYTES,
    OUTPUT_BYTES,
    length_bytes,
    returned_vectors,
    row_sum_bytes,
)
from cost_models.step_equation.unit_cost_arrays import as_array, gpu_rates
from cost_models.step_equation.unit_costs import READ_KINDS
from placer.plan.buffers import output_vectors
from placer.plan.shard import Shard
from placer.problem import Problem

_CHUNK = 1 << 20
"""Members of strided slices are counted for so many pairs of shard and CDF segment at a time."""

_STAGED, _HIT, _MISS = (READ_KINDS.index(kind) for kind in ("staged", "hit", "miss"))


@dataclass(frozen=True, slots=True, eq=False)
class ShardBatch:
    """`n` shards, each on one GPU and there the only one of its table with its columns.

    Attributes
    ----------
    table : int64, shape (n,)
        Numbers of their tables in the problem's profile.
    start, stop, step : int64, shape (n,)
        Their slices of ranks.
    width, strips : int64, shape (n,)
        Columns of each, and how many strips of columns its table is cut in.
    kind : int64, shape (n,)
        Place of ``device``, ``staged``, ``uva`` or ``host`` in `READ_KINDS`; that of ``hit`` for
        a shard with a cache.
    cache_rows : int64, shape (n,)
    """

    table: Int
    start: Int
    stop: Int
    step: Int
    width: Int
    strips: Int
    kind: Int
    cache_rows: Int

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def of(cls, problem: Problem, shards: Sequence[Shard]) -> "ShardBatch":
        """The shards of one plan, or of several one after the other.

        Strips of a table are counted over all of them, so give plans that cut a table
        differently in calls of their own, and join with `concatenate`.
        """
        numbers = {name: number for number, name in enumerate(problem.profile.table_names)}
        strips: dict[str, set[tuple[int, int]]] = {}
        for shard in shards:
            strips.setdefault(shard.table, set()).add(shard.cols)
        rows = [
            (
                numbers[shard.table],
                *shard.rows,
                shard.width,
                len(strips[shard.table]),
                _HIT if shard.lookup == "cached" else READ_KINDS.index(shard.lookup),
                shard.cache_rows,
            )
            for shard in shards
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(fields(cls))).T
        return cls(*columns)

    @classmethod
    def concatenate(cls, batches: Sequence["ShardBatch"]) -> "ShardBatch":
        """All shards of several batches."""
        parts = [[getattr(batch, field.name) for batch in batches] for field in fields(cls)]
        return cls(*(np.concatenate(part) for part in parts))


class BatchedCosts:
    """Costs of shards of one problem on one kind of GPU, by one model.

    Parameters
    ----------
    model : StepEquation
        Is asked for each table's unit costs once, here.
    problem : Problem
    gpu : int
        Number of the GPU.
    """

    def __init__(self, model: StepEquation, problem: Problem, gpu: int = 0) -> None:
        profiles = problem.profile.tables
        samples, gpus = problem.global_batch_size, len(problem.topology.gpus)
        costs = np.array(
            [as_array(model.unit_costs(problem, table, gpu)) for table in range(len(profiles))]
        )
        self._profiles = profiles
        self._rates, self._others = gpu_rates(costs)
        self._lookups = np.array([p.table.lookups_per_sample for p in profiles]) * samples
        self._rows = np.array([p.table.rows for p in profiles], dtype=np.int64)
        self._dims = np.array([p.table.dim for p in profiles], dtype=np.int64)
        self._element_bytes = np.array([float(p.table.element_bytes) for p in profiles])
        # Bytes of a row are linear in its columns.
        one = np.array([float(p.table.bytes_per_row(1)) for p in profiles])
        two = np.array([float(p.table.bytes_per_row(2)) for p in profiles])
        self._row_bytes = np.column_stack((2 * one - two, two - one))
        # Vectors are linear in lookups.
        most = np.maximum(self._lookups, 1.0)
        self._vectors = np.array(
            [
                [[output_vectors(p.table, samples, n) for n in (0.0, all_)]]
                + [
                    [returned_vectors(p.table, samples, n, alone=alone) for n in (0.0, all_)]
                    for alone in (False, True)
                ]
                for p, all_ in zip(profiles, most.tolist(), strict=True)
            ]
        )
        self._vectors[:, :, 1] = (self._vectors[:, :, 1] - self._vectors[:, :, 0]) / most[:, None]
        self._length_bytes = np.array([length_bytes(p.table, samples) for p in profiles])
        self._row_sum_bytes = np.array([row_sum_bytes(p.table, 1.0, 2, gpus) for p in profiles])

    def seconds(self, shards: ShardBatch) -> Float:
        """Seconds that each shard takes of its GPU in a step, shape (n,).

        Summed over the shards of a GPU they are its time in `CostModel.evaluate` of a plan
        without replicas. The time that hosts' memories take is not in it.
        """
        table, width = shards.table, shards.width.astype(np.float64)
        lookups, unique = self._loads(shards, shards.stop)
        weight_bytes = width * self._element_bytes[table]
        row_bytes = self._row_bytes[table, 0] + self._row_bytes[table, 1] * width
        pooled = self._vectors[table, 0, 0] + self._vectors[table, 0, 1] * lookups
        cached = np.flatnonzero(shards.kind == _HIT)
        hits, hit_rows = lookups.copy(), unique.copy()
        if cached.size:
            part = ShardBatch(*(getattr(shards, f.name)[cached] for f in fields(ShardBatch)))
            edge = np.minimum(part.stop, part.start + part.cache_rows * part.step)
            hits[cached], hit_rows[cached] = self._loads(part, edge)
        found = self._read_s(table, shards.kind, hits, hit_rows, weight_bytes, row_bytes, pooled)
        if cached.size:
            found[cached] += self._read_s(
                table[cached],
                np.full(cached.size, _MISS),
                (lookups - hits)[cached],
                (unique - hit_rows)[cached],
                weight_bytes[cached],
                row_bytes[cached],
                pooled[cached],
            )
        whole = (shards.start == 0) & (shards.stop == self._rows[table]) & (shards.step == 1)
        line = self._vectors[table, 1 + whole]
        returned = line[:, 0] + line[:, 1] * lookups
        output = returned * width * OUTPUT_BYTES
        exchanged = lookups * ID_BYTES + self._length_bytes[table] + 2 * output
        exchanged += self._row_sum_bytes[table] * unique * (shards.strips - 1)
        room = np.where(shards.kind == _HIT, shards.cache_rows, 0)
        option = shards.width < self._dims[table]
        pooled = np.isin(shards.kind, (_STAGED, _HIT)) & (shards.stop > shards.start)
        amounts = (
            returned,
            output,
            exchanged,
            1.0,
            1.0,
            room,
            option,
            pooled,
        )  # As in `OTHERS`; none is split.
        others = self._others[table]
        for number, amount in enumerate(amounts):
            found += amount * others[:, number]
        return found

    def _read_s(
        self,
        table: Int,
        kind: Int,
        lookups: Float,
        unique: Float,
        weight_bytes: Float,
        row_bytes: Float,
        vectors: Float,
    ) -> Float:
        rates = self._rates[table, kind]
        found: Float = (
            lookups * (rates[:, 0] + weight_bytes * rates[:, 1])
            + unique * (rates[:, 2] + row_bytes * rates[:, 3])
            + vectors * (rates[:, 4] + weight_bytes * rates[:, 5])
        )
        return found

    def _loads(self, shards: ShardBatch, stop: Int) -> tuple[Float, Float]:
        """Lookups and distinct rows of each shard's ranks before `stop`."""
        lookups, unique = np.zeros(len(shards)), np.zeros(len(shards))
        order = np.argsort(shards.table, kind="stable")
        edges = np.flatnonzero(np.diff(shards.table[order])) + 1
        for members in np.split(order, edges):
            if not members.size:
                continue
            number = int(shards.table[members[0]])
            cdf, all_lookups = self._profiles[number].cdf, float(self._lookups[number])
            shares, touched = cdf.shares, cdf.unique_at_ranks(all_lookups)
            strided = shards.step[members] > 1
            plain, slices = members[~strided], members[strided]
            if plain.size:
                ends = np.concatenate((shards.start[plain], stop[plain]))
                for values, into in ((shares, lookups), (touched, unique)):
                    first, last = np.interp(ends, cdf.ranks, values).reshape(2, -1)
                    into[plain] = last - first
            if slices.size:
                # Both are linear within a segment: by row, times a slice's rows in it.
                by_row = np.column_stack((np.diff(shares), np.diff(touched)))
                by_row /= np.diff(cdf.ranks)[:, None]
                every = np.column_stack((shards.start[slices], stop[slices], shards.step[slices]))
                # Placements cut a table in few ways, which come back again and again.
                distinct, which = np.unique(every, axis=0, return_inverse=True)
                chunk = max(1, _CHUNK // cdf.ranks.size)
                found = [
                    _members(cdf.ranks, distinct[begin : begin + chunk]) @ by_row
                    for begin in range(0, len(distinct), chunk)
                ]
                lookups[slices], unique[slices] = np.concatenate(found)[which].T
            lookups[members] *= all_lookups
        return lookups, unique


def _members(ranks: Int, slices: Int) -> Float:
    """How many members of each slice lie in each segment of ranks, shape (slices, segments)."""
    start, stop, step = slices.T[:, :, None]
    below = -(-(np.clip(ranks, start, stop) - start) // step)
    inside: Float = np.diff(below, axis=1).astype(np.float64)
    return inside
