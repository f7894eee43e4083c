"""What a change of a GPU's items makes of its phases, and the change itself, over arrays.

Functions here and in `solvers.search.annealing.moves` read and write arrays alone: numba compiles
them where it is installed, and they do the same a hundred times slower where it is not.
"""

from solvers.search.annealing.compiled import compiled
from solvers.search.annealing.state import (
    BYTES,
    FIRST_PHASE,
    NOBODY,
    NORM,
    Float,
    Int,
    Model,
    Rules,
    State,
)


@compiled
def item_of(model: Model, state: State, unit: int, number: int) -> int:
    """The item of a unit's shard with that number."""
    return int(model.first_item[state.option[unit]] + number)


@compiled
def number_on(gpu_of: Int, unit: int, gpu: int) -> int:
    """The number of a unit's shard that a GPU serves; -1 if none."""
    for number in range(gpu_of.shape[1]):
        if gpu_of[unit, number] == gpu:
            return number
    return NOBODY


@compiled
def count_arenas(
    first_arena: Int, arena: Int, counts: Int, arenas: Int, gpu: int, item: int, change: int
) -> None:
    """Count the arenas of an item in or out of those of a GPU."""
    if item < 0:
        return
    for place in range(first_arena[item], first_arena[item + 1]):
        before = counts[gpu, arena[place]]
        counts[gpu, arena[place]] = before + change
        arenas[gpu] += int(before + change > 0) - int(before > 0)


@compiled
def count_change(
    model: Model, state: State, gpu: int, leaves: int, arrives: int, gone: int, come: int
) -> None:
    """Count the arenas of items that leave and arrive."""
    first, arena, counts, arenas = model.first_arena, model.arena, state.counts, state.arenas
    count_arenas(first, arena, counts, arenas, gpu, leaves, -1)
    count_arenas(first, arena, counts, arenas, gpu, arrives, 1)
    count_arenas(first, arena, counts, arenas, gpu, gone, -1)
    count_arenas(first, arena, counts, arenas, gpu, come, 1)


@compiled
def cost_at(
    sums: Float,
    costs: Float,
    gpu: int,
    kind: int,
    leaves: int,
    arrives: int,
    gone: int,
    come: int,
    row: int,
    price: int,
) -> float:
    """A row of a GPU's sums after two items left and two arrived."""
    value = float(sums[gpu, row, price])
    if leaves >= 0:
        value -= costs[leaves, kind, row, price]
    if arrives >= 0:
        value += costs[arrives, kind, row, price]
    if gone >= 0:
        value -= costs[gone, kind, row, price]
    if come >= 0:
        value += costs[come, kind, row, price]
    return value


@compiled
def rate(
    model: Model,
    state: State,
    rules: Rules,
    gpu: int,
    leaves: int,
    arrives: int,
    gone: int,
    come: int,
) -> bool:
    """Phases and energy of a GPU after a change, into the new ones; whether its rows fit.

    Item `leaves` leaves, `arrives` arrives, and so do replicas `gone` and `come`; -1 is none.
    """
    sums, costs, kind, room = state.sums, model.costs, model.kind[gpu], model.room[gpu]
    low, high = -1, costs.shape[3]
    while high - low > 1:
        middle = (low + high) // 2
        taken = cost_at(sums, costs, gpu, kind, leaves, arrives, gone, come, BYTES, middle)
        if taken <= room:
            low = middle
        else:
            high = middle
    if low < 0:
        return False
    part = 0.0
    if high < costs.shape[3]:
        least = cost_at(sums, costs, gpu, kind, leaves, arrives, gone, come, BYTES, low)
        most = cost_at(sums, costs, gpu, kind, leaves, arrives, gone, come, BYTES, high)
        if most - least >= 0.5:
            part = (room - least) / (most - least)
    count_change(model, state, gpu, leaves, arrives, gone, come)
    arenas = state.arenas[gpu]
    count_change(model, state, gpu, arrives, leaves, come, gone)
    for phase in range(model.scale_s.size):
        row = FIRST_PHASE + phase
        seconds = cost_at(sums, costs, gpu, kind, leaves, arrives, gone, come, row, low)
        if part > 0.0:
            above = cost_at(sums, costs, gpu, kind, leaves, arrives, gone, come, row, high)
            seconds += part * (above - seconds)
        state.new_phase_s[gpu, phase] = seconds + arenas * model.launches[gpu, phase]
    prolong(model.lanes, model.lane_begins, model.lane_waits, state.new_phase_s[gpu])
    energy = 0.0
    for phase in range(model.scale_s.size):
        share = state.new_phase_s[gpu, phase] / model.scale_s[phase]
        square = share * share
        eighth = square * square * square * square
        energy += eighth * eighth * eighth * model.counted_s[phase]
    state.new_energy[gpu] = energy / (rules.step_s * NORM)
    return True


@compiled
def prolong(lanes: Int, begins_s: Float, waits_s: Float, phase_s: Float) -> None:
    """Add what shared lanes add; see `cost_models.schedule.SharedLane.added_s`."""
    for lane in range(lanes.shape[0]):
        phase, part, beside = lanes[lane, 0], phase_s[lanes[lane, 1]], phase_s[lanes[lane, 2]]
        if part <= 0.0:
            continue
        begins = waits_s[lane] + phase_s[phase] - part
        left = min(begins_s[lane] + beside - begins, beside)
        added = min(part - max(begins_s[lane] - begins, 0.0), left)
        if added > 0.0:
            phase_s[phase] += added


@compiled
def sum_item(sums: Float, costs: Float, sign: float) -> None:
    """Add an item's costs to a GPU's sums, or take them off."""
    for row in range(costs.shape[0]):
        for price in range(costs.shape[1]):
            sums[row, price] += sign * costs[row, price]


@compiled
def replace_items(
    model: Model, state: State, gpu: int, leaves: int, arrives: int, gone: int, come: int
) -> None:
    """Make a change that has been rated."""
    sums, costs, kind = state.sums[gpu], model.costs, model.kind[gpu]
    if leaves >= 0:
        sum_item(sums, costs[leaves, kind], -1.0)
    if arrives >= 0:
        sum_item(sums, costs[arrives, kind], 1.0)
    if gone >= 0:
        sum_item(sums, costs[gone, kind], -1.0)
    if come >= 0:
        sum_item(sums, costs[come, kind], 1.0)
    count_change(model, state, gpu, leaves, arrives, gone, come)
    state.phase_s[gpu] = state.new_phase_s[gpu]
    state.energy[gpu] = state.new_energy[gpu]


@compiled
def drop(state: State, unit: int, number: int) -> None:
    """Take a unit's shard off its GPU's list."""
    gpu, place = state.gpu[unit, number], state.at[unit, number]
    state.held[gpu] -= 1
    last = state.on[gpu, state.held[gpu]]
    state.on[gpu, place] = last
    state.at[last, number_on(state.gpu, last, gpu)] = place
    state.gpu[unit, number] = NOBODY


@compiled
def add(state: State, unit: int, number: int, gpu: int) -> None:
    """Put a unit's shard on a GPU's list."""
    state.gpu[unit, number] = gpu
    state.at[unit, number] = state.held[gpu]
    state.on[gpu, state.held[gpu]] = unit
    state.held[gpu] += 1


@compiled
def step_time_s(model: Model, state: State) -> float:
    """The longest chain of phases."""
    longest = 0.0
    for chain in range(model.members.shape[0]):
        seconds = model.fixed_s[chain]
        for phase in range(model.members.shape[1]):
            if model.members[chain, phase] > 0:
                seconds += state.phase_s[:, phase].max()
        longest = max(longest, seconds)
    return longest
