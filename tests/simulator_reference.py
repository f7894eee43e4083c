"""What a plan makes of batches, by loops over single lookups: slow, plain, and on its own.

Written from the documents of the plan format and of the pool's policy; shares no code with the
simulator or with the executor.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from placer.data.log import Chunk
from placer.plan.plan import Plan

Key = tuple[str, int, tuple[int, int]]
"""A part: table, number of the shard, columns."""

FADE = np.float32(0.5 ** (1 / 100))
ORDER = {"device": 0, "staged": 1, "cached": 2, "uva": 3, "host": 4}


def ranks_of(plan: Plan, name: str) -> list[int]:
    """The rank of each id of a table."""
    table = plan.tables_by_name[name]
    listed = [] if plan.order_of(name).kind == "id" else plan.hot_ids[name].tolist()
    ids = listed + [i for i in range(table.rows) if i not in set(listed)]
    ranks = [0] * table.rows
    for rank, one in enumerate(ids):
        ranks[one] = rank
    return ranks


def strips_of(plan: Plan, name: str) -> list[tuple[int, int]]:
    """The table's columns, cut wherever any of its shards begins or ends."""
    edges = {0, plan.tables_by_name[name].dim}
    for shard in plan.shards:
        if shard.table == name:
            edges |= set(shard.cols)
    ordered = sorted(edges)
    return list(pairwise(ordered))


def bag_of(chunk: Chunk, feature: str, sample: int) -> list[int]:
    bags = chunk.features[feature]
    if bags.offsets is None:
        return [int(bags.ids[sample])]
    return bags.ids[bags.offsets[sample] : bags.offsets[sample + 1]].tolist()


def lookups_by_device(
    plan: Plan, chunk: Chunk
) -> dict[tuple[int, tuple[int, int], str], Counter[int]]:
    """How often each device reads each rank, by shard and columns: one process for each GPU."""
    gpus = [gpu.id for gpu in plan.topology.gpus]
    found: dict[tuple[int, tuple[int, int], str], Counter[int]] = defaultdict(Counter)
    for table in plan.tables:
        ranks = ranks_of(plan, table.name)
        for process in range(len(gpus)):
            first = chunk.samples * process // len(gpus)
            last = chunk.samples * (process + 1) // len(gpus)
            for sample in range(first, last):
                for feature in table.features:
                    for one in bag_of(chunk, feature.name, sample):
                        for number, shard in enumerate(plan.shards):
                            if shard.table != table.name or ranks[one] not in range(*shard.rows):
                                continue
                            device = server_of(plan, shard.devices, process)
                            found[number, shard.cols, device][ranks[one]] += 1
    return found


def server_of(plan: Plan, devices: Sequence[str], process: int) -> str:
    """The GPU, or host, of a shard that serves a process's samples."""
    gpus = [gpu.id for gpu in plan.topology.gpus]
    serving = {device for shard in plan.shards for device in shard.devices}
    # Hosts without a GPU that serve anything come after the GPUs.
    order = gpus + [host.id for host in plan.topology.hosts if host.id in serving]
    places = {order.index(device): device for device in devices}
    holders = sorted(places)
    return places[process if process in holders else holders[process % len(holders)]]


