"""Construct a first assignment: choose sharding options, then put shards on GPUs, largest first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType

import numpy as np

from cost_models.arenas import Arena
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Block, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, PHASES, Bool, Float

Homes = Mapping[Arena, Bool]
"""For some arenas, the GPUs that serve them, shape (GPUs,); other arenas go anywhere."""

_ANYWHERE: Homes = MappingProxyType({})

_ATTEMPTS = ((0.5, 1.0), (1.0, 1.0), (1.0, 2.0), (1.0, 8.0), (1.0, 64.0))
"""Largest shard, as a share of a GPU's HBM, and the price of HBM for which lookups of cold rows are
chosen, as a multiple of the bound's. Each attempt starts with the options of the last. Without the
others, and without fewer replicas, test_buffers_of_lookups_that_nearly_fill_hbm fails."""

_FEWER_REPLICAS = 16
"""Number of attempts with ever fewer replicated tables."""

_NORM = 5
"""Packing minimises the sum of phase times to this power."""

_MOST_FINER = 2.0
"""Skip options with more than this multiple of the shards that a long shard calls for."""

_LEAST_WEIGHT = 1e-4
"""Weight of a phase in no counted chain: the final step may wait for it."""


def construct(instance: Instance, bound: LagrangianBound, target_s: float) -> Assignment | None:
    """Shard tables for a step of `target_s` seconds and assign them; None if they do not fit."""
    options = options_for(instance, bound, target_s)
    return None if options is None else packed(instance, options, bound.price_s_per_byte)


def options_for(
    instance: Instance, bound: LagrangianBound, target_s: float
) -> list[ShardingOption] | None:
    """Return the cheapest sharding option of each table whose shards take at most `target_s`.

    None if a table has no such option.
    """
    works = [bound.option_for(table, target_s) for table in range(instance.tables)]
    options = [work.option for work in works if work is not None]
    return options if len(options) == len(works) else None


def short_options(
    instance: Instance,
    options: Sequence[ShardingOption],
    price: float,
    longest_share: float,
    allowed: Sequence[Sequence[ShardingOption]] | None = None,
) -> list[ShardingOption]:
    """Return sharding options without shards that a phase of the step would wait for.

    A phase ends when its slowest GPU ends. So a shard that takes longer than the mean GPU's phase
    makes all others wait, even if its table is small. A table with such a shard gets the option
    that costs the step least. The cost is the table's work, shared by all GPUs, plus the time of
    its longest shard in each phase beyond `longest_share` of the mean GPU's time.

    - `options`: the present option of each table.
    - `price`: seconds that a byte of HBM is worth.
    - `longest_share`: share of the mean GPU's time in a phase that a shard may take without cost.
    - `allowed`: the options to choose from for each table; all by default.
    """
    weights, index = instance.objective.weights, instance.price_index(price)
    times = {
        table: _phases_of(instance, table, option, index)
        for table, option in enumerate(options)
        if not _is_served(instance, table, option, price)
    }
    sharing = instance.gpus - (instance.servers if instance.dram_price else 0)
    mean_s = np.sum([total_s for _, total_s in times.values()], axis=0) / sharing
    limit_s = longest_share * mean_s

    def cost_s(table: int, option: ShardingOption) -> tuple[float, float]:
        longest_s, total_s = _phases_of(instance, table, option, index)
        work_s = weights @ total_s + price * instance.option_costs_at(table, option, index)[BYTES]
        if instance.dram_price:
            work_s = instance.option_costs_at(table, option, index) @ (price, 1.0)
        over_s = weights @ np.maximum(0.0, longest_s - limit_s)
        return float(work_s / instance.gpus + over_s), float(over_s)

    chosen, known = list(options), dict[object, ShardingOption]()
    for table, (longest_s, _) in times.items():
        every = instance.options_of(table) if allowed is None else allowed[table]
        key = instance.alike[table], options[table], tuple(every)
        if key in known:
            chosen[table] = known[key]
            continue
        excess = np.divide(longest_s, limit_s, out=np.zeros_like(longest_s), where=limit_s > 0)
        if excess.max() > 1:
            others = _finer(every, options[table], float(excess.max()))
            costs: dict[ShardingOption, float] = {}
            enough: dict[tuple[int, bool], int] = {}
            for other in sorted(others, key=lambda one: (one.shard_count, one)):
                way = other.replicated_rows, bool(other.column_widths)
                # Dividing shards further only adds work if nothing waits for them.
                if other.shard_count > enough.get(way, other.shard_count):
                    continue
                costs[other], over_s = cost_s(table, other)
                if not over_s:
                    enough.setdefault(way, other.shard_count)
            chosen[table] = min(costs, key=lambda one: (costs[one], one))
        known[key] = chosen[table]
    return chosen


def options_at_price(
    instance: Instance, options: Sequence[ShardingOption], price: float
) -> list[ShardingOption]:
    """Return each table's option with the cheapest lookup of cold rows at a price of HBM."""
    cost_s = _costs_at(instance, price)
    chosen = []
    for table, option in enumerate(options):
        every = instance.options_of(table)
        alike = [one for one in every if one._replace(cold=option.cold) == option]
        chosen.append(min(alike, key=partial(cost_s, table)))
    return chosen


