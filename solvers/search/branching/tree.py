"""Search by branch and bound over how tables are cut and served; see the package."""

import heapq
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.search.branching.branches import Branches, Examined, Scores
from solvers.search.branching.formulation import Formulation
from solvers.search.branching.nodes import Node, Relaxed, first_groups, rounded
from solvers.search.branching.program import GroupProgram
from solvers.search.moves import improve

_NEARLY = 1 - 1e-6

_GROWTH = 1 / 3
"""Exponent of a search's gap in its time: half the gap takes about eight times as long."""

_USED = 0.8
"""Choose the next search's gap so that it takes about this share of the time left."""

_LARGEST_STEP, _LEAST_STEP = 0.5, 0.95
"""Limits of a search's gap, as shares of the last search's gap."""


_MOST_POINTS = 2_000_000
"""Merge similar points if all curves have more; give up if more are left."""

_ROOT_ROUNDS, _NODE_ROUNDS, _MOST_ROUNDS = 12, 2, 8
"""Largest number of programs for the root, for any other node, and for one that lacks points."""

_GAP_FACTOR = 0.7
"""Share of the known gap that the first search looks for. It also limits the gap of a search after
one that found a better plan."""

_ARENA_SHARE = 0.2
"""Decide arenas first if the launches of one take this share of a step."""

_ROUNDED_SHARE = 0.1
"""Share of the time for rounding relaxations."""

