"""TorchRec's planner with our search: `solvers.PlacerPlanner`. Importing this needs torchrec.

TorchRec's `EmbeddingShardingPlanner` enumerates the options of each table, has proposers choose
among them and a partitioner give them ranks. Here a search of ours does both for the whole model;
enumeration, reservations, constraints, statistics, checks and errors stay TorchRec's own.
"""

import copy
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch.nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import (
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Proposer,
)
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption
from torchrec.distributed.types import CacheParams, ShardingPlan

from cost_models.torchrec.estimates import ProfileCacheStatistics
from placer.adapters.torchrec.read import from_sharding_plan
from placer.errors import PlacerError
from placer.profile.profile import Profile
from solvers.model.clock import Clock
from solvers.result import Limits, Reason, SolveResult, Termination
from solvers.search.candidates.groups import Group
from solvers.search.candidates.placement import State, ranks_of
from solvers.search.candidates.search import Found, search
from solvers.torchrec_options import (
    TIERS,
    candidates_of,
    has_free_load_factor,
    is_replica_of_fused,
    is_trained_wrong,
    trainable,
    with_even_blocks,
    with_load_factor,
)


class Planning(Proposer, Partitioner):  # type: ignore[misc]
    """Our search, as TorchRec's planner wants it: a proposer of one proposal, and a partitioner.

    The proposals of other proposers, which come after it if it `is_first`, go to `partitioner`.
    """

    def __init__(
        self,
        limits: Limits,
        profile: Profile | None,
        partitioner: Any,
        ranks: int,
        *,
        replicate: bool,
        is_first: bool,
    ) -> None:
        self.limits = limits
        self.found: Found | None = None
        self.only_trainable = True  # Whether options are left out that TorchRec trains wrong.
        self.space: list[TorchRecOption] = []  # What may be chosen.
        self._profile, self._partitioner = profile, partitioner
        self._ranks, self._replicate, self._is_first = ranks, replicate, is_first
        self._least: list[TorchRecOption] = []
        self._is_proposed = False

    def load(self, search_space: list[TorchRecOption], enumerator: Any = None) -> None:
        """Take a search space. See TorchRec's `Proposer`."""
        self._estimate = enumerator.populate_estimates
        space = list(search_space)
        if self.only_trainable:
            even = with_even_blocks(space, self._estimate)
            space = trainable(even, replicate=self._replicate)
        self.space = [self._with_statistics(option) for option in space]
        self.found, self._is_proposed = None, False
        # If there is no plan, TorchRec checks by the least memory whether all together is too
        # little.
        least: dict[str, TorchRecOption] = {}
        for option in search_space:
            size = option.total_storage
            other = least.get(option.fqn, option).total_storage
            if option.fqn not in least or (size.hbm, size.ddr) < (other.hbm, other.ddr):
                least[option.fqn] = option
        self._least = list(least.values())
        if self._is_first:
            # TorchRec's planner passes the same list to the proposers after this one.
            search_space[:] = self._with_usual_factors()

    def _with_usual_factors(self) -> list[TorchRecOption]:
        """Return the space with a load factor for each cache, so that misses are charged."""
        usual = {
            id(option): with_load_factor(option, UVM_CACHING_RATIO)
            for option in self.space
            if has_free_load_factor(option)
        }
        if usual:
            self._estimate([*usual.values()])
        return [usual.get(id(option), option) for option in self.space]

    def propose(self) -> list[TorchRecOption] | None:
        """Propose the options of each table that take the least memory, once."""
        proposal = None if self._is_proposed else self._least
        self._is_proposed = True
        return proposal

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no other proposal."""

    def partition(
        self, proposal: list[TorchRecOption], storage_constraint: Any
    ) -> list[TorchRecOption]:
        """Search, or place a proposal of others."""
        if proposal is self._least:
            return self._searched(storage_constraint)
        plan: list[TorchRecOption] = self._partitioner.partition(
            proposal=proposal, storage_constraint=storage_constraint
        )
        return plan

    def _searched(self, storage_constraint: Any) -> list[TorchRecOption]:
        clock = Clock.start(self.limits)
        devices = storage_constraint.devices
        memory = np.array(
            [[max(0, getattr(device.storage, tier)) for tier in TIERS] for device in devices],
            dtype=np.float64,
        )
        local = getattr(storage_constraint, "intra_group_size", storage_constraint.local_world_size)
        local_ranks = min(int(local), len(devices))
        tables = candidates_of(self.space, self._estimate, len(devices), local_ranks, memory)
        self._require_candidates(tables, int(memory[:, 0].max()))
        # Those of a tower have to be together.
        towers: dict[str, dict[int, None]] = defaultdict(dict)
        numbers = {name: number for number, name in enumerate(tables)}
        for option in self.space:
            towers[option.dependency or f"\0{option.fqn}"][numbers[option.fqn]] = None
        bundles = [tuple(own) for own in towers.values()]
        self.found = search([*tables.values()], bundles, memory, local_ranks, clock)
        if self.found.state is None:
            raise _no_plan("no placement was found in which every rank has memory for its shards")
        return self._placed(self.found.state)

    def _require_candidates(self, tables: dict[str, list[Group]], hbm_bytes: int) -> None:
        """Raise if some table has no option that fits."""
        lines = []
        for name in (name for name, groups in tables.items() if not groups):
            own = [option for option in self.space if option.fqn == name]
            least = min(max(shard.storage.hbm for shard in option.shards) for option in own)
            lines.append(
                f"table {name!r} takes {least} bytes of HBM of a rank at least, of which there "
                f"are {hbm_bytes}: it is short of {least - hbm_bytes} bytes"
                if least > hbm_bytes
                else f"table {name!r} has no option that fits the ranks; it may only be "
                + ", ".join(sorted({f"{o.sharding_type} with {o.compute_kernel}" for o in own}))
            )
        if lines:
            raise _no_plan("; ".join(lines))

    def _placed(self, state: State) -> list[TorchRecOption]:
        """Return a state as options with ranks, in the order of tables."""
        placed, changed = [], []
        for table in sorted(state.places):
            place, group = state.places[table], state.group(table)
            option, factor = group.sources[place.candidate]
            if factor is None:
                option = copy.deepcopy(option)
            else:
                option = with_load_factor(option, factor)
                changed.append(option)
            ranks = ranks_of(group, place.slots).ravel().tolist()
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
            placed.append(option)
        if changed:
            self._estimate(changed)
        return placed

    def _with_statistics(self, option: TorchRecOption) -> TorchRecOption:
        """Return a cached option with the profile's statistics, where it has none."""
        params = option.cache_params or CacheParams()
        if (
            self._profile is None
            or params.stats is not None
            or option.compute_kernel != "fused_uvm_caching"
            or option.name not in self._profile.table_names
        ):
            return option
        changed = copy.deepcopy(option)
        samples = option.batch_size * self._ranks
        stats = ProfileCacheStatistics(self._profile[option.name], samples)
        changed.cache_params = replace(params, stats=stats)
        if not has_free_load_factor(changed):
            self._estimate([changed])
        return changed


