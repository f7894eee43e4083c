"""Pieces on GPUs, with each GPU's HBM filled as well as it can be; improved by moves and swaps."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from solvers._bound import PooledBound
from solvers._fill import Filling, fill
from solvers._instance import Cut, Instance, Piece, Placement

_CANDIDATE_GPUS = 8
"""GPUs that a piece of the slowest one is tried on, least loaded first."""

_MOST_PIECES = 8
"""Finer cuts than this are left to the construction."""

_Balanced = Literal["time", "buffers", "rows"]

_ATTEMPTS: tuple[tuple[float, _Balanced], ...] = (
    (0.5, "time"),
    (1.0, "time"),
    (1.0, "buffers"),
    (0.25, "rows"),
)
"""Largest piece, as a share of a GPU's HBM, and what GPUs are balanced by."""

_Change = dict[int, list[Piece]]
"""The pieces of the GPUs that a change touches, after it."""


@dataclass
class Packing:
    """Which pieces each GPU serves, and the filling of each GPU.

    Mutable: this is a search state, not a result.
    """

    instance: Instance
    pieces: list[list[Piece]]
    fillings: list[Filling]
    moves: int = 0
    _fillings: dict[tuple[int, float, tuple[Piece, ...]], Filling | None] = field(
        default_factory=dict
    )

    @classmethod
    def construct(cls, instance: Instance, bound: PooledBound, target_s: float) -> "Packing | None":
        """Cut tables for a step time of `target_s` and pack them; None if no GPU has room.

        Pieces with buffers of at most half a GPU's HBM pack best. Where so many do not fit,
        they may be as large as a GPU; then buffers are balanced instead of time; at last,
        for hosts short of memory, tables are cut small and all their rows balanced.
        """
        cuts: list[Cut] = []
        for table in range(instance.tables):
            work = bound.cut_for(table, target_s)
            if work is None:
                return None
            cuts.append(work.cut)
        for largest_share, balanced in _ATTEMPTS:
            to_place = [
                piece
                for table, cut in enumerate(cuts)
                for piece in instance.pieces(
                    table, _cut_that_fits(instance, table, cut, largest_share, balanced == "rows")
                )
            ]
            packing = cls._packed(instance, to_place, bound.price_s_per_byte, balanced)
            if packing is not None:
                return packing
        return None

    @classmethod
    def _packed(
        cls, instance: Instance, to_place: list[Piece], price: float, balanced: _Balanced
    ) -> "Packing | None":
        """Put pieces on the GPUs that would be done first, or have the most HBM left."""
        rung = int(np.searchsorted(-instance.prices, -price, side="right")) - 1
        estimate = {p: instance.ladder(p, instance.kinds[0]).values[:, rung] for p in to_place}
        ladders = {p: instance.ladder(p, instance.kinds[0]) for p in to_place}
        floors = {p: float(ladders[p].values[0, 0]) for p in to_place}
        sizes = {
            "time": {p: float(estimate[p][1]) for p in to_place},
            "buffers": floors,
            "rows": {p: float(ladders[p].full[0]) for p in to_place},
        }[balanced]
        to_place.sort(key=lambda p: (-sizes[p], p))
        load, hbm = np.zeros(instance.gpus), instance.hbm_bytes.copy()
        dram = instance.dram_bytes.copy()
        hosts = np.array(instance.host_of_gpu)
        chosen: list[list[Piece]] = [[] for _ in range(instance.gpus)]
        tables_on: list[set[int]] = [set() for _ in range(instance.gpus)]
        least, taken_bytes = np.zeros(instance.gpus), np.zeros(instance.gpus)
        for piece in to_place:
            hbm_bytes, gpu_s, _, dram_bytes, _ = estimate[piece]
            floor = floors[piece]
            # HBM that a GPU lacks makes a piece slower, not impossible: prefer room, and
            # insist on the buffers alone.
            allowed = least + floor <= instance.hbm_bytes
            if balanced != "rows":  # Else cold rows are counted when HBM has been filled.
                allowed &= dram_bytes <= dram[hosts]
            taken = np.array([piece.table in s for s in tables_on])
            short = np.maximum(0.0, hbm_bytes - hbm) * price
            filled = load + short if balanced == "time" else taken_bytes - instance.hbm_bytes
            score = np.where(allowed & ~taken, filled, np.inf)
            gpu = int(np.argmin(score))
            if not np.isfinite(score[gpu]):
                return None
            chosen[gpu].append(piece)
            tables_on[gpu].add(piece.table)
            load[gpu] += gpu_s + short[gpu]
            hbm[gpu] -= hbm_bytes
            least[gpu] += floor
            taken_bytes[gpu] += sizes[piece]
            dram[hosts[gpu]] -= dram_bytes
        return cls.of(instance, [(p, gpu) for gpu, pieces in enumerate(chosen) for p in pieces])

    @classmethod
    def of(cls, instance: Instance, pairs: Iterable[tuple[Piece, int]]) -> "Packing | None":
        """The packing that puts each piece on the GPU beside it; None if it does not fit."""
        pieces: list[list[Piece]] = [[] for _ in range(instance.gpus)]
        for piece, gpu in pairs:
            pieces[gpu].append(piece)
        packing = cls(instance, [sorted(mine) for mine in pieces], [])
        for gpu in range(instance.gpus):
            filling = packing.filling(gpu, pieces[gpu])
            if filling is None:
                return None
            packing.fillings.append(filling)
        return packing if packing.fits_dram(packing.fillings) else None

    def rearranged(self, pieces: list[list[Piece]], touched: Iterable[int]) -> "Packing | None":
        """A packing with other pieces on the GPUs `touched`; None if it does not fit."""
        fillings = list(self.fillings)
        for gpu in touched:
            filling = self.filling(gpu, pieces[gpu])
            if filling is None:
                return None
            fillings[gpu] = filling
        if not self.fits_dram(fillings):
            return None
        ordered = [sorted(mine) for mine in pieces]
        return Packing(self.instance, ordered, fillings, self.moves, self._fillings)

    def with_spare_hbm(self, spare_bytes: Sequence[int]) -> "Packing | None":
        """The same pieces on the same GPUs, each of which keeps some HBM free."""
        fillings = []
        for gpu, (pieces, spare) in enumerate(zip(self.pieces, spare_bytes, strict=True)):
            room = float(self.instance.hbm_bytes[gpu]) - spare
            filling = fill([self.instance.ladder(piece, gpu) for piece in pieces], room)
            if filling is None:
                return None
            fillings.append(filling)
        if not self.fits_dram(fillings):
            return None
        return Packing(self.instance, self.pieces, fillings, self.moves, self._fillings)

    @property
    def step_time_s(self) -> float:
        """Time of the slowest GPU or host memory."""
        return max(max(f.gpu_s for f in self.fillings), max(self.host_s(self.fillings)))

    def host_s(self, fillings: list[Filling]) -> list[float]:
        """Time of each host's memory."""
        times = [0.0] * len(self.instance.dram_bytes)
        for gpu, filling in enumerate(fillings):
            times[self.instance.host_of_gpu[gpu]] += filling.dram_s
        return times

    def fits_dram(self, fillings: list[Filling]) -> bool:
        """Whether every host has room for its GPUs' cold rows."""
        used = np.zeros(len(self.instance.dram_bytes))
        for gpu, filling in enumerate(fillings):
            used[self.instance.host_of_gpu[gpu]] += filling.dram_bytes
        return bool((used <= self.instance.dram_bytes).all())

    def placements(self) -> list[Placement]:
        """The pieces with their GPUs and hot rows."""
        return [
            Placement(piece, gpu, hot)
            for gpu, (pieces, filling) in enumerate(zip(self.pieces, self.fillings, strict=True))
            for piece, hot in zip(pieces, filling.hot_rows, strict=True)
        ]

    def filling(self, gpu: int, pieces: Iterable[Piece]) -> Filling | None:
        """The best filling of a GPU that serves `pieces`, in sorted order; None if none fits."""
        ordered = tuple(sorted(pieces))
        hbm_bytes = float(self.instance.hbm_bytes[gpu])
        key = (self.instance.kind_of_gpu[gpu], hbm_bytes, ordered)
        if key not in self._fillings:
            self._fillings[key] = fill([self.instance.ladder(p, gpu) for p in ordered], hbm_bytes)
        return self._fillings[key]

    def improve(self, deadline: float) -> None:
        """Move, swap and cut anew what the slowest GPU serves, while that makes it faster."""
        if self.instance.gpus == 1:
            return
        while time.monotonic() < deadline:
            change = self._best_exchange(deadline) or self._best_recut(deadline)
            if change is None:
                return
            for gpu, pieces in change.items():
                filling = self.filling(gpu, pieces)
                assert filling is not None, "it fitted when the change was found"
                self.pieces[gpu], self.fillings[gpu] = sorted(pieces), filling
            self.moves += 1

    def _slowest(self) -> tuple[int, float]:
        times = [filling.gpu_s for filling in self.fillings]
        slow = times.index(max(times))
        return slow, times[slow]

    def _time_after(self, change: _Change, slow_s: float) -> float | None:
        """Time of the slowest GPU of a change, or None if it does not help or fit."""
        worst = 0.0
        trial = list(self.fillings)
        for gpu, pieces in change.items():
            filling = self.filling(gpu, pieces)
            if filling is None or filling.gpu_s >= slow_s * (1 - 1e-7):
                return None
            worst = max(worst, filling.gpu_s)
            trial[gpu] = filling
        busiest = max(self.host_s(trial))
        if busiest > max(worst, *self.host_s(self.fillings)) or not self.fits_dram(trial):
            return None
        return worst

    def _best_exchange(self, deadline: float) -> _Change | None:
        """The best move of one piece off the slowest GPU, or swap with one of another."""
        slow, slow_s = self._slowest()
        by_time = sorted(range(self.instance.gpus), key=lambda gpu: self.fillings[gpu].gpu_s)
        best: tuple[float, _Change] | None = None
        for other in by_time[:_CANDIDATE_GPUS]:
            for change in self._exchanges(slow, other, slow_s) if other != slow else ():
                if time.monotonic() > deadline:
                    break
                worst = self._time_after(change, slow_s)
                if worst is not None and (best is None or worst < best[0]):
                    best = worst, change
        return best[1] if best else None

    def _best_recut(self, deadline: float) -> _Change | None:
        """The best way to cut a table of the slowest GPU anew and spread its pieces."""
        slow, slow_s = self._slowest()
        best: tuple[float, _Change] | None = None
        for current in self.pieces[slow]:
            for cut in self.instance.cuts_of(current.table):
                if cut == current.cut or cut.pieces > _MOST_PIECES:
                    continue
                if time.monotonic() > deadline:
                    break
                change = self._spread(current.table, cut)
                worst = None if change is None else self._time_after(change, slow_s)
                if change and worst is not None and (best is None or worst < best[0]):
                    best = worst, change
        return best[1] if best else None

    def _spread(self, table: int, cut: Cut) -> _Change | None:
        """Take a table off all GPUs, and put its pieces on those that are done first."""
        change: _Change = {
            gpu: [piece for piece in pieces if piece.table != table]
            for gpu, pieces in enumerate(self.pieces)
            if any(piece.table == table for piece in pieces)
        }
        load = np.array([filling.gpu_s for filling in self.fillings])
        for gpu, pieces in change.items():
            filling = self.filling(gpu, pieces)
            if filling is None:  # Rare: without the table, others end up split and need maps.
                return None
            load[gpu] = filling.gpu_s
        if cut.pieces > self.instance.gpus:
            return None
        for piece in self.instance.pieces(table, cut):
            gpu = int(np.argmin(load))
            change[gpu] = [*change.get(gpu, self.pieces[gpu]), piece]
            load[gpu] = np.inf  # One piece of a table on a GPU.
        return change

    def _exchanges(self, slow: int, other: int, below_s: float) -> Iterator[_Change]:
        """Moves of a piece from `slow` to `other`, and swaps of two of their pieces.

        Those are left out that take one of the GPUs `below_s` or more even if all its rows
        were in HBM: most of them.
        """
        mine, theirs = self.pieces[slow], self.pieces[other]
        here, there = ({piece.table for piece in pieces} for pieces in (mine, theirs))
        least = self.instance.least_s
        in_s = [least(piece, other) for piece in mine]
        back_s = [least(piece, slow) for piece in theirs]
        room = below_s - sum(least(piece, other) for piece in theirs)
        slow_room = below_s - sum(least(piece, slow) for piece in mine)
        for i, piece in enumerate(mine):
            rest = mine[:i] + mine[i + 1 :]
            if piece.table not in there and in_s[i] < room:
                yield {slow: rest, other: [*theirs, piece]}
            out_s = least(piece, slow)
            for j, back in enumerate(theirs):
                if in_s[i] - least(back, other) >= room or back_s[j] - out_s >= slow_room:
                    continue
                if piece.table != back.table and (piece.table in there or back.table in here):
                    continue
                yield {slow: [*rest, back], other: [*theirs[:j], *theirs[j + 1 :], piece]}


def _cut_that_fits(
    instance: Instance, table: int, cut: Cut, largest_share: float, with_rows: bool
) -> Cut:
    """`cut`, or one into more row slices if a piece is too large.

    That is, its buffers (and its rows, on demand) take more than `largest_share` of a GPU's
    HBM, or its cold rows fit nowhere.
    """
    finer = [c for c in instance.cuts_of(table) if not c.widths and c.pieces > cut.pieces]
    for more in (cut, *finer):
        needed = instance.ladder(Piece(table, more), instance.kinds[0])
        hbm_bytes = needed.full[0] if with_rows else needed.values[0, 0]
        if hbm_bytes <= instance.hbm_bytes.max() * largest_share and (
            needed.values[3, 0] <= instance.dram_bytes.max() + instance.hbm_bytes.max()
        ):
            return more
    return finer[-1] if finer else cut
