"""Simulated annealing over assignments: many cheap moves instead of a few well-chosen ones.

Kirkpatrick et al. 1983, doi:10.1126/science.220.4598.671. A GPU's time is rated by the sums
of its shards' priced costs (`solvers.model.knapsack.phases_at`), which a move changes for two
GPUs; nothing is filled exactly before the end. The energy is

    Σ over phases p of  s[p]/T · Σ over GPUs g of (t[p,g]/s[p])^n / n

where s are the slowest GPUs' times at the start and T is their sum: nearly the largest times alone,
but lower with fewer slow GPUs. A chain of phases that is shorter than the step is taken to be as
long, so that it counts when it becomes so.
"""

import math
import random
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from solvers.model.assignment import Assignment, total
from solvers.model.clock import Clock
from solvers.model.instance import ShardingOption, TableShard
from solvers.model.knapsack import BYTES, GPU_S, Float

Arena = tuple[object, ...]
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
        self.rows = len(instance.objective.schedule.phases)
        self.sums = [start.sums[gpu].copy() for gpu in range(instance.gpus)]
        self.on: list[list[Block]] = [instance.blocks(shards) for shards in start.shards]
        self.replicas = {shard.table: shard for shard in start.replicas}
        self.objective = objective = instance.objective
        self._prolonged = objective.schedule.prolonged_of_gpu
        self.launches_s = instance.launches_s
        self.launches_free = not any(launches.any() for launches in self.launches_s)
        self.arenas: list[Counter[Arena]] = [
            Counter(instance.arena_of(shard) for shard in (*shards, *start.replicas))
            for shards in start.shards
        ]
        phase_s = np.array([self._phases(gpu, sums) for gpu, sums in enumerate(self.sums)])
        # What shared lanes add depends on what others are waited for, which hardly changes.
        self.waits_s = objective.scale_s(phase_s)
        self.phase_s = objective.prolonged(phase_s)
        self.step_s = objective.longest_s(self.phase_s.max(axis=0)).item()
        # Chains that are shorter than the step may grow to its length.
        chains_s = objective.schedule.chain_times_s(phase_s.T)
        longer = self.step_s / np.maximum(chains_s, 1e-3 * self.step_s)
        self.scale_s = self.waits_s * (longer @ objective.members).clip(1.0)
        # What is part of no chain delays nobody by itself.
        self.counted_s = np.where(objective.members.any(axis=0), self.scale_s, 0.0)
        self.energies = [self._energy(phase_s) for phase_s in self.phase_s]
        self._sums: dict[tuple[Block, int], Float] = {}
        self._arena_of: dict[TableShard, Arena] = {}
        self._options: dict[int, list[ShardingOption]] = {}

    def run(self, steps: int, hot: float, target_s: float, clock: Clock) -> Assignment | None:
        """The best assignment of `steps` moves, filled exactly; None if none was better."""
        best_s = self.step_s
        best: tuple[list[list[Block]], list[TableShard]] | None = None
        cooling = math.log(self.params.cooling) / steps
        rarely = 1 + len(self.sums) // self.params.many_gpus
        for step in range(steps):
            if step % self.params.steps_between_looks == 0 and clock.spent:
                break
            clock.step()
            if not self._move(hot * math.exp(cooling * step)) or step % rarely:
                continue
            step_s = self.objective.longest_s(self.phase_s.max(axis=0)).item()
            if step_s < best_s * (1 - 1e-7):
                best_s = step_s
                best = [list(blocks) for blocks in self.on], list(self.replicas.values())
                if step_s <= target_s * (1 - 1e-5):
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
        slow = self._slow() if rng.random() < 0.5 else rng.randrange(len(self.sums))
        kind = rng.random()
        if kind < self.params.resharded_below:
            return self._reshard(slow, temperature)
        if not self.on[slow]:
            return False
        other = rng.randrange(len(self.sums) - 1)
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
        arenas = {
            slow: self._arenas(slow, moved, taken),
            other: self._arenas(other, taken, moved),
        }
        if not self._accept({slow: here, other: there}, arenas, temperature):
            return False
        if taken:
            self.on[slow][i], self.on[other][j] = taken, moved
        else:
            self.on[slow][i] = self.on[slow][-1]
            self.on[slow].pop()
            self.on[other].append(moved)
        return True

    def _slow(self) -> int:
        """The GPU of most energy, or one of the slow ones where there are many."""
        gpus = len(self.sums)
        looked_at = (
            range(gpus) if gpus <= self.params.many_gpus else self.rng.sample(range(gpus), 16)
        )
        return max(looked_at, key=self.energies.__getitem__)

    def _arenas(self, gpu: int, leaving: Block, arriving: Block) -> Counter[Arena]:
        """Shards of each arena on a GPU after a change."""
        arenas = self.arenas[gpu]
        if self.launches_free:
            return arenas
        arenas = arenas.copy()
        arenas.subtract(map(self._arena, leaving))
        arenas.update(map(self._arena, arriving))
        return +arenas

    def _arena(self, shard: TableShard) -> Arena:
        arena = self._arena_of.get(shard)
        if arena is None:
            arena = self._arena_of[shard] = self.instance.arena_of(shard)
        return arena

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
        old, replica = self.replicas.get(table), instance.replica(table, option)
        self._replace_replica(new, old, replica)
        added = self._spread(instance.shards(table, option), list(dropped), new)
        if added is None:
            return False
        gained: dict[int, Block] = {gpu: (shard,) for shard, gpu in added}
        own = () if old is None else (old,), () if replica is None else (replica,)
        arenas = {
            gpu: self._arenas(gpu, dropped.get(gpu, ()) + own[0], gained.get(gpu, ()) + own[1])
            for gpu in new
        }
        if not self._accept(new, arenas, temperature):
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
            # Those that are done first with a phase, by turns.
            phase = rng.randrange(self.phase_s.shape[1])
            times = self.phase_s[:, phase]
            noise = 0.5 * float(times.max())
            after = [
                (float(self._phases(gpu, new[gpu])[phase]) if gpu in holders else times.item(gpu))
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

    def _accept(
        self, new: dict[int, Float], arenas: dict[int, Counter[Arena]], temperature: float
    ) -> bool:
        """Accept the new sums of some GPUs if they are better, or else with some probability."""
        phases, energies, change = {}, {}, 0.0
        for gpu, sums in new.items():
            phase_s = self._phases(gpu, sums, arenas[gpu])
            if phase_s[0] == math.inf:
                return False
            phases[gpu] = phase_s = self._prolonged(phase_s, self.waits_s)
            energies[gpu] = energy = self._energy(phase_s)
            change += energy - self.energies[gpu]
        if change > 0 and self.rng.random() >= math.exp(-change / temperature):
            return False
        for gpu, sums in new.items():
            self.sums[gpu], self.phase_s[gpu] = sums, phases[gpu]
            self.energies[gpu], self.arenas[gpu] = energies[gpu], arenas[gpu]
        return True

    def _energy(self, phase_s: Float) -> float:
        share = phase_s / self.scale_s
        return float(share**self.params.norm @ self.counted_s) / (self.step_s * self.params.norm)

    def _phases(self, gpu: int, sums: Float, arenas: Counter[Arena] | None = None) -> Float:
        """`phases_at` of one GPU, an order of magnitude faster for one alone; and launches."""
        bytes_ = sums[BYTES]
        room: float = self.hbm[gpu]
        above = int(bytes_.searchsorted(room, "right"))
        if above == 0:
            return np.full(self.rows, np.inf)
        phase_s: Float = sums[GPU_S + 1 :, above - 1]
        if above < bytes_.size:
            low: float = bytes_.item(above - 1)
            more: float = bytes_.item(above) - low
            if more >= 0.5:
                part = (room - low) / more
                phase_s = phase_s + part * (sums[GPU_S + 1 :, above] - phase_s)
        if self.launches_free:
            return phase_s
        count = len(self.arenas[gpu] if arenas is None else arenas)
        return phase_s + count * self.launches_s[gpu]

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
