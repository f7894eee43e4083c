"""Rate changes of a GPU's items, and make them.

Functions here and in `solvers.search.annealing.moves` only read and write arrays, so that numba can
compile them. Without numba they do the same, far slower. Small functions take only the arrays that
they read: with tuples of all arrays they would take longer to compile.
"""

import math

import numpy as np

from solvers.model.knapsack import Bool, Float, Int
from solvers.search.annealing.state import (
    BYTES,
    FIRST_PHASE,
    HIGH_POWER,
    NOBODY,
    Model,
    Rules,
    State,
    compiled,
)


@compiled
def item_of(first_item: Int, options: Int, unit: int, number: int) -> int:
    """Return the item of a unit's shard number `number`."""
    return int(first_item[options[unit]] + number)


@compiled
def number_on(gpu_of: Int, unit: int, gpu: int) -> int:
    """Return which shard of a unit a GPU serves; -1 if none."""
    for number in range(gpu_of.shape[1]):
        if gpu_of[unit, number] == gpu:
            return number
    return NOBODY


@compiled
def set_change(change: Int, gpu: int, gone: int, come: int, gone_too: int, come_too: int) -> None:
    """Note the items that leave a GPU and that arrive there; -1 for none."""
    change[gpu, 0], change[gpu, 1], change[gpu, 2], change[gpu, 3] = gone, come, gone_too, come_too


@compiled
def changed_arenas(model: Model, state: State, gpu: int) -> int:
    """Return how many arenas a GPU has after its change."""
    counts, arenas, change = state.counts, state.arenas, state.change
    count_arenas(model.first_arena, model.arena, counts, arenas, change, gpu, False)
    changed = int(arenas[gpu])
    count_arenas(model.first_arena, model.arena, counts, arenas, change, gpu, True)
    return changed


@compiled
def count_arenas(
    first_arena: Int, arena_of: Int, counts: Int, arenas: Int, change: Int, gpu: int, back: bool
) -> None:
    """Update a GPU's counts of arenas by the items of its change, or undo that."""
    for place in range(4):
        item = change[gpu, place]
        if item < 0:
            continue
        step = 1 if (place % 2 == 1) != back else -1
        for number in range(first_arena[item], first_arena[item + 1]):
            arena = arena_of[number]
            before = counts[gpu, arena]
            counts[gpu, arena] = before + step
            arenas[gpu] += int(before + step > 0) - int(before > 0)


@compiled
def cost_at(
    sums: Float, costs: Float, change: Int, gpu: int, kind: int, price: int, row: int
) -> float:
    """Return one row of a GPU's sums after its change."""
    value = float(sums[gpu, price, row])
    for place in range(4):
        item = change[gpu, place]
        if item >= 0:
            cost = costs[item, kind, price, row]
            value += cost if place % 2 else -cost
    return value


@compiled
def rate(model: Model, state: State, rules: Rules, gpu: int) -> bool:
    """Write a GPU's phases and energy after its change; return whether its rows fit."""
    # Numba counts a reference each time a tuple's array is named, so name it ahead of loops.
    sums, costs, change, phase_s = state.sums, model.costs, state.change, state.new_phase_s
    launches = model.launches
    kind, room = model.kind[gpu], model.room[gpu]
    prices, rows = costs.shape[2], costs.shape[3]
    low, high = -1, prices
    if cost_at(sums, costs, change, gpu, kind, prices - 1, BYTES) <= room:
        low = prices - 1  # The common case: all rows fit.
    while high - low > 1:
        middle = (low + high) // 2
        if cost_at(sums, costs, change, gpu, kind, middle, BYTES) <= room:
            low = middle
        else:
            high = middle
    if low < 0:
        return False
    part = 0.0
    if high < prices:
        value = cost_at(sums, costs, change, gpu, kind, low, BYTES)
        above = cost_at(sums, costs, change, gpu, kind, high, BYTES)
        if above - value >= 0.5:
            part = (room - value) / (above - value)
    arenas = changed_arenas(model, state, gpu)
    for row in range(FIRST_PHASE, rows):
        value = cost_at(sums, costs, change, gpu, kind, low, row)
        if part > 0.0:
            value += part * (cost_at(sums, costs, change, gpu, kind, high, row) - value)
        phase = row - FIRST_PHASE
        phase_s[gpu, phase] = value + arenas * launches[gpu, phase]
    prolong(model.lanes, model.lane_begins, model.lane_waits, phase_s[gpu])
    state.new_energy[gpu] = energy_of(model, state, rules, phase_s[gpu])
    return True


