"""A problem as solvers see it: pieces of tables and their cost curves.

The search space of all solvers of this package: every table is cut into strided row slices
or into strips of columns (pieces), in one of the ways of `Instance.cuts_of(table)`; every
piece is served by one GPU; the hottest rows of a piece are in HBM and the rest, staged, in
the DRAM of the GPU's host.
"""

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models import CostModel, PieceCurve
from placer.problem import Problem
from solvers._fill import Hull, Ladder, hull, ladder

Float = npt.NDArray[np.float64]

_FINE_WAYS = 8
_PRICE_RATIO = 1.06
_MOST_PRICES = 250
_STRIP_COLUMNS = 16


class Cut(NamedTuple):
    """How a table is cut: into `ways` strided row slices, or strips of these `widths`.

    No widths mean one strip of all columns.
    """

    ways: int = 1
    widths: tuple[int, ...] = ()

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return self.ways * max(1, len(self.widths))


WHOLE = Cut()


class Piece(NamedTuple):
    """Strip `strip` of columns of the row slice of table `table` that starts at rank `offset`."""

    table: int
    cut: Cut = WHOLE
    offset: int = 0
    strip: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A piece on a GPU, with its `hot_rows` hottest rows in HBM."""

    piece: Piece
    gpu: int
    hot_rows: int


class Instance:
    """Curves of a problem under a cost model, computed when first asked for.

    GPUs that cost the same share their curves, so that 1,024 equal GPUs are one.
    """

    def __init__(self, problem: Problem, cost_model: CostModel) -> None:
        self.problem = problem
        self.cost_model = cost_model
        topology = problem.topology
        self.gpus = len(topology.gpus)
        self.tables = len(problem.profile)
        kinds: dict[tuple[object, ...], int] = {}
        self.kind_of_gpu: list[int] = []
        self.kinds: list[int] = []  # One GPU of each kind.
        for number, gpu in enumerate(topology.gpus):
            host = topology.hosts_by_id[gpu.host]
            peers = len(topology.gpus_of(gpu.host))
            key = (
                gpu.hbm_bytes_per_s,
                gpu.launch_s,
                host.dram_bytes_per_s,
                peers,
                topology.host_link_bytes_per_s(gpu.id),
                topology.peer_bytes_per_s(gpu.id),
                topology.network_bytes_per_s(gpu.id),
            )
            if key not in kinds:
                kinds[key] = len(kinds)
                self.kinds.append(number)
            self.kind_of_gpu.append(kinds[key])
        self.hbm_bytes = np.array([gpu.memory_bytes for gpu in topology.gpus], dtype=np.float64)
        hosts = {host.id: number for number, host in enumerate(topology.hosts)}
        self.host_of_gpu = [hosts[gpu.host] for gpu in topology.gpus]
        self.dram_bytes = np.array([h.memory_bytes for h in topology.hosts], dtype=np.float64)
        # Caches of this instance alone: they go when it goes.
        self._curve = cache(partial(cost_model.piece_curve, problem))
        self._least_s: dict[tuple[Piece, int], float] = {}
        self._ladder = cache(lambda *kind: ladder(self._curve(*kind), self.prices))

    @cached_property
    def prices(self) -> Float:
        """Prices of a byte of HBM, in seconds, from infinity down to 0."""
        worth = [
            -np.diff(corners.time_s) / np.diff(corners.hbm_bytes)
            for corners in (self.whole_hull(table) for table in range(self.tables))
        ]
        every = np.concatenate([w[w > 0] for w in worth])
        if not every.size:
            return np.array([np.inf, 0.0])
        low, high = float(every.min()), float(every.max())
        # Slices of a table repeat its prices; strips shift them by their state and maps.
        steps = min(_MOST_PRICES, max(2, int(np.log(high / low) / np.log(_PRICE_RATIO))))
        return np.concatenate(([np.inf], np.geomspace(high * 2, low / 2, steps), [0.0]))

    def whole_hull(self, table: int) -> Hull:
        """Hull of a table in one piece, on the first kind of GPU."""
        curve = self.curve(Piece(table), self.kinds[0])
        return hull(curve, curve.gpu_s)

    def cuts_of(self, table: int) -> tuple[Cut, ...]:
        """The cuts of a table that are searched, by number of pieces.

        Row slices: 1 to 8, powers of two up to all GPUs, and all GPUs. Strips of columns: two
        of any width, or three or four as even as can be, all multiples of 16 columns so that
        rows of a strip stay aligned.
        """
        spec = self.problem.profile.tables[table].table
        rows = spec.rows
        most = max(1, min(self.gpus, rows))
        fine = set(range(1, min(most, _FINE_WAYS) + 1))
        powers = {2**k for k in range(most.bit_length()) if 2**k <= most}
        ways = sorted(fine | powers | ({self.gpus} if self.gpus <= most else set()))
        cuts = [Cut(w) for w in ways]
        if self.gpus > 1 and spec.dim % _STRIP_COLUMNS == 0:
            # The wider strip first: which of the two is left of the other does not matter.
            wide = range(spec.dim - _STRIP_COLUMNS, (spec.dim - 1) // 2, -_STRIP_COLUMNS)
            cuts += [Cut(1, (w, spec.dim - w)) for w in wide]
            units = spec.dim // _STRIP_COLUMNS
            for strips in range(3, min(4, self.gpus, units) + 1):
                cuts.append(Cut(1, _even_widths(units, strips)))
        return tuple(sorted(cuts, key=lambda cut: (cut.pieces, cut.ways)))

    def pieces(self, table: int, cut: Cut) -> list[Piece]:
        """The pieces of a table that is cut in this way."""
        strips = range(max(1, len(cut.widths)))
        return [Piece(table, cut, index, strip) for strip in strips for index in range(cut.ways)]

    def columns(self, piece: Piece) -> tuple[int, int]:
        """The range of columns of a piece."""
        widths = piece.cut.widths or (self.problem.profile.tables[piece.table].table.dim,)
        first = sum(widths[: piece.strip])
        return first, first + widths[piece.strip]

    def curve(self, piece: Piece, gpu: int) -> PieceCurve:
        """Cost of a piece on a GPU."""
        return self._curve(*self._kind_of_piece(piece, gpu))

    def ladder(self, piece: Piece, gpu: int) -> Ladder:
        """Cost of a piece on a GPU at each of `prices`."""
        return self._ladder(*self._kind_of_piece(piece, gpu))

    def least_s(self, piece: Piece, gpu: int) -> float:
        """GPU time of a piece with all rows in HBM that are worth any."""
        key = piece, self.kind_of_gpu[gpu]
        if key not in self._least_s:
            self._least_s[key] = float(self.ladder(piece, gpu).values[1].min())
        return self._least_s[key]

    def _kind_of_piece(self, piece: Piece, gpu: int) -> tuple[int, int, int, int, int]:
        """What the cost of a piece depends on: strips of equal width cost the same."""
        first, last = self.columns(piece)
        kind = self.kinds[self.kind_of_gpu[gpu]]
        return piece.table, piece.cut.ways, piece.offset, last - first, kind

    @property
    def search_space(self) -> str:
        """The search space in words, for plans and reports."""
        cuts = {cut for table in range(self.tables) for cut in self.cuts_of(table)}
        ways = ", ".join(str(w) for w in sorted({cut.ways for cut in cuts}))
        strips = ", ".join(str(s) for s in sorted({len(c.widths) for c in cuts if c.widths}))
        return (
            f"each table in {ways} strided row slices"
            + (f" or {strips} strips of columns (multiples of {_STRIP_COLUMNS})" if strips else "")
            + "; each piece on one GPU, split hot/cold at any row between HBM and staged DRAM"
        )


def _even_widths(units: int, strips: int) -> tuple[int, ...]:
    """Widths of `strips` strips of `units` units of columns, the wider ones first."""
    narrow, wider = divmod(units, strips)
    return tuple(
        _STRIP_COLUMNS * (narrow + 1 if strip < wider else narrow) for strip in range(strips)
    )
