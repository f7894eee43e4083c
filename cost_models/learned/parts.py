"""Unit costs as a sum of parts, each of which the learned model multiplies by its own factor.

Rows that are not in HBM cost what rows in HBM do, and something besides: parts are taken so that
whatever the factors are, as long as they are positive, no unit of cold rows is cheaper than one of
hot rows. Curves then fall and are convex, as solvers expect.
"""

import numpy as np

from cost_models.base import Float
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.unit_cost_arrays import OTHERS, READS, SHAPE, as_array
from cost_models.step_equation.unit_costs import READ_KINDS, ReadKind, UnitCosts
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
    "piece",
    "shard",
    "cache_row",
    "strip",
    "pool",
    "split",
)
"""``lookup`` and ``row``: what lookups and distinct rows cost in HBM, wherever they are. Those of
a kind of read: what they cost besides. ``dram``: time of the host's memory, of all kinds."""

_HBM, _LINK, _DRAM = range(3)
_READ_PARTS = {"lookup": slice(0, 2), "row": slice(2, 6)}
_HOST_PARTS = {"lookup": slice(0, 2), "row": slice(2, 4), "vector": slice(4, 6)}
_OTHER_PARTS = {
    "output": slice(0, 2),
    "exchange": slice(2, 3),
    "piece": slice(3, 4),
    "shard": slice(4, 5),
    "cache_row": slice(5, 6),
    "strip": slice(6, 7),
    "pool": slice(7, 8),
    "split": slice(8, 10),
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
    for part, columns in _OTHER_PARTS.items():
        parts[_PART[part], READS:][columns] = whole[READS:][columns]
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
        Devices in the topology's order, GPUs first. Summed over parts and tables, and the largest
        over devices, they are the step time that the model says.
    """
    known: dict[int, tuple[UnitCosts, Float]] = {}

    def parts(table: int, gpu: int) -> Float:
        costs = model.unit_costs(problem, table, gpu)
        # The costs are kept as well, so that their id stays their own.
        return known.setdefault(id(costs), (costs, parts_of(costs)))[1]

    topology = problem.topology
    hosts = {host.id: len(topology.gpus) + at for at, host in enumerate(topology.hosts)}
    numbers = {gpu.id: number for number, gpu in enumerate(topology.gpus)}
    devices = len(topology.gpus) + len(topology.hosts)
    found = np.zeros((devices, len(problem.profile), len(PARTS)))
    for one in work_of(problem, plan):
        table = one.table
        of_gpu, of_dram = _amounts(one)
        if one.gpu is not None:
            found[one.gpu, table] += parts(table, one.gpu) @ of_gpu
        else:  # The link's part is shared by the GPUs of the host that serves the shard.
            of_gpu[:READS].reshape(SHAPE)[:, _HBM] = 0.0
            attached = topology.gpus_of(one.host)
            for gpu in attached:
                share = parts(table, numbers[gpu.id]) @ of_gpu / len(attached)
                found[numbers[gpu.id], table] += share
        asked = numbers[(topology.gpus_of(one.host) or topology.gpus)[0].id]
        found[hosts[one.host], table] += parts(table, asked) @ of_dram
    return found


def _amounts(work: Work) -> tuple[Float, Float]:
    """How many of each number of `as_array` a GPU, and its host's memory, has to do."""
    of_gpu, of_dram = np.zeros(READS + len(OTHERS)), np.zeros(READS + len(OTHERS))
    amounts = np.array(
        [
            work.lookups,
            work.lookups * work.weight_bytes,
            work.rows,
            work.rows * work.row_bytes,
            work.vectors,
            work.vectors * work.weight_bytes,
        ]
    )
    kind = _KIND[work.kind]
    of_gpu[:READS].reshape(SHAPE)[kind, :_DRAM] = amounts
    of_dram[:READS].reshape(SHAPE)[kind, _DRAM] = amounts
    of_gpu[READS:] = [
        work.output_vectors,
        work.output_bytes,
        work.exchanged_bytes,
        work.together.groups,
        work.shards,
        work.cache_rows,
        work.together.strips,
        work.together.pools,
        work.together.splits,
        work.split_lookups,
    ]
    return of_gpu, of_dram
