"""TorchRec's planner with our search: `solvers.PlacerPlanner`. Importing this needs torchrec.

TorchRec's `EmbeddingShardingPlanner` enumerates the options of each table, has proposers choose
among them and a partitioner give them ranks. Here a search of ours does both for the whole model;
enumeration, reservations, constraints, statistics, checks and errors stay TorchRec's own.
"""

import warnings
from typing import Any

import torch.nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

from placer.adapters.torchrec.read import from_sharding_plan
from placer.errors import PlacerError
from placer.profile.profile import Profile
from solvers.result import Limits, Reason, SolveResult, Termination
from solvers.torchrec.planning import Planning
from solvers.torchrec.trainable import is_replica_of_fused, is_trained_wrong

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
