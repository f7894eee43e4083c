"""Dynamic programming over HBM: one option per table, least total time for each total of HBM.

The idea of TorchRec's `DynamicProgrammingProposer` (torchrec 1.8, no paper): a multiple-choice
knapsack (Sinha and Zoltners 1979, doi:10.1287/opre.27.3.503). An option of a table is a way to
cut it and a number of its rows in HBM, with a time t and HBM bytes h summed over its pieces;
with total HBM in bins of one size, for tables 1 to n

    best[n][bin] = min over options o of table n of  best[n-1][bin'] + t[o]

where bin' is any bin from which h[o] more bytes lead to `bin`. Each bin keeps the bytes of its
best choice exactly, so that rounding does not add up over tables. Each bin's choice of options
is a proposal. From the one with the most HBM down, pieces of a proposal are placed, longest
first, on the GPU with the least time so far that has room for their rows; each GPU's HBM is
filled anew, and the proposal of the least step time is kept.

Total time alone would leave large tables whole however long the GPU that serves them takes, for
cutting costs extra. So options are limited to those whose pieces each take at most a share of
the bound, for a few such shares, the dynamic program run for each.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import CostModel
from cost_models._space import STRIP_COLUMNS
from placer.problem import Problem
from solvers._base import Limits, SolveResult, Termination
from solvers._bound import PooledBound, pooled_bound
from solvers._build import finished, fitted_plan
from solvers._clock import Clock
from solvers._feasibility import impossible
from solvers._fill import BYTES, DRAM_BYTES, GPU_S, Float
from solvers._instance import Cut, Instance, Piece
from solvers._packing import Packing

Int = npt.NDArray[np.int64]

_BINS_PER_GPU = 100
_MOST_BINS = 1000
"""TorchRec has 100 bins for each GPU."""

_HEADS = 3
"""Replicated heads, but for all rows, that are tried with a table."""

_NEVER_S = 1e30
_ROUNDING = 1e-6

_OPTIONS = 32
"""Options kept of a table: more differ too little."""

_SHARES = (1.0, 0.5, 0.25, 2.0, np.inf)
"""Longest piece as a share of the bound."""

_PROPOSALS = 24
"""Proposals of one dynamic program that are placed, evenly over its bins."""

_FINALISTS = 4


class DynamicProgramming:
    """The strategy of this module's docstring."""

    name = "dp"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Choose options, place them, keep the best proposal. See `Solver.solve`."""
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = pooled_bound(instance)
        found: list[Packing] = []
        placed = 0
        for proposal in _proposals(instance, bound, clock):
            # Its HBM is filled anew, but not so much better that the total would halve.
            if found and proposal.total_s / instance.gpus > 2 * found[0].step_time_s:
                continue
            packing = _partitioned(instance, proposal)
            placed += 1
            if packing is not None:
                found = sorted([*found, packing], key=lambda p: p.step_time_s)[:_FINALISTS]
            clock.step()
            if found and (
                clock.spent or found[0].step_time_s <= bound.step_time_s * (1 + limits.gap)
            ):
                break
        plan = None
        for packing in found:
            plan = fitted_plan(packing)
            if plan is not None:
                break
        if plan is None:
            return SolveResult(
                None,
                Termination(
                    "no_plan",
                    clock.limit_hit,
                    detail="no proposal could be placed: every GPU needs room for the buffers of "
                    "its pieces, and every host for their cold rows; raise --hbm or lower "
                    "--batch-size, or try `greedy-cost`",
                ),
                bound_s=bound.step_time_s,
            )
        return finished(
            self.name,
            instance,
            plan,
            bound=bound,
            limits=limits,
            started=started,
            limit=clock.limit_hit,
            stats={"proposals": placed},
        )


@dataclass(frozen=True, slots=True)
class _Options:
    """Ways to place one table, by rising bytes and falling time, unless `longest_s` says no.

    Attributes
    ----------
    cuts : list of Cut
    rungs : int64
        How many rows are in HBM: those worth it at the instance's price of this number.
    bytes_, time_s : float64
        HBM bytes and GPU seconds of all pieces and replicas.
    longest_s : float64
        GPU seconds of the longest piece, or of one replica.
    """

    cuts: list[Cut]
    rungs: Int
    bytes_: Float
    time_s: Float
    longest_s: Float

    def only(self, at: Int) -> "_Options":
        """The options with these numbers."""
        return _Options(
            [self.cuts[n] for n in at.tolist()],
            self.rungs[at],
            self.bytes_[at],
            self.time_s[at],
            self.longest_s[at],
        )

    def within(self, longest_s: float) -> "_Options":
        """The best few of those without a piece longer than that; else of the shortest."""
        least = float(self.longest_s.min())
        fits = np.flatnonzero(self.longest_s <= max(longest_s, least))
        order = fits[np.lexsort((self.time_s[fits], self.bytes_[fits]))]
        times = self.time_s[order]
        before = np.concatenate(([np.inf], np.minimum.accumulate(times)[:-1]))
        front = order[times < before]
        if front.size > _OPTIONS:
            front = front[np.linspace(0, front.size - 1, _OPTIONS).round().astype(np.int64)]
        return self.only(front)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A cut and a rung for each table, and the GPU seconds that they take together."""

    cuts: list[Cut]
    rungs: list[int]
    total_s: float


