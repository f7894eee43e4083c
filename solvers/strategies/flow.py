"""Assignment by min-cost flow: shards to GPUs, one class of about equal shards at a time.

Which GPU serves which shard is a transportation problem where shards take equal time, and its
min-cost flow is integral (Ahuja, Magnanti and Orlin 1993, "Network Flows", chapter 9): nothing
has to be rounded. Shards are therefore classed by what they cost, and the classes are assigned
from the largest shards to the smallest, each by the flow

    table → GPU    at most 1 where the table is cut: its shards go to different GPUs. No arc to
                   a GPU that may not serve it, or that serves a shard of it already
    GPU → host     one arc for each further shard, at the time when the GPU would then be done:
                   parallel arcs of rising cost, so that the cost of a GPU's load is convex. No
                   more arcs than it has HBM for buffers of such shards
    host → sink    as many as the host's memory has room for cold rows of such shards

Inside a class, larger shards then go where the flow has left most room. When a GPU is done is
not a sum of times, for what a shard costs depends on the HBM that is left for it. By duality, as
in `solvers.bounds.lagrangian`, it is

    max over prices λ of  Σ over its shards of (time + λ · bytes)  −  λ · HBM

which adds up shard by shard at each of a few prices; the shards still to come count as shared
evenly. With everything assigned, each GPU's HBM is filled exactly, and the next round starts
with what was wrong with each GPU's time, and with wider or narrower classes. (Classes of equal
shards alone, the narrowest, leave little to the flow: then it is a greedy.) Rounds are repeated for
tables cut as the bound would cut them for shorter and longer steps.

Networks are small, since shards that may go to the same GPUs are one node, and solved by
networkx's network simplex in milliseconds: fit for thousands of shards on a hundred GPUs, a round
of which takes about a second. Where the time limit strikes before the first plan, what is left is
assigned shard by shard.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
import numpy.typing as npt

from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, Float
from solvers.search.construction import construct
from solvers.strategies._base import Search, Strategy

Block = tuple[TableShard, ...]

_TARGETS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 1.03, 1.2, 2.5)
"""Step times, as shares of the bound, for which tables are cut."""

_RATIOS = (1.1, 1.02, 1.05, 1.0, 1.2, 1.0, 1.15, 1.0, 1.3, 1.03)
"""Largest over smallest cost in a class, a round each."""

_EVERY = 3
"""Of the instance's prices, so many are one at which GPUs are balanced."""

_CLASS_PER_GPU = 2
_ARCS_PER_GPU = 8
"""Sizes of networks: shards of a class per GPU, and how many one GPU can get of them."""

_DAMPING = 0.5

_PATIENCE = 5
_LEAST_GAIN = 1e-3
"""Rounds in a row without so much gain after which tables are cut anew."""

_UNITS = 10_000
"""Costs of arcs are whole numbers: this many for the longest shard of a class."""


class Flow(Strategy):
    """The strategy of this module's docstring."""

    name = "flow"
    no_plan = (
        "no assignment fits: every GPU needs room for the buffers of its shards, and every host "
        "for their cold rows; raise --hbm or lower --batch-size, or try `greedy-cost`"
    )

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Cut, assign by flows, fill, price anew: the best of all rounds."""
        _Rounds(search).run()
        return [] if search.best is None else [search.best]


class _Rounds:
    """Rounds of assignments, which improve a search's best one."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.rounds = 0
        self.flows = 0

    def run(self) -> None:
        """All rounds of all sharding options, as far as the clock lets them come; at least one."""
        search, bound = self.search, self.search.lagrangian
        tried = set[tuple[ShardingOption, ...]]()
        for target in _TARGETS:
            options = _options_for(search.instance, bound, target * bound.step_time_s)
            if options is None or tuple(options) in tried:
                continue
            tried.add(tuple(options))
            self._rounds_of(options)
            if search.is_over:
                break
        search.stats |= {"rounds": self.rounds, "flows": self.flows}

    def _rounds_of(self, options: Sequence[ShardingOption]) -> None:
        """Assign tables cut in one way, again and again with corrected times."""
        search, instance = self.search, self.search.instance
        ahead_s = np.zeros(instance.gpus)
        least_s, idle = np.inf, 0
        for ratio in _RATIOS:
            state = _State.empty(instance, options, search.lagrangian.price_s_per_byte, ahead_s)
            for members in _classes(state, ratio):
                self._assign(state, members)
            self.rounds += 1
            search.clock.step()
            assignment = (
                Assignment.of(instance, state.pairs, state.replicas) if state.complete else None
            )
            if assignment is None:
                if search.clock.spent:
                    return
                continue
            better = assignment.step_time_s < least_s * (1 - _LEAST_GAIN)
            least_s, idle = min(least_s, assignment.step_time_s), 0 if better else idle + 1
            search.keep(assignment)
            if search.is_over or idle == _PATIENCE:
                return
            wrong_s = assignment.times_s - (state.done_s - ahead_s)
            ahead_s = _DAMPING * (wrong_s - wrong_s.mean())

    def _assign(self, state: "_State", members: Sequence[Block]) -> None:
        """Put the blocks of a class on GPUs, in two halves where no flow takes them all."""
        if len(members) == 1 or (self.search.clock.spent and self.search.best is None):
            for block in members:
                state.put_first(block)
            return
        self.flows += 1
        flow = _flow(state, members)
        if flow is not None:
            state.put_all(members, flow)
            return
        middle = len(members) // 2
        self._assign(state, members[:middle])
        self._assign(state, members[middle:])