def _costs_at(
    instance: Instance, price: float
) -> Callable[[int, ShardingOption], tuple[float, ShardingOption]]:
    """Return a function of table and option: seconds at a price of HBM, with the option."""
    index, worth = instance.price_index(price), np.array([price, 1.0])
    return lambda table, one: (float(instance.option_costs_at(table, one, index) @ worth), one)


def _is_served(instance: Instance, table: int, option: ShardingOption, price: float) -> bool:
    """Return whether a server serves a table's shards at the bound's prices of memory.

    Where these were counted as the GPUs', two of five plans were 9 and 36% slower.
    """
    shards = instance.shards(table, option)
    if not (instance.servers and instance.dram_price and shards):
        return False
    index = instance.price_index(price)
    on_gpu, on_server = (instance.costs_at(shards[0], gpu, index) for gpu in (0, instance.gpus - 1))
    return bool(instance.server_share * on_server[GPU_S] < on_gpu[GPU_S] + price * on_gpu[BYTES])


def _finer(
    options: Sequence[ShardingOption], option: ShardingOption, times: float
) -> list[ShardingOption]:
    """Return an option, and others of about that many times its shards, or with replicas."""
    most = _MOST_FINER * times * option.shard_count
    way = option.cold, option.home
    return [o for o in options if (o.cold, o.home) == way and o.shard_count <= most]


def _phases_of(
    instance: Instance, table: int, option: ShardingOption, index: int
) -> tuple[Float, Float]:
    """Return phase seconds of a table's longest shard and of all its shards, shapes (phases,).

    Both include replicas, as every GPU has them.
    """
    gpu, shards = instance.kinds[0], instance.shards(table, option)
    every_s = np.zeros(instance.rows_of_costs)[PHASES]
    for replica in instance.replicas(table, option):
        every_s = instance.costs_at(replica, gpu, 0)[PHASES]
    if not shards:
        return every_s, instance.gpus * every_s
    # Costs of row slices lie between those of the first and the last slice.
    ends = [instance.costs_at(shard, gpu, index)[PHASES] for shard in (shards[0], shards[-1])]
    total_s = len(shards) * (ends[0] + ends[1]) / 2
    return every_s + np.maximum(*ends), instance.gpus * every_s + total_s


def packed(
    instance: Instance, options: Sequence[ShardingOption], price: float, homes: Homes = _ANYWHERE
) -> Assignment | None:
    """Assign tables in these sharding options, or finer ones, to GPUs; None if they do not fit.

    Shards whose buffers take at most half a GPU's HBM pack best. Then try shards as large as a GPU,
    lookups with fewer buffers, fewer replicas, and whole tables with the fewest buffers, balanced.
    """
    tried: list[ShardingOption] = []
    for largest_share, factor in _ATTEMPTS:
        dearer = factor * price
        if factor > 1:
            options = options_at_price(instance, options, dearer)
        fitting = _options_that_fit(instance, options, largest_share)
        assignment = None if fitting == tried else pack(instance, fitting, dearer, homes)
        if assignment is not None:
            return assignment
        tried = fitting
    for fewer in _with_fewer_replicas(instance, options, price):
        assignment = pack(instance, _options_that_fit(instance, fewer, 1.0), price, homes)
        if assignment is not None:
            return assignment
    options = [_frugal_option(instance, table) for table in range(instance.tables)]
    fitting = _options_that_fit(instance, options, 1.0)
    return pack(instance, fitting, price, homes, by_buffers=True)


