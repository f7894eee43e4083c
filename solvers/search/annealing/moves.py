"""Make random moves: move a shard, swap two shards, or reshard a table."""

import numpy as np

from solvers.model.knapsack import Int
from solvers.search.annealing.rating import (
    add,
    drop,
    item_of,
    make_change,
    may_go,
    number_on,
    set_change,
    step_time_s,
    weigh_phases,
)
from solvers.search.annealing.resharding import reshard, unit_on
from solvers.search.annealing.state import NOBODY, Model, Rules, State, compiled, compiled_into

_STEPS_OF_WEIGHTS = 1000
"""Weigh phases again after this many moves."""


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
