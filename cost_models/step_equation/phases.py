"""The phases of the executor's training step, and which part of each unit of work is in which.

Ids go to the GPUs that hold their rows, staged rows are copied, rows are looked up and pooled,
pooled rows go back; then, after the dense layers, gradients go the same way, and rows are updated.
All but copies and lookups begin with a collective, for which every GPU waits.

With look-ahead, ids travel and rows are copied beside the step before. A step then takes as long
as the longest of four chains: what is left of the phases above; ids and copies; and the two lanes
that both of these use, the host link and the network.
"""

import numpy as np

from cost_models.base import Float
from cost_models.schedule import Schedule
from cost_models.step_equation.unit_costs import READ_KINDS, SHAPE, ReadKind, UnitCosts
from placer.pipeline import Pipeline
from placer.problem import Problem

IDS, COPIES, LOOKUP, OUTPUTS, GRADIENTS, UPDATE, IN_PLACE = range(7)
"""Rows of the arrays here: six phases, and the part of lookups and updates that uses the link."""

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
    ahead_s = _COLLECTIVES["ids"] * latency_s + input_s
    main_s = (_COLLECTIVES["outputs"] + _COLLECTIVES["gradients"]) * latency_s + dense_s
    if problem.pipeline == "serial":
        chain = (IDS, COPIES, LOOKUP, OUTPUTS, GRADIENTS, UPDATE)
        return Schedule(NAMES, (chain,), (ahead_s + main_s,))
    link, network = len(NAMES), len(NAMES) + 1
    chains = ((LOOKUP, OUTPUTS, GRADIENTS, UPDATE), (IDS, COPIES), (link,), (network,))
    fixed_s = (main_s, ahead_s, input_s, allreduce_s)
    return Schedule((*NAMES, "link", "network"), chains, fixed_s)


def with_lanes(phase_s: Float, pipeline: Pipeline) -> Float:
    """The rows of a pipeline's schedule of phase times, shape (7, ...)."""
    if pipeline == "serial":
        return phase_s[:IN_PLACE]
    link_s = phase_s[COPIES] + phase_s[IN_PLACE]
    network_s = phase_s[IDS] + phase_s[OUTPUTS] + phase_s[GRADIENTS]
    return np.concatenate((phase_s[:IN_PLACE], link_s[None], network_s[None]))


HOST = 7
"""Row of `read_matrix`, after the phases, for the host's memory."""


def read_matrix(
    costs: UnitCosts, kind: ReadKind, weight_bytes: float, row_bytes: float, shares: Float
) -> Float:
    """Seconds of each phase and of the host's memory for reading and updating rows.

    Parameters
    ----------
    weight_bytes, row_bytes : float
        Bytes of weights, and of weights and state, of a row.
    shares : float64, of `SHAPE`
        The part of each of `costs` that is spent on the lookup; see `lookup_shares`.

    Returns
    -------
    float64, shape (8, 3)
        For a lookup, a distinct row and a vector; phases by their numbers, and `HOST`.
    """
    sizes = np.array((1.0, weight_bytes, 1.0, row_bytes, 1.0, weight_bytes))
    rates = np.array(costs.read(kind)) * sizes
    looked_up = rates * shares[READ_KINDS.index(kind)]
    # Rates of a unit, and of its bytes, are neighbours.
    hbm_s, link_s, dram_s = rates[:, ::2] + rates[:, 1::2]
    hbm_lookup_s, link_lookup_s, _ = looked_up[:, ::2] + looked_up[:, 1::2]
    matrix = np.zeros((8, 3))
    matrix[LOOKUP], matrix[UPDATE], matrix[HOST] = hbm_lookup_s, hbm_s - hbm_lookup_s, dram_s
    if kind in ("staged", "miss"):
        matrix[COPIES] = link_s
    else:
        matrix[LOOKUP] += link_lookup_s
        matrix[UPDATE] += link_s - link_lookup_s
        matrix[IN_PLACE] = link_s
    return matrix


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