@dataclass
class _State:
    """Where blocks are so far in a round.

    Attributes
    ----------
    cost : dict of Block to float64, shape (gpus, prices)
        Seconds of a block on each GPU, its HBM included, at each price.
    size_s : dict of Block to float
        The same at the bound's price, on the GPU where it is least.
    load : float64, shape (gpus, prices)
        The same of what each GPU has.
    to_come : float64, shape (prices,)
        What is still to be assigned, shared evenly.
    ahead_s : float64
        Seconds by which GPUs are taken to be done later than their load says.
    cold_bytes, all_bytes, least_bytes : dict of Block to float
        Rows that are not worth HBM at the bound's price; everything; buffers in HBM alone.
    hbm, dram : float64
        Bytes left for buffers on GPUs, and for cold rows on hosts.
    cold, everything : float64, shape (gpus,)
        Sums of cold and of all bytes of each GPU.
    holders : dict of int to set of int
        GPUs that serve a shard of a sharding option table.
    """

    instance: Instance
    blocks: list[Block]
    replicas: list[TableShard]
    cost: dict[Block, Float]
    size_s: dict[Block, float]
    cold_bytes: dict[Block, float]
    all_bytes: dict[Block, float]
    least_bytes: dict[Block, float]
    load: Float
    to_come: Float
    ahead_s: Float
    hbm: Float
    dram: Float
    cold: Float
    everything: Float
    pairs: list[tuple[TableShard, int]] = field(default_factory=list)
    holders: dict[int, set[int]] = field(default_factory=dict)

    @classmethod
    def empty(
        cls, instance: Instance, options: Sequence[ShardingOption], price: float, ahead_s: Float
    ) -> "_State":
        """Nothing assigned but replicas; `ahead_s` is what an earlier round was wrong by."""
        kinds = np.array(instance.kind_of_gpu)
        price_indices, usual = _rungs(instance, price)
        prices = instance.prices[price_indices]
        shards, replicas = instance.sharded(options)
        base = np.array([instance.replica_costs(replicas, gpu) for gpu in instance.kinds])[kinds]
        hbm = instance.hbm_bytes - base[:, BYTES]
        blocks = instance.blocks(shards)
        cost, size_s, cold_bytes, all_bytes, least_bytes = {}, {}, {}, {}, {}
        for block in blocks:
            values = np.array(
                [sum(instance.priced_costs(p, g) for p in block) for g in instance.kinds]
            )
            at_price = values[:, :, price_indices]
            cost[block] = (at_price[:, GPU_S] + prices * at_price[:, BYTES])[kinds]
            size_s[block] = float(cost[block][:, price_indices == usual].min())
            cold_bytes[block] = float(values[0, DRAM_BYTES, usual])
            all_bytes[block] = float(values[0, BYTES, -1] + values[0, DRAM_BYTES, -1])
            least_bytes[block] = float(values[0, BYTES, 0])
        return cls(
            instance,
            blocks,
            replicas,
            cost,
            size_s,
            cold_bytes,
            all_bytes,
            least_bytes,
            base[:, GPU_S, None] - prices * hbm[:, None],
            np.sum([c.mean(axis=0) for c in cost.values()], axis=0) / instance.gpus,
            ahead_s,
            hbm,
            instance.dram_bytes.copy(),
            np.zeros(instance.gpus),
            base[:, BYTES].copy(),
        )

    @property
    def done_s(self) -> Float:
        """When each GPU will be done, with its share of what is to come."""
        return self.done_with_s(0.0)

    def done_with_s(self, added: Float | float) -> Float:
        """The same with more on it: at the price that is worst for it, by duality."""
        done: Float = (self.load + added + self.to_come).max(axis=-1) + self.ahead_s
        return done

    @property
    def complete(self) -> bool:
        """Whether every block has a GPU."""
        return len(self.pairs) == sum(map(len, self.blocks))

    def allowed(self, block: Block) -> npt.NDArray[np.bool_]:
        """The GPUs that may serve a block, room aside."""
        open_ = self.instance.open_gpus(block)
        open_[list(self.holders.get(block[0].table, ()))] = False
        return open_

    def colder_by(self, block: Block) -> Float:
        """Bytes that each GPU would have more in DRAM: not worth its HBM, or without room there."""
        hbm_bytes = self.instance.hbm_bytes
        now = np.maximum(self.cold, self.everything - hbm_bytes)
        more, every = self.cold_bytes[block], self.all_bytes[block]
        then: Float = np.maximum(self.cold + more, self.everything + every - hbm_bytes)
        return np.maximum(then, 0.0) - np.maximum(now, 0.0)

    def put(self, block: Block, gpu: int) -> None:
        """Assign a block."""
        self.pairs += [(shard, gpu) for shard in block]
        self.load[gpu] += self.cost[block][gpu]
        self.to_come -= self.cost[block].mean(axis=0) / self.instance.gpus
        self.hbm[gpu] -= self.least_bytes[block]
        self.dram[self.instance.host_of_gpu[gpu]] -= self.colder_by(block)[gpu]
        self.cold[gpu] += self.cold_bytes[block]
        self.everything[gpu] += self.all_bytes[block]
        if block[0].option.shard_count > 1:
            self.holders.setdefault(block[0].table, set()).add(gpu)

    def put_first(self, block: Block) -> None:
        """Assign a block to the GPU that is then done first, if any has room for it."""
        room = (self.hbm >= self.least_bytes[block]) & (
            self.dram[self.instance.host_of_gpu] >= self.colder_by(block)
        )
        open_ = self.allowed(block) & room
        after = np.where(open_, self.done_with_s(self.cost[block]), np.inf)
        gpu = int(after.argmin())
        if np.isfinite(after[gpu]):
            self.put(block, gpu)

    def put_all(self, members: Sequence[Block], flow: dict[Block, int]) -> None:
        """Assign blocks: to each GPU as many as the flow says, larger ones to where more room is.

        Where that leaves a block no GPU, each goes where the flow has it.
        """
        left = np.bincount(list(flow.values()), minlength=self.instance.gpus)
        each = np.mean([self.cost[block] for block in members], axis=0)
        extra = np.zeros_like(self.load)
        chosen: dict[Block, int] = {}
        taken: dict[int, list[int]] = {}
        for block in members:
            open_ = self.allowed(block) & (left > 0)
            open_[taken.get(block[0].table, [])] = False
            if not open_.any():
                chosen = flow
                break
            # Done earliest with all that it is to get of average size: most room for each.
            done = self.done_with_s(extra + left[:, None] * each)
            share = np.where(open_, (done - done.max()) / np.maximum(left, 1), np.inf)
            gpu = int(share.argmin())
            chosen[block] = gpu
            left[gpu] -= 1
            extra[gpu] += self.cost[block][gpu]
            if block[0].option.shard_count > 1:
                taken.setdefault(block[0].table, []).append(gpu)
        for block in members:
            self.put(block, chosen[block])


