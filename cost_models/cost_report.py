"""A cost model's report of a plan: times by device and phase, and memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cost_models.schedule import ONE_PHASE, Float, Schedule
from placer.plan.memory import MemoryUse

_ALIKE = 1e-9
"""GPUs whose times differ by less than this share are equally slow: reports name the first one."""

Part = Literal["hbm", "link", "pooling", "communication", "launches", "drive"]
"""What a GPU spends its time on. ``pooling`` is waiting for rows that the host pools."""

PARTS: tuple[Part, ...] = ("hbm", "link", "pooling", "communication", "launches", "drive")


@dataclass(frozen=True, slots=True)
class GpuCost:
    """Seconds that one GPU spends on embeddings in one step, by what it waits for."""

    device: str
    hbm_s: float  # Reads and writes of its own memory.
    # Copies from and to its host's memory, and waits for rows that the host pools.
    link_s: float
    communication_s: float  # Exchanges of ids, pooled rows and gradients with other GPUs.
    launch_s: float  # Launches of kernels, and fixed costs of shards and arenas.

    @property
    def total_s(self) -> float:
        """The sum of all parts, without overlap or waits for other GPUs."""
        return self.hbm_s + self.link_s + self.communication_s + self.launch_s


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds that one host's memory is busy with embeddings in one step."""

    device: str
    dram_s: float


@dataclass(frozen=True, slots=True)
class TableCost:
    """The time that a table takes of a step, and its lookups in HBM."""

    # Seconds of all GPUs together: of the table's shards, and its part of arenas. The tables of a
    # GPU's arena share the arena's time in equal parts.
    gpu_s: float
    hbm_lookup_share: float  # Share of its lookups that HBM serves.


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """A phase of a step: its slowest GPU, that GPU's seconds, and the mean over GPUs."""

    name: str
    slowest: str
    slowest_s: float
    mean_s: float

    @property
    def waits_s(self) -> float:
        """Mean seconds that GPUs wait for the slowest GPU; 0 if it is only a rounding error."""
        waits_s = self.slowest_s - self.mean_s
        return waits_s if waits_s > 1e-12 * self.slowest_s else 0.0


