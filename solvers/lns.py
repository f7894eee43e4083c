"""Large-neighbourhood search: a few GPUs at a time are packed anew, exactly, by CP-SAT.

Shaw 1998, doi:10.1007/3-540-49481-2_30. The cost greedy's plan, improved by local search, is
the start. A round takes the slowest GPU and some others, gives CP-SAT the tables that they
alone serve, each in any of its cuts without replicas, and the pieces of other tables that
stay cut as they are (`solvers._program`), and keeps what is not worse. On few GPUs every
other round takes all of them, and some tables of which cuts and replicas are decided anew.
"""

import random
import time
from dataclasses import replace

import numpy as np

from cost_models import CostModel
from placer.problem import Problem
from solvers._base import Limits, SolveResult
from solvers._bound import PooledBound, pooled_bound
from solvers._build import result_of
from solvers._clock import Clock
from solvers._feasibility import impossible
from solvers._instance import Cut, Instance, Piece
from solvers._moves import improve
from solvers._packing import Change, Packing
from solvers._program import Program, price_list
from solvers._search import iterated_search, load_key
from solvers.greedy_cost import best_packing

_SEARCH_SHARE = 0.25
"""Share of the time for local search before the first round."""

_ROUND_S = 2.0
"""Seconds of CP-SAT in a round."""

_FEWEST_GPUS = 3
_MOST_GPUS = 6
_MOST_PLACES = 3000
"""Pieces × GPUs of a round; fewer GPUs are taken where there would be more."""

_FEW_GPUS = 8
_RECUT_TABLES = 6
_CHEAPEST_CUTS = 16
"""On so few GPUs, so many tables have so many of their cheapest cuts to choose from."""

_IDLE_ROUNDS = 40
"""Rounds in a row without a gain after which the search ends."""


