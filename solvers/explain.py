"""Why a table is where it is: its rows' worth against the price of HBM, and its alternatives.

Every alternative changes one table and leaves all others as they are; its cost is the cost
model's answer for the whole plan so changed. Of the rows of an alternative as many are in HBM
as save time and fit beside the other tables.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cost_models import CostModel, CostReport, PieceCurve
from placer.errors import PlacerError
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.units import format_bytes
from solvers._bound import pooled_bound
from solvers._build import build_plan, overfull
from solvers._fill import fill
from solvers._instance import Cut, Instance, Piece, Placement
from solvers._placements import placements_of

Constraint = Literal["hbm", "dram", "hottest row", "work"]

_MOST_GPUS = 8
"""Other GPUs that a table is tried on, those with room and the least load first."""

_PRICE_SHARE = 1 / 64
"""Share of a GPU's HBM over which its price is measured: far more than a row, far less than all."""

_FULL = 0.99
"""A memory that is filled to this share counts as full: rows and buffers do not come in bytes."""

_REFILLS = 12


@dataclass(frozen=True, slots=True)
class PieceMargin:
    """The worth of HBM at the split of one piece of a table, beside its price.

    Attributes
    ----------
    device : str
        The GPU that serves the piece.
    rows, hot_rows : int
        Rows of the piece, and those of them in HBM.
    last_s_per_byte, next_s_per_byte : float or None
        Seconds per byte that the coldest rows in HBM save, and that the hottest rows in DRAM
        would save; None where there are none.
    gpu_price_s_per_byte : float or None
        What one more byte of this GPU's HBM would save of its time, refilled with all its
        pieces; None if it serves a placement that solvers do not search.
    """

    device: str
    rows: int
    hot_rows: int
    last_s_per_byte: float | None
    next_s_per_byte: float | None
    gpu_price_s_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another placement of the table, everything else as it is.

    Attributes
    ----------
    name : str
        For people.
    step_time_s : float
        Of the whole plan, whether it fits or not.
    table_s : float
        Time of the table by itself, summed over GPUs.
    short_bytes : dict of device to int
        What the plan lacks; empty if it fits.
    plan : Plan
    """

    name: str
    step_time_s: float
    table_s: float
    short_bytes: dict[str, int]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Binding:
    """A constraint that keeps the table from a better placement, and how."""

    constraint: Constraint
    device: str
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What decided the placement of one table.

    Attributes
    ----------
    current : Alternative
        The placement as it is.
    pooled_price_s_per_byte : float
        The price of HBM if all GPUs' were one pool, in GPU seconds per byte.
    margins : tuple of PieceMargin
    alternatives : tuple of Alternative
        All rows in HBM and none, then other GPUs and cuts: those that fit first, fastest first.
    bindings : tuple of Binding
    """

    table: str
    current: Alternative
    pooled_price_s_per_byte: float
    margins: tuple[PieceMargin, ...]
    alternatives: tuple[Alternative, ...]
    bindings: tuple[Binding, ...]


def explain(problem: Problem, plan: Plan, table: str, cost_model: CostModel) -> Explanation:
    """Explain the placement of `table` in `plan`.

    Raises
    ------
    PlacerError
        If the plan has no such table, or places it in a way that the solvers' search space
        does not have: replicated, cached, read in place, or by uneven slices.
    """
    if table not in plan.tables_by_name:
        raise PlacerError(f"the plan has no table {table!r}; it has {_some(plan)}")
    asked = _Question(problem, plan, table, cost_model)
    margins = tuple(
        _margin(asked, placed, gpu_price)
        for placed, gpu_price in ((p, _gpu_price(asked, p.gpu)) for p in asked.placements)
    )
    current = asked.answer("as planned", plan)
    others = sorted(
        (*_on_other_gpus(asked), *_other_cuts(asked)),
        key=lambda other: (bool(other.short_bytes), other.step_time_s),
    )
    return Explanation(
        table,
        current,
        pooled_bound(asked.instance).price_s_per_byte,
        margins,
        (*_other_splits(asked), *others),
        tuple(_bindings(asked)),
    )


def _some(plan: Plan) -> str:
    names = list(plan.tables_by_name)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