def _proposals(instance: Instance, bound: PooledBound, clock: Clock) -> Iterator[_Proposal]:
    """Proposals for each share of the bound, those with the most HBM first."""
    every = []
    for table in range(instance.tables):
        cuts = _few_cuts(instance, table)
        if clock.spent:  # Nothing to choose from: what the bound would do with it.
            work = bound.cut_for(table, bound.step_time_s * (1 + _ROUNDING))
            cuts = cuts[:1] if work is None else [work.cut]
        every.append(_options(instance, table, cuts))
    first = True
    for share in _SHARES:
        if clock.spent and not first:
            return
        options = [one.within(share * bound.step_time_s) for one in every]
        yield from _of_bins(instance, options)
        first = False


def _options(instance: Instance, table: int, cuts: Sequence[Cut]) -> _Options:
    """Some cuts of a table, each with the rows in HBM that are worth it at each price."""
    gpu, prices = instance.kinds[0], instance.prices.size
    values = np.zeros((3, len(cuts), prices))
    for at, cut in enumerate(cuts):
        pieces, replica = instance.pieces(table, cut), instance.replica(table, cut)
        if pieces:
            # The first and the last slice are the extremes of what lies between.
            ends = [instance.ladder(p, gpu).values[: GPU_S + 1] for p in (pieces[0], pieces[-1])]
            values[: GPU_S + 1, at] += len(pieces) * (ends[0] + ends[1]) / 2
            # What no GPU has room for is as bad as one that takes forever.
            small = ends[0][BYTES] <= instance.hbm_bytes.max()
            slower = np.maximum(ends[0][GPU_S], ends[1][GPU_S])
            values[2, at] = np.where(small, slower, _NEVER_S)
        if replica is not None:
            everywhere = instance.ladder(replica, gpu).values[: GPU_S + 1]
            values[: GPU_S + 1, at] += instance.gpus * everywhere
            values[2, at] += everywhere[GPU_S]
    return _Options(
        [cut for cut in cuts for _ in range(prices)],
        np.tile(np.arange(prices), len(cuts)),
        values[BYTES].reshape(-1),
        values[GPU_S].reshape(-1),
        values[2].reshape(-1),
    )


def _few_cuts(instance: Instance, table: int) -> list[Cut]:
    """About twenty of a table's cuts, for the others differ too little from them in total.

    Row slices: powers of two, and all GPUs. Strips: as even as can be. Replicated heads: all
    rows, or one of a few shares, the other rows whole or on all GPUs.
    """
    cuts = instance.cuts_of(table)
    heads = sorted({cut.head for cut in cuts if 0 < cut.head < instance.rows(table)})
    few = np.linspace(0, len(heads) - 1, min(_HEADS, len(heads))).round().astype(int)
    kept = {0, instance.rows(table), *(heads[at] for at in few.tolist())}

    def wanted(cut: Cut) -> bool:
        if cut.head not in kept or (cut.head and cut.ways not in (1, instance.gpus)):
            return False
        if cut.widths and max(cut.widths) - min(cut.widths) > STRIP_COLUMNS:
            return False
        return cut.ways == instance.gpus or cut.ways & (cut.ways - 1) == 0

    # A constraint may leave none of these.
    return [cut for cut in cuts if wanted(cut)] or list(cuts)


