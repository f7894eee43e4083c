"""Simulated annealing over assignments: many cheap moves instead of a few well-chosen ones.

Kirkpatrick et al. 1983, doi:10.1126/science.220.4598.671. A GPU's time is rated by the sums
of its shards' priced costs (`solvers.model.knapsack.least_times`), which a move changes for two
GPUs; nothing is filled exactly before the end. The energy is Σ (tᵢ/T)^p / p over the GPUs' times:
nearly the largest time alone, but lower with fewer slow GPUs.
"""

import math
import random
import time
from dataclasses import dataclass

from solvers.model.assignment import Assignment, total
from solvers.model.clock import Clock
from solvers.model.instance import ShardingOption, TableShard
from solvers.model.knapsack import BYTES, GPU_S, Float

Block = tuple[TableShard, ...]
"""Shards that move as one: mostly a single one."""


@dataclass(frozen=True, slots=True)
class AnnealingParams:
    """Knobs of `anneal`.

    Attributes
    ----------
    norm : int
        The p of the energy.
    temperatures : tuple of float
        At the start of a run, by turns: from one that leaves the best assignment behind to one
        that looks around it. What a move may cost, as a share of the step.
    cooling : float
        Temperature at the end of a run, beside that at its start.
    steps_per_place : int
        Steps of the first runs, for each table and GPU; later runs are longer.
    longest : int
        Times the first run's steps that a run may take.
    idle_runs : int
        Runs of the longest kind without a gain after which the search ends.
    resharded_below, swapped_below : float
        Of a random number in [0, 1): below the first a table is sharded anew, below the second
        two blocks are swapped, and else one is moved.
    most_shards : int
        Finer sharding options than this are not tried.
    steps_between_looks : int
        Steps between two looks at the clock.
    many_gpus : int
        On more GPUs than these, the slowest of a few is taken for the slowest of all.
    """

    norm: int = 24
    temperatures: tuple[float, ...] = (0.3, 0.03, 0.003)
    cooling: float = 1e-3
    steps_per_place: int = 600
    longest: int = 8
    idle_runs: int = 6
    resharded_below: float = 0.4
    swapped_below: float = 0.76
    most_shards: int = 8
    steps_between_looks: int = 256
    many_gpus: int = 64


