"""Find what binds a plan: the resource of which a tenth more gains most, and the gain.

"What binds" in docs/questions.md says how.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from cost_models import CostModel, CostReport, TableShard
from cost_models.cost_report import Part
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.topology.devices import LinkKind
from placer.topology.topology import Topology
from placer.units import format_share
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance
from solvers.model.knapsack import Float, costs_with
from solvers.model.read_plan import read_shards

Resource = Literal[
    "free hbm", "hbm", "dram", "hbm bandwidth", "link", "dram bandwidth", "peers", "network",
    "launches", "drives", "dense", "nothing",
]  # fmt: skip

MORE = 1.1
"""Factor by which a resource grows."""

_WORTH = 1e-3
"""A resource binds if a tenth more of it gains more than this share."""

_MOST_FILLED = 2048
"""Largest number of shards whose HBM is filled again, at one to two milliseconds each."""

_PARTS: dict[Resource, tuple[Part, ...]] = {
    "hbm bandwidth": ("hbm",),
    "link": ("link",),
    "dram bandwidth": ("pooling",),
    "launches": ("launches",),
    "drives": ("drive",),
}

_WORDS: dict[Resource, tuple[str, str]] = {
    "free hbm": ("HBM that is left free binds", "rows moved there give"),
    "hbm": ("too little HBM binds", "a tenth more gives"),
    "dram": ("too little host memory binds", "a tenth more gives"),
    "hbm bandwidth": ("HBM bandwidth binds", "a tenth more gives"),
    "link": ("the links between hosts and GPUs bind", "a tenth more of their bandwidth gives"),
    "dram bandwidth": ("the bandwidth of host memory binds", "a tenth more gives"),
    "peers": ("the links between GPUs bind", "a tenth more of their bandwidth gives"),
    "network": ("the network binds", "a tenth more of its bandwidth gives"),
    "launches": ("the launches of kernels bind", "a tenth more of them a second give"),
    "drives": ("the drives of the hosts bind", "a tenth more reads and writes a second give"),
    "dense": ("the dense layers bind", "a tenth more of them a second give"),
}


class Change(NamedTuple):
    """A machine with more of one resource, and the change's name in reports."""

    resource: Resource
    words: str
    topology: Topology


