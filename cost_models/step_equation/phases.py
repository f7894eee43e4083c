"""The phases of the executor's training step, and what one unit of embedding work takes in each.

Ids go to the GPUs that hold their rows, staged rows are copied, rows are looked up and pooled,
pooled rows go back; then, after the dense layers, gradients go the same way, and rows are updated.
All but copies and lookups begin with a collective, for which every GPU waits.

With look-ahead, rows of the next batch are copied, and ids of the one after it travel, beside a
step. It then takes as long as the longest of four chains: what is left of the phases above; ids;
and the two lanes that these and copies use, the host link and the network.

Lookups that read rows in place share the link with copies, and pooled rows the network with ids:
these phases take longer (`SharedLane`). Updates in place do so too, but end no later than the
link's whole work, which is a chain.
"""

from functools import lru_cache
from operator import add
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.base import Float
from cost_models.schedule import Schedule, SharedLane
from placer.pipeline import PIPELINES, Pipeline
from placer.problem import Problem

ReadKind = Literal["device", "staged", "uva", "host", "hit", "miss"]
"""How rows are read: as a shard's `lookup`, but that a cache has hits and misses."""

READ_KINDS: tuple[ReadKind, ...] = ("device", "staged", "uva", "host", "hit", "miss")


Amount = npt.NDArray[Any] | float
"""Of one shard, or an array of many."""


class Rates(NamedTuple):
    """Seconds that a resource is busy for each unit of what a shard does in a step."""

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
        """Return both one after the other."""
        return Rates(*map(add, self, other))


NOTHING = Rates()


class ReadCosts(NamedTuple):
    """Seconds of each resource that reading and updating rows in one way takes."""

    # Of the GPU: its memory, and its way to its host. They are added.
    hbm: Rates = NOTHING
    link: Rates = NOTHING
    dram: Rates = NOTHING  # Of the host's memory, which its GPUs share.


class UnitCosts(NamedTuple):
    """Seconds of one GPU for each unit of work on one table; none is negative.

    All shards of a table have the same, so that a plan costs what its shards cost. For falling,
    convex curves no unit of ``staged``, ``uva`` and ``miss`` may be cheaper, HBM and link
    together, than one of ``device`` and ``hit``.

    Shards of a table with the same columns on one GPU are a *group*: they are pooled into one
    output. What kernels take that serve many tables at once is in `cost_models.arenas`.
    """

    # By how rows are read; a cache's hits and misses each by themselves.
    device: ReadCosts
    staged: ReadCosts
    uva: ReadCosts
    host: ReadCosts
    hit: ReadCosts
    miss: ReadCosts
    column_slice_s: float = 0.0  # For a group that has only some of the table's columns.
    shard_s: float = 0.0  # For each shard.
    # For a vector that a GPU returns, and for a byte of it: written, and its gradient read. Once
    # for a group.
    output_vector_s: float = 0.0
    output_byte_s: float = 0.0
    # For a byte that a GPU spreads evenly over all GPUs, itself included.
    exchange_byte_s: float = 0.0
    # For a row that a cache has room for, whether the step reads it or not.
    cache_row_s: float = 0.0
    # For a lookup whose id a map turns into a place; see `cost_models.step_equation.work`.
    mapped_lookup_s: float = 0.0
    # For a lookup of a group of which the host pools some rows, whichever row it reads.
    pooled_lookup_s: float = 0.0
    # For a byte, state included, of a distinct row that has only some of the table's columns.
    sliced_row_byte_s: float = 0.0

    def read(self, kind: ReadKind) -> ReadCosts:
        """Return costs of reading rows in this way."""
        costs: ReadCosts = getattr(self, kind)
        return costs


SHAPE = (len(READ_KINDS), len(ReadCosts._fields), len(Rates._fields))
"""Kinds of read, resources (HBM, link, DRAM), and rates."""


IDS, COPIES, LOOKUP, OUTPUTS, GRADIENTS, UPDATE, LINK_LOOKUP, LINK_UPDATE = range(8)
"""Rows of the arrays here: six phases, less what the last two have: what lookups and updates do on
the link."""

ROWS = 8

NAMES = ("ids", "copies", "lookup", "outputs", "gradients", "update")

_COLLECTIVES = {"ids": 2, "outputs": 1, "gradients": 1}
"""Collectives of phases: lengths of bags and ids; pooled rows; their gradients."""


def schedule_of(
    problem: Problem, dense_s: float, input_s: float = 0.0, allreduce_s: float = 0.0
) -> Schedule:
    """Return the schedule of a problem's pipeline.

    What collectives take besides their bytes is added to the chain that they are part of. Dense
    layers add `dense_s` to every step, `input_s` of the host link for their inputs, ahead of a
    step, and `allreduce_s` of the network for their gradients, mostly beside the backward pass.
    """
    latency_s = problem.topology.exchange_latency_s
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


