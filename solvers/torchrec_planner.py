"""TorchRec's planner with placer's search: `solvers.PlacerPlanner`. Importing this needs torchrec.

TorchRec's proposers choose options, and its partitioner assigns ranks. Here, one search does both.
"""

import warnings
from collections import defaultdict
from dataclasses import dataclass, field, replace
from operator import attrgetter
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
from solvers.search.candidates.placement import Group, State, ranks_of
from solvers.search.candidates.search import Found, search
from solvers.torchrec_options import (
    TIERS,
    candidates_of,
    has_free_load_factor,
    is_replica_of_fused,
    is_trained_wrong,
    trainable,
    with_load_factor,
)


@dataclass(eq=False)
class Planning(Proposer, Partitioner):  # type: ignore[misc]
    """The search as a TorchRec proposer, which makes one proposal, and as a partitioner."""

    limits: Limits
    profile: Profile | None
    partitioner: Any  # Places the proposals of other proposers.
    ranks: int
    replicate: bool
    is_first: bool  # Whether other proposers run after this one.
    found: Found | None = None
    only_trainable: bool = True  # Whether to leave out options that TorchRec may train wrong.
    space: list[TorchRecOption] = field(default_factory=list)  # The options to choose from.
    _least: list[TorchRecOption] = field(default_factory=list)
    _is_proposed: bool = False

    def load(self, search_space: list[TorchRecOption], enumerator: Any = None) -> None:
        """Take a search space. See TorchRec's `Proposer`."""
        self._estimate = enumerator.populate_estimates
        # If there is no plan, TorchRec checks with the options of least memory whether the memory
        # is too small.
        by_memory = attrgetter("total_storage.hbm", "total_storage.ddr")
        falling = sorted(search_space, key=by_memory, reverse=True)
        self._least = list({option.fqn: option for option in falling}.values())
        self.space = list(search_space)
        if self.only_trainable:
            self.space = trainable(search_space, replicate=self.replicate)
        self._add_statistics()
        self.found, self._is_proposed = None, False
        if self.is_first:
            # TorchRec's planner passes the same list to the proposers after this one. Without a
            # load factor, misses of caches cost no time.
            search_space[:] = [
                with_load_factor(one, UVM_CACHING_RATIO if has_free_load_factor(one) else None)
                for one in self.space
            ]
            self._estimate(search_space)

    def _add_statistics(self) -> None:
        """Add the profile's statistics to cached options without any."""
        if self.profile is None:
            return
        changed = []
        for option in self.space:
            params = option.cache_params or CacheParams()
            is_cached = option.compute_kernel == "fused_uvm_caching"
            if is_cached and params.stats is None and option.name in self.profile.table_names:
                samples = option.batch_size * self.ranks
                stats = ProfileCacheStatistics(self.profile[option.name], samples)
                option.cache_params = replace(params, stats=stats)
                changed.append(option)
        self._estimate(changed)

    def propose(self) -> list[TorchRecOption] | None:
        """Propose the option of least memory for each table, once."""
        proposal = None if self._is_proposed else self._least
        self._is_proposed = True
        return proposal

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because there is no other proposal."""

    def partition(
        self, proposal: list[TorchRecOption], storage_constraint: Any
    ) -> list[TorchRecOption]:
        """Run the search, or place a proposal of another proposer."""
        if proposal is self._least:
            return self._searched(storage_constraint)
        plan: list[TorchRecOption] = self.partitioner.partition(
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
        local_ranks = min(int(storage_constraint.intra_group_size), len(devices))
        tables = candidates_of(self.space, self._estimate, len(devices), local_ranks, memory)
        self._require_candidates(tables, int(memory[:, 0].max()))
        # Tables of one tower must be together.
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
        """Raise PlannerError if a table has no option that fits."""
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
        """Return the options of a state with ranks, in the order of tables."""
        placed = []
        for table in sorted(state.places):
            place, group = state.places[table], state.group(table)
            option = with_load_factor(*group.sources[place.candidate])
            ranks = ranks_of(group, place.slots).ravel().tolist()
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
            placed.append(option)
        self._estimate(placed)
        return placed


def _no_plan(message: str) -> PlannerError:
    return PlannerError(message=message, error_type=PlannerErrorType.PARTITION)


DEFAULT_TIME_LIMIT_S = 20

_PROPOSER = 4
"""Position of `proposer` in the arguments of TorchRec's planner."""

_OWN_SHARE = 0.6
"""Share of the time limit for the search if other proposers run after it."""


class PlacerPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """A drop-in for TorchRec's `EmbeddingShardingPlanner`: ``plan`` and ``collective_plan``.

    "Our search as TorchRec's planner" in docs/torchrec.md says what it searches.

    Parameters
    ----------
    *args, **options
        Arguments of TorchRec's planner. A `proposer` and a `partitioner` run in addition to the
        search, and with a performance model other than `NoopPerfModel`, so do TorchRec's default
        proposers. `timeout_seconds` limits the search and all proposers together; the default is
        20.
    seed, gap, max_steps
        Limits of the search: seed of random numbers, gap to the bound, and number of rounds.
    profile : Profile, optional
        Profile with cache statistics of tables, by name, if the constraints have none.
    replicate : bool
        Whether the planner may replicate tables with an optimizer in the backward pass, as
        TorchRec's planner does. Such a plan gives a warning.

    Attributes
    ----------
    result : SolveResult or None
        The last result: the plan in placer's format, if possible, its step time, and a bound over
        the search space.
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
        # Row blocks in proportion to ranks' memory, which TorchRec trains wrong, become even.
        self._enumerator._device_memory_sizes = None
        limit_s = self._timeout_seconds = self._timeout_seconds or DEFAULT_TIME_LIMIT_S
        others = self._proposers
        given = options.get("proposer") or any(args[_PROPOSER : _PROPOSER + 1])
        if not given and type(self._perf_model) is NoopPerfModel:
            others = []  # TorchRec's default proposers find nothing better.
        limits = Limits(
            limit_s * (_OWN_SHARE if others else 1.0), gap=gap, seed=seed, max_steps=max_steps
        )
        ranks = self._topology.world_size
        self._planning = self._partitioner = Planning(
            limits, profile, self._partitioner, ranks, replicate, is_first=bool(others)
        )
        self._proposers = [self._planning, *others]
        self.result: SolveResult | None = None

    def plan(self, module: torch.nn.Module, sharders: list[Any]) -> ShardingPlan:
        """Return a sharding plan. See TorchRec's planner.

        If there is no other plan, allow options that TorchRec may train wrong, with a
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
    """Warn of tables that TorchRec may not train as the user expects."""
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
