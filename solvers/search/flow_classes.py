"""Classes of about equal shards and their cheapest flows to GPUs, for `solvers.strategies.flow`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
import numpy.typing as npt

from solvers.model.instance import Block, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, Float

_EVERY = 3
"""Of the instance's prices, so many are one at which GPUs are balanced."""

_UNLIMITED = 2**53
"""Shards that a device has room for at most: bytes of nearly nothing go in infinitely often."""

_UNITS = 10_000
"""Costs of arcs are whole numbers: this many for the longest shard of a class."""

_CLASS_PER_GPU = 2
_ARCS_PER_GPU = 8
"""Sizes of networks: shards of a class per GPU, and how many one GPU can get of them."""


@dataclass
class FlowState:
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
        GPUs that serve a shard of a sharded table.
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
    ) -> "FlowState":
        """A state with only replicas assigned; `ahead_s` has the errors of an earlier round."""
        kinds = np.array(instance.kind_of_gpu)
        price_indices, usual = _balanced_prices(instance, price)
        prices = instance.prices[price_indices]
        shards, replicas = instance.sharded(options)
        base = np.array(instance.replicated(tuple(replicas)).costs)[kinds]
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
        """The same with `added` cost on each GPU: at the price that is worst for it, by duality."""
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


def classes_of(state: FlowState, ratio: float) -> Iterator[list[Block]]:
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


def cheapest_flow(state: FlowState, members: Sequence[Block]) -> dict[Block, int] | None:
    """The GPU of each block of a class in the cheapest flow; None if none takes them all."""
    groups: dict[tuple[int, bytes], list[Block]] = {}
    for block in members:
        table = block[0].table if block[0].option.shard_count > 1 else -1
        groups.setdefault((table, state.allowed(block).tobytes()), []).append(block)
    graph = nx.MultiDiGraph()
    graph.add_node("sink", demand=len(members))
    for number, ((table, mask), blocks) in enumerate(groups.items()):
        graph.add_node(("group", number), demand=-len(blocks))
        each = 1 if table >= 0 else len(blocks)
        for gpu in np.flatnonzero(np.frombuffer(mask, dtype=bool)).tolist():
            graph.add_edge(("group", number), ("gpu", gpu), capacity=each)
    _add_gpu_arcs(graph, state, members)
    _add_host_arcs(graph, state, members)
    try:
        _, flows = nx.network_simplex(graph)
    except nx.NetworkXUnfeasible:
        return None
    gpu_of_block: dict[Block, int] = {}
    for number, blocks in enumerate(groups.values()):
        gpus = [
            gpu
            for (_, gpu), arcs in flows["group", number].items()
            for _ in range(sum(arcs.values()))
        ]
        gpu_of_block |= dict(zip(blocks, gpus, strict=True))
    return gpu_of_block


def _add_gpu_arcs(graph: nx.MultiDiGraph, state: FlowState, members: Sequence[Block]) -> None:
    """Arcs from GPUs to hosts: each further block on a GPU costs what it delays the GPU by."""
    instance = state.instance
    each_s = np.mean([state.cost[block] for block in members], axis=0)
    to_come = state.to_come
    state.to_come = to_come - len(members) * each_s.mean(axis=0) / instance.gpus
    done_s = [state.done_with_s(more * each_s) for more in range(1, _ARCS_PER_GPU + 1)]
    state.to_come = to_come
    unit_s = max(state.size_s[block] for block in members) / _UNITS or 1.0
    least_bytes = max(state.least_bytes[block] for block in members)
    first_s = float(done_s[0].min())
    for gpu, host in enumerate(instance.host_of_gpu):
        room = len(members)
        if least_bytes > 0:
            room = int(min(max(0.0, state.hbm[gpu]) // least_bytes, _UNLIMITED))
        for more in range(1, min(room, len(members), _ARCS_PER_GPU) + 1):
            weight = round((float(done_s[more - 1][gpu]) - first_s) / unit_s)
            graph.add_edge(("gpu", gpu), ("host", host), capacity=1, weight=weight)


def _add_host_arcs(graph: nx.MultiDiGraph, state: FlowState, members: Sequence[Block]) -> None:
    """Arcs from hosts to the sink: as many blocks as the host's DRAM has room for."""
    colder = np.max([state.colder_by(block) for block in members], axis=0)
    cold_bytes = np.zeros(state.dram.size)
    np.maximum.at(cold_bytes, state.instance.host_of_gpu, colder)
    for host, left in enumerate(state.dram.tolist()):
        room = len(members)
        if cold_bytes[host] > 0:
            room = int(min(max(0.0, left) // cold_bytes[host], _UNLIMITED))
        graph.add_edge(("host", host), "sink", capacity=min(room, len(members)))


def _balanced_prices(instance: Instance, price: float) -> tuple[npt.NDArray[np.int64], int]:
    """Indices of the prices at which GPUs are balanced, and of the one next to `price`."""
    last = instance.prices.size - 1
    usual = instance.price_index(price)
    usual = max(usual, min(1, last))
    return np.unique([*range(min(1, last), last, _EVERY), usual, last]), usual