def _rows_of(pipeline: Pipeline) -> Float:
    """Return the rows of a pipeline's schedule as sums of phases, shape (rows, 8)."""
    rows = np.eye(len(NAMES), ROWS)
    rows[LOOKUP, LINK_LOOKUP] = rows[UPDATE, LINK_UPDATE] = 1.0
    if pipeline == "serial":
        return rows
    lanes = (COPIES, LINK_LOOKUP, LINK_UPDATE), (IDS, OUTPUTS, GRADIENTS), (LINK_LOOKUP,)
    return np.vstack((rows, *(np.eye(ROWS)[list(lane)].sum(axis=0) for lane in lanes)))


_ROWS_OF = {pipeline: _rows_of(pipeline) for pipeline in PIPELINES}


def with_lanes(phase_s: Float, pipeline: Pipeline) -> Float:
    """Return the rows of a pipeline's schedule of phase times, shape (8,) or (..., 8, GPUs)."""
    rows: Float = _ROWS_OF[pipeline] @ phase_s
    return rows


def parts_of(phase_s: Float, pooling_s: Float, launch_s: Float, drive_s: Float) -> Float:
    """Return phase times by what takes them, (6, 8, GPUs): see `cost_models.cost_report.PARTS`.

    `phase_s` are those of all works, `pooling_s` those of works whose rows hosts pool, both of
    shape (8, GPUs); `launch_s` is of shards, half of it the lookup's, `drive_s` of rows on drives.
    """
    parts_s = np.zeros((6, *phase_s.shape))
    hbm_s, link_s, by_hosts_s, exchange_s, launches_s, drives_s = parts_s
    on_link = [LINK_LOOKUP, LINK_UPDATE]
    by_hosts_s[on_link] = pooling_s[on_link]
    link_s[on_link] = phase_s[on_link] - pooling_s[on_link]
    launches_s[[LOOKUP, UPDATE]] = launch_s / 2
    link_s[COPIES], drives_s[COPIES] = phase_s[COPIES] - drive_s, drive_s
    exchanged = [IDS, OUTPUTS, GRADIENTS]
    exchange_s[exchanged] = phase_s[exchanged]
    hbm_s += phase_s - parts_s[1:].sum(axis=0)
    return parts_s


HOST = ROWS
"""Row of `read_matrix`, after the phases, for the host's memory."""


def read_matrix(
    costs: UnitCosts, kind: ReadKind, sizes: tuple[float, float, float], shares: Float
) -> Float:
    """Return seconds of each phase and of the host's memory for reading and updating rows.

    Shape (9, 3): for a lookup, a distinct row and a vector, by the numbers of phases and `HOST`.
    The sizes are bytes of a row's weights, of its weights and state in HBM, and what the link and
    the host's memory move for it: 0 means as many. See `lookup_shares` for `shares`.
    """
    of_kind = shares[READ_KINDS.index(kind)]
    return _read_matrix(costs.read(kind), kind, sizes, of_kind.tobytes())


@lru_cache(maxsize=4096)
def _read_matrix(
    costs: ReadCosts, kind: ReadKind, sizes: tuple[float, float, float], shares: bytes
) -> Float:
    """`read_matrix`, not to be written to: tables of a model share a few, and ask very often."""
    weight_bytes, row_bytes, home_bytes = sizes
    units = np.tile((1.0, weight_bytes, 1.0, row_bytes, 1.0, weight_bytes), (3, 1))
    units[1:, 3] = home_bytes or row_bytes
    rates = np.array(costs) * units
    looked_up = rates * np.frombuffer(shares).reshape(rates.shape)
    # Rates of a unit, and of its bytes, are neighbours.
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


def lookup_shares(id_bytes: float = 8.0, sort_bytes: float = 112.0) -> Float:
    """Return the part of each constant of `ReadCosts` that is spent on the lookup, of `SHAPE`.

    By resource (HBM, link, DRAM) and rate. Counted in bytes: the lookup reads ids and weights; the
    update sorts ids, gathers a gradient for each lookup, and reads and writes weights and state.
    Copies of staged rows land in HBM before the lookup, and leave it after the update.
    """
    lookup = id_bytes / (id_bytes + sort_bytes)
    in_memory = (lookup, 0.5, 0.0, 0.0, 0.5, 0.5)
    copied = (lookup, 0.5, 0.5, 0.25, 0.5, 0.5)
    in_place = (lookup, 0.0, 0.0, 0.0, 0.5, 0.5)
    over_link = (1.0, 1.0, 0.0, 0.0, 0.5, 0.5)
    shares = np.zeros(SHAPE)
    for number, kind in enumerate(READ_KINDS):
        hbm = copied if kind in ("staged", "miss") else in_memory
        shares[number] = (in_place if kind == "uva" else hbm, over_link, in_memory)
    return shares
