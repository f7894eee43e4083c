"""Arrays that annealing works on: the problem, which GPU serves what, and a run's rules.

A *unit* is a table, or tables that stay together; an *item* is one of the shards that a sharding
option divides it into. numba compiles functions that change these arrays, if it is installed.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from solvers.model.knapsack import Bool, Float, Int

P = ParamSpec("P")
R = TypeVar("R")

HAS_COMPILER = find_spec("numba") is not None


def compiled(function: Callable[P, R], inline: str = "never") -> Callable[P, R]:
    """Compile a function that reads and writes arrays; without numba, return it as it is.

    Both give the same numbers to the bit, as `fastmath` is off. Numba keeps the compiled code
    beside the module, or in the user's cache folder.
    """
    if not HAS_COMPILER:
        return function
    import numba

    # The wrapper for C would take a third of the time, and nothing calls it. Without references to
    # arrays being counted, which tuples of them make the most of a move's time, functions may
    # make no arrays; and calls are as cheap only if they are inlined.
    options: dict[str, Any] = {
        "cache": True,
        "no_cfunc_wrapper": True,
        "nogil": True,
        "forceinline": True,
        "inline": inline,
        "_nrt": False,
    }
    made: Any = numba.njit(**options)(function)
    if made is not function:  # It is if the variable NUMBA_DISABLE_JIT is set.
        # Numba compares the function's module. Code from others of this package is in it, too.
        kept = made._cache._cache_file
        kept._source_stamp = kept._source_stamp, stamp(Path(__file__).parent)
    result: Callable[P, R] = made
    return result


def stamp(folder: Path) -> tuple[tuple[str, float, int], ...]:
    """Return name, time of change and size of each Python file of a folder."""
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.py"))]
    return tuple((name, known.st_mtime, known.st_size) for name, known in files)


def compiled_into(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function as a part of the only one that calls it.

    By itself it would be optimised once more, and that takes most of the time to compile.
    """
    return compiled(function, inline="always")


def is_loaded(function: Callable[..., Any]) -> bool:
    """Return whether this process has loaded a function's code, or needs none."""
    return bool(getattr(function, "signatures", True))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether a function's code is in this process or on disk.

    Code of another version of numba or of the module does not count.
    """
    compiler: Any = function
    return is_loaded(function) or bool(compiler._cache._cache_file._load_index())


SmallInt = npt.NDArray[np.int32]

BYTES, FIRST_PHASE = 0, 1
"""Rows of costs: bytes of HBM, then the seconds of each phase."""

NOBODY = -1

LOW_POWER, HIGH_POWER = 8, 24
"""Powers of phases in the energy, which `rate` multiplies out."""


class Model(NamedTuple):
    """The problem, which no move changes."""

    # Shape (items, kinds of GPU, prices, 1 + phases): bytes of HBM and seconds of each phase of an
    # item at falling prices of HBM.
    costs: Float
    kind: Int  # Shape (GPUs,).
    room: Float  # Shape (GPUs,): bytes of HBM.
    launches: Float  # Shape (GPUs, phases): seconds that each arena takes.
    # The arenas of item i are `arena[first_arena[i]:first_arena[i + 1]]`.
    first_arena: Int
    arena: Int
    home: Int  # Shape (items,): the GPU that alone may serve an item; -1 for any.
    # Shape (units + 1,): unit u has options `first_option[u]` to `first_option[u + 1]`, cheap ones
    # first.
    first_option: Int
    # Shape (options,): items of an option, and the one that every GPU holds, or -1.
    first_item: Int
    item_count: Int
    replica: Int
    may_serve: Bool  # Shape (units, GPUs).
    members: Float  # Shape (chains, phases): 1 where a phase is part of a chain.
    fixed_s: Float  # Shape (chains,).
    # Shape (lanes, 3): phase, part and phase beside of each `cost_models.schedule.SharedLane`.
    lanes: Int
    lane_begins: Float  # Shape (lanes,): seconds after which the phase beside begins.
    lane_waits: Float  # Shape (lanes,): seconds that are waited before the phase.
    scale_s: Float  # Shape (phases,): what phases are measured by in the energy.
    counted_s: Float  # Shape (phases,): `scale_s` of phases in chains, else 0.
    # Shape (phases,): 1 for phases of the chain in which rows come from drives, if GPUs share
    # hosts' DRAM so that all drives are done at once; else empty. The last two phases are then in
    # no chain: seconds of the drive, and what the DRAM is worth.
    drive_chain: Float
    dram_s: float  # What the mean GPU's DRAM is worth, less what the chain takes always.
    done_s: float  # When all drives are done, about; 0 without drives, where DRAM has no more room.
    sharers: int  # GPUs: servers, after them, share neither DRAM nor drives.
    # What a second of all servers is worth, beside one of all GPUs; 0 without servers.
    served_s: float


class State(NamedTuple):
    """Which GPU serves what."""

    option: Int  # Shape (units,).
    # Shape (units, most items of an option): the GPU of each item of the unit's option; -1 behind
    # the last.
    gpu: Int
    sums: Float  # Shape (GPUs, prices, 1 + phases): of what each GPU holds, as in `Model.costs`.
    phase_s: Float  # Shape (GPUs, phases).
    energy: Float  # Shape (GPUs,).
    # Shape (GPUs, units): the units of which a GPU serves an item, in any order: the largest
    # array of many.
    on: SmallInt
    at: Int  # Shape (units, most items): where each item's unit is in its GPU's row of `on`.
    held: Int  # Shape (GPUs,): how many units are there.
    counts: Int  # Shape (GPUs, arenas): shards of each arena.
    arenas: Int  # Shape (GPUs,): how many arenas have shards.
    # Shape (GPUs, 4): items that leave a GPU and arrive in the move that is rated, by turns; -1 for
    # none.
    change: Int
    # Of the move that is rated.
    new_phase_s: Float
    new_energy: Float
    changed: Int  # Shape (GPUs,): the GPUs of that move, the first of which count.
    chosen: Int  # Shape (most items,): GPUs for the items of an option that is tried.
    done_s: Float  # Shape (GPUs,): when each GPU would be done without them.
    candidates: Int  # The GPUs to choose from, the first of which count.
    # Shape (units,): the units with replicas, in any order, of which the first
    # `replicated_count[0]` count.
    replicated: Int
    replicated_count: Int  # Shape (1,).
    weight_s: Float  # Shape (phases,): what phases count in the energy.
    pooled_s: Float  # Shape (1,): mean seconds of drives and DRAM of all GPUs.


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
