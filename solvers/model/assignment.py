"""Pieces on GPUs, with each GPU's HBM filled as well as it can be: a search's state."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from solvers.model.instance import Instance, Placement, TableShard
from solvers.model.knapsack import BYTES, GPU_S, Filling, Float, Ladder, fill, least_times

Change = dict[int, list[TableShard]]
"""The pieces of the GPUs that a change touches, after it."""


@dataclass
class Assignment:
    """Which pieces each GPU serves, which rows all GPUs hold, and the filling of each GPU.

    Mutable: this is a search state, not a result.

    Attributes
    ----------
    pieces : list of lists of Piece
        Of each GPU, in order, replicas aside.
    replicas : tuple of Piece
        What every GPU holds besides.
    fillings : list of Filling
        Of each GPU, replicas included.
    sums : float64, shape (gpus, 2, prices)
        HBM bytes and GPU seconds of each GPU at each of the instance's prices.
    moves : int
        Improvements made so far.
    """

    instance: Instance
    shards: list[list[TableShard]]
    replicas: tuple[TableShard, ...]
    fillings: list[Filling]
    sums: Float
    moves: int = 0

    @classmethod
    def of(
        cls,
        instance: Instance,
        pairs: Iterable[tuple[TableShard, int]],
        replicas: Iterable[TableShard] = (),
    ) -> "Assignment | None":
        """The packing that puts each piece on the GPU beside it; None if it does not fit."""
        shards: list[list[TableShard]] = [[] for _ in range(instance.gpus)]
        for shard, gpu in pairs:
            shards[gpu].append(shard)
        for mine in shards:
            mine.sort()
        everywhere = tuple(sorted(replicas))
        base = replicated(instance, everywhere)
        sums = np.stack(
            [
                base[instance.kind_of_gpu[gpu]] + total(instance, mine, gpu)
                for gpu, mine in enumerate(shards)
            ]
        )
        assignment = cls(instance, shards, everywhere, [], sums)
        for gpu in range(instance.gpus):
            filling = assignment.filling(gpu, shards[gpu])
            if filling is None:
                return None
            assignment.fillings.append(filling)
        return assignment if assignment.fits_dram() else None

    def copy(self) -> "Assignment":
        """The same state, to be changed by itself."""
        return Assignment(
            self.instance,
            [list(mine) for mine in self.shards],
            self.replicas,
            list(self.fillings),
            self.sums.copy(),
            self.moves,
        )

    def with_spare_hbm(self, spare_bytes: Sequence[int]) -> "Assignment | None":
        """The same pieces on the same GPUs, each of which keeps some HBM free."""
        fillings = []
        for gpu, (shards, spare) in enumerate(zip(self.shards, spare_bytes, strict=True)):
            filling = self.fillings[gpu] if not spare else self.filling(gpu, shards, spare)
            if filling is None:
                return None
            fillings.append(filling)
        spared = Assignment(
            self.instance, self.shards, self.replicas, fillings, self.sums, self.moves
        )
        return spared if spared.fits_dram() else None

    @property
    def times_s(self) -> Float:
        """Time of each GPU."""
        return np.array([filling.gpu_s for filling in self.fillings])

    @property
    def step_time_s(self) -> float:
        """Time of the slowest GPU or host memory."""
        return max(max(f.gpu_s for f in self.fillings), float(self.hosts({})[0].max()))

    def hosts(self, changed: Mapping[int, Filling]) -> tuple[Float, Float]:
        """Time and bytes of each host's memory, if some GPUs are filled otherwise."""
        dram = np.array([(f.dram_s, f.dram_bytes) for f in self.fillings])
        for gpu, filling in changed.items():
            dram[gpu] = filling.dram_s, filling.dram_bytes
        of_host = self.instance.host_of_gpu
        hosts = len(self.instance.dram_bytes)
        # NumPy's types say that counts are whole numbers, with weights too.
        time_s: Any = np.bincount(of_host, dram[:, 0], hosts)
        used: Any = np.bincount(of_host, dram[:, 1], hosts)
        return time_s, used

    def fits_dram(self) -> bool:
        """Whether every host has room for its GPUs' cold rows."""
        return bool((self.hosts({})[1] <= self.instance.dram_bytes).all())

    def placements(self) -> list[Placement]:
        """The pieces with their GPUs and hot rows, replicas aside."""
        return [
            Placement(shard, gpu, hot)
            for gpu, (shards, filling) in enumerate(zip(self.shards, self.fillings, strict=True))
            for shard, hot in zip(shards, filling.hot_rows, strict=True)
        ]

    def filling(
        self,
        gpu: int,
        shards: Sequence[TableShard],
        spare_bytes: float = 0.0,
        replicas: Sequence[TableShard] | None = None,
        given: Mapping[TableShard, Ladder] = MappingProxyType({}),
    ) -> Filling | None:
        """The best filling of a GPU that serves `pieces`, in their order; None if none fits.

        `given` has ladders of pieces of which not every number of rows may be in HBM.
        """
        instance = self.instance
        everywhere = self.replicas if replicas is None else replicas
        base = np.zeros(5)
        for shard in everywhere:
            base += instance.ladder(shard, gpu).values[:, 0]
        filled = fill(
            [given.get(shard) or instance.ladder(shard, gpu) for shard in shards],
            float(instance.hbm_bytes[gpu]) - float(base[BYTES]) - spare_bytes,
            lambda number: instance.curve(shards[number], gpu),
        )
        if filled is None or not everywhere:
            return filled
        return Filling(
            filled.hot_rows,
            filled.gpu_s + float(base[GPU_S]),
            filled.dram_s,
            filled.hbm_bytes + float(base[BYTES]),
            filled.dram_bytes,
        )

    def changed(self, change: Change) -> "Assignment | None":
        """A packing with other pieces on some GPUs; None if it does not fit."""
        fillings: dict[int, Filling] = {}
        for gpu, shards in change.items():
            filling = self.filling(gpu, shards)
            if filling is None:
                return None
            fillings[gpu] = filling
        if (self.hosts(fillings)[1] > self.instance.dram_bytes).any():
            return None
        assignment = self.copy()
        assignment.apply(change, fillings, self.replicas)
        return assignment

    def holders(self, table: int) -> list[int]:
        """The GPUs that serve a piece of a table."""
        return [
            gpu
            for gpu, mine in enumerate(self.shards)
            if any(shard.table == table for shard in mine)
        ]

    def apply(
        self, change: Change, fillings: Mapping[int, Filling], replicas: tuple[TableShard, ...]
    ) -> None:
        """Make a change whose fillings are known."""
        everywhere = replicas != self.replicas
        self.replicas = replicas
        for gpu, shards in change.items():
            self.shards[gpu] = shards
        base = replicated(self.instance, replicas)
        for gpu, filling in fillings.items():
            self.fillings[gpu] = filling
        for gpu in range(self.instance.gpus) if everywhere else change:
            self.sums[gpu] = base[self.instance.kind_of_gpu[gpu]] + total(
                self.instance, self.shards[gpu], gpu
            )
        self.moves += 1


