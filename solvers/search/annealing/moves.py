"""Random moves: shards are moved and swapped, tables sharded anew, arenas given up."""

import math

import numpy as np

from solvers.search.annealing.compiled import compiled
from solvers.search.annealing.rating import (
    add,
    drop,
    item_of,
    make_change,
    number_on,
    rate,
    replace_items,
    set_change,
    step_time_s,
)
from solvers.search.annealing.state import NOBODY, Float, Int, Model, Rules, State


@compiled
def may_go(model: Model, state: State, unit: int, item: int, gpu: int, leaving: int) -> bool:
    """Whether a GPU that unit `leaving` leaves, or -1, may serve an item."""
    if not model.may_serve[unit, gpu] or model.home[item] not in (NOBODY, gpu):
        return False
    return bool(unit == leaving or number_on(state.gpu, unit, gpu) < 0)


@compiled
def exchange(
    model: Model,
    state: State,
    rules: Rules,
    slow: int,
    swaps: bool,
    temperature: float,
    rng: np.random.Generator,
) -> bool:
    """Try to move a shard from GPU `slow` to another one, or to swap two; whether it is done."""
    if not state.held[slow]:
        return False
    other = int(rng.random() * (state.held.size - 1))
    other += other >= slow
    moved = state.on[slow, int(rng.random() * state.held[slow])]
    number = number_on(state.gpu, moved, slow)
    item = item_of(model, state, moved, number)
    taken = back = item_back = NOBODY
    if swaps and state.held[other]:
        taken = state.on[other, int(rng.random() * state.held[other])]
        back = number_on(state.gpu, taken, other)
        item_back = item_of(model, state, taken, back)
        if not may_go(model, state, taken, item_back, slow, moved):
            return False
    if not may_go(model, state, moved, item, other, taken):
        return False
    set_change(state.change, slow, item, item_back, NOBODY, NOBODY)
    set_change(state.change, other, item_back, item, NOBODY, NOBODY)
    state.changed[0], state.changed[1] = slow, other
    if not make_change(model, state, rules, 2, temperature, rng):
        return False
    drop(state, moved, number)
    if taken >= 0:
        drop(state, taken, back)
        add(state, taken, back, slow)
    add(state, moved, number, other)
    return True


@compiled
def first_least(values: Float) -> int:
    """Where the least of some values is first."""
    found = 0
    for number in range(values.size):
        if values[number] < values[found]:
            found = number
    return found


@compiled
def choose_gpus(
    model: Model,
    state: State,
    rules: Rules,
    unit: int,
    option: int,
    rng: np.random.Generator,
) -> bool:
    """A GPU for each shard of an option of a unit, into `chosen`; whether all find one.

    The same GPUs at times, or those that are done first with a phase, by turns and by chance.
    """
    chosen, done_s = state.chosen, state.done_s
    gpus, count = state.held.size, model.item_count[option]
    before = model.item_count[state.option[unit]]
    if count == before and rng.random() < 0.5:
        # Only what each GPU has of the table changes.
        for number in range(count):
            chosen[number] = state.gpu[unit, number]
        for number in range(count - 1, 0, -1):
            other = int(rng.random() * (number + 1))
            chosen[number], chosen[other] = chosen[other], chosen[number]
        for number in range(count):
            if model.home[model.first_item[option] + number] not in (NOBODY, chosen[number]):
                return False
        return True
    phase = int(rng.random() * model.scale_s.size)
    noise = 0.0
    for gpu in range(gpus):
        done_s[gpu] = state.phase_s[gpu, phase]
        noise = max(noise, 0.5 * done_s[gpu])
    for number in range(before):
        gpu = state.gpu[unit, number]
        item = item_of(model, state, unit, number)
        set_change(state.change, gpu, item, NOBODY, NOBODY, NOBODY)
        if rate(model, state, rules, gpu):
            done_s[gpu] = state.new_phase_s[gpu, phase]
    for gpu in range(gpus):
        done_s[gpu] += noise * rng.random()
        if not model.may_serve[unit, gpu]:
            done_s[gpu] = np.inf
    for number in range(count):
        home = model.home[model.first_item[option] + number]
        gpu = home if home >= 0 else first_least(done_s)
        if not np.isfinite(done_s[gpu]):
            return False
        chosen[number] = gpu
        done_s[gpu] = np.inf
    return True