def anneal(
    start: Assignment, *, target_s: float, seed: int, clock: Clock, params: AnnealingParams
) -> Assignment:
    """The best assignment of runs of growing length, each from the best one so far.

    Ends at `target_s` seconds, when the clock is spent, or when long runs gain nothing.
    """
    instance = start.instance
    best = start
    if instance.gpus == 1:
        return best
    rng = random.Random(seed)
    number = idle = 0
    steps_per_s = 0.0
    while not clock.spent and best.step_time_s > target_s and idle < params.idle_runs:
        length = min(2 ** (number // len(params.temperatures)), params.longest)
        steps = length * params.steps_per_place * (instance.tables + instance.gpus)
        # A run that the deadline would end early finds nothing: it ends cold.
        if steps_per_s and not clock.repeats:
            steps = max(1, min(steps, int(steps_per_s * clock.left_s)))
        began = time.monotonic()
        temperature = params.temperatures[number % len(params.temperatures)]
        annealed = _Annealing(best, rng, params).run(steps, temperature, target_s, clock)
        steps_per_s = steps / max(1e-9, time.monotonic() - began)
        if annealed is not None and annealed.step_time_s < best.step_time_s * (1 - 1e-7):
            best, idle = annealed, 0
        elif length == params.longest:
            idle += 1
        number += 1
    return best


class _Annealing:
    """One run: the assignment as sums, and what the best state was."""

    def __init__(self, start: Assignment, rng: random.Random, params: AnnealingParams) -> None:
        self.params = params
        self.instance = instance = start.instance
        self.rng = rng
        self.hbm = instance.hbm_bytes.tolist()
        self.sums = [start.sums[gpu].copy() for gpu in range(instance.gpus)]
        self.on: list[list[Block]] = [instance.blocks(shards) for shards in start.shards]
        self.replicas = {shard.table: shard for shard in start.replicas}
        self.times = [self._time(gpu, sums) for gpu, sums in enumerate(self.sums)]
        self.scale_s = max(self.times)
        self.energies = [self._energy(time_s) for time_s in self.times]
        self._sums: dict[tuple[Block, int], Float] = {}
        self._options: dict[int, list[ShardingOption]] = {}

    def run(self, steps: int, hot: float, target_s: float, clock: Clock) -> Assignment | None:
        """The best assignment of `steps` moves, filled exactly; None if none was better."""
        best_s = self.scale_s
        best: tuple[list[list[Block]], list[TableShard]] | None = None
        cooling = math.log(self.params.cooling) / steps
        rarely = 1 + len(self.times) // self.params.many_gpus
        for step in range(steps):
            if step % self.params.steps_between_looks == 0 and clock.spent:
                break
            clock.step()
            if not self._move(hot * math.exp(cooling * step)) or step % rarely:
                continue
            worst = max(self.times)
            if worst < best_s * (1 - 1e-7):
                best_s = worst
                best = [list(blocks) for blocks in self.on], list(self.replicas.values())
                if worst <= target_s * (1 - 1e-5):
                    break
        if best is None:
            return None
        blocks, replicas = best
        pairs = [
            (shard, gpu) for gpu, mine in enumerate(blocks) for block in mine for shard in block
        ]
        return Assignment.of(self.instance, pairs, replicas)

    def _move(self, temperature: float) -> bool:
        """Try one random change; return whether it was made."""
        rng = self.rng
        slow = self._slow() if rng.random() < 0.5 else rng.randrange(len(self.times))
        kind = rng.random()
        if kind < self.params.resharded_below:
            return self._reshard(slow, temperature)
        if not self.on[slow]:
            return False
        other = rng.randrange(len(self.times) - 1)
        other += other >= slow
        i = rng.randrange(len(self.on[slow]))
        moved = self.on[slow][i]
        taken: Block = ()
        j = -1
        if kind < self.params.swapped_below and self.on[other]:
            j = rng.randrange(len(self.on[other]))
            taken = self.on[other][j]
        if not (self._may(moved, other, taken) and self._may(taken, slow, moved)):
            return False
        here = self.sums[slow] - self._sum(moved, slow)
        there = self.sums[other] + self._sum(moved, other)
        if taken:
            here += self._sum(taken, slow)
            there -= self._sum(taken, other)
        if not self._accept({slow: here, other: there}, temperature):
            return False
        if taken:
            self.on[slow][i], self.on[other][j] = taken, moved
        else:
            self.on[slow][i] = self.on[slow][-1]
            self.on[slow].pop()
            self.on[other].append(moved)
        return True

    def _slow(self) -> int:
        """The slowest GPU, or one of the slow ones where there are many."""
        gpus = len(self.times)
        looked_at = (
            range(gpus) if gpus <= self.params.many_gpus else self.rng.sample(range(gpus), 16)
        )
        return max(looked_at, key=self.times.__getitem__)

    def _reshard(self, slow: int, temperature: float) -> bool:
        """Try another sharding option for a table of a GPU, or for one that is replicated."""
        rng, instance = self.rng, self.instance
        held = len(self.on[slow])
        at = rng.randrange(max(1, held + len(self.replicas)))
        if at < held:
            block = self.on[slow][at]
            if len(block) > 1 or instance.in_group(block[0].table):
                return False
            table = block[0].table
        elif self.replicas:
            table = list(self.replicas)[at - held]
        else:
            return False
        options = self._options_of(table)
        # Cheap options are first, and tried more often.
        option = options[int(len(options) * rng.random() ** 2)]
        dropped = {
            gpu: block
            for gpu, blocks in enumerate(self.on)
            for block in blocks
            if block[0].table == table
        }
        new = {gpu: self.sums[gpu] - self._sum(block, gpu) for gpu, block in dropped.items()}
        replica = instance.replica(table, option)
        self._replace_replica(new, self.replicas.get(table), replica)
        added = self._spread(instance.shards(table, option), list(dropped), new)
        if added is None or not self._accept(new, temperature):
            return False
        for gpu, block in dropped.items():
            self.on[gpu].remove(block)
        for shard, gpu in added:
            self.on[gpu].append((shard,))
        self.replicas.pop(table, None)
        if replica is not None:
            self.replicas[table] = replica
        return True

    def _replace_replica(
        self, new: dict[int, Float], old: TableShard | None, replica: TableShard | None
    ) -> None:
        """Exchange a table's replicas in the new sums of all GPUs."""
        if replica == old:
            return
        for gpu in range(self.instance.gpus):
            sums = new.get(gpu, self.sums[gpu])
            if old is not None:
                sums = sums - self._sum((old,), gpu)
            if replica is not None:
                sums = sums + self._sum((replica,), gpu)
            new[gpu] = sums

    def _spread(
        self, shards: list[TableShard], holders: list[int], new: dict[int, Float]
    ) -> list[tuple[TableShard, int]] | None:
        """A GPU for each shard of a table, added to the new sums; None if one finds none.

        `holders` served the table before, and have new sums.
        """
        rng, gpus = self.rng, range(self.instance.gpus)
        if shards and shards[0].option.blocked:
            free = list(gpus)
        elif len(shards) == len(holders) and rng.random() < 0.5:
            free = rng.sample(holders, len(holders))  # Only their shares change.
        else:
            noise = 0.5 * self.scale_s
            after = [
                (self._time(gpu, new[gpu]) if gpu in holders else self.times[gpu])
                + noise * rng.random()
                for gpu in gpus
            ]
            free = sorted(gpus, key=after.__getitem__)
        added: list[tuple[TableShard, int]] = []
        for shard in shards:
            gpu = next((g for g in free if self.instance.may_serve(shard, g)), -1)
            if gpu < 0:
                return None
            free.remove(gpu)
            new[gpu] = new.get(gpu, self.sums[gpu]) + self._sum((shard,), gpu)
            added.append((shard, gpu))
        return added

    def _accept(self, new: dict[int, Float], temperature: float) -> bool:
        """Accept the new sums of some GPUs if they are better, or else with some probability."""
        times, energies, change = {}, {}, 0.0
        for gpu, sums in new.items():
            times[gpu] = time_s = self._time(gpu, sums)
            if time_s == math.inf:
                return False
            energies[gpu] = energy = self._energy(time_s)
            change += energy - self.energies[gpu]
        if change > 0 and self.rng.random() >= math.exp(-change / temperature):
            return False
        for gpu, sums in new.items():
            self.sums[gpu], self.times[gpu] = sums, times[gpu]
            self.energies[gpu] = energies[gpu]
        return True

    def _energy(self, time_s: float) -> float:
        return float((time_s / self.scale_s) ** self.params.norm / self.params.norm)

    def _time(self, gpu: int, sums: Float) -> float:
        """`least_times` of one GPU, an order of magnitude faster for one alone."""
        bytes_, time_s = sums[BYTES], sums[GPU_S]
        room: float = self.hbm[gpu]
        above = int(bytes_.searchsorted(room, "right"))
        if above == 0:
            return math.inf
        slow: float = time_s.item(above - 1)
        if above == bytes_.size:
            return slow
        low: float = bytes_.item(above - 1)
        more: float = bytes_.item(above) - low
        if more < 0.5:
            return slow
        fast: float = time_s.item(above)
        return slow + (room - low) / more * (fast - slow)

    def _sum(self, block: Block, gpu: int) -> Float:
        key = block, self.instance.kind_of_gpu[gpu]
        block_costs = self._sums.get(key)
        if block_costs is None:
            block_costs = self._sums[key] = total(self.instance, block, gpu)
        return block_costs

    def _may(self, block: Block, gpu: int, leaving: Block) -> bool:
        """Whether a block may be served by a GPU that another block leaves."""
        for shard in block:
            if not self.instance.may_serve(shard, gpu):
                return False
            if shard.option.shard_count > 1 and any(
                other[0].table == shard.table for other in self.on[gpu] if other is not leaving
            ):
                return False
        return True

    def _options_of(self, table: int) -> list[ShardingOption]:
        """Sharding options that can be tried, by the GPU seconds and HBM that they take."""
        if table not in self._options:
            instance = self.instance
            most = min(self.params.most_shards, instance.gpus)
            gpu = instance.kinds[0]
            rated = []
            for option in instance.options_of(table):
                shards = instance.shards(table, option)
                if len(shards) > most:
                    continue
                # All rows in HBM: a rough order is enough.
                work = sum(float(instance.priced_costs(p, gpu)[GPU_S, -1]) for p in shards)
                replica = instance.replica(table, option)
                if replica is not None:
                    alone = float(instance.priced_costs(replica, gpu)[GPU_S, -1])
                    work += instance.gpus * alone
                rated.append((work, option))
            self._options[table] = [option for _, option in sorted(rated)]
        return self._options[table]