def pack(
    instance: Instance,
    options: Sequence[ShardingOption],
    price: float,
    homes: Homes = _ANYWHERE,
    *,
    by_buffers: bool = False,
) -> Assignment | None:
    """Assign tables in these sharding options to the GPUs that delay the step least.

    The `price` of a byte of HBM decides how many rows of each shard are assumed to be in HBM. With
    `by_buffers`, balance GPUs by the bytes of buffers.
    """
    shards, replicas = instance.sharded(options)
    blocks = instance.blocks(shards)
    loads = _Loads(instance, blocks, replicas, price, homes, by_buffers)
    for block in sorted(blocks, key=lambda b: (-loads.sizes[b], b)):
        if not loads.put(block):
            return None
    return Assignment.of(instance, loads.pairs, replicas)


class _Loads:
    """Loads of GPUs and hosts while blocks are packed one by one."""

    def __init__(
        self,
        instance: Instance,
        blocks: Sequence[Block],
        replicas: Sequence[TableShard],
        price: float,
        homes: Homes,
        by_buffers: bool,
    ) -> None:
        self.instance, self.price, self.homes, self.by_buffers = instance, price, homes, by_buffers
        self.kinds = np.array(instance.kind_of_gpu)
        index = instance.price_index(price)
        self.costs = {
            block: np.array(
                [
                    sum(instance.priced_costs(s, gpu)[:, index] for s in block)
                    for gpu in instance.kinds
                ]
            )
            for block in blocks
        }
        self.buffers = {  # Bytes with the fewest rows in HBM.
            block: sum(float(instance.priced_costs(s, instance.kinds[0])[BYTES, 0]) for s in block)
            for block in blocks
        }
        time_s = {block: float(cost[0, GPU_S]) for block, cost in self.costs.items()}
        self.sizes = self.buffers if by_buffers else time_s
        base = np.array(instance.replicated(tuple(replicas)).costs)
        self.capacity = instance.hbm_bytes - base[self.kinds, BYTES]
        self.hbm, self.least = self.capacity.copy(), np.zeros(instance.gpus)
        self.dram, self.hosts = instance.dram_bytes.copy(), np.array(instance.host_of_gpu)
        self.holders: dict[int, list[int]] = {}
        # Time that the first shard of an arena adds to a GPU.
        launch_s = [instance.launches_weighed_s(gpu) for gpu in instance.kinds]
        self.launch_s = np.array(launch_s)[self.kinds]
        self.launches_s = np.array(instance.launches_s)
        self.phase_s = base[self.kinds][:, PHASES]
        self.arenas: dict[Arena, Bool] = {}
        for arena in instance.arenas(replicas):
            self.arenas[arena] = np.ones(instance.gpus, dtype=bool)
            self.phase_s = self.phase_s + self.launches_s
        whole_s = np.sum([costs[0, PHASES] for costs in self.costs.values()], axis=0)
        # Measure phases by the mean GPU's final time in them.
        self.mean_s = np.maximum(1e-12, self.phase_s.mean(axis=0) + whole_s / instance.gpus)
        self.weights = np.maximum(instance.objective.weights, _LEAST_WEIGHT)
        self.pairs: list[tuple[TableShard, int]] = []
        # If DRAM has a price, prices decide between GPUs and servers.
        self.served = instance.servers if instance.dram_price else 0

    def put(self, block: Block) -> bool:
        """Assign a block to the GPU that is least full afterwards; false if none has room."""
        cost = self.costs[block][self.kinds]
        # HBM that a GPU lacks makes a shard slower, not impossible: prefer room, and
        # insist on the buffers alone.
        allowed = self.instance.open_gpus(block) & (
            self.least + self.buffers[block] <= self.capacity
        )
        # If drives take rows, cold rows are counted after HBM has been filled.
        if not self.instance.lacks_dram:
            allowed &= cost[:, DRAM_BYTES] <= self.dram[self.hosts]
        for shard in block:
            allowed[self.holders.get(shard.table, [])] = False
        if not self.by_buffers and self.served and allowed.any():
            worth_s = cost[:, GPU_S] + self.price * cost[:, BYTES]
            worth_s[-self.served :] = self.instance.server_share * cost[-self.served :, GPU_S]
            allowed &= worth_s <= worth_s[allowed].min()
        for arena in sorted(self.instance.arenas(block) & self.homes.keys()):
            if (allowed & self.homes[arena]).any():
                allowed &= self.homes[arena]
        short_s = np.maximum(0.0, cost[:, BYTES] - self.hbm) * self.price
        arenas = [self._arena(arena) for arena in self.instance.arenas(block)]
        phase_s = cost[:, PHASES]
        for present in arenas:
            short_s += np.where(present, 0.0, self.launch_s)
            phase_s = phase_s + np.where(present[:, None], 0.0, self.launches_s)
        score = self.least - self.capacity
        if not self.by_buffers:
            score = self._delay(phase_s) + _NORM * short_s
        score = np.where(allowed, score, np.inf)
        gpu = int(np.argmin(score))
        if not np.isfinite(score[gpu]):
            return False
        for present in arenas:
            present[gpu] = True
        for shard in block:
            self.pairs.append((shard, gpu))
            if shard.option.shard_count > 1:
                self.holders.setdefault(shard.table, []).append(gpu)
        self.phase_s[gpu] += phase_s[gpu]
        self.hbm[gpu] -= cost[gpu, BYTES]
        self.least[gpu] += self.buffers[block]
        self.dram[self.hosts[gpu]] -= cost[gpu, DRAM_BYTES]
        return True

    def _arena(self, arena: Arena) -> Bool:
        """Return which GPUs have shards of an arena, shape (GPUs,)."""
        if arena not in self.arenas:
            self.arenas[arena] = np.zeros(self.instance.gpus, dtype=bool)
        return self.arenas[arena]

    def _delay(self, added_s: Float) -> Float:
        """Return what adding `added_s`, shape (GPUs, phases), adds to the sum of powers."""
        before, after = self.phase_s / self.mean_s, (self.phase_s + added_s) / self.mean_s
        delay: Float = (after**_NORM - before**_NORM) @ (self.weights * self.mean_s)
        return delay


