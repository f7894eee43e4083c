"""What one step of `placer sweep` takes, part by part, for each placement on each platform."""

from dataclasses import dataclass
from typing import NamedTuple

from cost_models import CostModel, CostReport
from cost_models.dense import DenseCost, dense_cost
from cost_models.sweep.placements import Placement, pooled_by_host, shortage
from cost_models.sweep.platforms import Platform, cpu_server, server_topology
from cost_models.sweep.settings import Setting
from placer.errors import PlacerError
from placer.plan.memory import Shortage, device_memory
from placer.problem import Problem
from placer.topology.devices import Host
from placer.topology.kinds import CPU_SERVER
from placer.topology.topology import Topology
from placer.units import format_bytes

CPU_BATCH = 200
"""Samples of a CPU trainer's step: as recalled from Acun et al., section V."""

_ID_BYTES = 8
_FLOAT_BYTES = 4


class ImpossibleError(PlacerError):
    """A placement that a platform does not allow; caught where points are made."""

    def __init__(self, detail: str, shortage: Shortage | None = None) -> None:
        super().__init__(detail)
        self.shortage = shortage


def _too_small(shortage: Shortage, name: str | None = None) -> ImpossibleError:
    return ImpossibleError(
        f"{name or shortage.device} lacks {format_bytes(shortage.short_bytes)} of "
        f"{shortage.resource.upper()} for {shortage.detail}",
        shortage,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of each part of a step; the step takes as long as its longest part."""

    samples: int
    parts_s: dict[str, float]
    hbm_lookup_share: float
    detail: str = ""
    extra_servers: int = 0

    @property
    def waits_for(self) -> str:
        """The longest part, which the step waits for."""
        return max(self.parts_s, key=lambda part: self.parts_s[part])

    @property
    def samples_per_s(self) -> float:
        """Samples of the step over its time."""
        return self.samples / self.parts_s[self.waits_for]


class _ServerLoad(NamedTuple):
    """What one table takes of a server that pools it: seconds of its memory a step, and bytes."""

    dram_s: float
    held_bytes: int


class Embeddings:
    """Costs of embeddings, computed once: they do not depend on the dense layers."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._reports: dict[tuple[object, ...], CostReport | ImpossibleError] = {}
        self._loads: dict[tuple[object, ...], _ServerLoad] = {}

    def report(
        self, name: str, topology: Topology, setting: Setting, placement: Placement
    ) -> CostReport:
        """Return what a placement on the GPUs of the platform of that name costs."""
        key = (name, placement.name, setting.batch, *setting.embedding_key)
        if key not in self._reports:
            assert placement.plan is not None, "servers have no plan on GPUs"
            problem = Problem(setting.profile(), topology, setting.batch)
            plan = placement.plan(problem, self.model)
            short = shortage(plan)
            self._reports[key] = _too_small(short) if short else self.model.evaluate(problem, plan)
        report = self._reports[key]
        if isinstance(report, ImpossibleError):
            raise report
        return report

    def server_load(self, server: Host, setting: Setting, samples: int) -> _ServerLoad:
        """Return what one of the tables takes of a server, for a step of so many samples."""
        key = (server, samples, *setting.embedding_key)
        if key not in self._loads:
            problem = Problem(setting.profile(1), server_topology(server), samples)
            plan = pooled_by_host(problem, self.model)
            report = self.model.evaluate(problem, plan)
            held = device_memory(plan)[server.id].total_bytes
            self._loads[key] = _ServerLoad(report.hosts[0].dram_s, held)
        return self._loads[key]


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one setting on one platform."""

    platform: Platform
    setting: Setting
    embeddings: Embeddings
    parameter_servers: int

    def of(self, placement: Placement) -> Step:
        """Cost a placement; raises `ImpossibleError` where the platform cannot have it."""
        if placement.name == "cpu":
            return self._on_cpus()
        topology = self.platform.topology
        if topology is None:
            raise ImpossibleError(f"{self.platform.name} has no GPUs")
        if placement.name == "remote":
            return self._remote(topology)
        if placement.name == "host-pooled" and len(topology.hosts) > 1:
            raise ImpossibleError("pooled rows that cross to other hosts are not modelled")
        return self._on_gpus(topology, placement)

    def _on_gpus(self, topology: Topology, placement: Placement) -> Step:
        report = self.embeddings.report(self.platform.name, topology, self.setting, placement)
        dense = self._dense(topology)
        busy, link = 0.0, 0.0
        for gpu, cost, rest in zip(topology.gpus, report.gpus, dense, strict=True):
            own_s = cost.hbm_s + cost.launch_s + cost.communication_s + rest.step_s
            busy = max(busy, own_s if placement.copies_ahead else own_s + cost.link_s)
            between_s = cost.communication_s + rest.allreduce_s
            link = max(link, cost.link_s + rest.input_s + _shared(topology, gpu.id, between_s))
        return Step(
            self.setting.batch * len(topology.gpus),
            {"gpu": busy, "host link": link, "host memory": max(h.dram_s for h in report.hosts)},
            report.hbm_lookup_share,
        )

    def _remote(self, topology: Topology) -> Step:
        """Cost tables on CPU servers, which pool for the GPUs and update."""
        setting, servers = self.setting, self.parameter_servers
        if self.platform.network_bytes_per_s is None:
            raise ImpossibleError(f"the network of {self.platform.name} is not known")
        samples = setting.batch * len(topology.gpus)
        server = cpu_server()
        tables = -(-setting.sparse // servers)
        load = self._load(server, samples, tables, "parameter server")
        sent = self._network_bytes * samples
        ports = self.platform.network_bytes_per_s * len(topology.hosts)
        dense = self._dense(topology)
        pooled = setting.batch * setting.sparse * setting.dim * _FLOAT_BYTES
        link_s = [
            pooled / topology.host_link_bytes_per_s(gpu.id)
            + cost.input_s
            + _shared(topology, gpu.id, cost.allreduce_s)
            for gpu, cost in zip(topology.gpus, dense, strict=True)
        ]
        return Step(
            samples,
            {
                "gpu": max(cost.step_s for cost in dense),
                "host link": max(link_s),
                "network": sent / ports,
                "servers' memory": tables * load.dram_s,
                "servers' network": sent * tables / setting.sparse / CPU_SERVER.network.bytes_per_s,
            },
            0.0,
            f"{servers} parameter servers",
            servers,
        )

    def _on_cpus(self) -> Step:
        """Trainers and parameter servers on CPUs; one server is both."""
        platform = self.platform
        servers = platform.servers
        if platform.topology is not None:
            servers = len(platform.topology.hosts)
        compute_s = self._cpu_compute_s
        if servers == 1:
            load = self._load(platform.server, CPU_BATCH, self.setting.sparse, platform.name)
            parts = {"cpu": compute_s, "host memory": self.setting.sparse * load.dram_s}
            return Step(CPU_BATCH, parts, 0.0, "one server")
        steps: list[Step] = []
        for trainers in range(1, servers):
            try:
                steps.append(self._with_trainers(trainers, servers - trainers))
            except ImpossibleError:
                if not steps:  # Of the most parameter servers, which lack least.
                    raise
                break
        return max(steps, key=lambda step: step.samples_per_s)

    def _with_trainers(self, trainers: int, servers: int) -> Step:
        platform, setting = self.platform, self.setting
        assert platform.network_bytes_per_s is not None, "several servers have a network"
        tables = -(-setting.sparse // servers)
        load = self._load(platform.server, CPU_BATCH, tables, "parameter server")
        sent = self._network_bytes * CPU_BATCH
        port = platform.network_bytes_per_s
        parts = {
            "cpu": self._cpu_compute_s,
            "network": sent / port,
            # A server serves the steps of all trainers, one after the other.
            "servers' memory": trainers * tables * load.dram_s,
            "servers' network": trainers * sent * tables / setting.sparse / port,
        }
        detail = f"{trainers} trainers, {servers} parameter servers"
        return Step(trainers * CPU_BATCH, parts, 0.0, detail)

    def _dense(self, topology: Topology) -> tuple[DenseCost, ...]:
        network, batch = self.setting.dense_network, self.setting.batch
        rate = self.platform.gpu.per_s
        return tuple(dense_cost(network, topology, gpu, batch, rate) for gpu in topology.gpus)

    def _load(self, server: Host, samples: int, tables: int, name: str) -> _ServerLoad:
        """Return what each of `tables` tables takes of a server; raises where they do not fit."""
        load = self.embeddings.server_load(server, self.setting, samples)
        short = tables * load.held_bytes - server.memory_bytes
        if short > 0:
            raise _too_small(Shortage(server.id, "dram", short, f"{tables} tables"), name)
        return load

    @property
    def _cpu_compute_s(self) -> float:
        flops = self.setting.dense_network.flops_per_sample * CPU_BATCH
        return flops / self.platform.cpu.per_s

    @property
    def _network_bytes(self) -> float:
        """Bytes of a sample in the busier direction: ids and gradients out, to the servers."""
        setting = self.setting
        row_bytes = setting.dim * _FLOAT_BYTES
        return float(setting.sparse * (setting.pooling * _ID_BYTES + row_bytes))


def _shared(topology: Topology, gpu: str, between_s: float) -> float:
    """Return what of the time between GPUs is on the host link: all without other links."""
    alone = topology.peer_bytes_per_s(gpu) > topology.host_link_bytes_per_s(gpu)
    return 0.0 if alone else between_s