@dataclass(frozen=True, slots=True)
class Binding:
    """The resource that limits a plan, or ``nothing`` if no single one does, and a sentence.

    `gains` has the relative gain in samples a second with a tenth more of each resource: 0.02 means
    2% more. ``free hbm`` is the gain of filling HBM again. Gains of memory are left out if they are
    unknown: for sharding that is not searched, and for very many shards.
    """

    resource: Resource
    words: str
    gains: Mapping[Resource, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """The gain of `resource`; the greatest gain if none binds."""
        return self.gains.get(self.resource, max(self.gains.values(), default=0.0))


def changes(machine: Topology) -> list[Change]:
    """Return the machine with a tenth more of each resource that it has.

    >>> [change.words for change in changes(Topology.parse("1xh100"))][:2]
    ['HBM +10%', 'DRAM +10%']
    """

    def more(devices: str, of: str, scale: float = MORE) -> Topology:
        each: Any = getattr(machine, devices)
        kind = type(getattr(each[0], of))  # Bytes stay whole.
        grown = tuple(replace(one, **{of: kind(scale * getattr(one, of))}) for one in each)
        changed: dict[str, Any] = {devices: grown}
        return replace(machine, **changed)

    def faster(kind: LinkKind) -> Topology:
        links = (
            replace(one, bytes_per_s=one.bytes_per_s * MORE) if one.kind == kind else one
            for one in machine.links
        )
        return replace(machine, links=tuple(links))

    found = [
        Change("hbm", "HBM +10%", more("gpus", "memory_bytes")),
        Change("dram", "DRAM +10%", more("hosts", "memory_bytes")),
        Change("hbm bandwidth", "HBM bandwidth +10%", more("gpus", "hbm_bytes_per_s")),
        Change("link", "host link bandwidth +10%", faster("pcie")),
        Change("dram bandwidth", "DRAM bandwidth +10%", more("hosts", "dram_bytes_per_s")),
        Change("launches", "kernel launches +10% a second", more("gpus", "launch_s", 1 / MORE)),
    ]
    kinds = {link.kind for link in machine.links}
    if "nvlink" in kinds:
        found.append(Change("peers", "peer bandwidth +10%", faster("nvlink")))
    if "network" in kinds and len(machine.hosts) > 1:
        found.append(Change("network", "network bandwidth +10%", faster("network")))
    if any(host.drive for host in machine.hosts):
        faster_drives = tuple(
            replace(host, drive=host.drive and host.drive.faster(MORE)) for host in machine.hosts
        )
        found.append(Change("drives", "drives +10%", replace(machine, hosts=faster_drives)))
    return found


def binding(
    problem: Problem,
    plan: Plan,
    cost_model: CostModel,
    report: CostReport | None = None,
    like: Instance | None = None,
) -> Binding:
    """Find what limits a plan. All commands report this answer.

    - `problem`: with accesses over the plan's row order.
    - `report`: the plan's cost, if it is known.
    - `like`: an instance of the same problem and cost model, whose cached curves are reused.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from placer.workloads import named_workload
    >>> from solvers import solve
    >>> problem = Problem(named_workload("random-3@1"), Topology.parse("2xt4"), batch_size=8192)
    >>> found = binding(problem, solve(problem, "greedy-cost").plan, Roofline())
    >>> found.gain == max(found.gains.values())
    True
    """
    report = report or cost_model.evaluate(problem, plan)
    step_s = report.step_time_s
    gains: dict[Resource, float] = _of_memory(problem, plan, cost_model, report, like)
    machine = problem.topology
    before_s = _exchange_s(machine)
    for change in changes(machine):
        if change.resource in ("hbm", "dram"):
            continue
        scale: dict[Part, float | Float] = dict.fromkeys(_PARTS.get(change.resource, ()), 1 / MORE)
        scale["communication"] = _exchange_s(change.topology) / np.where(before_s, before_s, 1.0)
        dram = 1 / MORE if change.resource == "dram bandwidth" else 1.0
        gains[change.resource] = _gain(step_s, report.step_time_if(scale, dram=dram))
    if report.dense_s:
        gains["dense"] = _gain(step_s, report.step_time_if({}, dense=1 / MORE))
    resource, *others = sorted(gains, key=lambda one: -gains[one])
    waits = f"waits for {report.bottleneck}"
    unknown = "" if "hbm" in gains else "; what more memory gains is not known"
    if gains[resource] <= _WORTH:
        words = (
            f"no resource binds by itself: a tenth more of any gains at most {format_share(_WORTH)}"
        )
        return Binding("nothing", f"{waits}; {words}{unknown}", gains)
    binds, how = _WORDS[resource]
    second = gains[others[0]]
    rest = f", of any other resource {format_share(second) if second > 0 else 'nothing'}"
    words = f"{binds}: {how} {format_share(gains[resource])} more samples a second{rest}"
    return Binding(resource, f"{waits}; {words}{unknown}", gains)


def _gain(before_s: float, after_s: float) -> float:
    return max(0.0, before_s / after_s - 1) if after_s > 0 else 0.0


def _exchange_s(machine: Topology) -> Float:
    """Return seconds per byte that a GPU sends to all GPUs, or a server sends, shape (devices,)."""
    alone = len(machine.gpus) == 1
    of_gpus = [0.0 if alone else machine.exchange_s(gpu.id, 1.0) for gpu in machine.gpus]
    return np.array(of_gpus + [1 / machine.server_bytes_per_s(one.id) for one in machine.servers])


def _of_memory(
    problem: Problem,
    plan: Plan,
    cost_model: CostModel,
    report: CostReport,
    like: Instance | None,
) -> dict[Resource, float]:
    """Return gains of more memory, with the plan's shards on its GPUs and HBM filled again."""
    cold = {shard.table for shard in plan.shards if shard.memory != "hbm" and shard.row_count}
    if not cold:
        return {"hbm": 0.0, "dram": 0.0}
    count = sum(len(plan.shards_by_table[table]) for table in cold)
    if cost_model.uniform_splits or count > _MOST_FILLED:
        return {}
    instance = Instance(problem, cost_model, like=like)
    known = _placed(instance, plan, cold)
    if not known:
        return {}
    # In any memory, as bytes between the points of a curve may be understated.
    as_is = _filled(instance, known, np.inf, np.inf, fixed=True)
    uses = report.memory
    gpus, hosts = problem.topology.serving, problem.topology.hosts
    has = np.array([uses[gpu.id].capacity_bytes for gpu in gpus], dtype=np.float64)
    used = np.array([uses[gpu.id].total_bytes for gpu in gpus], dtype=np.float64)
    dram = np.array([uses[host.id].capacity_bytes for host in hosts], dtype=np.float64)
    in_dram = np.array([uses[host.id].total_bytes for host in hosts], dtype=np.float64)
    with_gpus = [bool(problem.topology.gpus_of(host.id)) for host in hosts]
    dram, in_dram = dram * with_gpus, in_dram * with_gpus  # Servers' is taken for HBM.
    is_gpu = np.arange(len(gpus)) < len(problem.topology.gpus)
    if as_is is None:
        return {}
    others = used - [one.hbm_bytes for one in as_is.knapsacks]
    others_dram = in_dram - as_is.hosts({})[1]

    def step_s(hbm: float, dram_share: float, least: float) -> float:
        room = has * np.where(is_gpu, hbm, dram_share) - others
        filled = _filled(instance, known, room, dram * dram_share - others_dram)
        if filled is None:
            return least
        phase_s = report.phase_times_s + (filled.phase_s - as_is.phase_s).T
        host_s = np.array([host.dram_s for host in report.hosts])
        host_s = host_s + filled.hosts({})[0] - as_is.hosts({})[0]
        return min(least, max(report.schedule.step_time_s(phase_s), float(host_s.max())))

    now_s = step_s(1.0, 1.0, report.step_time_s)
    return {
        "free hbm": _gain(report.step_time_s, now_s),
        "hbm": _gain(now_s, step_s(MORE, 1.0, now_s)),
        "dram": _gain(now_s, step_s(1.0, MORE, now_s)),
    }


_Known = dict[TableShard, tuple[int, Float]]
"""The GPU of each shard, and its costs there, shape (5 + phases, 1)."""


def _placed(instance: Instance, plan: Plan, tables: set[str]) -> _Known:
    """Return the shards of some tables, without those that no sharding option describes."""
    known: _Known = {}
    topology = instance.problem.topology
    for number, profile in enumerate(instance.problem.profile):
        if profile.name not in tables:
            continue
        shards = plan.shards_by_table[profile.name]
        placed = read_shards(number, profile.table, shards, topology, ())
        for one in () if placed is None else placed.placements:
            costs = costs_with(instance.curve(one.shard, one.gpu), one.hot_rows)
            known[one.shard] = one.gpu, costs[:, None]
    return known


def _filled(
    instance: Instance,
    known: _Known,
    hbm_bytes: Float | float,
    dram_bytes: Float | float,
    *,
    fixed: bool = False,
) -> Assignment | None:
    """Return the shards on their GPUs with this much memory, as they are or filled again."""
    assert instance.prices.size, "before the memory that they are dense around is another"
    roomy = copy.copy(instance)
    roomy.hbm_bytes = np.broadcast_to(hbm_bytes, (instance.gpus,))
    roomy.dram_bytes = np.broadcast_to(dram_bytes, instance.dram_bytes.shape)
    costs = {shard: of for shard, (_, of) in known.items()} if fixed else {}
    pairs = [(shard, gpu) for shard, (gpu, _) in known.items()]
    return Assignment.of(roomy, pairs, fixed=costs)
