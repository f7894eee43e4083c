"""TorchRec's planner with our search: `solvers.PlacerPlanner`. Importing this needs torchrec.

TorchRec's `EmbeddingShardingPlanner` enumerates the options of each table, has proposers choose
among them and a partitioner give them ranks. Here one object does both for the whole model, by a
solver of ours; enumeration, reservations, constraints, statistics, checks and errors stay
TorchRec's own.
"""

import copy
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import (
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Proposer,
)
from torchrec.distributed.planner.types import (
    ShardingOption as TorchRecOption,
)
from torchrec.distributed.types import CacheParams

from cost_models.torchrec.enumerated import EnumeratedOptions
from cost_models.torchrec.estimates import ProfileCacheStatistics
from placer.adapters.torchrec.machine import topology_of
from placer.adapters.torchrec.models import OPTIMIZERS
from placer.constraints.constraints import Constraints
from placer.errors import PlacerError, ProblemError
from placer.problem import Problem
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import DType, Feature, OptimizerName, Table
from solvers.registry import solve
from solvers.result import SolveResult

DEFAULT_TIME_LIMIT_S = 20.0

DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
"""Of tables that are trained."""


class PlacerPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """A drop-in for TorchRec's `EmbeddingShardingPlanner`: ``plan`` and ``collective_plan``.

    It minimizes what TorchRec's planner does, the time of the slowest rank by the estimates of
    the enumerator, over table-, column- and row-wise and data-parallel options, within the memory
    that the storage reservation leaves. Host memory is shared by the ranks of a host. On several
    hosts TorchRec's greedy proposers are run as well, because they know options that are not
    searched, such as ``table_row_wise``, and the better plan is taken. Where no
    plan is found, the `PlannerError` says of tables that fit no GPU what they are short of.

    Parameters
    ----------
    topology, batch_size, enumerator, storage_reservation, stats, constraints, debug, callbacks, \
plan_loader
        As TorchRec's planner has them.
    performance_model : PerfModel, optional
        `NoopPerfModel`, which is what is minimized.
    proposer, partitioner
        Not used, with a warning: the search is ours.
    timeout_seconds : int, optional
        Of the search; 20 by default. On several hosts it has half of what is given.
    solver : str
        One of `solvers.SOLVERS`.
    seed, gap, max_steps
        See `solvers.Limits`.
    profile : Profile, optional
        Cache statistics of its tables, known by their names, where the constraints have none.

    Attributes
    ----------
    result : SolveResult or None
        Of the last search: the plan in our words, its step time, and a bound over what is
        searched. On several hosts the plan that is returned may be TorchRec's.

    Raises
    ------
    ProblemError
        If the performance model is another one.
    """

    def __init__(
        self,
        topology: Any = None,
        batch_size: int | None = None,
        enumerator: Any = None,
        storage_reservation: Any = None,
        proposer: Any = None,
        partitioner: Any = None,
        performance_model: Any = None,
        stats: Any = None,
        constraints: dict[str, Any] | None = None,
        debug: bool = True,
        callbacks: Any = None,
        timeout_seconds: int | None = None,
        plan_loader: Any = None,
        *,
        solver: str = "auto",
        seed: int = 0,
        gap: float = 1e-3,
        max_steps: int | None = None,
        profile: Profile | None = None,
    ) -> None:
        if performance_model is not None and type(performance_model) is not NoopPerfModel:
            raise ProblemError(
                f"performance_model {type(performance_model).__name__}: PlacerPlanner minimizes "
                "the time of the slowest rank, which is NoopPerfModel; leave it out"
            )
        for name, value in (("proposer", proposer), ("partitioner", partitioner)):
            if value is not None:
                warnings.warn(f"PlacerPlanner searches by itself: {name} is not used", stacklevel=2)
        search = _Search(
            {
                "solver": solver,
                "time_limit_s": float(timeout_seconds or DEFAULT_TIME_LIMIT_S),
                "seed": seed,
                "gap": gap,
                "max_steps": max_steps,
            },
            profile,
        )
        self._search = search
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=_Once(search),
            partitioner=search,
            performance_model=performance_model,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        if self._topology.world_size > self._topology.local_world_size:
            self._proposers += [GreedyProposer(), GreedyProposer(use_depth=False)]
            search.limits["time_limit_s"] *= 0.5 if timeout_seconds else 1.0

    @property
    def result(self) -> SolveResult | None:
        """The result of the last search."""
        return self._search.result