def total(instance: Instance, shards: Iterable[TableShard], gpu: int) -> Float:
    """Bytes and seconds of pieces on a GPU at each price, shape (2, prices)."""
    summed = np.zeros((2, instance.prices.size))
    for shard in shards:
        summed += instance.ladder(shard, gpu).values[: GPU_S + 1]
    return summed


def replicated(instance: Instance, replicas: Iterable[TableShard]) -> list[Float]:
    """Bytes and seconds of what every GPU holds, by the GPU's kind, shape (2, prices)."""
    return [total(instance, replicas, gpu) for gpu in instance.kinds]


def least_loaded(
    assignment: Assignment, allowed: npt.NDArray[np.bool_] | None, number: int
) -> list[int]:
    """The GPUs of those allowed that are done first, at most `number` of them."""
    times = assignment.times_s
    if allowed is not None:
        times = np.where(allowed, times, np.inf)
    order = np.argsort(times, kind="stable")[:number].tolist()
    return [gpu for gpu in order if np.isfinite(times[gpu])]


def time_with(instance: Instance, sums: Float, gpus: Sequence[int], added: Float) -> Float:
    """About the time of each of some GPUs with more pieces, shape (gpus,).

    `sums` are of those GPUs, shape (gpus, 2, prices).
    """
    return least_times(sums + added, instance.hbm_bytes[list(gpus)])