def _no_plan(message: str) -> PlannerError:
    return PlannerError(message=message, error_type=PlannerErrorType.PARTITION)


DEFAULT_TIME_LIMIT_S = 20

_PROPOSER = 4
"""Position of the proposer among the arguments of TorchRec's planner."""

_OWN_SHARE = 0.6
"""Share of the time limit by which our search ends where other proposers run after it."""


class PlacerPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """A drop-in for TorchRec's `EmbeddingShardingPlanner`: ``plan`` and ``collective_plan``.

    It minimizes what TorchRec's planner does, the time of the slowest rank by the estimates of
    the enumerator, over all options that the enumerator has and TorchRec can train, within
    the memory that the storage reservation leaves each rank. Load factors of caches with
    statistics are searched as well.

    Parameters
    ----------
    *args, **options
        Those of TorchRec's planner. The search minimizes the time of the slowest rank whatever
        the performance model is. With another one than `NoopPerfModel`, TorchRec's default
        proposers run too, and it chooses among all plans. A `proposer` and a `partitioner` run
        beside the search. `timeout_seconds` is of the search, and of all proposers together; 20
        by default.
    seed, gap, max_steps
        Of the search: what is random in it, the gap to the bound at which it ends, rounds.
    profile : Profile, optional
        Cache statistics of its tables, known by their names, where the constraints have none.
    replicate : bool
        Whether tables may be replicated whose optimizer is applied in the backward pass, as
        TorchRec's planner does. TorchRec leaves such replicas to the optimizer of the dense
        layers, so a plan that has them comes with a warning.

    Attributes
    ----------
    result : SolveResult or None
        Of the last plan: the plan in our words if there are such, its step time, and a bound
        over what is searched.
    """

    _partitioner: Any
    _proposers: list[Any]
    _timeout_seconds: int | None

    def __init__(
        self,
        *args: Any,
        seed: int = 0,
        gap: float = 1e-3,
        max_steps: int | None = None,
        profile: Profile | None = None,
        replicate: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        limit_s = self._timeout_seconds = self._timeout_seconds or DEFAULT_TIME_LIMIT_S
        others = self._proposers
        given = options.get("proposer") or any(args[_PROPOSER : _PROPOSER + 1])
        if not given and type(self._perf_model) is NoopPerfModel:
            others = []  # By the same aim, TorchRec's default ones find nothing better.
        limits = Limits(
            limit_s * (_OWN_SHARE if others else 1.0), gap=gap, seed=seed, max_steps=max_steps
        )
        ranks = self._topology.world_size
        self._planning = self._partitioner = Planning(
            limits, profile, self._partitioner, ranks, replicate=replicate, is_first=bool(others)
        )
        self._proposers = [self._planning, *others]
        self.result: SolveResult | None = None

    def plan(self, module: torch.nn.Module, sharders: list[Any]) -> ShardingPlan:
        """See TorchRec's planner.

        Only where there is no other plan are options used that TorchRec trains wrong, with a
        warning.
        """
        self._planning.only_trainable = True
        try:
            plan = super().plan(module, sharders)
        except PlannerError:
            self._planning.only_trainable = False
            plan = super().plan(module, sharders)
        _warn(self._best_plan or [])
        self.result = self._result(module, plan)
        return plan

    def _result(self, module: torch.nn.Module, plan: ShardingPlan) -> SolveResult | None:
        found = self._planning.found
        if not plan.plan or self._best_plan is None or found is None:
            return None
        step_time_s = NoopPerfModel(self._topology).rate(self._best_plan) / 1000
        bound_s = min(found.limit_s / 1000, step_time_s)
        detail = ""
        try:
            ours = from_sharding_plan(
                plan, module, self._topology, self._batch_size, optimizer="sgd"
            )
        except PlacerError as error:
            ours, detail = None, str(error)
        reason: Reason = (
            "optimal" if step_time_s <= bound_s * (1 + self._planning.limits.gap) else "feasible"
        )
        return SolveResult(
            ours,
            Termination(reason, found.ended_by, detail),
            step_time_s,
            bound_s,
            {
                "search_space": "every option of the enumerator that TorchRec can train",
                "steps": found.steps,
            },
        )


def _warn(plan: list[Any]) -> None:
    """Say which tables TorchRec would not train as the user may think."""
    wrong = [option.fqn for option in plan if is_trained_wrong(option)]
    if wrong:
        warnings.warn(
            "TorchRec may train tables wrong that this plan, the only one found, places so: "
            f"{', '.join(wrong)} (docs/torchrec.md)",
            stacklevel=3,
        )
    replicas = [option.fqn for option in plan if is_replica_of_fused(option)]
    if replicas:
        warnings.warn(
            f"{len(replicas)} tables are replicated, {replicas[0]!r} among them: the optimizer of "
            "their backward pass is not applied to them, leave them to that of the dense layers, "
            "or plan with replicate=False",
            stacklevel=3,
        )


__all__ = ["PlacerPlanner"]
