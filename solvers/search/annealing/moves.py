"""Make random moves: move a shard, swap two shards, or reshard a table."""

import numpy as np

from solvers.model.knapsack import Float, Int
from solvers.search.annealing.rating import (
    add,
    drop,
    item_of,
    make_change,
    may_go,
    number_on,
    rate,
    set_change,
    step_time_s,
    weigh_phases,
)
from solvers.search.annealing.state import NOBODY, Model, Rules, State, compiled, compiled_into

_STEPS_OF_WEIGHTS = 1000
"""Weigh phases again after this many moves."""


@compiled
def first_done(done_s: Float, candidates: Int, count: int) -> int:
    """Return the GPU of the first `count` candidates that finishes first."""
    found = candidates[0]
    for place in range(1, count):
        if done_s[candidates[place]] < done_s[found]:
            found = candidates[place]
    return int(found)


@compiled
def first_with_arena(state: State, arena: int, first: int, candidates: Int, count: int) -> int:
    """Return the candidate with an arena that finishes first; `first` if none has the arena."""
    found = NOBODY
    for place in range(count):
        gpu = candidates[place]
        if state.counts[gpu, arena] <= 0 or not np.isfinite(state.done_s[gpu]):
            continue
        if found < 0 or state.done_s[gpu] < state.done_s[found]:
            found = int(gpu)
    return found if found >= 0 else first


