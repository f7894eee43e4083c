"""The phases of the executor's training step, and the cost of each unit of work in each phase.

docs/cost-model.md says what the phases are, and which of them run beside each other with
look-ahead. Lookups that read rows in place share the link with copies, and pooled rows share the
network with ids, so these phases take longer (`SharedLane`). Updates in place share the link, too.
They need no delay of their own, as all work of the link is a chain.
"""

from functools import cache, lru_cache
from operator import add
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.base import Float
from cost_models.dense import dense_costs, dense_step_s
from cost_models.schedule import Schedule, SharedLane
from cost_models.step_equation.loads import ID_BYTES, SORT_BYTES_PER_LOOKUP
from placer.plan.fields import Pipeline
from placer.problem import Problem

ReadKind = Literal["device", "staged", "uva", "host", "hit", "miss"]
"""How rows are read: a shard's `lookup`, but with ``hit`` and ``miss`` for ``cached``."""

READ_KINDS: tuple[ReadKind, ...] = ("device", "staged", "uva", "host", "hit", "miss")

Amount = npt.NDArray[Any] | float
"""An amount of work of one shard, or an array for many shards."""


class Rates(NamedTuple):
    """Seconds that a resource is busy for each unit of a shard's work in a step."""

    # For a lookup, forward and backward, and for a byte of weights of its row.
    lookup_s: float = 0.0
    lookup_byte_s: float = 0.0
    # For a distinct row that the step touches, and for a byte of its weights and state.
    row_s: float = 0.0
    row_byte_s: float = 0.0
    # For a vector that a host returns, and for a byte of it.
    vector_s: float = 0.0
    vector_byte_s: float = 0.0

    def __add__(self, other: "Rates") -> "Rates":  # type: ignore[override]
        """Return the rates of doing both, one after the other."""
        return Rates(*map(add, self, other))


class ReadCosts(NamedTuple):
    """Seconds of each resource for reading and updating rows in one way."""

    # Seconds of the GPU: of its memory and its link to the host. They add up.
    hbm: Rates = Rates()
    link: Rates = Rates()
    dram: Rates = Rates()  # Seconds of the host's memory, which its GPUs share.


class UnitCosts(NamedTuple):
    """Seconds of one GPU for each unit of work on one table; none is negative.

    All shards of a table have the same unit costs, so a plan costs the sum of its shards. Curves
    fall and are convex only if no unit of ``staged``, ``uva`` and ``miss`` takes less time, on HBM
    and link together, than the same unit of ``device`` and ``hit``.

    Shards of a table with the same columns on one GPU are a *group*: they are pooled into one
    output. Costs of kernels that serve many tables at once are in `cost_models.arenas`.
    """

    # Costs for each `ReadKind`.
    device: ReadCosts = ReadCosts()
    staged: ReadCosts = ReadCosts()
    uva: ReadCosts = ReadCosts()
    host: ReadCosts = ReadCosts()
    hit: ReadCosts = ReadCosts()
    miss: ReadCosts = ReadCosts()
    column_slice_s: float = 0.0  # For a group that has only some of the table's columns.
    shard_s: float = 0.0  # For each shard.
    # For a vector that a GPU returns once for a group, and for a byte of it: to write it, and to
    # read its gradient.
    output_vector_s: float = 0.0
    output_byte_s: float = 0.0
    # For a byte of data that a GPU sends evenly to all GPUs, itself included.
    exchange_byte_s: float = 0.0
    # For each row of a cache's capacity, read or not.
    cache_row_s: float = 0.0
    # For a lookup that needs a map from its id to the row's place; see `work.is_mapped`.
    mapped_lookup_s: float = 0.0
    # For a lookup of any row in a group with rows that the host pools.
    pooled_lookup_s: float = 0.0
    # For a byte of weights and state of a distinct row with only some of the table's columns.
    sliced_row_byte_s: float = 0.0

    def read(self, kind: ReadKind) -> ReadCosts:
        """Return the costs of one way to read rows."""
        costs: ReadCosts = getattr(self, kind)
        return costs


IDS, COPIES, LOOKUP, OUTPUTS, GRADIENTS, UPDATE, LINK_LOOKUP, LINK_UPDATE = range(8)
"""Row numbers of arrays of phase times. `LOOKUP` and `UPDATE` leave out the time on the link, which
the last two rows have."""

ROWS = 8

NAMES = ("ids", "copies", "lookup", "outputs", "gradients", "update")

_COLLECTIVES = {"ids": 2, "outputs": 1, "gradients": 1}
"""Number of collectives in a phase: lengths of bags and ids; pooled rows; their gradients."""


def schedule_of(problem: Problem, with_servers: bool = True) -> Schedule:
    """Return the schedule of a problem's pipeline. `with_servers`: whether servers exchange, too.

    The latency of collectives is added to their chains. Dense layers add their own time to every
    step, copies of inputs ahead of the step to the host link, and the sum of their gradients,
    mostly during the backward pass, to the network.
    """
    costs = dense_costs(problem)
    input_s = max((cost.input_s for cost in costs), default=0.0)
    allreduce_s = max((cost.allreduce_s for cost in costs), default=0.0)
    dense_s = dense_step_s(problem) or 0.0
    topology = problem.topology
    latency_s = topology.exchange_latency_s if with_servers else topology.gpu_exchange_latency_s
    ids_s = _COLLECTIVES["ids"] * latency_s
    main_s = (_COLLECTIVES["outputs"] + _COLLECTIVES["gradients"]) * latency_s + dense_s
    if problem.pipeline == "serial":
        chain = (IDS, COPIES, LOOKUP, OUTPUTS, GRADIENTS, UPDATE)
        return Schedule(NAMES, (chain,), (ids_s + input_s + main_s,))
    names = (*NAMES, "link", "network", "reads in place")
    link, network, in_place = range(len(NAMES), len(names))
    chains = ((LOOKUP, OUTPUTS, GRADIENTS, UPDATE), (IDS,), (link,), (network,))
    on_link = SharedLane(LOOKUP, in_place, COPIES)
    on_network = SharedLane(OUTPUTS, OUTPUTS, IDS, (LOOKUP,), ids_s)
    fixed_s = (main_s, ids_s, input_s, allreduce_s)
    return Schedule(names, chains, fixed_s, (on_link, on_network))


