"""What reports read of cost models and solvers, which this layer does not import."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from placer.plan.memory import MemoryUse
from placer.plan.plan import Plan


class GpuTimes(Protocol):
    """See `cost_models.GpuCost`."""

    @property
    def device(self) -> str: ...
    @property
    def hbm_s(self) -> float: ...
    @property
    def link_s(self) -> float: ...
    @property
    def communication_s(self) -> float: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def total_s(self) -> float: ...


class HostTimes(Protocol):
    """See `cost_models.HostCost`."""

    @property
    def device(self) -> str: ...
    @property
    def dram_s(self) -> float: ...


class Cost(Protocol):
    """See `cost_models.CostReport`."""

    @property
    def cost_model(self) -> str: ...
    @property
    def gpus(self) -> Sequence[GpuTimes]: ...
    @property
    def hosts(self) -> Sequence[HostTimes]: ...
    @property
    def memory(self) -> Mapping[str, MemoryUse]: ...
    @property
    def hbm_lookup_share(self) -> float: ...
    @property
    def step_time_s(self) -> float: ...
    @property
    def bottleneck(self) -> str: ...
    @property
    def balance(self) -> float: ...
    @property
    def relative_error(self) -> float | None: ...


Evaluate = Callable[[Plan], Cost]
"""A cost model's answer for a plan: ``functools.partial(model.evaluate, problem)``."""


class Shortage(Protocol):
    """See `solvers.Shortage`."""

    @property
    def device(self) -> str: ...
    @property
    def resource(self) -> str: ...
    @property
    def short_bytes(self) -> int: ...


class Termination(Protocol):
    """See `solvers.Termination`."""

    @property
    def reason(self) -> str: ...
    @property
    def limit(self) -> str | None: ...
    @property
    def detail(self) -> str: ...
    @property
    def shortages(self) -> Sequence[Shortage]: ...


def ending(end: Termination) -> str:
    """Why a search ended: ``optimal``, ``feasible (time limit)``, ``feasible (stopped)``."""
    if end.limit is None:
        return end.reason
    return f"{end.reason} ({'stopped' if end.limit == 'stop' else f'{end.limit} limit'})"


class Result(Protocol):
    """See `solvers.SolveResult`."""

    @property
    def plan(self) -> Plan | None: ...
    @property
    def termination(self) -> Termination: ...
    @property
    def step_time_s(self) -> float | None: ...
    @property
    def bound_s(self) -> float | None: ...
    @property
    def gap(self) -> float | None: ...
    @property
    def stats(self) -> Mapping[str, Any]: ...
