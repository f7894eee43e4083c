"""Pieces on GPUs, with each GPU's HBM filled as well as it can be: a search's state."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from solvers._fill import BYTES, GPU_S, Filling, Float, Ladder, fill, least_times
from solvers._instance import Instance, Piece, Placement

Change = dict[int, list[Piece]]
"""The pieces of the GPUs that a change touches, after it."""


@dataclass
class Packing:
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
    pieces: list[list[Piece]]
    replicas: tuple[Piece, ...]
    fillings: list[Filling]
    sums: Float
    moves: int = 0

    @classmethod
    def of(
        cls,
        instance: Instance,
        pairs: Iterable[tuple[Piece, int]],
        replicas: Iterable[Piece] = (),
    ) -> "Packing | None":
        """The packing that puts each piece on the GPU beside it; None if it does not fit."""
        pieces: list[list[Piece]] = [[] for _ in range(instance.gpus)]
        for piece, gpu in pairs:
            pieces[gpu].append(piece)
        for mine in pieces:
            mine.sort()
        everywhere = tuple(sorted(replicas))
        base = replicated(instance, everywhere)
        sums = np.stack(
            [
                base[instance.kind_of_gpu[gpu]] + total(instance, mine, gpu)
                for gpu, mine in enumerate(pieces)
            ]
        )
        packing = cls(instance, pieces, everywhere, [], sums)
        for gpu in range(instance.gpus):
            filling = packing.filling(gpu, pieces[gpu])
            if filling is None:
                return None
            packing.fillings.append(filling)
        return packing if packing.fits_dram() else None

    def copy(self) -> "Packing":
        """The same state, to be changed by itself."""
        return Packing(
            self.instance,
            [list(mine) for mine in self.pieces],
            self.replicas,
            list(self.fillings),
            self.sums.copy(),
            self.moves,
        )

    def with_spare_hbm(self, spare_bytes: Sequence[int]) -> "Packing | None":
        """The same pieces on the same GPUs, each of which keeps some HBM free."""
        fillings = []
        for gpu, (pieces, spare) in enumerate(zip(self.pieces, spare_bytes, strict=True)):
            filling = self.fillings[gpu] if not spare else self.filling(gpu, pieces, spare)
            if filling is None:
                return None
            fillings.append(filling)
        spared = Packing(self.instance, self.pieces, self.replicas, fillings, self.sums, self.moves)
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
            Placement(piece, gpu, hot)
            for gpu, (pieces, filling) in enumerate(zip(self.pieces, self.fillings, strict=True))
            for piece, hot in zip(pieces, filling.hot_rows, strict=True)
        ]

    def filling(
        self,
        gpu: int,
        pieces: Sequence[Piece],
        spare_bytes: float = 0.0,
        replicas: Sequence[Piece] | None = None,
        given: Mapping[Piece, Ladder] = MappingProxyType({}),
    ) -> Filling | None:
        """The best filling of a GPU that serves `pieces`, in their order; None if none fits.

        `given` has ladders of pieces of which not every number of rows may be in HBM.
        """
        instance = self.instance
        everywhere = self.replicas if replicas is None else replicas
        base = np.zeros(5)
        for piece in everywhere:
            base += instance.ladder(piece, gpu).values[:, 0]
        filled = fill(
            [given.get(piece) or instance.ladder(piece, gpu) for piece in pieces],
            float(instance.hbm_bytes[gpu]) - float(base[BYTES]) - spare_bytes,
            lambda number: instance.curve(pieces[number], gpu),
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

    def changed(self, change: Change) -> "Packing | None":
        """A packing with other pieces on some GPUs; None if it does not fit."""
        fillings: dict[int, Filling] = {}
        for gpu, pieces in change.items():
            filling = self.filling(gpu, pieces)
            if filling is None:
                return None
            fillings[gpu] = filling
        if (self.hosts(fillings)[1] > self.instance.dram_bytes).any():
            return None
        packing = self.copy()
        packing.apply(change, fillings, self.replicas)
        return packing

    def holders(self, table: int) -> list[int]:
        """The GPUs that serve a piece of a table."""
        return [
            gpu
            for gpu, mine in enumerate(self.pieces)
            if any(piece.table == table for piece in mine)
        ]

    def apply(
        self, change: Change, fillings: Mapping[int, Filling], replicas: tuple[Piece, ...]
    ) -> None:
        """Make a change whose fillings are known."""
        everywhere = replicas != self.replicas
        self.replicas = replicas
        for gpu, pieces in change.items():
            self.pieces[gpu] = pieces
        base = replicated(self.instance, replicas)
        for gpu, filling in fillings.items():
            self.fillings[gpu] = filling
        for gpu in range(self.instance.gpus) if everywhere else change:
            self.sums[gpu] = base[self.instance.kind_of_gpu[gpu]] + total(
                self.instance, self.pieces[gpu], gpu
            )
        self.moves += 1


def total(instance: Instance, pieces: Iterable[Piece], gpu: int) -> Float:
    """Bytes and seconds of pieces on a GPU at each price, shape (2, prices)."""
    summed = np.zeros((2, instance.prices.size))
    for piece in pieces:
        summed += instance.ladder(piece, gpu).values[: GPU_S + 1]
    return summed


def replicated(instance: Instance, replicas: Iterable[Piece]) -> list[Float]:
    """Bytes and seconds of what every GPU holds, by the GPU's kind, shape (2, prices)."""
    return [total(instance, replicas, gpu) for gpu in instance.kinds]


def least_loaded(packing: Packing, allowed: npt.NDArray[np.bool_] | None, number: int) -> list[int]:
    """The GPUs of those allowed that are done first, at most `number` of them."""
    times = packing.times_s
    if allowed is not None:
        times = np.where(allowed, times, np.inf)
    order = np.argsort(times, kind="stable")[:number].tolist()
    return [gpu for gpu in order if np.isfinite(times[gpu])]


def time_with(instance: Instance, sums: Float, gpus: Sequence[int], added: Float) -> Float:
    """About the time of each of some GPUs with more pieces, shape (gpus,).

    `sums` are of those GPUs, shape (gpus, 2, prices).
    """
    return least_times(sums + added, instance.hbm_bytes[list(gpus)])