class _Question:
    """The plan, what the table has in it, and what there is without the table."""

    def __init__(self, problem: Problem, plan: Plan, table: str, cost_model: CostModel) -> None:
        self.plan, self.table, self.cost_model = plan, table, cost_model
        self.problem = problem
        self.instance = Instance(problem, cost_model)
        self.number = problem.profile.table_names.index(table)
        placements = placements_of(self.instance, plan, table)
        if placements is None:
            raise PlacerError(
                f"table {table!r} is placed in a way that solvers do not search, so there is "
                "nothing to compare it with; --explain knows strided row slices and strips of "
                "columns, each on one GPU, in HBM, staged or split"
            )
        self.placements = placements
        self.rest = replace(plan, shards=tuple(s for s in plan.shards if s.table != table))
        self.cost = cost_model.evaluate(problem, plan)
        self.rest_cost = cost_model.evaluate(problem, self.rest)
        gpus = problem.topology.gpus
        memory = self.rest_cost.memory
        self.free_hbm = [memory[gpu.id].free_bytes for gpu in gpus]
        self.rest_s = [gpu.total_s for gpu in self.rest_cost.gpus]

    def with_placements(self, placements: Sequence[Placement]) -> Plan:
        """The plan with the table placed otherwise."""
        made = build_plan(self.instance, placements)
        row_order = {k: v for k, v in self.plan.row_order.items() if k != self.table}
        hot_ids = {k: v for k, v in self.plan.hot_ids.items() if k != self.table}
        return replace(
            self.rest,
            shards=(*self.rest.shards, *made.shards),
            row_order={**row_order, **made.row_order},
            hot_ids={**hot_ids, **made.hot_ids},
        )

    def answer(self, name: str, plan: Plan) -> Alternative:
        """What a plan costs that differs in this table alone."""
        alone = replace(plan, shards=plan.shards_by_table[self.table])
        table_cost = self.cost_model.evaluate(self.problem, alone)
        return Alternative(
            name,
            self.cost_model.evaluate(self.problem, plan).step_time_s,
            sum(gpu.total_s for gpu in table_cost.gpus),
            overfull(plan),
            plan,
        )

    def filled(self, pieces: Sequence[tuple[Piece, int]]) -> Plan:
        """The plan with these pieces on these GPUs, and as many rows in HBM as help and fit."""
        spare = [0] * self.instance.gpus
        for attempt in range(_REFILLS):
            placements = []
            for piece, gpu in pieces:
                room = float(self.free_hbm[gpu] - spare[gpu])
                filling = fill([self.instance.ladder(piece, gpu)], room)
                hot = 0 if filling is None else filling.hot_rows[0]
                placements.append(Placement(piece, gpu, hot))
            plan = self.with_placements(placements)
            excess = overfull(plan)
            over = [excess.get(gpu.id, 0) for gpu in self.problem.topology.gpus]
            if not any(over[p.gpu] and p.hot_rows for p in placements):
                break
            spare = [s + (o << attempt) for s, o in zip(spare, over, strict=True)]
        return plan


def _margin(asked: _Question, placed: Placement, gpu_price: float | None) -> PieceMargin:
    curve = asked.instance.curve(placed.piece, placed.gpu)
    return PieceMargin(
        asked.problem.topology.gpus[placed.gpu].id,
        int(curve.hot_rows[-1]),
        placed.hot_rows,
        _saving(curve, placed.hot_rows, before=True),
        _saving(curve, placed.hot_rows, before=False),
        gpu_price,
    )


def _saving(curve: PieceCurve, hot_rows: int, *, before: bool) -> float | None:
    """Seconds per byte of HBM that the rows just before (or after) a split save."""
    if before:
        last = int(np.searchsorted(curve.hot_rows, hot_rows, side="left"))
    else:
        last = int(np.searchsorted(curve.hot_rows, hot_rows, side="right"))
    if not 0 < last < curve.hot_rows.size:
        return None
    extra = float(curve.hbm_bytes[last] - curve.hbm_bytes[last - 1])
    saved = float(curve.gpu_s[last - 1] - curve.gpu_s[last])
    # Rows that every step stages take as many bytes in its buffer: in HBM they cost nothing.
    return saved / extra if extra > 0 else float("inf") if saved > 0 else 0.0


def _gpu_price(asked: _Question, gpu: int) -> float | None:
    """Seconds per byte that a little more HBM on one GPU saves of its time."""
    ladders = []
    device = asked.problem.topology.gpus[gpu].id
    served = dict.fromkeys(s.table for s in asked.plan.shards if device in s.devices)
    for table in served:
        placements = placements_of(asked.instance, asked.plan, table)
        if placements is None:
            return None
        ladders += [asked.instance.ladder(p.piece, gpu) for p in placements if p.gpu == gpu]
    hbm_bytes = float(asked.instance.hbm_bytes[gpu])
    more = hbm_bytes * _PRICE_SHARE
    now, then = fill(ladders, hbm_bytes), fill(ladders, hbm_bytes + more)
    if now is None or then is None:
        return None
    return max(0.0, now.gpu_s - then.gpu_s) / more


def _other_splits(asked: _Question) -> Iterator[Alternative]:
    """All rows in one tier, the pieces where they are."""
    instance, placed = asked.instance, asked.placements
    rows = [int(instance.curve(p.piece, p.gpu).hot_rows[-1]) for p in placed]
    for name, counts in (("all rows in HBM", rows), ("all rows in DRAM", [0] * len(rows))):
        moved = [Placement(p.piece, p.gpu, n) for p, n in zip(placed, counts, strict=True)]
        if moved != placed:
            yield asked.answer(name, asked.with_placements(moved))


def _other_cuts(asked: _Question) -> Iterator[Alternative]:
    instance = asked.instance
    current = asked.placements[0].piece.cut
    for cut in instance.cuts_of(asked.number):
        # Strips in the other order are the same cut.
        same = (cut.ways, sorted(cut.widths)) == (current.ways, sorted(current.widths))
        if same or cut.pieces > instance.gpus:
            continue
        pieces = instance.pieces(asked.number, cut)
        gpus = _roomy_first(asked, pieces[0])
        yield asked.answer(_cut_name(cut), asked.filled(list(zip(pieces, gpus, strict=False))))


