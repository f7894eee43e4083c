"""Take a table off all GPUs, and rate its sharding options and where their shards go.

What depends on the GPUs alone is computed once. Each distinct shard is tried on all GPUs once,
however many sharding options have it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from solvers.model.assignment import Assignment, Change
from solvers.model.instance import Block, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, OF_GPU, Float, phases_at, phases_of_swaps
from solvers.model.shared_costs import total

MOST_SHARDS = 8
"""If an option has more shards than this, try them on all GPUs."""

_CANDIDATE_GPUS = MOST_SHARDS + 8
"""Otherwise try them on this many GPUs, the least loaded ones."""


class Without:
    """An assignment with one table taken off all GPUs."""

    def __init__(self, assignment: Assignment, table: int) -> None:
        instance = assignment.instance
        self.assignment, self.table = assignment, table
        self.holders = assignment.holders(table)
        self.phase_s = assignment.phase_s
        allowed = instance.allowed(table)
        order = np.argsort(assignment.times_s, kind="stable").tolist()
        self.least_loaded = [gpu for gpu in order if allowed is None or allowed[gpu]]
        self.replicas = tuple(shard for shard in assignment.replicas if shard.table != table)
        self.dropped = [shard for shard in assignment.replicas if shard.table == table]
        self.kept = {
            gpu: [shard for shard in assignment.shards[gpu] if shard.table != table]
            for gpu in self.holders
        }

    def rated(self, options: Sequence[ShardingOption]) -> list[float]:
        """Rate the objective with the table in each of some sharding options."""
        keys_s = [np.inf] * len(options)
        for numbers, room in self._rooms(options):
            found_s = room.spread([options[at] for at in numbers])[0]
            for at, key_s in zip(numbers, found_s, strict=True):
                keys_s[at] = float(key_s)
        return keys_s

    def spread(self, option: ShardingOption) -> tuple[Change, tuple[TableShard, ...]] | None:
        """Return the table's shards with the GPUs that they delay least, and its replicas.

        None if they do not fit.
        """
        ((_, room),) = self._rooms([option])
        (key_s,), (gpus,) = room.spread([option])
        if not np.isfinite(key_s):
            return None
        replicas = tuple(sorted((*self.replicas, *room.replicas)))
        change: Change = {gpu: list(mine) for gpu, mine in self.kept.items()}
        shards = self.assignment.instance.shards(self.table, option)
        for shard, gpu in zip(shards, gpus, strict=True):
            change.setdefault(gpu, list(self.assignment.shards[gpu])).append(shard)
        return {gpu: sorted(mine) for gpu, mine in change.items()}, replicas

    def _rooms(self, options: Sequence[ShardingOption]) -> Iterator[tuple[list[int], "_Room"]]:
        """Yield options with equally many shards and the same replicas, by number, with their room.

        They share all that depends on replicas alone.
        """
        instance = self.assignment.instance
        replicas: dict[tuple[object, ...], Block] = {}
        alike: dict[tuple[tuple[object, ...], bool], dict[int, list[int]]] = {}
        for at, option in enumerate(options):
            own = instance.replicas(self.table, option)
            count = len(instance.shards(self.table, option))
            everywhere = option.blocked or count > MOST_SHARDS
            key: tuple[object, ...] = tuple(replica.cost_key for replica in own)
            replicas[key] = own
            groups = alike.setdefault((key, everywhere), {})
            groups.setdefault(count, []).append(at)
        for (key, everywhere), groups in alike.items():
            homes = range(instance.gpus) if everywhere else self.least_loaded[:_CANDIDATE_GPUS]
            room = _Room(self, replicas[key], list(dict.fromkeys((*self.holders, *homes))))
            for numbers in groups.values():
                yield numbers, room


class _Room:
    """The GPUs with a table's replicas but not its shards, and what its shards would cost there."""

    def __init__(self, without: Without, replicas: Block, gpus: list[int]) -> None:
        assignment, table = without.assignment, without.table
        instance = self.instance = assignment.instance
        self.table, self.replicas, self.gpus = table, replicas, gpus
        sums = assignment.sums
        changed = [*((one, -1) for one in without.dropped), *((one, 1) for one in replicas)]
        for one, sign in changed:
            of_kinds = [instance.priced_costs(one, gpu)[OF_GPU] for gpu in instance.kinds]
            sums = sums + sign * np.array(of_kinds)[instance.kind_of_gpu]
        self.sums, self.hbm = sums[gpus].copy(), instance.hbm_bytes[gpus]
        for at, gpu in enumerate(gpus):
            if gpu in without.kept:
                mine = (shard for shard in assignment.shards[gpu] if shard.table == table)
                self.sums[at] -= total(instance, mine, gpu)
        phase_s = without.phase_s
        others = np.delete(np.arange(instance.gpus), gpus)
        if changed and others.size:
            hbm = instance.hbm_bytes[others]
            phase_s = phase_s.copy()
            phase_s[others] += phases_at(sums[others], hbm) - phases_at(
                assignment.sums[others], hbm
            )
        objective = instance.objective
        self.scale_s = objective.scale_s(phase_s)
        everywhere = instance.replicated(assignment.replicas).arenas.copy()
        everywhere.subtract(instance.arena_of(shard) for shard in without.dropped)
        everywhere.update(instance.arena_of(shard) for shard in replicas)
        replicated = {arena for arena, count in everywhere.items() if count}
        self.arenas = [
            instance.arenas(without.kept.get(gpu, assignment.shards[gpu])) | replicated
            for gpu in gpus
        ]
        self.launch_s = np.array([instance.launches_s[gpu] for gpu in gpus])
        launches_s = np.array([len(present) for present in self.arenas])[:, None] * self.launch_s
        self.besides_s = launches_s + assignment.arena_s(gpus)
        before_s = phases_at(self.sums, self.hbm) + self.besides_s
        self.powers = objective.powers(before_s, self.scale_s)
        rest = objective.powers(phase_s[others], self.scale_s).sum(axis=0)
        self.all_powers = rest + self.powers.sum(axis=0)
        self._after: dict[tuple[object, ...], Float] = {}
        is_full = instance.needs_servers and not instance.lacks_dram
        self.free_bytes = self._free_bytes(without) if is_full else None

    def _free_bytes(self, without: Without) -> Float:
        """Return the bytes of HBM of each GPU and of DRAM of its host that the table may take.

        Servers have no limit here.
        """
        assignment, instance = without.assignment, self.instance
        used = np.array([knapsack.hbm_bytes for knapsack in assignment.knapsacks])
        of_hosts = instance.dram_bytes - assignment.hosts({})[1]
        free = instance.hbm_bytes - used + of_hosts[instance.host_of_gpu]
        for gpu in without.holders:
            mine = (shard for shard in assignment.shards[gpu] if shard.table == self.table)
            free[gpu] += sum(instance.priced_costs(shard, gpu)[BYTES, -1] for shard in mine)
        free[instance.gpus - instance.servers :] = np.inf
        return np.asarray(free[self.gpus])

    def spread(self, options: Sequence[ShardingOption]) -> tuple[Float, list[list[int]]]:
        """Put the shards of options, equally many each, where they delay the step least.

        Return the rated objective, shape (options,), infinite if they do not fit; and the GPU of
        each shard.
        """
        objective = self.instance.objective
        every = np.arange(len(options))
        shards = [self.instance.shards(self.table, option) for option in options]
        powers = np.repeat(self.powers[None], len(options), axis=0)
        sums = np.repeat(self.all_powers[None], len(options), axis=0)
        taken = np.zeros(powers.shape[:2], dtype=bool)
        homes: list[list[int]] = [[] for _ in options]
        lost = np.zeros(len(options), dtype=bool)
        for each in zip(*shards, strict=True):
            after = np.array([self._with(shard) for shard in each])
            with np.errstate(invalid="ignore"):  # GPUs without room for the replicas.
                then = np.maximum(sums[:, None] - powers + after, 0.0)  # Rounding may leave less.
            keys_s = objective.norm_s(self.scale_s, then)
            keys_s[taken | ~np.isfinite(keys_s)] = np.inf
            at = keys_s.argmin(axis=1)
            lost |= ~np.isfinite(keys_s[every, at])
            sums = then[every, at]
            powers[every, at] = after[every, at]
            taken[every, at] = True  # A GPU serves at most one shard of a table.
            for mine, index in zip(homes, at.tolist(), strict=True):
                mine.append(self.gpus[index])
        keys_s = objective.norm_s(self.scale_s, sums)
        keys_s[lost] = np.inf
        return keys_s, homes

    def _with(self, shard: TableShard) -> Float:
        """Return each GPU's phases to the power if it also served a shard, shape (GPUs, phases).

        NaN if the GPU may not serve the shard.
        """
        instance = self.instance
        key = shard if shard.home_gpu is not None else shard.cost_key
        known = self._after.get(key)
        if known is None:
            kinds = [instance.kind_of_gpu[gpu] for gpu in self.gpus]
            if len(set(kinds)) == 1:
                added = instance.priced_costs(shard, self.gpus[0])[None, OF_GPU]
                then_s = phases_of_swaps(self.sums, added, self.hbm[:, None])[:, 0]
            else:
                of_kinds = [instance.priced_costs(shard, gpu)[OF_GPU] for gpu in instance.kinds]
                then_s = phases_at(self.sums + np.array(of_kinds)[kinds], self.hbm)
            arena = instance.arena_of(shard)
            new = np.array([arena not in present for present in self.arenas])
            then_s += self.besides_s + new[:, None] * self.launch_s
            known = instance.objective.powers(then_s, self.scale_s)
            known[~instance.open_gpus((shard,))[self.gpus]] = np.nan
            if self.free_bytes is not None:
                whole_bytes = instance.priced_costs(shard, instance.kinds[0])[BYTES, -1]
                known[whole_bytes > self.free_bytes] = np.nan
            self._after[key] = known
        return known
