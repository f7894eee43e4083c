"""Local search: what the slowest GPU serves is moved, swapped or cut anew while that helps.

Every candidate is rated by the sums of ladders (`solvers._fill.least_times`), many at once;
only the best few have their HBM filled exactly.
"""

import numpy as np

from solvers._clock import Clock
from solvers._fill import GPU_S, Filling, Float, least_times
from solvers._instance import Cut, Piece
from solvers._packing import Change, Packing, least_loaded, replicated, time_with, total

_CANDIDATE_GPUS = 8
"""GPUs that a piece of the slowest one is tried on, least loaded first."""

_FINALISTS = 4
"""Candidates that are filled exactly before a kind of move is given up."""

_LARGEST_TABLES, _CHEAPEST_CUTS = 12, 32
"""Tables of the slowest GPU that are cut anew, and cuts of each that are tried."""

_MOST_PIECES = 8
"""Finer cuts than this are left to the construction."""

_LEAST_GAIN = 1e-7


def improve(packing: Packing, clock: Clock, *, recuts: bool = True) -> None:
    """Change a packing, in place, until no move makes the slowest GPU faster.

    Without `recuts`, tables stay cut as they are: ten times as fast.
    """
    if packing.instance.gpus == 1:
        return
    while not clock.spent:
        if not (exchange(packing) or (recuts and recut(packing, clock))):
            return
        clock.step()


def exchange(packing: Packing) -> bool:
    """Make the best move of a block off the slowest GPU, or swap with one of another GPU's."""
    instance = packing.instance
    times = packing.times_s
    slow = int(times.argmax())
    mine = instance.blocks(packing.pieces[slow])
    if not mine:
        return False
    others = [g for g in np.argsort(times, kind="stable")[: _CANDIDATE_GPUS + 1] if g != slow]
    found: list[tuple[float, int, int, int]] = []
    theirs = {}
    for other in map(int, others[:_CANDIDATE_GPUS]):
        theirs[other] = instance.blocks(packing.pieces[other])
        rated = _exchange_times(packing, slow, other, mine, theirs[other])
        rated[rated >= times[slow] * (1 - _LEAST_GAIN)] = np.inf
        # One best for each piece given: finalists should differ.
        back = rated.argmin(axis=1)
        best = rated[np.arange(len(mine)), back]
        found += [
            (float(best[i]), other, i, int(back[i]))
            for i in np.flatnonzero(np.isfinite(best)).tolist()
        ]
    for _, other, i, j in sorted(found)[:_FINALISTS]:
        given = mine[i]
        taken = theirs[other][j] if j < len(theirs[other]) else ()
        change = {
            slow: sorted([*(p for p in packing.pieces[slow] if p not in given), *taken]),
            other: sorted([*(p for p in packing.pieces[other] if p not in taken), *given]),
        }
        if _make(packing, change, packing.replicas, times[slow]):
            return True
    return False


def _exchange_times(
    packing: Packing,
    slow: int,
    other: int,
    mine: list[tuple[Piece, ...]],
    theirs: list[tuple[Piece, ...]],
) -> Float:
    """About the later of two GPUs' times when they swap blocks, shape (mine, theirs + 1).

    The last column is for a move that takes nothing back. Infinite where a swap is not
    allowed.
    """
    instance = packing.instance
    here = np.array([total(instance, block, slow) for block in mine])
    there = np.array([total(instance, block, other) for block in theirs])
    nothing = np.zeros((1, *here.shape[1:]))
    there = np.concatenate((there, nothing)) if theirs else nothing
    if instance.kind_of_gpu[slow] == instance.kind_of_gpu[other]:
        here_there, there_here = here, there
    else:
        here_there = np.array([total(instance, block, other) for block in mine])
        there_here = np.concatenate(
            [*(total(instance, block, slow)[None] for block in theirs), nothing]
        )
    of_slow = packing.sums[slow] - here[:, None] + there_here[None]
    of_other = packing.sums[other] + here_there[:, None] - there[None]
    times = np.maximum(
        least_times(of_slow, instance.hbm_bytes[slow]),
        least_times(of_other, instance.hbm_bytes[other]),
    )
    times[~_may_swap(packing, slow, other, mine, theirs)] = np.inf
    return times