@compiled
def find_candidates(
    model: Model, state: State, rules: Rules, unit: int, option: int, rng: np.random.Generator
) -> int:
    """Write the GPUs to choose from for a unit's option into `candidates`; return their number.

    These are all GPUs. Among many GPUs they are those that hold the unit now and some random ones,
    which may repeat.
    """
    candidates, gpus, count = state.candidates, state.held.size, 0
    if gpus <= rules.many_gpus:
        for gpu in range(gpus):
            candidates[gpu] = gpu
        return gpus
    for number in range(model.item_count[state.option[unit]]):
        candidates[count] = state.gpu[unit, number]
        count += 1
    for number in range(model.item_count[option]):
        home = model.home[model.first_item[option] + number]
        if home >= 0:
            candidates[count] = home
            count += 1
    for _ in range(rules.many_gpus // 2):
        gpu = int(rng.random() * gpus)
        if model.may_serve[unit, gpu]:
            candidates[count] = gpu
            count += 1
    return count


@compiled_into
def choose_gpus(
    model: Model,
    state: State,
    rules: Rules,
    unit: int,
    option: int,
    rng: np.random.Generator,
) -> bool:
    """Write a GPU for each shard of a unit's option into `chosen`; return whether all have one.

    By chance these are the present GPUs or those that finish first in some phase. Where launches
    take much of a step, prefer GPUs that launch the shard's arena anyway.
    """
    chosen, done_s, candidates = state.chosen, state.done_s, state.candidates
    count, before = model.item_count[option], model.item_count[state.option[unit]]
    if count == before and rng.random() < 0.5:
        # Only the table's shards change on each GPU.
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
    looked_at = find_candidates(model, state, rules, unit, option, rng)
    noise = 0.0
    for place in range(looked_at):
        gpu = candidates[place]
        done_s[gpu] = state.phase_s[gpu, phase]
        noise = max(noise, 0.5 * done_s[gpu])
    for number in range(before):
        gpu = state.gpu[unit, number]
        item = item_of(model.first_item, state.option, unit, number)
        set_change(state.change, gpu, item, NOBODY, NOBODY, NOBODY)
        if rate(model, state, rules, gpu):
            done_s[gpu] = state.new_phase_s[gpu, phase]
    for place in range(looked_at):
        gpu = candidates[place]
        done_s[gpu] += noise * rng.random()
        if not model.may_serve[unit, gpu]:
            done_s[gpu] = np.inf
    together = rng.random() < rules.together
    for number in range(count):
        item = model.first_item[option] + number
        home = model.home[item]
        gpu = home if home >= 0 else first_done(done_s, candidates, looked_at)
        if together and home < 0:
            arena = model.arena[model.first_arena[item]]
            gpu = first_with_arena(state, arena, gpu, candidates, looked_at)
        if not np.isfinite(done_s[gpu]):
            return False
        chosen[number] = gpu
        done_s[gpu] = np.inf
    return True


@compiled
def unit_back(
    model: Model, state: State, unit: int, there: int, here: int, rng: np.random.Generator
) -> int:
    """Return a unit whose shard may move from `there` to `here` in exchange, or -1."""
    if here < 0 or there == here or not state.held[there] or number_on(state.gpu, unit, there) >= 0:
        return NOBODY
    back = int(np.int64(state.on[there, int(rng.random() * state.held[there])]))
    number = number_on(state.gpu, back, there)
    item = item_of(model.first_item, state.option, back, number)
    may = may_go(model.may_serve, model.home, state.gpu, back, item, here, NOBODY)
    return back if may else NOBODY


@compiled_into
def note_replicated(state: State, unit: int, before: bool, after: bool) -> None:
    """Add a unit to the replicated units, or remove it, as its option changes."""
    if before == after:
        return
    units, last = state.replicated, int(state.replicated_count[0])
    if after:
        units[last] = unit
        state.replicated_count[0] = last + 1
        return
    for place in range(last):
        if units[place] == unit:
            units[place] = units[last - 1]
            break
    state.replicated_count[0] = last - 1


@compiled_into
def reshard(
    model: Model,
    state: State,
    rules: Rules,
    unit: int,
    temperature: float,
    rng: np.random.Generator,
) -> bool:
    """Try another sharding option of a unit; return whether that was done."""
    first, old = model.first_option[unit], state.option[unit]
    # Options are sorted by cost: try cheap ones more often.
    option = first + int((model.first_option[unit + 1] - first) * rng.random() ** 2)
    if not choose_gpus(model, state, rules, unit, option, rng):
        return False
    chosen, change = state.chosen, state.change
    gone, come = model.replica[old], model.replica[option]
    if gone == come:
        gone, come = NOBODY, NOBODY
    count = 0
    if max(gone, come) >= 0:
        for gpu in range(state.held.size):
            state.changed[gpu] = gpu
        count = state.held.size
    else:
        for number in range(model.item_count[old]):
            state.changed[count] = state.gpu[unit, number]
            count += 1
        for number in range(model.item_count[option]):
            if number_on(state.gpu, unit, chosen[number]) < 0:
                state.changed[count] = chosen[number]
                count += 1
    for number in range(count):
        set_change(change, state.changed[number], NOBODY, NOBODY, gone, come)
    for number in range(model.item_count[old]):
        change[state.gpu[unit, number], 0] = model.first_item[old] + number
    for number in range(model.item_count[option]):
        change[chosen[number], 1] = model.first_item[option] + number
    here = there = back = back_number = NOBODY
    if max(gone, come) < 0 and rng.random() < 0.5:
        here = state.gpu[unit, int(rng.random() * model.item_count[old])]
        there = chosen[int(rng.random() * model.item_count[option])]
        back = unit_back(model, state, unit, there, here, rng)
    if back >= 0:
        back_number = number_on(state.gpu, back, there)
        item_back = item_of(model.first_item, state.option, back, back_number)
        change[there, 2] = change[here, 3] = item_back
    if not make_change(model, state, rules, count, temperature, rng):
        return False
    if back >= 0:
        drop(state, back, back_number)
        add(state, back, back_number, here)
    for number in range(model.item_count[old]):
        drop(state, unit, number)
    state.option[unit] = option
    note_replicated(state, unit, model.replica[old] >= 0, model.replica[option] >= 0)
    for number in range(model.item_count[option]):
        add(state, unit, number, chosen[number])
    return True


@compiled_into
def unit_on(state: State, gpu: int, rng: np.random.Generator) -> int:
    """Return a random unit that a GPU serves or replicates; -1 if there is none."""
    replicated = state.replicated_count[0]
    if replicated and rng.random() * state.option.size < replicated:
        return int(state.replicated[int(rng.random() * replicated)])
    held = state.held[gpu]
    return int(np.int64(state.on[gpu, int(rng.random() * held)])) if held else NOBODY


@compiled
def other_gpu(state: State, rules: Rules, slow: int, swaps: bool, rng: np.random.Generator) -> int:
    """Return a random GPU but `slow`; of many GPUs, the one with least energy of a random few."""
    gpus = state.held.size
    chosen = int(rng.random() * (gpus - 1))
    chosen += chosen >= slow
    if gpus <= rules.many_gpus:
        return chosen
    for _ in range(2 if swaps else 8):
        gpu = int(rng.random() * (gpus - 1))
        gpu += gpu >= slow
        if state.energy[gpu] < state.energy[chosen]:
            chosen = gpu
    return chosen


@compiled_into
def exchange(
    model: Model,
    state: State,
    rules: Rules,
    slow: int,
    swaps: bool,
    temperature: float,
    rng: np.random.Generator,
) -> bool:
    """Try to move a shard off GPU `slow`, or to swap it; return whether that was done."""
    if not state.held[slow]:
        return False
    other = other_gpu(state, rules, slow, swaps, rng)
    first_item, options, gpu_of = model.first_item, state.option, state.gpu
    # Numbers of 64 bits, as elsewhere: for others numba would compile all that takes them anew.
    moved = int(np.int64(state.on[slow, int(rng.random() * state.held[slow])]))
    number = number_on(gpu_of, moved, slow)
    item = item_of(first_item, options, moved, number)
    taken = back = item_back = NOBODY
    if swaps and state.held[other]:
        taken = int(np.int64(state.on[other, int(rng.random() * state.held[other])]))
        back = number_on(gpu_of, taken, other)
        item_back = item_of(first_item, options, taken, back)
        if not may_go(model.may_serve, model.home, gpu_of, taken, item_back, slow, moved):
            return False
    if not may_go(model.may_serve, model.home, gpu_of, moved, item, other, taken):
        return False
    set_change(state.change, slow, item, item_back, NOBODY, NOBODY)
    set_change(state.change, other, item_back, item, NOBODY, NOBODY)
    state.changed[0], state.changed[1] = slow, other
    changed = int(np.int64(2))  # No constant, for which it would be compiled anew.
    if not make_change(model, state, rules, changed, temperature, rng):
        return False
    drop(state, moved, number)
    if taken >= 0:
        drop(state, taken, back)
        add(state, taken, back, slow)
    add(state, moved, number, other)
    return True


@compiled_into
def slow_gpu(state: State, rules: Rules, rng: np.random.Generator) -> int:
    """Return the GPU with the most energy; among many GPUs, in turns a slow one or any."""
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
    """Try moves `first` to `last`; return the best step time and keep its state in `best_…`.

    `best_s`: step time that a state must beat to become the best. `best_option`, `best_gpu`: as in
    `State`; written to.
    """
    rarely = 1 + state.held.size // rules.many_gpus
    for step in range(first, last):
        if step % _STEPS_OF_WEIGHTS == 0:
            weigh_phases(model, state, rules)
        temperature = rules.hot * np.exp(rules.cooling * step)
        slow, kind = slow_gpu(state, rules, rng), rng.random()
        if kind < rules.resharded_below:
            unit = unit_on(state, slow, rng)
            done = unit >= 0 and reshard(model, state, rules, unit, temperature, rng)
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