_ARENA_GPUS = 4
"""Up to this many GPUs, decide first how many of them have each arena, if launches take much of a
step."""

Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""The built-in `map`, or `map` of a pool of threads."""


class Round(NamedTuple):
    """A search for plans below a target. If time ends first, the next search continues it."""

    target: float  # Step time, in units of the formulation.
    nodes: list[Node] | None = None  # A heap that holds all these plans; None at the beginning.
    decided: float = math.inf  # Least bound of decided nodes, which have no parts.
    took: float = 0.0  # Seconds so far, or programs if steps are limited.


class BranchAndBound:
    """A branch-and-bound search: see `branch_and_bound`.

    Attributes
    ----------
    best : Assignment
    bound_s : float
        Proven lower bound of every plan's step time.
    programs : int
        Number of linear programs solved.
    formulation : Formulation
    roots : list of Node or None
        Nodes with their first relaxations, which together hold all plans below `below_s`: the whole
        search space, or its parts by which tables servers hold.
    """

    def __init__(
        self,
        best: Assignment,
        instance: Instance,
        price_s_per_byte: float,
        clock: Clock,
        most_gap: float,
        programs: int,
        before: "BranchAndBound | None" = None,
    ) -> None:
        self.best, self.clock = best, clock
        self.most_gap, self.most_programs = most_gap, programs
        self.roots: list[Node] | None = None
        self.unfinished: Round | None = None
        self.below_s = best.step_time_s
        self.bound_s = 0.0
        if before is not None and before.formulation.instance is instance:
            formulation, self.bound_s = before.formulation, before.bound_s
            self._scores: Scores = before._scores
            if self.below_s <= before.below_s:
                self.roots, self.below_s = before.roots, before.below_s
                self.unfinished = before.unfinished
        else:
            formulation = Formulation(instance, best.step_time_s, price_s_per_byte, _MOST_POINTS)
            self._scores = Scores(formulation)
        self.formulation: Formulation = formulation
        self.unit_s = self.formulation.unit_s
        self._gap = 0.0
        self.programs = 0
        self._rounded_s = 0.0
        self._begin_s = clock.left_s
        launches = float((self.formulation.launches @ self.formulation.members[0]).min())
        self._are_arenas_first = (
            instance.gpus <= _ARENA_GPUS and launches >= _ARENA_SHARE * self.limit
        )
        # Maps over relaxations, and over nodes that are examined together.
        self._map: Map = map
        self._map_nodes: Map = map
        self._at_once = 1
        self._rounding = threading.Lock()
        self._is_over = False

    @property
    def proven_s(self) -> float:
        """The bound, at most the best plan's step: rounding errors may lift it above."""
        return min(self.bound_s, self.best.step_time_s)

    @property
    def limit(self) -> float:
        """The best plan's step time, in units of the formulation."""
        return self.best.step_time_s / self.unit_s

    @property
    def spent(self) -> bool:
        """Whether to stop now; once true, it stays so, as parts of nodes may be missing."""
        if not self._is_over:
            programs = self.clock.repeats and self.programs >= self.most_programs
            self._is_over = self.clock.spent or programs
        return self._is_over

    def run(self, gap: float) -> None:
        """Run `search` with a thread for each core, or with one if steps are limited.

        With several threads, limited steps would end each run at another program.
        """
        threads = self.clock.limits.thread_count
        if self.clock.repeats or threads == 1:
            self.search(gap)
            return
        # Nodes wait for their relaxations, so each has a pool of its own.
        with ThreadPoolExecutor(threads) as nodes, ThreadPoolExecutor(threads) as relaxations:
            self._map_nodes, self._map, self._at_once = nodes.map, relaxations.map, threads
            self.search(gap)

    def search(self, gap: float) -> None:
        """Search until no plan is left that is faster than the best by a share of `gap`.

        Each round looks only for plans that are faster by a given share, and leaves out all else.
        The share begins large, so that first rounds are short, and shrinks.
        """
        if self.roots is None:
            self.roots = self._first()
        if self.roots is None:
            return
        self._prove(min((root.bound for root in self.roots), default=math.inf))
        self._gap = gap * _NEARLY  # Meet the gap in spite of rounding.
        if not self.bound_s:  # Rounds look for shares of the known gap.
            return
        known = self.best.step_time_s / self.bound_s - 1
        if not self._gap < known <= self.most_gap:
            return
        may_gain, factor, known_s = True, _GAP_FACTOR, 0.0
        while not self.spent and may_gain:
            current = self.unfinished
            # Its target may be below the bound by now.
            if current is None or current.target * self.unit_s <= self.bound_s:
                wanted = (self.best.step_time_s / self.bound_s - 1) * factor
                current = Round(self.limit / (1 + max(self._gap, wanted)))
            left = self._left
            may_gain = self._search(self.roots, current) and current.target < self._target(math.inf)
            # A round that does not end proves little, so it has to fit into the time left. One
            # that begins with a poor plan examines more nodes.
            share = (current.took + left - self._left) / max(_USED * self._left, 1e-9)
            largest = _LARGEST_STEP if self.best.step_time_s == known_s else _GAP_FACTOR
            factor = min(max(largest, share**_GROWTH), _LEAST_STEP)
            known_s = self.best.step_time_s

    def _first(self) -> list[Node] | None:
        """Return the roots with their relaxations; None if time is over."""
        f = self.formulation
        options = np.arange(len(f.options))
        extra = np.where(f.cheap_options, 0.0, np.inf)
        root = Node(0.0, 0, 0, first_groups(f), {}, options, extra, f.first_points)
        found = self._relaxed(root, self.limit, _ROOT_ROUNDS)
        if not found.is_solved:
            return None
        parts = [root.with_relaxation(found)]
        if not f.server_kinds.size:
            return parts
        while parts:
            divided = self._branches(math.inf).by_side(parts[0])
            if divided is None or self.spent:
                break
            parts = sorted(parts[1:] + divided)
        return parts

    @property
    def _left(self) -> float:
        """Seconds left, or programs if steps are limited."""
        return self.most_programs - self.programs if self.clock.repeats else self.clock.left_s

    def _prove(self, bound: float) -> None:
        self.bound_s = max(self.bound_s, min(bound, self.limit) * self.unit_s)

    def _branches(self, most: float) -> Branches:
        """Return how to divide nodes that may hold plans faster than `most`."""
        return Branches(
            self.formulation,
            self._scores,
            self._are_arenas_first,
            lambda nodes: self._examined(nodes, most),
            lambda: 0.0 if self.spent else self._target(most),
        )

    def _search(self, roots: Sequence[Node], current: Round) -> bool:
        """Examine all plans of a round; if time ends before, keep the round for the next search.

        Return false if fully decided nodes are left whose bounds are below the round's target:
        further rounds gain nothing.
        """
        most, began = current.target, self._left
        branches = self._branches(most)
        heap, decided = current.nodes, current.decided
        if heap is None:
            kept = branches.kept(roots)
            heap = [*roots] if self.spent else kept
            heapq.heapify(heap)
        numbers = len(heap)
        while heap and not self.spent and heap[0].bound < self._target(most):
            nodes = [heapq.heappop(heap) for _ in range(min(self._at_once, len(heap)))]
            found = self._map_nodes(branches.of, nodes)
            for node, children in zip(nodes, found, strict=True):
                if children is None:
                    decided = min(decided, node.bound)
                    continue
                # Once time is over, parts may be missing, so the node stays as it was.
                for child in [node] if self.spent else children:
                    numbers += 1
                    heapq.heappush(heap, replace(child, number=numbers))
        left, target = min((node.bound for node in heap), default=math.inf), self._target(most)
        self._prove(min(left, decided, target))
        took = current.took + began - self._left
        self.unfinished = Round(most, heap, decided, took) if left < target else None
        return decided >= min(left, target)

    def _target(self, most: float) -> float:
        """Return the step time that a plan must beat: `most`, or what meets the gap."""
        return min(most, self.limit / (1 + self._gap))

    def _examined(self, nodes: Sequence[Node], most: float) -> Iterator[Examined]:
        """Yield each node that may hold plans of interest, with its bound and remaining options.

        Nothing is examined once time is over.
        """
        target, tables = self._target(most), self.formulation.instance.tables
        nodes = [node for node in nodes if node.bound < target and not self.spent]
        rounds = _NODE_ROUNDS
        examined = self._map(lambda node: self._relaxed_and_placed(node, target, rounds), nodes)
        for node, found in zip(nodes, examined, strict=True):
            if not found.is_solved:
                yield Examined(node, None)
            elif found.bound < target:
                left = np.unique(self.formulation.table_of[found.options]).size
                if left == tables:
                    yield Examined(node.with_relaxation(found), found)

    def _relaxed(self, node: Node, most: float, rounds: int) -> Relaxed:
        if self.spent:
            return Relaxed.unknown(node)
        self.programs += 1
        left_s = math.inf if self.clock.repeats else self.clock.left_s
        return relaxed(self.formulation, node, most, min(left_s, 3600.0), rounds)

    def _relaxed_and_placed(self, node: Node, target: float, rounds: int) -> Relaxed:
        """Return a node's relaxation; also round it unless another thread is rounding."""
        found = self._relaxed(node, target, rounds)
        if found.is_solved and found.bound < target and self._rounding.acquire(blocking=False):
            try:
                self._round(node, found)
            finally:
                self._rounding.release()
        return found

    def _round(self, node: Node, found: Relaxed) -> None:
        """Round a relaxation to a placement, improve it, and keep it if it is the best."""
        left_s = self.clock.left_s
        spent_s = self._begin_s - left_s
        if not self.clock.repeats and self._rounded_s > _ROUNDED_SHARE * spent_s:
            return
        assignment = rounded(self.best.instance, self.formulation, node, found)
        if assignment is not None:
            improve(assignment, self.clock, reshard_tables=False)
            if assignment.step_time_s < self.best.step_time_s * 1.02:
                improve(assignment, self.clock)
            if assignment.step_time_s < self.best.step_time_s:
                self.best = assignment
        self._rounded_s += left_s - self.clock.left_s