def _may_swap(
    packing: Packing,
    slow: int,
    other: int,
    mine: list[tuple[Piece, ...]],
    theirs: list[tuple[Piece, ...]],
) -> np.ndarray:
    """Which swaps keep pieces of one table apart and each where it may be served."""
    instance = packing.instance
    allowed = np.ones((len(mine), len(theirs) + 1), dtype=bool)
    tables_here = {piece.table for piece in packing.pieces[slow]}
    tables_there = {piece.table for piece in packing.pieces[other]}
    for i, block in enumerate(mine):
        if not all(instance.may_serve(piece, other) for piece in block):
            allowed[i] = False
        twice = {piece.table for piece in block} & tables_there
        if twice:
            allowed[i] &= [twice <= {p.table for p in back} for back in (*theirs, ())]
    for j, block in enumerate(theirs):
        if not all(instance.may_serve(piece, slow) for piece in block):
            allowed[:, j] = False
        twice = {piece.table for piece in block} & tables_here
        if twice:
            allowed[:, j] &= [twice <= {p.table for p in given} for given in mine]
    return allowed


def recut(packing: Packing, clock: Clock) -> bool:
    """Make a new cut of a table of the slowest GPU, its pieces spread anew.

    The largest tables are tried first, each in the cheapest of its cuts; the first that
    leaves another GPU the slowest is taken, or else the best.
    """
    instance = packing.instance
    times = packing.times_s
    slow = int(times.argmax())
    slow_s, next_s = float(times[slow]), float(np.partition(times, -2)[-2])
    # What a new cut may cost in all: with more, some GPU would be as slow.
    slack_s = instance.gpus * slow_s - float(times.sum())
    found: list[tuple[float, int, Cut]] = []
    for table, now in _largest(packing, slow):
        without = _Without(packing, table)
        before = without.work_s
        rated = [
            (work_s, cut)
            for cut in instance.cuts_of(table)
            if cut != now
            and cut.pieces <= _MOST_PIECES
            and (work_s := _work_s(packing, table, cut)) - before < slack_s
        ]
        for _, cut in sorted(rated)[:_CHEAPEST_CUTS]:
            if clock.spent:
                return False
            worst = without.spread(cut)[0]
            if worst < slow_s * (1 - _LEAST_GAIN):
                found.append((worst, table, cut))
        if found and min(found)[0] <= next_s and _recut_to(packing, found, slow_s):
            return True
    return _recut_to(packing, found, slow_s)


def _largest(packing: Packing, slow: int) -> list[tuple[int, Cut]]:
    """Tables of a GPU with their cuts, those that take most of its time first."""
    instance = packing.instance
    # Replicas are on every GPU, so on the slowest one too.
    alone = [p for p in packing.pieces[slow] if not instance.in_group(p.table)]
    ranked = []
    for pieces in (alone, packing.replicas):
        times = [(-float(instance.ladder(p, slow).values[GPU_S, -1]), p) for p in pieces]
        ranked += [(p.table, p.cut) for _, p in sorted(times)[:_LARGEST_TABLES]]
    return list(dict(ranked).items())


def _recut_to(packing: Packing, found: list[tuple[float, int, Cut]], slow_s: float) -> bool:
    """Make the best of some new cuts that helps when filled exactly."""
    for _, table, cut in sorted(found)[:_FINALISTS]:
        change, replicas = _Without(packing, table).spread(cut)[1:]
        if _make(packing, change, replicas, slow_s):
            return True
    return False


def with_cut(packing: Packing, table: int, cut: Cut) -> Packing | None:
    """A packing with a table cut anew, for better or worse; None if it does not fit."""
    worst, change, replicas = _Without(packing, table).spread(cut)
    if not np.isfinite(worst):
        return None
    changed = packing.copy()
    return changed if _make(changed, change, replicas, np.inf) else None