@dataclass(frozen=True, slots=True)
class CostReport:
    """The cost of a plan: times by GPU and host, memory by device, and lookups in HBM.

    `gpus` ends with the hosts without GPUs, which serve lookups like GPUs. `hbm_lookup_share` is
    the share of lookups in device shards and hits of caches. `relative_error` is the median error
    of the model's step times, as a share, if it was measured. `schedule` has the order of phases,
    `phase_s` the seconds of each phase and GPU, and `parts_s`, shape (parts, phases, GPUs), the
    same by `PARTS`; both are missing if the step is one phase. `dense_s` are the seconds of dense
    layers in the first chain; None for embeddings alone. `tables` has the tables with shards; their
    `gpu_s` add up to `GpuCost.total_s` of all GPUs.

    Examples
    --------
    >>> fast = GpuCost("gpu:0", hbm_s=0.002, link_s=0.0, communication_s=0.001, launch_s=0.0)
    >>> slow = GpuCost("gpu:1", hbm_s=0.001, link_s=0.004, communication_s=0.001, launch_s=0.0)
    >>> report = CostReport("roofline", (fast, slow), (), {}, hbm_lookup_share=0.9)
    >>> report.step_time_s, report.bottleneck
    (0.006, 'gpu:1 link')
    """

    cost_model: str
    gpus: tuple[GpuCost, ...]
    hosts: tuple[HostCost, ...]
    memory: dict[str, MemoryUse]
    hbm_lookup_share: float
    relative_error: float | None = None
    schedule: Schedule = ONE_PHASE
    phase_s: tuple[tuple[float, ...], ...] = ()
    dense_s: float | None = None
    parts_s: Float | None = field(default=None, compare=False, repr=False)
    tables: Mapping[str, TableCost] = field(default_factory=dict)

    @property
    def step_time_s(self) -> float:
        """Time of the longest chain of phases, or of the busiest host's memory if longer."""
        busiest = max((host.dram_s for host in self.hosts), default=0.0)
        return max(self.schedule.step_time_s(self.phase_times_s), busiest)

    def step_time_if(
        self, scale: Mapping[Part, float | Float], *, dram: float = 1.0, dense: float = 1.0
    ) -> float:
        """Return the step time of the same plan if some parts took `scale` times as long.

        `scale`, mapping of part to float, or float64 of shape (GPUs,): factors for the parts of
        GPUs' times. `dram`, `dense`: factors for the times of hosts' memory and of dense layers.

        Examples
        --------
        >>> gpu = GpuCost("gpu:0", hbm_s=0.5, link_s=0.25, communication_s=0.0, launch_s=0.25)
        >>> report = CostReport("roofline", (gpu,), (), {}, hbm_lookup_share=0.9)
        >>> report.step_time_if({"hbm": 0.5})
        0.75
        """
        parts_s = zip(PARTS, self.part_times_s, strict=True)
        times = sum(scale.get(part, 1.0) * of for part, of in parts_s)
        fixed_s = self.schedule.fixed_s
        if self.dense_s and fixed_s:
            fixed_s = (fixed_s[0] - (1 - dense) * self.dense_s, *fixed_s[1:])
        busiest = max((host.dram_s for host in self.hosts), default=0.0)
        schedule = replace(self.schedule, fixed_s=fixed_s)
        return max(schedule.step_time_s(np.asarray(times)), dram * busiest)

    @property
    def part_times_s(self) -> Float:
        """Seconds of each of `PARTS`, phase and GPU, shape (parts, phases, GPUs)."""
        if self.parts_s is not None:
            return self.parts_s
        one = [(g.hbm_s, g.link_s, 0.0, g.communication_s, g.launch_s, 0.0) for g in self.gpus]
        return np.array(one).T[:, None]

    @property
    def phase_times_s(self) -> Float:
        """Seconds of each phase and GPU, shape (phases, GPUs), without delays of shared lanes."""
        return np.array(self.phase_s or [[gpu.total_s for gpu in self.gpus]])

    @property
    def gpu_s(self) -> Float:
        """Seconds of each GPU in the phases of the longest chain, shape (GPUs,)."""
        seconds: Float = self.longest_chain[1].sum(axis=0)
        return seconds

    @property
    def slowest_gpu(self) -> int:
        """The number of the GPU with the most seconds in the phases of the longest chain."""
        seconds = self.gpu_s
        return int(np.argmax(seconds >= (1 - _ALIKE) * seconds.max()))

    @property
    def longest_chain(self) -> tuple[tuple[str, ...], Float]:
        """The names of the longest chain's phases, in order, and each GPU's seconds in them.

        Seconds have shape (phases, GPUs). They include delays of shared lanes, but no dense
        layers.
        """
        longest, times = self._longest
        chain = self.schedule.chains[longest]
        return tuple(self.schedule.phases[phase] for phase in chain), times[list(chain)]

    @property
    def phases(self) -> tuple[PhaseCost, ...]:
        """The phases of the longest chain, in order, each with its slowest GPU.

        If the step waits for a host's memory, its only phase is ``dram``.
        """
        host = self._waited_host
        if host is not None:
            mean_s = float(np.mean([one.dram_s for one in self.hosts]))
            return (PhaseCost("dram", host.device, host.dram_s, mean_s),)
        return self._chain_phases

    @property
    def _chain_phases(self) -> tuple[PhaseCost, ...]:
        names, times = self.longest_chain
        hosts = {host.device for host in self.hosts}
        are_gpus = np.array([gpu.device not in hosts for gpu in self.gpus])
        return tuple(
            PhaseCost(
                name,
                self.gpus[int(of_gpus.argmax())].device,
                float(of_gpus.max()),
                float(of_gpus[are_gpus].mean()),
            )
            for name, of_gpus in zip(names, times, strict=True)
        )

    @property
    def has_dense_phase(self) -> bool:
        """Whether there are dense layers, and the longest chain is the first, which has them."""
        return self.dense_s is not None and self._longest[0] == 0

    @property
    def other_s(self) -> float:
        """Seconds of the step that belong to no phase and to no dense layer.

        They are latencies of links, and what trainers add to each step.
        """
        known_s = sum(phase.slowest_s for phase in self.phases)
        if self.has_dense_phase and self._waited_host is None:
            known_s += self.dense_s or 0.0
        left_s = self.step_time_s - known_s
        return left_s if left_s > _ALIKE * self.step_time_s else 0.0

    @property
    def _waited_host(self) -> HostCost | None:
        """The host whose memory the step waits for; None if it does not wait for memory."""
        busiest = max(self.hosts, key=lambda host: host.dram_s, default=None)
        return busiest if busiest is not None and busiest.dram_s >= self.step_time_s > 0 else None

    @property
    def _longest(self) -> tuple[int, Float]:
        """The number of the longest chain, and phase times with delays of shared lanes."""
        times = self.phase_times_s
        return int(np.argmax(self.schedule.chain_times_s(times))), self.schedule.prolonged(times)

    @property
    def bottleneck(self) -> str:
        """Name what the step waits for: the slowest GPU and its longest phase or part.

        If they take longer, it is a host's memory or the dense layers.
        """
        if self._waited_host is not None:
            return f"{self._waited_host.device} dram"
        names, times = self.longest_chain if self.phase_s else (PARTS, self.part_times_s[:, 0])
        of_slowest = times[:, self.slowest_gpu]
        if self.has_dense_phase and (self.dense_s or 0.0) > of_slowest.max():
            return "dense layers"
        return f"{self.gpus[self.slowest_gpu].device} {names[int(of_slowest.argmax())]}"

    @property
    def balance(self) -> float:
        """The GPUs' mean time over the slowest GPU's, summed over phases: 1 if no GPU waits."""
        phases = self._chain_phases
        slowest_s = sum(phase.slowest_s for phase in phases)
        return sum(phase.mean_s for phase in phases) / slowest_s if slowest_s > 0 else 1.0
