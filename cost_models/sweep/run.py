"""Run a sweep: cost every placement of every setting on every platform."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models import CostModel, CostReport
from cost_models.dense import DenseCost, dense_cost
from cost_models.step_equation.loads import ID_BYTES, OUTPUT_BYTES
from cost_models.sweep.models_and_machines import Platform, Setting, cases, server_topology
from cost_models.sweep.placements import PLACEMENTS, pooled_by_host, shortage
from placer.errors import PlacerError, PlanMismatchError, ProblemError
from placer.plan.memory import Shortage, device_memory
from placer.problem import Problem
from placer.topology.devices import Host
from placer.topology.kinds import CPU_SERVER
from placer.topology.presets import cpu_server
from placer.topology.topology import Topology
from placer.units import format_bytes

CPU_BATCH = 200
"""Samples in a CPU trainer's step, recalled from Acun et al., section V."""


class ImpossibleError(PlacerError):
    """Raised for a placement that is not possible on a platform; `Steps.point` catches it."""

    def __init__(self, detail: str, shortage: Shortage | None = None) -> None:
        super().__init__(detail)
        self.shortage = shortage


def _too_small(shortage: Shortage, name: str | None = None) -> ImpossibleError:
    what = f"{format_bytes(shortage.short_bytes)} of {shortage.resource.upper()}"
    words = f"{name or shortage.device} lacks {what} for {shortage.detail}"
    return ImpossibleError(words, shortage)


@dataclass(frozen=True, slots=True)
class Point:
    """The result of one placement of one setting on one platform.

    `varied` has the values that differ from the sweep's base. If the placement is not possible,
    times and samples per second are None, `detail` has the reason, and `shortage` the memory that
    is too small, if any. Otherwise `detail` may have a remark. With CPU servers, a step is the time
    in which every trainer does one batch. A step takes as long as its longest part, `waits_for`.
    `hbm_lookup_share` is the share of lookups in HBM, and `extra_servers` the number of additional
    machines.
    """

    platform: str
    placement: str
    setting: Setting
    varied: Mapping[str, float]
    step_time_s: float | None = None
    samples_per_s: float | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    waits_for: str = ""
    hbm_lookup_share: float | None = None
    shortage: Shortage | None = None
    detail: str = ""
    extra_servers: int = 0


class Embeddings:
    """Costs of embeddings, computed once, as they do not depend on the dense layers."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._reports: dict[tuple[object, ...], CostReport | ImpossibleError] = {}
        self._loads: dict[tuple[object, ...], tuple[float, int]] = {}

    def report(self, name: str, topology: Topology, setting: Setting, placement: str) -> CostReport:
        """Return the cost of a placement's embeddings on the GPUs of platform `name`."""
        key = (name, placement, setting.batch, *setting.embedding_key)
        if key not in self._reports:
            make = PLACEMENTS[placement]
            problem = Problem(setting.profile(), topology, setting.batch)
            assert make is not None, "servers have no plan on GPUs"
            plan = make(problem, self.model)
            short = shortage(plan)
            self._reports[key] = _too_small(short) if short else self.model.evaluate(problem, plan)
        report = self._reports[key]
        if isinstance(report, ImpossibleError):
            raise report
        return report

    def server_load(self, server: Host, setting: Setting, samples: int) -> tuple[float, int]:
        """Return the seconds of a server's memory for one table in a step, and its bytes."""
        key = (server, samples, *setting.embedding_key)
        if key not in self._loads:
            problem = Problem(setting.profile(1), server_topology(server), samples)
            plan = pooled_by_host(problem, self.model)
            report = self.model.evaluate(problem, plan)
            held = device_memory(plan)[server.id].total_bytes
            self._loads[key] = report.hosts[0].dram_s, held
        return self._loads[key]