def _frugal_option(instance: Instance, table: int) -> ShardingOption:
    """Return the option of the whole table that needs the least HBM."""

    def least_hbm(option: ShardingOption) -> float:
        needed = *instance.replicas(table, option), *instance.shards(table, option)
        return sum(float(instance.costs_at(one, instance.kinds[0], 0)[BYTES]) for one in needed)

    return min((c for c in instance.options_of(table) if c.shard_count == 1), key=least_hbm)


def _with_fewer_replicas(
    instance: Instance, options: Sequence[ShardingOption], price: float
) -> Iterator[list[ShardingOption]]:
    """Yield options with ever fewer replicated tables; those that gain most by it stay longest.

    The others are whole. Replicas take HBM of every GPU, so none may have room for a large shard.
    """
    cost_s = _costs_at(instance, price)
    whole: dict[int, tuple[float, ShardingOption]] = {}
    for table, option in enumerate(options):
        every = instance.options_of(table)
        others = [o for o in every if o.shard_count == 1 and not o.replicated_rows]
        if option.replicated_rows and others:
            least_s, other = min(cost_s(table, one) for one in others)
            whole[table] = least_s - cost_s(table, option)[0], other
    fewer, step = list(options), -(-len(whole) // _FEWER_REPLICAS)
    for number, table in enumerate(sorted(whole, key=whole.__getitem__), 1):
        fewer[table] = whole[table][1]
        if number % step == 0 or number == len(whole):
            yield list(fewer)


def _options_that_fit(
    instance: Instance, options: Sequence[ShardingOption], largest_share: float
) -> list[ShardingOption]:
    """Return options, with more row slices where a shard is too large.

    A shard is too large if its buffers take more than `largest_share` of a GPU's HBM or than
    replicas leave of it, or if no host has room for its cold rows.
    """
    of_tables = (instance.replicas(table, option) for table, option in enumerate(options))
    base = np.array(instance.replicated(tuple(chain.from_iterable(of_tables))).costs)
    gpu, most = instance.kinds[0], float(instance.hbm_bytes.max())
    room = float((instance.hbm_bytes - base[instance.kind_of_gpu, BYTES]).max())
    room, dram_room = min(room, most * largest_share), float(instance.dram_bytes.max()) + most

    def fits(table: int, option: ShardingOption) -> bool:
        first = [instance.costs_at(s, gpu, 0) for s in instance.shards(table, option)[:1]]
        return all(one[BYTES] <= room and one[DRAM_BYTES] <= dram_room for one in first)

    def fitting(table: int, option: ShardingOption) -> ShardingOption:
        if fits(table, option):
            return option
        more = [one for one in instance.options_of(table) if one.shard_count > option.shard_count]
        way = (), option.replicated_rows, option.cold, option.home
        finer = [o for o in more if (o.column_widths, o.replicated_rows, o.cold, o.home) == way]
        return next((one for one in finer if fits(table, one)), [option, *finer][-1])

    return [fitting(table, option) for table, option in enumerate(options)]
