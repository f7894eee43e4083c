"""A search's state: shards on GPUs, with the best rows in each GPU's HBM."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cost_models import CostCurve
from solvers.model.drive_rows import is_open, opened
from solvers.model.instance import Instance, Placement, ShardingOption, TableShard
from solvers.model.knapsack import (
    BYTES,
    GPU_S,
    PHASES,
    Float,
    Knapsack,
    priced_costs,
    solve_knapsack,
)
from solvers.model.shared_costs import total

_DRAM_PRICE_SHARES = (1e-9, 1e-6, 1e-3, 1.0)
"""Prices of a host's memory if it is short, as shares of the highest price of HBM."""

Change = dict[int, list[TableShard]]
"""The new shards of each GPU that a change touches."""


@dataclass
class Assignment:
    """Which shards each GPU serves, which rows all GPUs replicate, and each GPU's knapsack.

    Mutable: this is a search state, not a result.
    """

    instance: Instance
    shards: list[list[TableShard]]  # Sorted shards of each GPU, without replicas.
    replicas: tuple[TableShard, ...]  # Rows that every GPU holds.
    knapsacks: list[Knapsack]  # Hot rows of each GPU, replicas included.
    # Shape (gpus, 2 + phases, prices): HBM bytes, GPU seconds and seconds of each phase, at each of
    # the instance's prices.
    sums: Float
    moves: int = 0  # Improvements made so far.

    @classmethod
    def of(
        cls,
        instance: Instance,
        pairs: Iterable[tuple[TableShard, int]],
        replicas: Iterable[TableShard] = (),
        *,
        fixed: Mapping[TableShard, Float] = MappingProxyType({}),
    ) -> "Assignment | None":
        """Return the assignment of each shard to the GPU paired with it; None if it does not fit.

        If rows in HBM are known, `fixed` has the costs of all shards, of shape (5 + phases, 1).
        """
        shards: list[list[TableShard]] = [[] for _ in range(instance.gpus)]
        for shard, gpu in pairs:
            shards[gpu].append(shard)
        everywhere = tuple(sorted(replicas))
        if not fixed and any(is_open(shard) for mine in shards for shard in mine):
            bare = cls(instance, shards, everywhere, [], np.zeros(0))
            shards = instance.drives.filled(shards, bare.knapsack)
        for mine in shards:
            mine.sort()
        base = instance.replicated(everywhere).totals
        sums = np.stack(
            [
                base[instance.kind_of_gpu[gpu]] + total(instance, mine, gpu)
                for gpu, mine in enumerate(shards)
            ]
        )
        assignment = cls(instance, shards, everywhere, [], sums)
        for gpu in range(instance.gpus):
            knapsack = assignment.knapsack(gpu, shards[gpu], fixed=fixed)
            if knapsack is None:
                return None
            assignment.knapsacks.append(knapsack)
        if assignment.fits_dram():
            return assignment
        return None if fixed else assignment.with_rows_off_hosts()

    def with_rows_off_hosts(self) -> "Assignment | None":
        """Return the assignment with more rows in HBM on hosts that lack room, however slow.

        None if that is not enough. Without it, one plan of nine took twice as long.
        """
        instance = self.instance
        finite = instance.prices[1:-1]
        price = float(finite[0]) if finite.size else 1.0
        over = self.hosts({})[1] > instance.dram_bytes
        for share in _DRAM_PRICE_SHARES:
            knapsacks = list(self.knapsacks)
            for gpu in np.flatnonzero(over[instance.host_of_gpu]).tolist():
                filled = self.knapsack(gpu, self.shards[gpu], dram_price=price * share)
                knapsacks[gpu] = filled or knapsacks[gpu]
            trial = replace(self, knapsacks=knapsacks)
            if trial.fits_dram():
                return trial
        return None

    def copy(self) -> "Assignment":
        """Return a copy that can be changed without changing this assignment."""
        shards = [list(mine) for mine in self.shards]
        return replace(self, shards=shards, knapsacks=[*self.knapsacks], sums=self.sums.copy())

    def with_spare_hbm(self, spare_bytes: Sequence[int]) -> "Assignment | None":
        """Return the same shards on the same GPUs, each of which keeps some HBM free."""
        knapsacks = []
        for gpu, (shards, spare) in enumerate(zip(self.shards, spare_bytes, strict=True)):
            knapsack = self.knapsacks[gpu] if not spare else self.knapsack(gpu, shards, spare)
            if knapsack is None:
                return None
            knapsacks.append(knapsack)
        spared = replace(self, knapsacks=knapsacks)
        fits = (spared.hosts({})[1] <= self.instance.all_dram_bytes).all()
        return spared if fits else None

    @property
    def times_s(self) -> Float:
        """Weighted seconds of each GPU, shape (gpus,)."""
        return np.array([knapsack.gpu_s for knapsack in self.knapsacks])

    @property
    def phase_s(self) -> Float:
        """Time of each GPU in each phase, shape (gpus, phases)."""
        return np.array([knapsack.phase_s for knapsack in self.knapsacks])

    def arena_s(self, gpus: Sequence[int]) -> Float:
        """Return the time of arenas besides launches on some GPUs, shape (len(gpus), phases).

        Ratings of changes assume that it stays.
        """
        nothing = np.zeros(self.instance.launches_s[0].size)
        return np.array([self.knapsacks[gpu].arena_s + nothing for gpu in gpus])

    @property
    def step_time_s(self) -> float:
        """Time of the longest chain of phases, or of the busiest host's memory."""
        step_s = float(self.instance.objective.step_time_s(self.phase_s))
        return max(step_s, float(self.hosts({})[0].max()))

    def slow_gpus(self) -> dict[int, int]:
        """Return GPUs that phases wait for, each with such a phase, the longest wait first."""
        objective = self.instance.objective
        phase_s = objective.prolonged(self.phase_s)
        waits_s = (phase_s.max(axis=0) - phase_s.mean(axis=0)) * objective.weights
        slow: dict[int, int] = {}
        for phase in np.argsort(-waits_s, kind="stable").tolist():
            slow.setdefault(int(phase_s[:, phase].argmax()), phase)
        return slow

    @property
    def key_s(self) -> float:
        """The objective's norm of all times, or the time of the busiest host's memory."""
        return max(self.instance.objective.key_s(self.phase_s), float(self.hosts({})[0].max()))

    def hosts(self, changed: Mapping[int, Knapsack]) -> tuple[Float, Float]:
        """Return seconds and bytes of each host's memory, with other knapsacks on some GPUs."""
        dram = np.array([(f.dram_s, f.dram_bytes) for f in self.knapsacks])
        for gpu, knapsack in changed.items():
            dram[gpu] = knapsack.dram_s, knapsack.dram_bytes
        of_host = self.instance.host_of_gpu
        hosts = len(self.instance.dram_bytes)
        # NumPy's type hints say that counts are integers even with weights.
        time_s: Any = np.bincount(of_host, dram[:, 0], hosts)
        used: Any = np.bincount(of_host, dram[:, 1], hosts)
        return time_s, used

    def fits_dram(self) -> bool:
        """Return whether every host has room for its GPUs' cold rows."""
        return bool((self.hosts({})[1] <= self.instance.dram_bytes).all())

    @property
    def option_of(self) -> dict[int, ShardingOption]:
        """Return each table's sharding option, with shares of rows on drives left open."""
        served = {shard.table: opened(shard).option for held in self.shards for shard in held}
        return served | {shard.table: shard.option for shard in self.replicas}

    def placements(self) -> list[Placement]:
        """Return the shards with their GPUs and hot rows, without replicas."""
        return [
            Placement(shard, gpu, hot)
            for gpu, (shards, knapsack) in enumerate(zip(self.shards, self.knapsacks, strict=True))
            for shard, hot in zip(shards, knapsack.hot_rows, strict=True)
        ]

    def knapsack(
        self,
        gpu: int,
        shards: Sequence[TableShard],
        spare_bytes: float = 0.0,
        replicas: tuple[TableShard, ...] | None = None,
        fixed: Mapping[TableShard, Float] = MappingProxyType({}),
        dram_price: float = 0.0,
    ) -> Knapsack | None:
        """Return the best knapsack of a GPU that serves these sorted shards; None if none fits.

        `fixed` has the priced costs of shards whose rows in HBM are not free. `dram_price` is the
        price of a byte of the host's memory, in seconds.
        """
        instance = self.instance
        everywhere = instance.replicated(self.replicas if replicas is None else replicas)
        base = everywhere.costs[instance.kind_of_gpu[gpu]]

        def curve(shard: TableShard) -> CostCurve:
            true = instance.curve(shard, gpu)
            return replace(true, gpu_s=true.gpu_s + dram_price * true.dram_bytes)

        if dram_price:
            fixed = {shard: priced_costs(curve(shard), instance.prices) for shard in shards}
        filled = solve_knapsack(
            [
                fixed[shard] if shard in fixed else instance.priced_costs(shard, gpu)
                for shard in shards
            ],
            float(instance.hbm_bytes[gpu]) - float(base[BYTES]) - spare_bytes,
            lambda number: curve(shards[number]),
        )
        if filled is None:
            return None
        arenas = instance.arenas(shards) | everywhere.arenas.keys()
        launches_s = len(arenas) * instance.launches_s[gpu]
        arena_s = instance.arena_times.seconds(
            gpu, zip(shards, filled.hot_rows, strict=True), everywhere.shards
        )
        launches_s = launches_s + arena_s
        weights = instance.objective.weights
        gpu_s = filled.gpu_s - (dram_price + instance.dram_price) * filled.dram_bytes
        return replace(
            filled,
            gpu_s=gpu_s + float(base[GPU_S] + weights @ launches_s),
            phase_s=filled.phase_s + base[PHASES] + launches_s,
            hbm_bytes=filled.hbm_bytes + float(base[BYTES]),
            arena_s=arena_s,
        )

    def holders(self, table: int) -> list[int]:
        """Return the GPUs that serve a shard of a table."""
        return [
            gpu
            for gpu, mine in enumerate(self.shards)
            if any(shard.table == table for shard in mine)
        ]

    def apply(
        self, change: Change, knapsacks: Mapping[int, Knapsack], replicas: tuple[TableShard, ...]
    ) -> None:
        """Make a change whose knapsacks are known."""
        everywhere = replicas != self.replicas
        self.replicas = replicas
        for gpu, shards in change.items():
            self.shards[gpu] = shards
        base = self.instance.replicated(replicas).totals
        for gpu, knapsack in knapsacks.items():
            self.knapsacks[gpu] = knapsack
        for gpu in range(self.instance.gpus) if everywhere else change:
            self.sums[gpu] = base[self.instance.kind_of_gpu[gpu]] + total(
                self.instance, self.shards[gpu], gpu
            )
        self.moves += 1