@compiled
def reshard(
    model: Model,
    state: State,
    rules: Rules,
    unit: int,
    temperature: float,
    rng: np.random.Generator,
) -> bool:
    """Try another sharding option of a unit; whether it is done."""
    first, old = model.first_option[unit], state.option[unit]
    # Cheap options are first, and tried more often.
    option = first + int((model.first_option[unit + 1] - first) * rng.random() ** 2)
    if not choose_gpus(model, state, rules, unit, option, rng):
        return False
    chosen, change = state.chosen, state.change
    gone, come = model.replica[old], model.replica[option]
    if gone == come:
        gone, come = NOBODY, NOBODY
    for gpu in range(state.held.size):
        set_change(change, gpu, NOBODY, NOBODY, gone, come)
    for number in range(model.item_count[old]):
        change[state.gpu[unit, number], 0] = model.first_item[old] + number
    for number in range(model.item_count[option]):
        change[chosen[number], 1] = model.first_item[option] + number
    count = 0
    for gpu in range(state.held.size):
        if max(change[gpu, 0], change[gpu, 1], gone, come) >= 0:
            state.changed[count] = gpu
            count += 1
    if not make_change(model, state, rules, count, temperature, rng):
        return False
    for number in range(model.item_count[old]):
        drop(state, unit, number)
    state.option[unit] = option
    for number in range(model.item_count[option]):
        add(state, unit, number, chosen[number])
    return True


@compiled
def gather(
    model: Model,
    state: State,
    rules: Rules,
    slow: int,
    temperature: float,
    rng: np.random.Generator,
) -> bool:
    """Try to move an arena's shards off GPU `slow` to GPUs that have it too; whether it is done.

    Moves of one shard seldom take an arena with them: the shards that stay keep its launches.
    """
    if not state.held[slow]:
        return False
    unit = state.on[slow, int(rng.random() * state.held[slow])]
    item = item_of(model, state, unit, number_on(state.gpu, unit, slow))
    arena = model.arena[model.first_arena[item]]
    before = 0.0
    for gpu in range(state.held.size):
        before += state.energy[gpu]
    gathered, count, place = state.gathered, 0, 0
    may_move = True
    while may_move and place < state.held[slow]:
        unit = state.on[slow, place]
        number = number_on(state.gpu, unit, slow)
        item = item_of(model, state, unit, number)
        if model.arena[model.first_arena[item]] != arena:
            place += 1
            continue
        gpu = host_of_arena(model, state, unit, item, arena, slow, rng)
        may_move = gpu >= 0 and relocate(model, state, rules, unit, number, slow, gpu)
        if may_move:  # The last unit of the GPU's list is in this place now.
            gathered[count, 0], gathered[count, 1], gathered[count, 2] = unit, number, gpu
            count += 1
    change = -before
    for gpu in range(state.held.size):
        change += state.energy[gpu]
    if may_move and (change <= 0 or rng.random() < math.exp(-change / temperature)):
        return count > 0
    for undone in range(count - 1, -1, -1):
        unit, number, gpu = gathered[undone, 0], gathered[undone, 1], gathered[undone, 2]
        relocate(model, state, rules, unit, number, gpu, slow)
    return False


