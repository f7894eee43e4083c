"""Arrays that annealing works on: the problem, which GPU serves what, and a run's rules.

A *unit* is a table, or tables that stay together; an *item* is one of the shards that a sharding
option divides it into.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
SmallInt = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]

BYTES, FIRST_PHASE = 0, 1
"""Rows of costs: bytes of HBM, then the seconds of each phase."""

NOBODY = -1

LOW_POWER, HIGH_POWER = 8, 24
"""Powers of phases in the energy, which `rate` multiplies out."""


class Model(NamedTuple):
    """The problem, which no move changes.

    Attributes
    ----------
    costs : float64, shape (items, kinds of GPU, prices, 1 + phases)
        Bytes of HBM and seconds of each phase of an item at falling prices of HBM.
    kind : int64, shape (GPUs,)
    room : float64, shape (GPUs,)
        Bytes of HBM.
    launches : float64, shape (GPUs, phases)
        Seconds that each arena takes.
    first_arena, arena : int64
        The arenas of item i are `arena[first_arena[i]:first_arena[i + 1]]`.
    home : int64, shape (items,)
        The GPU that alone may serve an item; -1 for any.
    first_option : int64, shape (units + 1,)
        Unit u has options `first_option[u]` to `first_option[u + 1]`, cheap ones first.
    first_item, item_count, replica : int64, shape (options,)
        Items of an option, and the one that every GPU holds, or -1.
    may_serve : bool, shape (units, GPUs)
    members : float64, shape (chains, phases)
        1 where a phase is part of a chain.
    fixed_s : float64, shape (chains,)
    lanes : int64, shape (lanes, 3)
        Phase, part and phase beside of each `cost_models.schedule.SharedLane`.
    lane_begins : float64, shape (lanes,)
        Seconds after which the phase beside begins.
    lane_waits : float64, shape (lanes,)
        Seconds that are waited before the phase.
    scale_s : float64, shape (phases,)
        What phases are measured by in the energy.
    counted_s : float64, shape (phases,)
        `scale_s` of phases in chains, else 0.
    drive_chain : float64, shape (phases,)
        1 for phases of the chain in which rows come from drives, if GPUs share hosts' DRAM so that
        all drives are done at once; else empty. The last two phases are then in no chain: seconds
        of the drive, and what the DRAM is worth.
    dram_s : float
        What the mean GPU's DRAM is worth, less what the chain takes always.
    done_s : float
        When all drives are done, about; 0 without drives, where DRAM has no more room.
    sharers : int
        GPUs: servers, after them, share neither DRAM nor drives.
    served_s : float
        What a second of all servers is worth, beside one of all GPUs; 0 without servers.
    """

    costs: Float
    kind: Int
    room: Float
    launches: Float
    first_arena: Int
    arena: Int
    home: Int
    first_option: Int
    first_item: Int
    item_count: Int
    replica: Int
    may_serve: Bool
    members: Float
    fixed_s: Float
    lanes: Int
    lane_begins: Float
    lane_waits: Float
    scale_s: Float
    counted_s: Float
    drive_chain: Float
    dram_s: float
    done_s: float
    sharers: int
    served_s: float


class State(NamedTuple):
    """Which GPU serves what.

    Attributes
    ----------
    option : int64, shape (units,)
    gpu : int64, shape (units, most items of an option)
        The GPU of each item of the unit's option; -1 behind the last.
    sums : float64, shape (GPUs, prices, 1 + phases)
        Of what each GPU holds, as in `Model.costs`.
    phase_s : float64, shape (GPUs, phases)
    energy : float64, shape (GPUs,)
    on : int32, shape (GPUs, units)
        The units of which a GPU serves an item, in any order. (It is the largest array of many.)
    at : int64, shape (units, most items)
        Where each item's unit is in its GPU's row of `on`.
    held : int64, shape (GPUs,)
        How many units are there.
    counts : int64, shape (GPUs, arenas)
        Shards of each arena.
    arenas : int64, shape (GPUs,)
        How many arenas have shards.
    change : int64, shape (GPUs, 4)
        Items that leave a GPU and arrive in the move that is rated, by turns; -1 for none.
    new_phase_s, new_energy : float64, as `phase_s` and `energy`
        Of the move that is rated.
    changed : int64, shape (GPUs,)
        The GPUs of that move, the first of which count.
    chosen : int64, shape (most items,)
        GPUs for the items of an option that is tried.
    done_s : float64, shape (GPUs,)
        When each GPU would be done without them.
    candidates : int64
        The GPUs to choose from, the first of which count.
    replicated : int64, shape (units,)
        The units with replicas, in any order, of which the first `replicated_count[0]` count.
    replicated_count : int64, shape (1,)
    weight_s : float64, shape (phases,)
        What phases count in the energy.
    pooled_s : float64, shape (1,)
        Mean seconds of drives and DRAM of all GPUs.
    """

    option: Int
    gpu: Int
    sums: Float
    phase_s: Float
    energy: Float
    on: SmallInt
    at: Int
    held: Int
    counts: Int
    arenas: Int
    change: Int
    new_phase_s: Float
    new_energy: Float
    changed: Int
    chosen: Int
    done_s: Float
    candidates: Int
    replicated: Int
    replicated_count: Int
    weight_s: Float
    pooled_s: Float


class Rules(NamedTuple):
    """Parameters of a run.

    `together` is the probability that shards of another option go where their arenas are.
    """

    resharded_below: float
    swapped_below: float
    many_gpus: int
    together: float
    power: int
    step_s: float
    hot: float
    cooling: float