def _of_bins(instance: Instance, options: Sequence[_Options]) -> Iterator[_Proposal]:
    """The dynamic program, and proposals of its bins from the one with the most HBM down."""
    bins = min(_MOST_BINS, _BINS_PER_GPU * instance.gpus)
    size = float(instance.hbm_bytes.sum()) / bins
    best, used = np.full(bins, np.inf), np.zeros(bins)
    best[0] = 0.0
    at_bin = np.arange(bins)
    chosen = np.zeros((len(options), bins), dtype=np.int16)
    came_from = np.zeros((len(options), bins), dtype=np.int16)
    for table, mine in enumerate(options):
        steps = np.minimum(mine.bytes_ / size, bins + 1.0)
        down = steps.astype(np.int64)
        # The bytes beyond a bin's start may or may not carry over into the next one.
        sources = at_bin - np.concatenate((down, down + 1))[:, None]
        more = np.concatenate((steps, steps))[:, None]
        added = np.concatenate((mine.time_s, mine.time_s))[:, None]
        possible = sources >= 0
        sources = np.maximum(sources, 0)
        then = used[sources] + more
        possible &= then.astype(np.int64) == at_bin
        total = np.where(possible, best[sources] + added, np.inf)
        at = total.argmin(axis=0)
        chosen[table] = at % steps.size
        came_from[table] = sources[at, at_bin]
        best, used = total[at, at_bin], then[at, at_bin]
    # More HBM for no less time is no proposal.
    least_before = np.concatenate(([np.inf], np.minimum.accumulate(best)[:-1]))
    worth = np.flatnonzero(best < least_before)[::-1]
    if worth.size > _PROPOSALS:
        worth = worth[np.linspace(0, worth.size - 1, _PROPOSALS).round().astype(np.int64)]
    for end in worth.tolist():
        picked = np.empty(len(options), dtype=np.int64)
        at = end
        for table in range(len(options) - 1, -1, -1):
            picked[table] = chosen[table, at]
            at = came_from[table, at]
        pairs = list(zip(options, picked.tolist(), strict=True))
        yield _Proposal(
            [mine.cuts[n] for mine, n in pairs],
            [int(mine.rungs[n]) for mine, n in pairs],
            float(best[end]),
        )


def _partitioned(instance: Instance, proposal: _Proposal) -> Packing | None:
    """Pieces of a proposal on the least loaded GPUs with room for them, longest first."""
    kinds, hosts = np.array(instance.kind_of_gpu), np.array(instance.host_of_gpu)
    load, hbm = np.zeros(instance.gpus), instance.hbm_bytes.copy()
    dram = instance.dram_bytes.copy()
    pieces: list[Piece] = []
    replicas: list[Piece] = []
    for table, cut in enumerate(proposal.cuts):
        pieces += instance.pieces(table, cut)
        replica = instance.replica(table, cut)
        if replica is not None:
            replicas.append(replica)
            each = np.array([instance.ladder(replica, g).values[:, 0] for g in instance.kinds])
            load += each[kinds, GPU_S]
            hbm -= each[kinds, BYTES]
    costs = {
        block: np.array(
            [
                sum(instance.ladder(p, g).values[:, proposal.rungs[p.table]] for p in block)
                for g in instance.kinds
            ]
        )
        for block in instance.blocks(pieces)
    }
    apart: dict[int, list[int]] = {}
    pairs: list[tuple[Piece, int]] = []
    for block in sorted(costs, key=lambda b: (-costs[b][0, GPU_S], b)):
        cost = costs[block][kinds]
        open_ = (cost[:, BYTES] <= hbm) & (cost[:, DRAM_BYTES] <= dram[hosts])
        for piece in block:
            open_[apart.get(piece.table, [])] = False
            mask = instance.allowed(piece.table)
            if mask is not None:
                open_ &= mask
            if piece.cut.blocked:
                open_ &= np.arange(instance.gpus) == piece.offset
        after = np.where(open_, load + cost[:, GPU_S], np.inf)
        gpu = int(after.argmin())
        if not np.isfinite(after[gpu]):
            return None
        load[gpu] = after[gpu]
        hbm[gpu] -= cost[gpu, BYTES]
        dram[hosts[gpu]] -= cost[gpu, DRAM_BYTES]
        for piece in block:
            pairs.append((piece, gpu))
            if piece.cut.pieces > 1:
                apart.setdefault(piece.table, []).append(gpu)
    return Packing.of(instance, pairs, replicas)