class Pool:
    """HBM entries that staged and cached rows share."""

    def __init__(
        self, pieces: list[tuple[Key, range, int, int]], policy: str, ordered: Collection[str]
    ) -> None:
        self.policy, self.ordered = policy, ordered
        self.names: list[tuple[Key, int]] = []  # Of each slot: its part, and its place in it.
        self.quota: dict[Key, int] = {}
        staged_slots, entries, warm = 0, 0, []
        for key, rows, staging, cache in pieces:
            if cache:
                warm += range(len(self.names), len(self.names) + min(cache, len(rows)))
                self.quota[key] = cache
            else:
                staged_slots += len(rows)
            self.names += [(key, place) for place in range(len(rows))]
            entries += staging + cache
        self.first_cached = staged_slots
        self.slot = [-1] * entries
        self.used = [-1] * entries
        self.priority = [np.float32(0)] * entries
        self.dirty = [False] * entries
        for entry, slot in enumerate(warm):
            self.slot[entry], self.priority[entry] = slot, self.first(slot)

    def by_rank(self, slot: int) -> np.float32:
        key, place = self.names[slot]
        share = np.float32(place) / np.float32(self.quota.get(key, 1))
        return np.float32(1) / (np.float32(1) + share)

    def first(self, slot: int) -> np.float32:
        """What a row begins with; of an ordered table the hottest have 24 lookups, or half."""
        by_rank = self.by_rank(slot)
        if self.policy == "rank":
            return by_rank
        counted_on = by_rank > 0.5 and self.names[slot][0][0] in self.ordered
        return np.float32(24) * by_rank if counted_on else np.float32(0)

    def step(
        self, wanted: dict[int, int], ticket: int, oldest: int, left: set[int]
    ) -> dict[str, dict[int, int]]:
        """What becomes of each wanted slot, by the word for it; counts are of lookups."""
        where = {slot: entry for entry, slot in enumerate(self.slot) if slot >= 0}
        hits = {slot: times for slot, times in wanted.items() if slot in where}
        if self.policy == "lfu":
            self.priority = [priority * FADE for priority in self.priority]
        for slot, times in hits.items():
            self.used[where[slot]] = ticket
            if self.policy == "lfu":
                self.priority[where[slot]] += np.float32(times)
        free = [e for e, slot in enumerate(self.slot) if slot < 0]
        may_go = [e for e, slot in enumerate(self.slot) if slot >= 0 and self.used[e] < oldest]
        staged = [e for e in may_go if self.slot[e] < self.first_cached]
        cached = [e for e in may_go if self.slot[e] >= self.first_cached]
        staged.sort(key=lambda e: (-max(1, ticket - self.used[e]), e))
        cached.sort(key=lambda e: (self.priority[e], e))
        misses = sorted(set(wanted) - set(hits))
        room = (free + staged + cached)[: len([slot for slot in misses if slot not in left])]
        room.sort(key=lambda e: self.slot[e] if self.slot[e] >= 0 else len(self.names))
        copied: dict[int, int] = {}
        back: dict[int, int] = {}
        in_place: dict[int, int] = {}
        for slot in misses:
            if slot in left or len(copied) == len(room):
                in_place[slot] = wanted[slot]
                continue
            entry = room[len(copied)]
            if self.dirty[entry]:
                back[self.slot[entry]] = 1
            self.slot[entry], self.used[entry] = slot, ticket
            read = np.float32(wanted[slot] if self.policy == "lfu" else 0)
            self.priority[entry] = self.first(slot) + read
            copied[slot] = wanted[slot]
        for entry, slot in enumerate(self.slot):
            if slot in hits or slot in copied:
                self.dirty[entry] = True
        return {"hit": hits, "staged": copied, "in_place": in_place, "written_back": back}


def count(
    plan: Plan, batches: Sequence[Chunk], policy: str, ahead: bool
) -> dict[Key, Counter[str]]:
    """Everything that one process counts, by part."""
    found: dict[Key, Counter[str]] = defaultdict(Counter)
    arenas: dict[tuple[object, ...], list[Key]] = defaultdict(list)
    for table in plan.tables:
        strips = strips_of(plan, table.name)
        cut = table.optimizer == "rowwise_adagrad" and len(strips) > 1
        for cols in strips:
            for number, shard in enumerate(plan.shards):
                if shard.table == table.name and set(range(*cols)) <= set(range(*shard.cols)):
                    key = (table.dtype, cols[1] - cols[0], table.optimizer, cut)
                    arenas[key].append((table.name, number, cols))
    ranks = {table.name: ranks_of(plan, table.name) for table in plan.tables}
    pools: dict[tuple[object, ...], Pool] = {}
    ordered = [
        table.name
        for table in plan.tables
        if plan.order_of(table.name).kind != "id" or table.name in plan.hot_ids
    ]
    for arena, keys in arenas.items():
        pooled = [key for key in keys if plan.shards[key[1]].lookup in ("staged", "cached")]
        if not any(len(range(*plan.shards[key[1]].rows)) for key in pooled):
            continue

        def place(key: Key) -> tuple[int, str]:
            shard = plan.shards[key[1]]
            return ORDER[shard.lookup], plan.topology.gpus_by_id[shard.devices[0]].host

        pieces = []
        for key in sorted(pooled, key=place):
            shard = plan.shards[key[1]]
            pieces.append((key, range(*shard.rows), shard.staging_rows, shard.cache_rows))
        pools[arena] = Pool(pieces, policy, ordered)
    left_before: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for ticket, chunk in enumerate(batches):
        reads: dict[Key, Counter[int]] = defaultdict(Counter)
        for arena, keys in arenas.items():
            for key in keys:
                members = range(*plan.shards[key[1]].rows)
                for feature in plan.tables_by_name[key[0]].features:
                    for one in chunk.features[feature.name].ids.tolist():
                        if ranks[key[0]][one] in members:
                            reads[key][members.index(ranks[key[0]][one])] += 1
                found[key]["lookups"] += sum(reads[key].values())
                found[key]["rows"] += len(reads[key])
            if arena not in pools or not any(reads[key] for key in keys):
                left_before[arena] = set()
                continue
            pool = pools[arena]
            numbers = {name: slot for slot, name in enumerate(pool.names)}
            wanted = {
                numbers[key, place]: times
                for key in keys
                for place, times in reads[key].items()
                if (key, place) in numbers
            }
            oldest = max(0, ticket - 1) if ahead else ticket
            became = pool.step(wanted, ticket, oldest, left_before[arena] if ahead else set())
            left_before[arena] = set(became["in_place"])
            for word, slots in became.items():
                for slot, times in slots.items():
                    found[pool.names[slot][0]][f"{word}_rows"] += 1
                    found[pool.names[slot][0]][f"{word}_lookups"] += times
    return found
