"""What keeps a plan from being faster, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cost_models import CostReport
from placer.units import format_bytes, format_seconds
from solvers.bounds.lagrangian import LagrangianBound
from solvers.bounds.linear_program import GroupPrice, LpBound
from solvers.model.instance import Instance

Resource = Literal[
    "table", "dense", "dram time", "dram", "hbm", "link", "communication", "launches", "work"
]

_ALL_OF = 0.99
"""What takes more than this share of the step, or of a device's memory, takes all of it."""

_MOST_OF = 0.5
"""Dense layers that take more than this share of the step bind it."""

_WORTH = 1e-3
"""Memory binds if as much of it again would save more than this share of the step."""

_TAKEN = 0.5
"""Memory does not bind a plan that takes less of it than this share."""

_EVEN = 0.8
"""GPUs busy for less than this share of the step on average are worth a word."""

_MORE = 0.1
"""How much more memory is spoken of."""

_NAMED = 4
"""Devices that are named."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The resource that limits a plan, and a sentence with the evidence.

    Attributes
    ----------
    resource : str
        ``table``: one table's shard, which no sharding option makes shorter. ``dense``: layers
        beside the embeddings. ``dram time``: the bandwidth of a host's memory. ``dram`` or
        ``hbm``: too little of it. Otherwise what the slowest GPU spends most of its time on: its
        ``link`` to the host, ``communication``, ``launches``, or ``work`` in its own memory.
    words : str
    """

    resource: Resource
    words: str


def binding(instance: Instance, bound: LagrangianBound | LpBound, report: CostReport) -> Binding:
    """Find what limits a plan.

    Parameters
    ----------
    instance : Instance
    bound : LagrangianBound or LpBound
        The latter knows more: of hosts' memory too, whether more of it would help.
    report : CostReport
        Of the plan.
    """
    waits = f"waits for {report.bottleneck}"
    cause = _of_a_table(instance, bound, report) or _of_a_host(bound, report)
    cause = cause or _of_dense(report) or _of_memory(instance, bound, report)
    cause = cause or _of_work(instance, report)
    return Binding(cause.resource, f"{waits}; {cause.words}")


def _of_a_table(
    instance: Instance, bound: LagrangianBound | LpBound, report: CostReport
) -> Binding | None:
    table, longest_s = _longest(bound)
    if isinstance(bound, LagrangianBound) and longest_s >= _ALL_OF * report.step_time_s:
        # Cutting it may not be cheapest, but make its shards shorter.
        longest_s = min(option.longest_s for option in bound.options_of(table))
    if not report.step_time_s > 0 or longest_s < _ALL_OF * report.step_time_s:
        return None
    name = instance.problem.profile.tables[table].name
    return Binding(
        "table",
        f"table {name!r} alone takes {format_seconds(longest_s)} in its fastest sharding option, "
        "so that no other table and no more memory matters",
    )


def _longest(bound: LagrangianBound | LpBound) -> tuple[int, float]:
    """The table whose longest shard is longest, in the sharding option where that is shortest."""
    if isinstance(bound, LpBound):
        return bound.longest_table, bound.longest_s
    longest = [min((c.longest_s for c in options), default=0.0) for options in bound.cheapest]
    table = max(range(len(longest)), key=longest.__getitem__)
    return table, longest[table]


def _of_a_host(bound: LagrangianBound | LpBound, report: CostReport) -> Binding | None:
    busiest = max(report.hosts, key=lambda host: host.dram_s, default=None)
    if busiest is None or busiest.dram_s < _ALL_OF * report.step_time_s or not busiest.dram_s:
        return None
    proven = (
        bound.dram_time_share
        if isinstance(bound, LpBound)
        else float(bound.dram_s >= _ALL_OF * bound.step_time_s)
    )
    return Binding(
        "dram time",
        f"the memory of {busiest.device} is busy for {busiest.dram_s / report.step_time_s:.0%} of "
        "the step with rows that are not in HBM"
        + (f", and {proven:.0%} of the bound is the same" if proven > _WORTH else ""),
    )


