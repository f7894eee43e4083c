"""What a change of a GPU's items makes of its phases, and the change itself, over arrays.

Functions here and in `solvers.search.annealing.moves` read and write arrays alone: numba compiles
them where it is installed, and they do the same a hundred times slower where it is not.
"""

import math

import numpy as np

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
def count_arenas(model: Model, state: State, gpu: int, back: bool) -> None:
    """Count the arenas of a change's items in and out of those of a GPU, or undo that."""
    for place in range(4):
        item = state.change[gpu, place]
        if item < 0:
            continue
        step = 1 if (place % 2 == 1) != back else -1
        for number in range(model.first_arena[item], model.first_arena[item + 1]):
            arena = model.arena[number]
            before = state.counts[gpu, arena]
            state.counts[gpu, arena] = before + step
            state.arenas[gpu] += int(before + step > 0) - int(before > 0)


@compiled
def cost_at(
    sums: Float, costs: Float, change: Int, gpu: int, kind: int, row: int, price: int
) -> float:
    """A row of a GPU's sums after its change."""
    value = float(sums[gpu, row, price])
    for place in range(4):
        item = change[gpu, place]
        if item >= 0:
            cost = costs[item, kind, row, price]
            value += cost if place % 2 else -cost
    return value


@compiled
def rate(model: Model, state: State, rules: Rules, gpu: int) -> bool:
    """Phases and energy of a GPU after its change, into the new ones; whether its rows fit."""
    sums, costs, change = state.sums, model.costs, state.change
    kind, room = model.kind[gpu], model.room[gpu]
    low, high = -1, costs.shape[3]
    while high - low > 1:
        middle = (low + high) // 2
        if cost_at(sums, costs, change, gpu, kind, BYTES, middle) <= room:
            low = middle
        else:
            high = middle
    if low < 0:
        return False
    count_arenas(model, state, gpu, False)
    arenas = state.arenas[gpu]
    count_arenas(model, state, gpu, True)
    part = 0.0
    energy = 0.0
    for row in range(costs.shape[2]):
        value = cost_at(sums, costs, change, gpu, kind, row, low)
        above = value
        if high < costs.shape[3]:
            above = cost_at(sums, costs, change, gpu, kind, row, high)
        if row == BYTES:
            if above - value >= 0.5:
                part = (room - value) / (above - value)
            continue
        phase = row - FIRST_PHASE
        seconds = value + part * (above - value)
        state.new_phase_s[gpu, phase] = seconds + arenas * model.launches[gpu, phase]
    prolong(model.lanes, model.lane_begins, model.lane_waits, state.new_phase_s[gpu])
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
def replace_items(model: Model, state: State, gpu: int) -> None:
    """Make a GPU's change, which has been rated."""
    kind = model.kind[gpu]
    for place in range(4):
        item = state.change[gpu, place]
        if item < 0:
            continue
        sign = 1.0 if place % 2 else -1.0
        for row in range(model.costs.shape[2]):
            for price in range(model.costs.shape[3]):
                state.sums[gpu, row, price] += sign * model.costs[item, kind, row, price]
    count_arenas(model, state, gpu, False)
    for phase in range(model.scale_s.size):
        state.phase_s[gpu, phase] = state.new_phase_s[gpu, phase]
    state.energy[gpu] = state.new_energy[gpu]


@compiled
def make_change(
    model: Model,
    state: State,
    rules: Rules,
    changed: Int,
    temperature: float,
    rng: np.random.Generator,
) -> bool:
    """Make the changes of some GPUs if that is a gain, or else with some probability."""
    change = 0.0
    for gpu in changed:
        if not rate(model, state, rules, gpu):
            return False
        change += state.new_energy[gpu] - state.energy[gpu]
    if change > 0 and rng.random() >= math.exp(-change / temperature):
        return False
    for gpu in changed:
        replace_items(model, state, gpu)
    return True


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