class _Without:
    """A packing with one table taken off all GPUs."""

    def __init__(self, packing: Packing, table: int) -> None:
        self.packing = packing
        self.table = table
        self.holders = packing.holders(table)
        instance = packing.instance
        self.replicas = tuple(piece for piece in packing.replicas if piece.table != table)
        self.sums = packing.sums
        dropped = [piece for piece in packing.replicas if piece.table == table]
        if dropped:
            base = np.array(replicated(instance, dropped))
            self.sums = packing.sums - base[instance.kind_of_gpu]
        self.kept = {
            gpu: [piece for piece in packing.pieces[gpu] if piece.table != table]
            for gpu in self.holders
        }
        self.sums_of_holders = {
            gpu: self.sums[gpu]
            - total(instance, (p for p in packing.pieces[gpu] if p.table == table), gpu)
            for gpu in self.holders
        }

    @property
    def work_s(self) -> float:
        """GPU seconds that the table takes as it is now."""
        held = [p for gpu in self.holders for p in self.packing.pieces[gpu]]
        pieces = {piece.cut for piece in (*held, *self.packing.replicas)
                  if piece.table == self.table}  # fmt: skip
        return sum(_work_s(self.packing, self.table, cut) for cut in pieces)

    def spread(self, cut: Cut) -> tuple[float, Change, tuple[Piece, ...]]:
        """The table's pieces on the GPUs that are done first: about the slowest one's time.

        Returns that time, the change, and what is then replicated.
        """
        packing, instance = self.packing, self.packing.instance
        pieces = instance.pieces(self.table, cut)
        replica = instance.replica(self.table, cut)
        sums, replicas = self.sums, self.replicas
        everywhere = sums is not packing.sums or replica is not None
        if replica is not None:
            replicas = tuple(sorted((*replicas, replica)))
            sums = sums + np.array(replicated(instance, [replica]))[instance.kind_of_gpu]
        near = least_loaded(packing, instance.allowed(self.table), len(pieces) + _CANDIDATE_GPUS)
        homes = range(instance.gpus) if cut.blocked else near
        candidates = list(dict.fromkeys((*self.holders, *homes)))
        open_sums = sums[candidates].copy()
        for at, gpu in enumerate(candidates):
            if gpu in self.sums_of_holders:
                extra = sums[gpu] - self.sums[gpu]
                open_sums[at] = self.sums_of_holders[gpu] + extra
        free = np.ones(len(candidates), dtype=bool)
        change: Change = {gpu: list(mine) for gpu, mine in self.kept.items()}
        for piece in pieces:
            if len({instance.kind_of_gpu[gpu] for gpu in candidates}) == 1:
                added = total(instance, [piece], candidates[0])
            else:
                added = np.array([total(instance, [piece], gpu) for gpu in candidates])
            may = free & [instance.may_serve(piece, gpu) for gpu in candidates]
            after = np.where(may, time_with(instance, open_sums, candidates, added), np.inf)
            at = int(after.argmin())
            if not np.isfinite(after[at]):
                return np.inf, {}, replicas
            gpu = candidates[at]
            open_sums[at] += added if added.ndim == 2 else added[at]
            free[at] = False  # One piece of a table on a GPU.
            change.setdefault(gpu, list(packing.pieces[gpu])).append(piece)
        if everywhere:
            all_sums = sums.copy()
            all_sums[candidates] = open_sums
            worst = least_times(all_sums, instance.hbm_bytes).max()
        else:
            touched = [at for at, gpu in enumerate(candidates) if gpu in change]
            worst = least_times(
                open_sums[touched], instance.hbm_bytes[[candidates[at] for at in touched]]
            ).max(initial=0.0)
        return float(worst), {gpu: sorted(mine) for gpu, mine in change.items()}, replicas


def _work_s(packing: Packing, table: int, cut: Cut) -> float:
    """GPU seconds of a table cut in this way, with all rows in HBM that are worth any."""
    instance = packing.instance
    gpu = instance.kinds[0]
    pieces = instance.pieces(table, cut)
    replica = instance.replica(table, cut)
    work = 0.0
    if pieces:
        # The first and the last slice are the extremes of what lies between.
        ends = [float(instance.ladder(p, gpu).values[GPU_S, -1]) for p in (pieces[0], pieces[-1])]
        work += len(pieces) * sum(ends) / 2
    if replica is not None:
        work += instance.gpus * float(instance.ladder(replica, gpu).values[GPU_S, -1])
    return work


def _make(packing: Packing, change: Change, replicas: tuple[Piece, ...], below_s: float) -> bool:
    """Make a change if, filled exactly, all GPUs it touches take less than `below_s`."""
    touched = range(packing.instance.gpus) if replicas != packing.replicas else change
    fillings: dict[int, Filling] = {}
    for gpu in touched:
        pieces = change.get(gpu, packing.pieces[gpu])
        filling = packing.filling(gpu, pieces, replicas=replicas)
        if filling is None or filling.gpu_s >= below_s * (1 - _LEAST_GAIN):
            return False
        fillings[gpu] = filling
    host_s, used = packing.hosts(fillings)
    if (used > packing.instance.dram_bytes).any():
        return False
    worst = max((filling.gpu_s for filling in fillings.values()), default=0.0)
    if np.isfinite(below_s) and host_s.max() > max(worst, packing.hosts({})[0].max()):
        return False
    packing.apply(change, fillings, replicas)
    return True
