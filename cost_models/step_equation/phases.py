"""The phases of the executor's training step, and which part of each unit of work is in which.

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

from typing import NamedTuple

import numpy as np

from cost_models.base import Float
from cost_models.schedule import Schedule, SharedLane
from cost_models.step_equation.unit_costs import READ_KINDS, SHAPE, Amount, ReadKind, UnitCosts
from placer.pipeline import Pipeline
from placer.problem import Problem

IDS, COPIES, LOOKUP, OUTPUTS, GRADIENTS, UPDATE, LINK_LOOKUP, LINK_UPDATE = range(8)
"""Rows of the arrays here: six phases, and the parts of lookups and updates that use the link."""

ROWS = 8

NAMES = ("ids", "copies", "lookup", "outputs", "gradients", "update")

_COLLECTIVES = {"ids": 2, "outputs": 1, "gradients": 1}
"""Collectives of phases: lengths of bags and ids; pooled rows; their gradients."""


def schedule_of(
    problem: Problem, dense_s: float, input_s: float = 0.0, allreduce_s: float = 0.0
) -> Schedule:
    """The schedule of a problem's pipeline.

    What collectives take besides their bytes is added to the chain that they are part of.

    Parameters
    ----------
    problem : Problem
    dense_s : float
        What dense layers add to every step.
    input_s, allreduce_s : float
        Seconds of the host link for their inputs, ahead of a step, and of the network for their
        gradients, of which most run beside the backward pass.
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
    shared = SharedLane(LOOKUP, in_place, COPIES), SharedLane(OUTPUTS, OUTPUTS, IDS, (LOOKUP,), ids_s)
    return Schedule(names, chains, (main_s, ids_s, input_s, allreduce_s), shared)


def with_lanes(phase_s: Float, pipeline: Pipeline) -> Float:
    """The rows of a pipeline's schedule of phase times, shape (8, ...)."""
    if pipeline == "serial":
        return phase_s[: len(NAMES)]
    link_s = phase_s[[COPIES, LINK_LOOKUP, LINK_UPDATE]].sum(axis=0)
    network_s = phase_s[[IDS, OUTPUTS, GRADIENTS]].sum(axis=0)
    return np.stack((*phase_s[: len(NAMES)], link_s, network_s, phase_s[LINK_LOOKUP]))


class Amounts(NamedTuple):
    """What a shard does in a step: numbers, or arrays over the hot rows of a curve."""

    lookups: Amount
    rows: Amount
    vectors: Amount
    weight_bytes: float
    row_bytes: float

    @property
    def units(self) -> Float:
        """In the order of `Rates`, shape (6, ...)."""
        units = np.empty((6, *np.shape(self.lookups)))
        for at, amount in enumerate((self.lookups, self.rows, self.vectors)):
            units[2 * at] = amount
        units[1], units[5] = units[0] * self.weight_bytes, units[4] * self.weight_bytes
        units[3] = units[2] * self.row_bytes
        return units


def read_phases(costs: UnitCosts, kind: ReadKind, amounts: Amounts, shares: Float) -> Float:
    """Seconds of a GPU in each phase for reading and updating rows, shape (8, ...).

    Parameters
    ----------
    shares : float64, of `SHAPE`
        The part of each of `costs` that is spent on the lookup; see `lookup_shares`.
    """
    number, units = READ_KINDS.index(kind), amounts.units
    hbm, link = (np.array(rates) for rates in costs.read(kind)[:2])
    hbm_share, link_share = shares[number, :2]
    rates = np.stack((hbm * hbm_share, hbm * (1 - hbm_share), link * link_share, link))
    lookup_s, update_s, looked_up_s, link_s = rates @ units.reshape(len(units), -1)
    phase_s = np.zeros((ROWS, lookup_s.size))
    if kind in ("staged", "miss"):
        phase_s[COPIES] = link_s
    else:
        lookup_s += looked_up_s
        update_s += link_s - looked_up_s
        phase_s[LINK_LOOKUP], phase_s[LINK_UPDATE] = looked_up_s, link_s - looked_up_s
    phase_s[LOOKUP], phase_s[UPDATE] = lookup_s, update_s
    return phase_s.reshape(ROWS, *units.shape[1:])


def lookup_shares(id_bytes: float = 8.0, sort_bytes: float = 112.0) -> Float:
    """The part of each constant of `ReadCosts` that is spent on the lookup, of `SHAPE`.

    By resource (HBM, link, DRAM) and rate. Counted in bytes: the lookup reads ids and weights; the
    update sorts ids, gathers a gradient for each lookup, and reads and writes weights and state.
    Copies of staged rows land in HBM before the lookup, and leave it after the update.

    Parameters
    ----------
    id_bytes, sort_bytes : float
        Of one lookup, read by the lookup, and read and written by the update's sort.
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