def _classes(state: _State, ratio: float) -> Iterator[list[Block]]:
    """Blocks of about equal cost, the most costly first."""
    size_s = state.size_s
    members: list[Block] = []
    for block in sorted(state.blocks, key=lambda b: (-size_s[b], b)):
        if members and (
            len(members) == _CLASS_PER_GPU * state.instance.gpus
            or size_s[block] * ratio < size_s[members[0]]
        ):
            yield members
            members = []
        members.append(block)
    if members:
        yield members


def _flow(state: _State, members: Sequence[Block]) -> dict[Block, int] | None:
    """The GPU of each block of a class in the cheapest flow; None if none takes them all."""
    instance = state.instance
    groups: dict[tuple[int, bytes], list[Block]] = {}
    for block in members:
        table = block[0].table if block[0].option.shard_count > 1 else -1
        groups.setdefault((table, state.allowed(block).tobytes()), []).append(block)
    each_s = np.mean([state.cost[block] for block in members], axis=0)
    to_come = state.to_come
    state.to_come = to_come - len(members) * each_s.mean(axis=0) / instance.gpus
    done_s = [state.done_with_s(more * each_s) for more in range(1, _ARCS_PER_GPU + 1)]
    state.to_come = to_come
    unit_s = max(state.size_s[block] for block in members) / _UNITS or 1.0
    least = max(state.least_bytes[block] for block in members)
    colder = np.max([state.colder_by(block) for block in members], axis=0)
    cold = np.zeros(state.dram.size)
    np.maximum.at(cold, instance.host_of_gpu, colder)
    graph = nx.MultiDiGraph()
    graph.add_node("sink", demand=len(members))
    for number, ((table, mask), blocks) in enumerate(groups.items()):
        graph.add_node(("group", number), demand=-len(blocks))
        each = 1 if table >= 0 else len(blocks)
        for gpu in np.flatnonzero(np.frombuffer(mask, dtype=bool)).tolist():
            graph.add_edge(("group", number), ("gpu", gpu), capacity=each)
    first_s = float(done_s[0].min())
    for gpu, host in enumerate(instance.host_of_gpu):
        room = len(members) if least <= 0 else int(max(0.0, state.hbm[gpu]) // least)
        for more in range(1, min(room, len(members), _ARCS_PER_GPU) + 1):
            weight = round((float(done_s[more - 1][gpu]) - first_s) / unit_s)
            graph.add_edge(("gpu", gpu), ("host", host), capacity=1, weight=weight)
    for host, left in enumerate(state.dram.tolist()):
        room = len(members) if cold[host] <= 0 else int(max(0.0, left) // cold[host])
        graph.add_edge(("host", host), "sink", capacity=min(room, len(members)))
    try:
        _, flows = nx.network_simplex(graph)
    except nx.NetworkXUnfeasible:
        return None
    found: dict[Block, int] = {}
    for number, blocks in enumerate(groups.values()):
        gpus = [
            gpu
            for (_, gpu), arcs in flows["group", number].items()
            for _ in range(sum(arcs.values()))
        ]
        found |= dict(zip(blocks, gpus, strict=True))
    return found


def _rungs(instance: Instance, price: float) -> tuple[npt.NDArray[np.int64], int]:
    """Numbers of the instance's prices that are looked at, and of the one next to `price`."""
    last = instance.prices.size - 1
    usual = instance.price_index(price)
    usual = max(usual, min(1, last))
    return np.unique([*range(min(1, last), last, _EVERY), usual, last]), usual


def _options_for(
    instance: Instance, bound: LagrangianBound, target_s: float
) -> list[ShardingOption] | None:
    """Sharding options of all tables for a step time of `target_s`, or for less than is possible.

    For less, tables are cut more finely, so that shards are easy to balance.
    """
    start = construct(instance, bound, max(target_s, bound.step_time_s))
    if start is None:
        return None
    options = [start.option_of[table] for table in range(instance.tables)]
    if target_s >= bound.step_time_s:
        return options
    fine = [_fine_option(instance, bound, table, target_s) for table in range(instance.tables)]
    # Where memory asks for more shards than time does, those.
    return [
        max(pair, key=lambda option: option.shard_count) for pair in zip(fine, options, strict=True)
    ]


def _fine_option(
    instance: Instance, bound: LagrangianBound, table: int, target_s: float
) -> ShardingOption:
    """The cheapest sharding option with shards of at most `target_s`, or else of not much more."""
    work = bound.option_for(table, target_s)
    if work is not None:
        return work.option
    known = bound.options[table]
    shortest = min(known, key=lambda work: (work.longest_s, work.option))
    if any(work.option.shard_count > 1 for work in known) or not np.isfinite(shortest.longest_s):
        return shortest.option
    # The bound has looked at whole tables alone: as many row slices as the time asks for.
    slices = [
        c for c in instance.options_of(table) if not c.column_widths and not c.replicated_rows
    ]
    enough = [option for option in slices if option.row_slices * target_s >= shortest.longest_s]
    return min(enough, key=lambda option: option.row_slices, default=shortest.option)