@compiled
def power_of(share: float, power: int) -> float:
    """Raise a share to `LOW_POWER` or `HIGH_POWER`."""
    square = share * share
    eighth = square * square * square * square
    return eighth * eighth * eighth if power == HIGH_POWER else eighth


@compiled
def energy_of(model: Model, state: State, rules: Rules, phase_s: Float) -> float:
    """Return the energy of a GPU with these seconds of phases, shape (phases,)."""
    scale_s, weight_s, energy = model.scale_s, state.weight_s, 0.0
    for phase in range(scale_s.size):
        share = phase_s[phase] / scale_s[phase]
        energy += power_of(share, rules.power) * weight_s[phase]
    energy /= rules.step_s * rules.power
    if model.drive_chain.size and model.served_s == 0.0:
        seconds = drive_s(model.drive_chain, model.done_s, phase_s)
        energy += seconds / (rules.step_s * state.held.size)
    return energy


@compiled
def drive_s(drive_chain: Float, done_s: float, phase_s: Float) -> float:
    """Return what a GPU adds to the time of its host's drives: its own time, and its DRAM's worth.

    The sum grows with the distance from `done_s`, when all GPUs are done: DRAM that moves from one
    GPU to another costs one more than it gains the other. Without drives, only DRAM counts.
    """
    worth_s, seconds = phase_s[phase_s.size - 1], phase_s[phase_s.size - 2]
    if done_s <= 0.0:
        return float(worth_s)
    for phase in range(drive_chain.size):
        seconds += drive_chain[phase] * phase_s[phase]
    return float(seconds + worth_s + (seconds - done_s) ** 2 / done_s)


@compiled
def pooled_energy(model: Model, rules: Rules, pooled_s: float) -> float:
    """Return the energy of drives, as of a phase that all GPUs finish at the same time.

    Without drives, return the energy of DRAM: where it is full, another byte costs its price.
    """
    share = (pooled_s - model.dram_s) / rules.step_s
    if model.done_s <= 0.0:
        share = 1.0 + share / model.served_s
    return power_of(max(0.0, share), rules.power) / rules.power


@compiled
def weigh_phases(model: Model, state: State, rules: Rules) -> None:
    """Weigh phases by how few GPUs are as slow as the slowest one, and rate all GPUs again.

    A step waits for the slowest GPU of each phase. If many GPUs are as slow, changing one of them
    gains little.
    """
    phase_s, counted_s, weight_s = state.phase_s, model.counted_s, state.weight_s
    gpus, before, after = phase_s.shape[0], 0.0, 0.0
    for phase in range(counted_s.size):
        slowest, count = 0.0, 0.0
        for gpu in range(gpus):
            slowest = max(slowest, phase_s[gpu, phase])
        if slowest > 0.0:
            for gpu in range(gpus):
                count += power_of(phase_s[gpu, phase] / slowest, rules.power)
        weight_s[phase] = counted_s[phase] / max(1.0, count)
        before += counted_s[phase] * count
        after += weight_s[phase] * count
    if after > 0.0:  # Keep the sum of all energies about the same.
        for phase in range(counted_s.size):
            weight_s[phase] *= before / after
    for gpu in range(gpus):
        state.energy[gpu] = energy_of(model, state, rules, phase_s[gpu])