def branch_and_bound(
    best: Assignment,
    price_s_per_byte: float,
    *,
    clock: Clock,
    gap: float = 0.0,
    most_gap: float = math.inf,
    programs: int = 25,
    bounding: Instance | None = None,
    before: BranchAndBound | None = None,
) -> BranchAndBound | None:
    """Look for plans that are faster than `best`, and prove how much faster any can be.

    Stop when no plan is left that is faster by a share of `gap`. Return None for a single GPU and
    for problems that are too large.

    - `price_s_per_byte`: a first price of HBM, in GPU seconds.
    - `most_gap`: stop after the first relaxation if the gap is larger. With 0, always stop there.
    - `programs`: largest number of programs if steps are limited.
    - `bounding`: the problem with more chains of phases, each a lower bound of a step; by default
      the problem of `best`.
    - `before`: an earlier search of the same problem, whose formulation and roots are reused.
    """
    instance = bounding or best.instance
    if instance.gpus == 1 or best.step_time_s <= 0:
        return None
    search = BranchAndBound(best, instance, price_s_per_byte, clock, most_gap, programs, before)
    f = search.formulation
    if not f.is_complete or not 0 < f.points.shape[1] <= _MOST_POINTS:
        return None
    search.run(gap)
    return search


def relaxed(
    formulation: Formulation, node: Node, most: float, time_limit_s: float, rounds: int
) -> Relaxed:
    """Return a node's relaxation after at most this many programs, each with more points.

    Once sides of tables are decided, more programs follow as long as the bound is below the node's:
    then they lack points, and their solution says nothing of what to decide next.
    """
    best: Relaxed | None = None
    deadline = time.monotonic() + time_limit_s
    for number in range(max(rounds, _MOST_ROUNDS)):
        if number >= rounds and (not node.sides or best is None or best.bound >= node.bound):
            break
        found = GroupProgram(formulation, node, most).solve(deadline - time.monotonic())
        if not found.is_solved:
            return best or found
        if best is None or found.bound >= best.bound:
            best = found
        if found.bound >= most or found.is_exact:
            break
        # The next program also has the options and points that are cheapest at these prices.
        extra = np.full(node.options.size, np.inf)
        extra[np.isin(node.options, found.options)] = found.extra
        points = np.union1d(node.points, found.points)
        node = replace(node, extra=np.minimum(extra, node.extra), points=points)
    assert best is not None, "there is at least one round"
    return best