@dataclass(frozen=True, slots=True)
class Steps:
    """Costs the placements of one setting on one platform."""

    platform: Platform
    setting: Setting
    varied: Mapping[str, float]
    embeddings: Embeddings
    parameter_servers: int

    def point(self, placement: str) -> Point:
        """Return the point of a placement, with its cost or the reason why it is not possible."""
        try:
            return self._costed(placement)
        except ImpossibleError as error:
            return self._point(placement, shortage=error.shortage, detail=str(error))
        except PlanMismatchError as error:  # A cost model that does not know the placement.
            return self._point(placement, detail=str(error))

    def _point(self, placement: str, **known: Any) -> Point:
        return Point(self.platform.name, placement, self.setting, dict(self.varied), **known)

    def _step(self, placement: str, samples: int, parts_s: dict[str, float], **more: Any) -> Point:
        """Return the point of a step that takes as long as its longest part."""
        more = {"hbm_lookup_share": 0.0, **more}
        waits_for = max(parts_s, key=lambda part: parts_s[part])
        step_s = parts_s[waits_for]
        speed = {"step_time_s": step_s, "samples_per_s": samples / step_s}
        return self._point(placement, **speed, parts_s=parts_s, waits_for=waits_for, **more)

    def _costed(self, placement: str) -> Point:
        """Cost a placement; raises `ImpossibleError` if it is not possible on the platform."""
        if placement == "cpu":
            return self._on_cpus()
        topology = self.platform.topology
        if topology is None:
            raise ImpossibleError(f"{self.platform.name} has no GPUs")
        if placement == "remote":
            return self._remote(topology)
        if placement == "host-pooled" and len(topology.hosts) > 1:
            raise ImpossibleError("pooled rows that cross to other hosts are not modelled")
        return self._on_gpus(topology, placement)

    def _on_gpus(self, topology: Topology, placement: str) -> Point:
        report = self.embeddings.report(self.platform.name, topology, self.setting, placement)
        dense = self._dense(topology)
        busy, link = 0.0, 0.0
        for gpu, cost, rest in zip(topology.gpus, report.gpus, dense, strict=True):
            own_s = cost.hbm_s + cost.launch_s + cost.communication_s + rest.step_s
            # Rows that are read in place cross the host link during the step, not ahead of it.
            busy = max(busy, own_s + cost.link_s * (placement == "host-read"))
            between_s = cost.communication_s + rest.allreduce_s
            link = max(link, cost.link_s + rest.input_s + _shared(topology, gpu.id, between_s))
        host_s = max(host.dram_s for host in report.hosts)
        parts = {"gpu": busy, "host link": link, "host memory": host_s}
        samples, share = self.setting.batch * len(topology.gpus), report.hbm_lookup_share
        return self._step(placement, samples, parts, hbm_lookup_share=share)

    def _remote(self, topology: Topology) -> Point:
        """Cost tables on CPU servers, which pool rows for the GPUs and update them."""
        setting, servers = self.setting, self.parameter_servers
        if self.platform.network_bytes_per_s is None:
            raise ImpossibleError(f"the network of {self.platform.name} is not known")
        samples = setting.batch * len(topology.gpus)
        tables = -(-setting.sparse // servers)
        pooling_s = self._pooling_s(cpu_server(), samples, tables, "parameter server")
        sent = self._network_bytes * samples
        ports = self.platform.network_bytes_per_s * len(topology.hosts)
        dense = self._dense(topology)
        pooled = setting.batch * setting.sparse * setting.dim * OUTPUT_BYTES
        link_s = 0.0
        for gpu, cost in zip(topology.gpus, dense, strict=True):
            own_s = pooled / topology.host_link_bytes_per_s(gpu.id) + cost.input_s
            link_s = max(link_s, own_s + _shared(topology, gpu.id, cost.allreduce_s))
        parts = {
            "gpu": max(cost.step_s for cost in dense),
            "host link": link_s,
            "network": sent / ports,
            "servers' memory": pooling_s,
            "servers' network": sent * tables / setting.sparse / CPU_SERVER.network.bytes_per_s,
        }
        words = f"{servers} parameter servers"
        return self._step("remote", samples, parts, detail=words, extra_servers=servers)

    def _on_cpus(self) -> Point:
        """Cost the best split into trainers and parameter servers; a single server is both."""
        platform, tables = self.platform, self.setting.sparse
        servers = len(platform.topology.hosts) if platform.topology else platform.servers
        if servers == 1:
            pooling_s = self._pooling_s(platform.server, CPU_BATCH, tables, platform.name)
            parts = {"cpu": self._cpu_compute_s, "host memory": pooling_s}
            return self._step("cpu", CPU_BATCH, parts, detail="one server")
        steps: list[Point] = []
        for trainers in range(1, servers):
            try:
                steps.append(self._with_trainers(trainers, servers - trainers))
            except ImpossibleError:
                if not steps:  # With the most parameter servers, the least is short.
                    raise
                break
        return max(steps, key=lambda step: step.samples_per_s or 0.0)

    def _with_trainers(self, trainers: int, servers: int) -> Point:
        platform, setting = self.platform, self.setting
        assert platform.network_bytes_per_s is not None, "several servers have a network"
        tables = -(-setting.sparse // servers)
        pooling_s = self._pooling_s(platform.server, CPU_BATCH, tables, "parameter server")
        sent, port = self._network_bytes * CPU_BATCH, platform.network_bytes_per_s
        parts = {
            "cpu": self._cpu_compute_s,
            "network": sent / port,
            # A server serves all trainers, one after the other.
            "servers' memory": trainers * pooling_s,
            "servers' network": trainers * sent * tables / setting.sparse / port,
        }
        detail = f"{trainers} trainers, {servers} parameter servers"
        return self._step("cpu", trainers * CPU_BATCH, parts, detail=detail)

    def _dense(self, topology: Topology) -> tuple[DenseCost, ...]:
        network, batch = self.setting.dense_network, self.setting.batch
        rate = self.platform.gpu.per_s
        return tuple(dense_cost(network, topology, gpu, batch, rate) for gpu in topology.gpus)

    def _pooling_s(self, server: Host, samples: int, tables: int, name: str) -> float:
        """Return the seconds of a server's memory for tables; raises if they do not fit."""
        seconds, held_bytes = self.embeddings.server_load(server, self.setting, samples)
        short = tables * held_bytes - server.memory_bytes
        if short > 0:
            raise _too_small(Shortage(server.id, "dram", short, f"{tables} tables"), name)
        return tables * seconds

    @property
    def _cpu_compute_s(self) -> float:
        # Each layer has a product in forward and two in backward, of two operations each.
        flops = 6 * self.setting.dense_network.macs_per_sample * CPU_BATCH
        return flops / self.platform.cpu.per_s

    @property
    def _network_bytes(self) -> float:
        """Bytes of a sample's ids and gradients to the servers, the busier direction."""
        setting = self.setting
        row_bytes = setting.dim * OUTPUT_BYTES
        return float(setting.sparse * (setting.pooling * ID_BYTES + row_bytes))


def _shared(topology: Topology, gpu: str, between_s: float) -> float:
    """Return the time of traffic between GPUs if it crosses the host link, otherwise 0."""
    alone = topology.peer_bytes_per_s(gpu) > topology.host_link_bytes_per_s(gpu)
    return 0.0 if alone else between_s


PARAMETER_SERVERS = 8
"""Default number of CPU servers with the tables of placement ``remote``; an assumption."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points of a sweep, by platform, then by case, then in the order of `placements`.

    With `grid`, all combinations of axes were tried; otherwise one axis at a time was varied.
    """

    base: Setting
    axes: Mapping[str, tuple[float, ...]]
    grid: bool
    platforms: tuple[Platform, ...]
    placements: tuple[str, ...]
    cost_model: str
    points: tuple[Point, ...]

    def ranked(self, platform: str, varied: Mapping[str, float]) -> tuple[Point, ...]:
        """Return the possible placements of a case on a platform, the fastest first.

        Placements that need additional machines come last. Ties keep the order of `placements`.
        """
        possible = [
            point
            for point in self.points
            if point.platform == platform and point.varied == varied and point.samples_per_s
        ]
        possible.sort(key=lambda point: (point.extra_servers > 0, -(point.samples_per_s or 0.0)))
        return tuple(possible)


def distinct(platforms: Sequence[Platform]) -> Sequence[Platform]:
    """Return the platforms as they are. Raises ProblemError if two have the same name."""
    names = [platform.name for platform in platforms]
    if len(set(names)) < len(names):
        raise ProblemError(f"platforms are named more than once: {', '.join(names)}")
    return platforms


def sweep(
    platforms: Sequence[Platform],
    axes: Mapping[str, Sequence[float]],
    cost_model: CostModel,
    *,
    base: Setting | None = None,
    placements: Sequence[str] = tuple(PLACEMENTS),
    grid: bool = False,
    parameter_servers: int = PARAMETER_SERVERS,
    on_point: Callable[[float, float | None, str], None] = lambda done, total, name: None,
    stop: Callable[[], bool] = lambda: False,
) -> Sweep:
    """Cost every placement of every case on every platform.

    Raises ProblemError if a placement is unknown, there is no platform or axis, or a platform is
    named twice.

    Parameters
    ----------
    axes : mapping of axis to values
        Values to try: one axis at a time, the others as in `base`, or all combinations if `grid`.
    parameter_servers : int
        Number of CPU servers of placement ``remote``.
    on_point : callable
        Called after each case with the cases done, the number of cases, and the platform's name.
    stop : callable
        Called before each case; if it returns true, the sweep ends with the points so far.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from cost_models.sweep import platform
    >>> machines = [platform("big-basin"), platform("zion")]
    >>> swept = sweep(machines, {"batch": [200]}, Roofline(), placements=["gpu", "host-pooled"])
    >>> [swept.ranked(name, {"batch": 200})[0].placement for name in ("big-basin", "zion")]
    ['gpu', 'gpu']
    """
    for name in placements:
        if name not in PLACEMENTS:
            known = ", ".join(PLACEMENTS)
            raise ProblemError(f"no placement is called {name!r}; choose from {known}")
    if not platforms or not axes or not placements:
        raise ProblemError("a sweep needs a platform, a placement and an axis to vary")
    distinct(platforms)
    base = base or Setting()
    todo = [(one, *case) for one in platforms for case in cases(base, axes, grid=grid)]
    embeddings = Embeddings(cost_model)
    points: list[Point] = []
    for done, (machine, changed, setting) in enumerate(todo):
        if stop():
            break
        steps = Steps(machine, setting, changed, embeddings, parameter_servers)
        points += [steps.point(name) for name in placements]
        on_point(done + 1, len(todo), machine.name)
    varied = {axis: tuple(values) for axis, values in axes.items()}
    what = tuple(platforms), tuple(placements), cost_model.name
    return Sweep(base, varied, grid, *what, tuple(points))