def _on_other_gpus(asked: _Question) -> Iterator[Alternative]:
    """The slowest piece of the table on other GPUs, which serve none of it."""
    placed = asked.placements
    times = [gpu.total_s for gpu in asked.cost.gpus]
    slowest = max(placed, key=lambda p: (times[p.gpu], -p.gpu))
    taken = {p.gpu for p in placed}
    others = [gpu for gpu in _roomy_first(asked, slowest.piece) if gpu not in taken]
    for gpu in others[:_MOST_GPUS]:
        pairs = [(p.piece, gpu if p is slowest else p.gpu) for p in placed]
        ids = asked.problem.topology.gpus
        what = "" if len(placed) == 1 else f"slice of {ids[slowest.gpu].id} "
        yield asked.answer(f"{what}on {ids[gpu].id}", asked.filled(pairs))


def _roomy_first(asked: _Question, piece: Piece) -> list[int]:
    """GPUs in the order to try them: where the piece's buffers fit, then by load."""

    def lacks_room(gpu: int) -> bool:
        return asked.free_hbm[gpu] < float(asked.instance.ladder(piece, gpu).values[0].min())

    return sorted(
        range(asked.instance.gpus), key=lambda gpu: (lacks_room(gpu), asked.rest_s[gpu], gpu)
    )


def _cut_name(cut: Cut) -> str:
    if cut.widths:
        return f"{len(cut.widths)} strips of {'+'.join(map(str, cut.widths))} columns"
    return "in one piece" if cut.ways == 1 else f"{cut.ways} row slices"


def _bindings(asked: _Question) -> Iterator[Binding]:
    """What keeps the table from being faster, strongest first."""
    topology, cost = asked.problem.topology, asked.cost
    cold = [p for p in asked.placements if _saving_rows(asked, p)]
    for device in dict.fromkeys(topology.gpus[p.gpu].id for p in cold):
        use = cost.memory[device]
        if use.total_bytes >= _FULL * use.capacity_bytes:
            yield Binding(
                "hbm",
                device,
                f"{format_bytes(use.free_bytes)} of {format_bytes(use.capacity_bytes)} are free, "
                "and it has rows in DRAM that HBM would make faster",
            )
    for host in dict.fromkeys(topology.gpus[p.gpu].host for p in asked.placements):
        use = cost.memory[host]
        if use.capacity_bytes and use.total_bytes >= _FULL * use.capacity_bytes:
            yield Binding(
                "dram", host, f"{format_bytes(use.free_bytes)} are free for rows that are cold"
            )
    yield from _hottest_row(asked)
    yield _work(asked, cost)


def _saving_rows(asked: _Question, placed: Placement) -> bool:
    saving = _saving(asked.instance.curve(placed.piece, placed.gpu), placed.hot_rows, before=False)
    return saving is not None and saving > 0


def _hottest_row(asked: _Question) -> Iterator[Binding]:
    """Slices share the rows, but not the lookups of one row."""
    cut = asked.placements[0].piece.cut
    profile = asked.problem.profile.tables[asked.number]
    top = float(profile.cdf.share(1))
    if cut.ways > 1 and top * cut.ways > 0.5:
        device = asked.problem.topology.gpus[
            next(p.gpu for p in asked.placements if p.piece.offset == 0)
        ].id
        yield Binding(
            "hottest row",
            device,
            f"one row takes {top:.1%} of the lookups; an even slice of {cut.ways} has "
            f"{1 / cut.ways:.1%}, so more slices would not make the first one much faster",
        )


def _work(asked: _Question, cost: CostReport) -> Binding:
    """What the slowest of its GPUs waits for, and how far that GPU is from the slowest of all."""
    times = {gpu.device: gpu for gpu in cost.gpus}
    gpus = {asked.problem.topology.gpus[p.gpu].id for p in asked.placements}
    slowest = max((times[g] for g in sorted(gpus)), key=lambda gpu: gpu.total_s)
    alone = asked.cost_model.evaluate(
        asked.problem, replace(asked.plan, shards=asked.plan.shards_by_table[asked.table])
    )
    mine = next(gpu for gpu in alone.gpus if gpu.device == slowest.device)
    parts = {
        "HBM bandwidth": mine.hbm_s,
        "the host link": mine.link_s,
        "communication": mine.communication_s,
        "kernel launches": mine.launch_s,
    }
    most = max(parts, key=lambda part: parts[part])
    share = parts[most] / mine.total_s if mine.total_s else 0.0
    behind = 1 - slowest.total_s / cost.step_time_s if cost.step_time_s else 0.0
    slowest_of_all = cost.bottleneck.rsplit(" ", 1)[0]
    place = (
        "the slowest device"
        if behind < 1e-9
        else f"{behind:.2%} faster than the slowest device, {slowest_of_all}"
    )
    return Binding("work", slowest.device, f"{most} is {share:.0%} of its time there; {place}")