class Lns:
    """The strategy of this module's docstring."""

    name = "lns"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search to the gap or a limit. See `Solver.solve`.

        Raises
        ------
        BackendError
            If CP-SAT rejects a model.
        """
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = pooled_bound(instance)
        target_s = bound.step_time_s * (1 + limits.gap)
        packing = best_packing(instance, bound, clock)
        rounds = 0
        if packing is not None and instance.gpus > 1:
            packing = iterated_search(
                packing, target_s=target_s, seed=limits.seed, clock=clock.part(_SEARCH_SHARE)
            )
            packing, rounds = neighbourhood_search(
                packing, bound, target_s=target_s, seed=limits.seed, clock=clock
            )
        return result_of(
            self.name,
            instance,
            packing,
            bound=bound,
            clock=clock,
            started=started,
            stats={"rounds": rounds},
        )


def neighbourhood_search(
    packing: Packing, bound: PooledBound, *, target_s: float, seed: int, clock: Clock
) -> tuple[Packing, int]:
    """The best packing that rounds of CP-SAT find, and how many rounds there were."""
    rng = random.Random(seed)
    best = current = packing
    rounds = idle = 0
    gpus = _FEWEST_GPUS
    while not clock.spent and best.step_time_s > target_s and idle < _IDLE_ROUNDS:
        clock.step()
        rounds += 1
        idle += 1
        everywhere = packing.instance.gpus <= _FEW_GPUS and rounds % 2 == 0
        found = (
            _recut_round(current, bound, rng, clock)
            if everywhere
            else _round(current, bound, gpus, rng, clock)
        )
        if found is None:
            continue
        improve(found, clock)
        if load_key(found) < load_key(current) * (1 - 1e-7):
            current = found
        if found.step_time_s < best.step_time_s * (1 - 1e-7):
            best, idle = found, 0
        elif idle % 8 == 0:  # Wider where a few GPUs have nothing left to gain.
            gpus = min(gpus + 1, _MOST_GPUS)
    return best, rounds


def _round(
    packing: Packing, bound: PooledBound, number: int, rng: random.Random, clock: Clock
) -> Packing | None:
    """A packing in which some GPUs are packed anew, the slowest one among them."""
    instance = packing.instance
    times = packing.times_s
    slow = int(times.argmax())
    others = [gpu for gpu in range(instance.gpus) if gpu != slow]
    # Half of the time those with room to take work over, else any.
    if rng.random() < 0.5:
        others = [others[i] for i in np.argsort(times[others], kind="stable")[: 2 * number]]
    chosen = [slow, *rng.sample(others, min(number - 1, len(others)))]
    while len(chosen) > 1:
        free, loose = _content(packing, chosen)
        cuts = {table: _cuts(packing, bound, table, len(chosen)) for table in free}
        pieces = len(loose) + sum(cut.pieces for options in cuts.values() for cut in options)
        if pieces * len(chosen) <= _MOST_PLACES:
            break
        chosen.pop()
    else:
        return None
    program = Program(
        instance,
        chosen,
        cuts,
        float(times[slow]),
        price_list(bound.price_s_per_byte),
        loose=loose,
        replicas=packing.replicas,
    )
    program.hint(packing)
    limits = replace(clock.limits, seed=rng.randrange(1 << 30), gap=1e-5)
    answer = program.run(limits, min(_ROUND_S, max(0.1, clock.left_s)))
    if answer.pairs is None:
        return None
    change: Change = {gpu: [] for gpu in chosen}
    for piece, gpu in answer.pairs:
        change[gpu].append(piece)
    return packing.changed({gpu: sorted(mine) for gpu, mine in change.items()})


def _recut_round(
    packing: Packing, bound: PooledBound, rng: random.Random, clock: Clock
) -> Packing | None:
    """A packing in which some tables are cut, replicated or not, and all are placed anew."""
    instance = packing.instance
    cut_of = {piece.table: piece.cut for mine in packing.pieces for piece in mine}
    cut_of |= {piece.table: piece.cut for piece in packing.replicas}
    tables = sorted(table for table in cut_of if not instance.in_group(table))
    free = set(rng.sample(tables, min(_RECUT_TABLES, len(tables))))
    upper_s = packing.step_time_s
    cuts = {}
    for table in sorted(free):
        works = [w for w in bound.cuts[table] if w.longest_s <= upper_s]
        works.sort(key=lambda work: (work.priced_s, work.cut))
        options = [work.cut for work in works[:_CHEAPEST_CUTS]]
        cuts[table] = list(dict.fromkeys([cut_of[table], *options]))
    loose = [piece for mine in packing.pieces for piece in mine if piece.table not in free]
    kept = [replica for replica in packing.replicas if replica.table not in free]
    pieces = len(loose) + sum(cut.pieces for options in cuts.values() for cut in options)
    if pieces * instance.gpus > _MOST_PLACES:
        return None
    program = Program(
        instance,
        range(instance.gpus),
        cuts,
        upper_s,
        price_list(bound.price_s_per_byte),
        loose=loose,
        replicas=kept,
    )
    program.hint(packing)
    limits = replace(clock.limits, seed=rng.randrange(1 << 30), gap=1e-5)
    answer = program.run(limits, min(_ROUND_S, max(0.1, clock.left_s)))
    if answer.pairs is None:
        return None
    return Packing.of(instance, answer.pairs, [*kept, *answer.replicas])


def _content(packing: Packing, gpus: list[int]) -> tuple[list[int], list[Piece]]:
    """Tables that these GPUs alone serve, and their pieces of other tables."""
    held = {piece for gpu in gpus for piece in packing.pieces[gpu]}
    count: dict[int, int] = {}
    for piece in held:
        count[piece.table] = count.get(piece.table, 0) + 1
    cut_of = {piece.table: piece.cut for piece in held}
    replicated = {piece.table for piece in packing.replicas}
    whole = [
        table
        for table, pieces in count.items()
        if len(packing.instance.pieces(table, cut_of[table])) == pieces
        and table not in replicated
        and not packing.instance.in_group(table)
    ]
    free = sorted(whole)
    return free, sorted(piece for piece in held if piece.table not in set(free))


def _cuts(packing: Packing, bound: PooledBound, table: int, most: int) -> list[Cut]:
    """Cuts for a table that stays without replicas, the one that it has among them."""
    return [cut for cut in packing.instance.cuts_of(table) if cut.pieces <= most and not cut.head]