def _of_dense(report: CostReport) -> Binding | None:
    if not report.has_dense_phase or (report.dense_s or 0.0) < _MOST_OF * report.step_time_s:
        return None
    share = (report.dense_s or 0.0) / report.step_time_s
    return Binding("dense", f"they take {share:.0%} of the step, which no placement shortens")


def _of_memory(
    instance: Instance, bound: LagrangianBound | LpBound, report: CostReport
) -> Binding | None:
    if not bound.step_time_s > 0:
        return None
    gpus = [gpu.id for gpu in instance.problem.topology.gpus]
    hosts = [host.id for host in instance.problem.topology.hosts]
    if isinstance(bound, LpBound):
        of_gpus, of_hosts = _worth_s(bound.gpus, gpus), _worth_s(bound.hosts, hosts)
    else:
        of_gpus, of_hosts = (bound.hbm_worth_s / instance.gpus, gpus), (0.0, [])
    is_dram = of_hosts[0] > of_gpus[0]
    saved_s, devices = of_hosts if is_dram else of_gpus
    if not saved_s > _WORTH * bound.step_time_s:
        return None
    uses = [report.memory[device] for device in devices]
    used, has = sum(use.total_bytes for use in uses), sum(use.capacity_bytes for use in uses)
    if used < _TAKEN * has:
        return None
    every, kind = (hosts, "memory") if is_dram else (gpus, "HBM")
    if len(devices) == len(every) > 1:
        whose = f"all {'hosts' if is_dram else 'GPUs'}"
    else:
        whose = ", ".join(devices[:_NAMED]) + (", …" if len(devices) > _NAMED else "")
    return Binding(
        "dram" if is_dram else "hbm",
        f"{format_bytes(used)} of {format_bytes(has)} of the {kind} of {whose} is taken, and "
        f"by the bound's price {_MORE:.0%} more would save up to "
        f"{min(1.0, saved_s / bound.step_time_s * _MORE):.1%} of the step",
    )


def _worth_s(groups: Sequence[GroupPrice], names: Sequence[str]) -> tuple[float, list[str]]:
    """Seconds that all of a memory is worth at its prices, and the devices with a price."""
    priced = [group for group in groups if group.price_s_per_byte > 0]
    devices = sorted(device for group in priced for device in group.devices)
    worth_s = sum(group.price_s_per_byte * group.memory_bytes for group in priced)
    return worth_s, [names[device] for device in devices]


def _of_work(instance: Instance, report: CostReport) -> Binding:
    """What the slowest GPU does most of the time."""
    slowest = max(report.gpus, key=lambda gpu: gpu.total_s)
    parts: dict[Resource, float] = {
        "work": slowest.hbm_s,
        "link": slowest.link_s,
        "communication": slowest.communication_s,
        "launches": slowest.launch_s,
    }
    words: dict[Resource, str] = {
        "work": "reads and writes of its own memory",
        "link": "copies from its host's memory",
        "communication": "exchanges with other GPUs",
        "launches": "the fixed cost of its shards",
    }
    resource = max(parts, key=lambda part: parts[part])
    share = parts[resource] / slowest.total_s if slowest.total_s else 0.0
    uses = [report.memory[gpu.id] for gpu in instance.problem.topology.gpus]
    has = sum(use.capacity_bytes for use in uses)
    free = has - sum(use.total_bytes for use in uses)
    verdict = "which more memory would not shorten"
    if report.balance < _EVEN:
        verdict = f"and the GPUs are busy for {report.balance:.0%} of the step on average"
    elif resource == "link" and free > (1 - _TAKEN) * has:
        verdict = f"and {format_bytes(free)} of {format_bytes(has)} of HBM is free for those rows"
    return Binding(resource, f"{share:.0%} of it are {words[resource]}, {verdict}")