@compiled
def host_of_arena(
    model: Model,
    state: State,
    unit: int,
    item: int,
    arena: int,
    slow: int,
    rng: np.random.Generator,
) -> int:
    """A GPU with an arena that may serve an item: of two of them, that of less energy; or -1."""
    gpus, chosen, first = state.held.size, NOBODY, int(rng.random() * state.held.size)
    for step in range(gpus):
        gpu = (first + step) % gpus
        if gpu == slow or state.counts[gpu, arena] <= 0:
            continue
        if not may_go(model, state, unit, item, gpu, NOBODY):
            continue
        if chosen >= 0:
            return gpu if state.energy[gpu] < state.energy[chosen] else chosen
        chosen = gpu
    return chosen


@compiled
def relocate(
    model: Model, state: State, rules: Rules, unit: int, number: int, here: int, there: int
) -> bool:
    """Move a shard to another GPU, whatever that costs; False if there is no room."""
    item = item_of(model, state, unit, number)
    set_change(state.change, here, item, NOBODY, NOBODY, NOBODY)
    set_change(state.change, there, NOBODY, item, NOBODY, NOBODY)
    if not rate(model, state, rules, there) or not rate(model, state, rules, here):
        return False
    replace_items(model, state, here)
    replace_items(model, state, there)
    drop(state, unit, number)
    add(state, unit, number, there)
    return True


@compiled
def slow_gpu(state: State, rules: Rules, rng: np.random.Generator) -> int:
    """The GPU of most energy, or one of the slow ones where there are many, or any, by turns."""
    gpus = state.held.size
    if rng.random() >= 0.5:
        return int(rng.random() * gpus)
    if gpus <= rules.many_gpus:
        slow = 0
        for gpu in range(gpus):
            if state.energy[gpu] > state.energy[slow]:
                slow = gpu
        return slow
    slow = int(rng.random() * gpus)
    for _ in range(15):
        gpu = int(rng.random() * gpus)
        if state.energy[gpu] > state.energy[slow]:
            slow = gpu
    return slow


@compiled
def unit_on(model: Model, state: State, gpu: int, rng: np.random.Generator) -> int:
    """A unit of which a GPU serves a shard, or one that is replicated; -1 if none."""
    replicated = 0
    for unit in range(state.option.size):
        replicated += model.replica[state.option[unit]] >= 0
    place = int(rng.random() * (state.held[gpu] + replicated))
    if place < state.held[gpu]:
        return int(state.on[gpu, place])
    place -= state.held[gpu]
    for unit in range(state.option.size):
        if model.replica[state.option[unit]] >= 0:
            if place == 0:
                return unit
            place -= 1
    return NOBODY


@compiled
def run_moves(
    model: Model,
    state: State,
    rules: Rules,
    first: int,
    last: int,
    best_s: float,
    best_option: Int,
    best_gpu: Int,
    rng: np.random.Generator,
) -> float:
    """Try moves `first` to `last`; the best step time, whose state is in the arrays of the best.

    Parameters
    ----------
    best_s : float
        Seconds that a state must take less than to be the best.
    best_option, best_gpu : int64
        As in `State`; written to.
    """
    rarely = 1 + state.held.size // rules.many_gpus
    for step in range(first, last):
        temperature = rules.hot * np.exp(rules.cooling * step)
        slow, kind = slow_gpu(state, rules, rng), rng.random()
        if kind < rules.resharded_below:
            unit = unit_on(model, state, slow, rng)
            done = unit >= 0 and reshard(model, state, rules, unit, temperature, rng)
        elif kind < rules.gathered_below:
            done = gather(model, state, rules, slow, temperature, rng)
        else:
            swaps = kind < rules.swapped_below
            done = exchange(model, state, rules, slow, swaps, temperature, rng)
        if not done or step % rarely:
            continue
        step_s = step_time_s(model, state)
        if step_s < best_s * (1 - 1e-7):
            best_s = step_s
            for unit in range(best_option.size):
                best_option[unit] = state.option[unit]
                for number in range(best_gpu.shape[1]):
                    best_gpu[unit, number] = state.gpu[unit, number]
    return best_s