@cache
def _rows_of(pipeline: Pipeline) -> Float:
    """Return the matrix that sums phases into rows of a pipeline's schedule, shape (rows, 8)."""
    rows = np.eye(len(NAMES), ROWS)
    rows[LOOKUP, LINK_LOOKUP] = rows[UPDATE, LINK_UPDATE] = 1.0
    if pipeline == "serial":
        return rows
    lanes = (COPIES, LINK_LOOKUP, LINK_UPDATE), (IDS, OUTPUTS, GRADIENTS), (LINK_LOOKUP,)
    return np.vstack((rows, *(np.eye(ROWS)[list(lane)].sum(axis=0) for lane in lanes)))


def with_lanes(phase_s: Float, pipeline: Pipeline) -> Float:
    """Turn phase times, shape (8,) or (..., 8, GPUs), into rows of a pipeline's schedule."""
    rows: Float = _rows_of(pipeline) @ phase_s
    return rows


def parts_of(seconds: Float, kind: ReadKind, launch_s: Amount, drive_s: Amount) -> Float:
    """Divide the phases of a work, shape (8,), among `cost_models.cost_report.PARTS`, shape (6, 8).

    Fixed costs of shards take `launch_s` of these seconds, and rows on drives `drive_s`.
    """
    parts_s = np.zeros((6, ROWS))
    hbm_s, link_s, by_hosts_s, exchange_s, launches_s, drives_s = parts_s
    on_link, exchanged = [LINK_LOOKUP, LINK_UPDATE], [IDS, OUTPUTS, GRADIENTS]
    (by_hosts_s if kind == "host" else link_s)[on_link] = seconds[on_link]
    launches_s[[LOOKUP, UPDATE]] = launch_s / 2
    link_s[COPIES], drives_s[COPIES] = seconds[COPIES] - drive_s, drive_s
    exchange_s[exchanged] = seconds[exchanged]
    hbm_s += seconds - parts_s[1:].sum(axis=0)
    return parts_s


HOST = ROWS
"""The row of `read_matrix` for the host's memory, after the phases."""


def read_matrix(
    costs: UnitCosts, kind: ReadKind, sizes: tuple[float, float, float], shares: Float
) -> Float:
    """Return seconds of each phase and of the host's memory for reading and updating rows.

    The shape is (9, 3): phases and `HOST`, by lookup, distinct row and vector. `sizes` are bytes of
    a row's weights, of its weights and state in HBM, and of the same in its home; 0 means as many
    as in HBM. See `LOOKUP_SHARES` for `shares`.
    """
    of_kind = shares[READ_KINDS.index(kind)]
    return _read_matrix(costs.read(kind), kind, sizes, of_kind.tobytes())


@lru_cache(maxsize=4096)
def _read_matrix(
    costs: ReadCosts, kind: ReadKind, sizes: tuple[float, float, float], shares: bytes
) -> Float:
    """Return `read_matrix` as a cached, read-only array, which many tables share."""
    weight_bytes, row_bytes, home_bytes = sizes
    units = np.tile((1.0, weight_bytes, 1.0, row_bytes, 1.0, weight_bytes), (3, 1))
    units[1:, 3] = home_bytes or row_bytes
    rates = np.array(costs) * units
    looked_up = rates * np.frombuffer(shares).reshape(rates.shape)
    # Rates of a unit and of its bytes are neighbours.
    hbm_s, link_s, dram_s = rates[:, ::2] + rates[:, 1::2]
    hbm_lookup_s, link_lookup_s, _ = looked_up[:, ::2] + looked_up[:, 1::2]
    matrix = np.zeros((HOST + 1, 3))
    matrix[LOOKUP], matrix[UPDATE], matrix[HOST] = hbm_lookup_s, hbm_s - hbm_lookup_s, dram_s
    if kind in ("staged", "miss"):
        matrix[COPIES] = link_s
    else:
        matrix[LINK_LOOKUP], matrix[LINK_UPDATE] = link_lookup_s, link_s - link_lookup_s
    matrix.flags.writeable = False
    return matrix


def _lookup_shares() -> Float:
    lookup = ID_BYTES / (ID_BYTES + SORT_BYTES_PER_LOOKUP)
    in_memory = (lookup, 0.5, 0.0, 0.0, 0.5, 0.5)
    copied = (lookup, 0.5, 0.5, 0.25, 0.5, 0.5)
    in_place = (lookup, 0.0, 0.0, 0.0, 0.5, 0.5)
    over_link = (1.0, 1.0, 0.0, 0.0, 0.5, 0.5)
    shares = np.zeros((len(READ_KINDS), len(ReadCosts._fields), len(Rates._fields)))
    for number, kind in enumerate(READ_KINDS):
        hbm = copied if kind in ("staged", "miss") else in_memory
        shares[number] = (in_place if kind == "uva" else hbm, over_link, in_memory)
    return shares


LOOKUP_SHARES = _lookup_shares()
"""The lookup's share of each constant of `ReadCosts`, shape (kinds of read, resources, rates).

The shares count bytes. The lookup reads ids and weights. The update sorts ids, gathers a gradient
for each lookup, and reads and writes weights and state. Copies of staged rows arrive in HBM before
the lookup and leave after the update.
"""