@compiled
def prolong(lanes: Int, begins_s: Float, waits_s: Float, phase_s: Float) -> None:
    """Add the seconds of shared lanes; see `cost_models.schedule.SharedLane.added_s`."""
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
    """Make a GPU's change that has been rated."""
    kind = model.kind[gpu]
    for place in range(4):
        item = state.change[gpu, place]
        if item < 0:
            continue
        sign = 1.0 if place % 2 else -1.0
        for price in range(model.costs.shape[2]):
            for row in range(model.costs.shape[3]):
                state.sums[gpu, price, row] += sign * model.costs[item, kind, price, row]
    first_arena, counts, arenas = model.first_arena, state.counts, state.arenas
    count_arenas(first_arena, model.arena, counts, arenas, state.change, gpu, False)
    for phase in range(model.scale_s.size):
        state.phase_s[gpu, phase] = state.new_phase_s[gpu, phase]
    state.energy[gpu] = state.new_energy[gpu]


@compiled
def make_change(
    model: Model,
    state: State,
    rules: Rules,
    count: int,
    temperature: float,
    rng: np.random.Generator,
) -> bool:
    """Make the changes of the `count` changed GPUs if they gain, or by chance if they do not."""
    change = 0.0
    for number in range(count):
        gpu = state.changed[number]
        if not rate(model, state, rules, gpu):
            return False
        change += state.new_energy[gpu] - state.energy[gpu]
    pooled_s = state.pooled_s[0]
    if model.served_s > 0.0:
        for number in range(count):
            gpu = state.changed[number]
            if gpu < model.sharers:
                more_s = drive_s(model.drive_chain, model.done_s, state.new_phase_s[gpu])
                more_s -= drive_s(model.drive_chain, model.done_s, state.phase_s[gpu])
                pooled_s += more_s / model.sharers
        change += pooled_energy(model, rules, pooled_s)
        change -= pooled_energy(model, rules, state.pooled_s[0])
    if change > 0 and rng.random() >= math.exp(-change / temperature):
        return False
    state.pooled_s[0] = pooled_s
    for number in range(count):
        replace_items(model, state, state.changed[number])
    return True


@compiled
def drop(state: State, unit: int, number: int) -> None:
    """Remove a unit's shard from its GPU's list."""
    gpu, place = state.gpu[unit, number], state.at[unit, number]
    state.held[gpu] -= 1
    last = int(np.int64(state.on[gpu, state.held[gpu]]))
    state.on[gpu, place] = last
    state.at[last, number_on(state.gpu, last, gpu)] = place
    state.gpu[unit, number] = NOBODY


@compiled
def add(state: State, unit: int, number: int, gpu: int) -> None:
    """Add a unit's shard to a GPU's list."""
    state.gpu[unit, number] = gpu
    state.at[unit, number] = state.held[gpu]
    state.on[gpu, state.held[gpu]] = unit
    state.held[gpu] += 1


@compiled
def slowest_s(phase_s: Float, phase: int) -> float:
    """Return the slowest GPU's seconds in a phase."""
    slowest = 0.0
    for gpu in range(phase_s.shape[0]):
        slowest = max(slowest, phase_s[gpu, phase])
    return slowest


@compiled
def step_time_s(model: Model, state: State) -> float:
    """Return seconds of the longest chain of phases, or of drives if their mean is longer.

    Infinite if neither DRAM nor drives have room.
    """
    longest = 0.0
    for chain in range(model.members.shape[0]):
        seconds = model.fixed_s[chain]
        for phase in range(model.members.shape[1]):
            if model.members[chain, phase] > 0:
                seconds += slowest_s(state.phase_s, phase)
        longest = max(longest, seconds)
    if model.drive_chain.size:
        mean_s = 0.0
        for gpu in range(model.sharers):
            seconds = drive_s(model.drive_chain, model.done_s, state.phase_s[gpu])
            mean_s += seconds / model.sharers
        state.pooled_s[0] = mean_s
        if model.done_s <= 0.0 and mean_s > model.dram_s:
            return np.inf  # DRAM is full.
        longest = max(longest, mean_s - model.dram_s)
    return longest


@compiled
def may_go(
    may_serve: Bool, home: Int, gpu_of: Int, unit: int, item: int, gpu: int, leaving: int
) -> bool:
    """Return whether a GPU may serve an item, once unit `leaving` (-1: none) has left it."""
    if not may_serve[unit, gpu] or home[item] not in (NOBODY, gpu):
        return False
    return bool(unit == leaving or number_on(gpu_of, unit, gpu) < 0)