class _Once(Proposer):  # type: ignore[misc]
    """Hands the search space to the search, and proposes once."""

    def __init__(self, search: "_Search") -> None:
        self._search = search
        self._proposal: list[TorchRecOption] | None = None

    def load(self, search_space: list[TorchRecOption], enumerator: Any = None) -> None:
        """Keep the options, and propose those of each table that take the least memory.

        If there is no plan, TorchRec checks with them whether all memory together is too little.
        """
        self._search.options = search_space
        self._search.estimate = enumerator.populate_estimates
        least: dict[str, TorchRecOption] = {}
        for option in search_space:
            size = option.total_storage
            other = least.get(option.fqn, option).total_storage
            if option.fqn not in least or (size.hbm, size.ddr) < (other.hbm, other.ddr):
                least[option.fqn] = option
        self._proposal = list(least.values())

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: there is no other proposal."""

    def propose(self) -> list[TorchRecOption] | None:
        """The one proposal, and then none."""
        proposal, self._proposal = self._proposal, None
        if proposal is not None:
            self._search.proposal = proposal
        return proposal


class _Search(Partitioner):  # type: ignore[misc]
    """Chooses options and ranks of all tables."""

    def __init__(self, limits: dict[str, Any], profile: Profile | None) -> None:
        self.options: list[TorchRecOption] = []
        self.estimate: Any = None
        self.result: SolveResult | None = None
        self.limits = limits
        self.proposal: list[TorchRecOption] | None = None
        self._profile = profile
        self._others = GreedyPerfPartitioner()

    def partition(
        self, proposal: list[TorchRecOption], storage_constraint: Any
    ) -> list[TorchRecOption]:
        """The plan as options with ranks; TorchRec's own, for proposals that are not ours.

        Raises
        ------
        PlannerError
            If there is none, or none was found.
        """
        if proposal is not self.proposal:
            placed: list[TorchRecOption] = self._others.partition(proposal, storage_constraint)
            return placed
        options = [self._with_statistics(option) for option in self.options]
        on_cpu = storage_constraint.compute_device == "cpu"
        model = EnumeratedOptions(options, self.estimate, on_cpu=on_cpu)
        try:
            problem = _problem_of(options, topology_of(storage_constraint))
            self.result = solve(problem, cost_model=model, **self.limits)
        except PlacerError as error:
            raise PlannerError(
                message=str(error), error_type=PlannerErrorType.STRICT_CONSTRAINTS
            ) from error
        if self.result.plan is None:
            raise PlannerError(
                message=_shortage(self.result, problem, model),
                error_type=PlannerErrorType.PARTITION,
            )
        placed = model.placed(problem, self.result.plan)
        _require_fit(placed, storage_constraint, on_cpu)
        return placed

    def _with_statistics(self, option: TorchRecOption) -> TorchRecOption:
        """A cached option with the profile's statistics, where it has none."""
        stats = option.cache_params.stats if option.cache_params is not None else None
        if (
            self._profile is None
            or stats is not None
            or option.compute_kernel != "fused_uvm_caching"
            or option.name not in self._profile.table_names
        ):
            return option
        changed = copy.deepcopy(option)
        samples = option.batch_size * len({shard.rank for shard in option.shards} or {0})
        profile = self._profile[option.name]
        changed.cache_params = replace(
            changed.cache_params or CacheParams(), stats=ProfileCacheStatistics(profile, samples)
        )
        self.estimate([changed])
        return changed


def _problem_of(options: list[TorchRecOption], topology: Any) -> Problem:
    """The tables of a search space as a problem; accesses are in the estimates, not in it."""
    tables: dict[str, TableProfile] = {}
    towers: dict[str, dict[str, None]] = {}
    for option in options:
        if option.dependency:
            towers.setdefault(option.dependency, {})[option.fqn] = None
        if option.fqn not in tables:
            table = _table_of(option)
            flat = AccessCdf(np.array([0, table.rows]), np.array([0.0, 1.0]))
            tables[option.fqn] = TableProfile(table, flat)
    together = [tuple(names) for names in towers.values() if len(names) > 1]
    return Problem(
        Profile(tuple(tables.values())),
        topology,
        options[0].batch_size,
        Constraints(together=tuple(together)),
    )


def _table_of(option: TorchRecOption) -> Table:
    rows, dim = option.tensor.shape
    name = str(option.tensor.dtype).removeprefix("torch.")
    dtype = next((known for known in DTYPES if known == name), None)
    if dtype is None:
        raise ProblemError(
            f"table {option.fqn!r} is {name}; PlacerPlanner knows {', '.join(DTYPES)}"
        )
    pooling: Any = "sum" if option.is_pooled else "none"
    return Table(
        option.fqn,
        rows,
        dim,
        dtype,
        _optimizer_of(option),
        tuple(
            Feature(f"{option.fqn}/{number}", float(length), pooling=pooling)
            for number, length in enumerate(option.input_lengths)
        ),
    )


def _optimizer_of(option: TorchRecOption) -> OptimizerName:
    """The table's optimizer; unknown ones have at most two numbers for each weight."""
    classes: Any = getattr(option.tensor, "_optimizer_classes", None) or [None]
    if classes[0] is None:
        return "sgd"  # TorchRec counts no state for it either.
    return OPTIMIZERS.get(classes[0].__name__, "adam")


def _shortage(result: SolveResult, problem: Problem, model: EnumeratedOptions) -> str:
    """What is short, where that is known, by how many bytes, on which device."""
    lines = [result.termination.detail or result.termination.reason]
    lines += [
        f"{lack.device} is short of {lack.short_bytes} bytes of {lack.resource}: {lack.detail}"
        for lack in result.termination.shortages
    ]
    largest = max(problem.topology.gpus, key=lambda gpu: gpu.memory_bytes)
    for number, name in enumerate(problem.profile.table_names):
        least = math.ceil(model.least_gpu_bytes(problem, number))
        if least > largest.memory_bytes:
            lines.append(
                f"table {name!r} takes {least} bytes of a GPU at least, {largest.id} has "
                f"{largest.memory_bytes}: it is short of {least - largest.memory_bytes} bytes"
            )
    return "; ".join(lines)


def _require_fit(placed: list[TorchRecOption], topology: Any, on_cpu: bool) -> None:
    """Raise unless every rank has the memory that TorchRec counts for it."""
    totals = {device.rank: 0 for device in topology.devices}
    for option in placed:
        for shard in option.shards:
            totals[shard.rank] += math.ceil(shard.storage.ddr if on_cpu else shard.storage.hbm)
    for device in topology.devices:
        has = device.storage.ddr if on_cpu else device.storage.hbm
        if totals[device.rank] > has:
            raise PlannerError(
                message=f"rank {device.rank} would need {totals[device.rank]} bytes and has {has}",
                error_type=PlannerErrorType.PARTITION,
            )


__all__ = ["PlacerPlanner"]
