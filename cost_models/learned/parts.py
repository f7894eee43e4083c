"""Unit costs as a sum of parts, each of which the learned model multiplies by its own factor.

Rows that are not in HBM cost what rows in HBM do, and something besides: parts are taken so that
whatever the factors are, as long as they are positive, no unit of cold rows is cheaper than one of
hot rows. Curves then fall and are convex, as solvers expect.
"""

import numpy as np

from cost_models.base import Float
from cost_models.step_equation.arena_loads import arena_loads, arena_times
from cost_models.step_equation.contention import contended
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.phases import NAMES
from cost_models.step_equation.unit_costs import (
    READ_KINDS,
    READS,
    SHAPE,
    ReadKind,
    UnitCosts,
    as_array,
)
from cost_models.step_equation.work import Work, work_of
from placer.plan.plan import Plan
from placer.problem import Problem

PARTS = (
    "lookup",
    "row",
    "hit_lookup",
    "hit_row",
    "staged_lookup",
    "staged_row",
    "uva_lookup",
    "uva_row",
    "miss_lookup",
    "miss_row",
    "host_lookup",
    "host_row",
    "host_vector",
    "dram",
    "output",
    "exchange",
    "shard",
    "cache_row",
    "column_slice",
    "mapped",
    "pooled",
)
"""``lookup`` and ``row``: what lookups and distinct rows cost in HBM, wherever they are. Those of
a kind of read: what they cost besides. ``dram``: time of the host's memory, of all kinds."""

_HBM, _LINK, _DRAM = range(3)
_READ_PARTS = {"lookup": slice(0, 2), "row": slice(2, 6)}
_HOST_PARTS = {"lookup": slice(0, 2), "row": slice(2, 4), "vector": slice(4, 6)}
_OTHER_PARTS = {
    "output": ("output_vector_s", "output_byte_s"),
    "exchange": ("exchange_byte_s",),
    "shard": ("shard_s",),
    "cache_row": ("cache_row_s",),
    "column_slice": ("column_slice_s", "sliced_row_byte_s"),
    "mapped": ("mapped_lookup_s",),
    "pooled": ("pooled_lookup_s",),
}
_KIND = {kind: number for number, kind in enumerate(READ_KINDS)}
_PART = {part: number for number, part in enumerate(PARTS)}


def parts_of(costs: UnitCosts) -> Float:
    """The parts of unit costs, shape (parts, numbers of `as_array`); their sum is the whole."""
    whole = as_array(costs)
    reads = whole[:READS].reshape(SHAPE)
    parts = np.zeros((len(PARTS), whole.size))
    shares = parts[:, :READS].reshape(len(PARTS), *reads.shape)
    device, hit = (reads[_KIND[kind], :_DRAM].sum(axis=0) for kind in ("device", "hit"))
    hot_hit = np.minimum(device, hit)
    floors: dict[ReadKind, list[tuple[str, Float]]] = {
        "device": [("", device)],
        "hit": [("", device)],
        "staged": [("", device)],
        "uva": [("", device)],
        "miss": [("", hot_hit), ("hit_", hit - hot_hit)],
        "host": [],
    }
    for kind, floor in floors.items():
        _fill(shares[:, _KIND[kind]], reads[_KIND[kind]], floor, kind)
    shares[_PART["dram"], :, _DRAM] = reads[:, _DRAM]
    for part, names in _OTHER_PARTS.items():
        columns = [READS - len(READ_KINDS) + UnitCosts._fields.index(name) for name in names]
        parts[_PART[part], columns] = whole[columns]
    return parts


def _fill(shares: Float, read: Float, floor: list[tuple[str, Float]], kind: ReadKind) -> None:
    """Deal a kind's rates out: what its floor takes, HBM before link, and the rest.

    Parameters
    ----------
    shares : shape (parts, resources, rates)
        Is added to.
    read : shape (resources, rates)
    floor : list of (prefix, rates)
        Parts that other kinds have in common with this one.
    """
    left = read[:_DRAM].copy()
    for prefix, amount in floor:
        for resource in (_HBM, _LINK):
            taken = np.minimum(left[resource], amount)
            amount = amount - taken
            left[resource] -= taken
            for name, columns in _READ_PARTS.items():
                shares[_PART[prefix + name], resource, columns] += taken[columns]
    if kind == "device":
        return
    names = _HOST_PARTS if kind == "host" else _READ_PARTS
    for name, columns in names.items():
        shares[_PART[f"{kind}_{name}"], :_DRAM, columns] += left[:, columns]


def contributions(model: StepEquation, problem: Problem, plan: Plan) -> Float:
    """Seconds of each device for each table, by parts of the tables' unit costs.

    Returns
    -------
    float64, shape (GPUs + hosts, tables, parts)
        Devices in the topology's order, GPUs first. Summed over parts and tables, and with
        `fixed_times`, the largest over devices is the step time that the model says.
    """
    known: dict[int, tuple[UnitCosts, Float]] = {}

    def parts(table: int, gpu: int) -> Float:
        costs = model.unit_costs(problem, table, gpu)
        # The costs are kept as well, so that their id stays their own.
        return known.setdefault(id(costs), (costs, parts_of(costs)))[1]

    topology = problem.topology
    hosts = {host.id: len(topology.gpus) + at for at, host in enumerate(topology.hosts)}
    numbers = topology.gpu_numbers
    devices = len(topology.gpus) + len(topology.hosts)
    seconds = np.zeros((devices, len(problem.profile), len(PARTS)))
    for work in work_of(problem, plan):
        table, host = work.table, hosts[work.host]
        if work.gpu is not None:
            own = parts(table, work.gpu)
            hbm_s, link_s, dram_s = _read_s(own, work)
            seconds[work.gpu, table] += (
                hbm_s + link_s + own[:, READS:] @ np.array(work.extras[: own.shape[1] - READS])
            )
            seconds[host, table] += dram_s
            continue
        # The link's part is shared by the GPUs of the host that serves the shard.
        attached = topology.gpus_of(work.host)
        for number in (numbers[gpu.id] for gpu in attached):
            seconds[number, table] += _read_s(parts(table, number), work)[_LINK] / len(attached)
        serving = numbers[(attached or topology.gpus)[0].id]
        seconds[host, table] += _read_s(parts(table, serving), work)[_DRAM]
    of_gpus = seconds[: len(topology.gpus)]
    of_gpus[:] = contended(of_gpus.T, topology, model.contention).T
    return seconds


def fixed_times(model: StepEquation, problem: Problem, plan: Plan) -> Float:
    """Seconds of each device that belong to no table: arenas, and any step; shape (devices,)."""
    arenas_s = arena_times(model, problem, arena_loads(problem, plan))[: len(NAMES)].sum(axis=0)
    arenas_s = contended(arenas_s, problem.topology, model.contention)
    main_s = float(model.schedule(problem).fixed[0])
    return np.concatenate((arenas_s + main_s, np.zeros(len(problem.topology.hosts))))


def _read_s(parts: Float, work: Work) -> Float:
    """Seconds of each resource for reading rows, by part; shape (resources, parts)."""
    amounts = [
        work.lookups,
        work.lookups * work.weight_bytes,
        work.rows,
        work.rows * work.row_bytes,
        work.vectors,
        work.vectors * work.weight_bytes,
    ]
    rates = parts[:, :READS].reshape(len(parts), *SHAPE)[:, _KIND[work.kind]]
    seconds: Float = (rates @ amounts).T
    return seconds
