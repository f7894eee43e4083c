# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, assignment"
"""Compiled CPU kernels: ids to slots, pooling, and the fused update.

Each call of a kernel does one thread's part of the work, without the GIL. No two threads write the
same row, so kernels need no atomics. Every sum runs in the order of the lookups, for any number of
threads.
"""

import numba
import numpy as np

from placer.growing.kernels import prefetch

AHEAD = 12
"""Lookups between the prefetch of a row and its use, to hide a DRAM access."""

LINE = 16
"""Floats in a cache line of 64 bytes."""

CHUNKS_PER_THREAD = 16
"""Chunks of work per thread. Small chunks balance threads, as some rows take longer to read."""

RANGE_BITS = 12
"""Divide slots into at most 2¹² ranges, and give threads ranges with about equal lookups."""

DIGIT_BITS = 11
"""Bits to sort in a pass: 2,048 counters fit into the L1 cache."""

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = 0, 1, 2, 3

_FUSED = {"contract"}
"""Allow fused multiply-add, but keep the rules of NaN and infinity."""


@numba.njit(cache=True, nogil=True)
def translate(ids, slot_map, table, starts, out, thread, threads):
    """Write the slots of the ids of an arena's segments; return the first bad id's place, or −1.

    See `SegmentTable` for `table`. Segment s has places ``starts[s]..starts[s + 1]`` of `out`.
    """
    place = out.size * thread // threads
    stop = out.size * (thread + 1) // threads
    segment = np.searchsorted(starts, place, side="right") - 1
    while place < stop:
        last = min(stop, starts[segment + 1])
        shift = table[segment, 0] - starts[segment]
        limit, near, edge, far, first = table[segment, 3:]
        for j in range(place, last):
            row = np.int64(ids[j + shift])
            if row < 0 or row >= limit:
                return j
            if first >= 0:
                out[j] = np.int64(slot_map[first + row])
            else:
                out[j] = row + (near if row < edge else far)
        place = last
        segment += 1
    return -1


@numba.njit(cache=True, nogil=True)
def _first_bag(offsets, chunk, chunks):
    """Return the first bag of a chunk, if chunks have equal sums of lookups and bags."""
    bags = offsets.size - 1
    target = (offsets[bags] + bags) * chunk // chunks
    low, high = 0, bags
    while low < high:
        middle = (low + high) // 2
        if offsets[middle] + middle < target:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True, fastmath=_FUSED)
def pool(rows, slots, offsets, weights, out, thread, threads):
    """Sum each bag's rows into `out`; empty `weights` mean that all are one."""
    width = rows.shape[1]
    weighted = weights.size > 0
    chunks = threads * CHUNKS_PER_THREAD
    for chunk in range(thread, chunks, threads):
        first, last = _first_bag(offsets, chunk, chunks), _first_bag(offsets, chunk + 1, chunks)
        for bag in range(first, last):
            for k in range(width):
                out[bag, k] = 0.0
            for j in range(offsets[bag], offsets[bag + 1]):
                ahead = j + AHEAD
                if ahead < slots.size:
                    for k in range(0, width, LINE):
                        prefetch(rows, (slots[ahead], k))
                slot = slots[j]
                if weighted:
                    weight = weights[j]
                    for k in range(width):
                        out[bag, k] += weight * rows[slot, k]
                else:
                    for k in range(width):
                        out[bag, k] += rows[slot, k]


@numba.njit(cache=True, nogil=True)
def _bit_length(number):
    bits = 0
    while number >> bits:
        bits += 1
    return bits


def sorts(rows: int, lookups: int, bags: int) -> bool:
    """Return whether `update` can sort lookups of these sizes."""
    return rows.bit_length() + lookups.bit_length() <= 64 and bags < 1 << 31


@numba.njit(cache=True, nogil=True)
def _own_slots(slots, rows, thread, threads):
    """Return the range of slots that a thread updates, and its number of lookups.

    Each thread computes the same ranges, which is cheaper than waiting for another thread.
    """
    if threads == 1:
        return 0, rows, slots.size
    shift = 0
    while (rows - 1) >> shift >= 1 << RANGE_BITS:
        shift += 1
    counts = np.zeros(((rows - 1) >> shift) + 1, np.int64)
    for j in range(slots.size):
        counts[slots[j] >> shift] += 1
    low, high, own, before = -1, -1, 0, 0
    for part in range(counts.size):
        if before * threads // slots.size == thread and counts[part] > 0:
            low = part if low < 0 else low
            high = part + 1
            own += counts[part]
        before += counts[part]
    return low << shift, min(high << shift, rows), own


@numba.njit(cache=True, nogil=True)
def _sort(keys, lowest, bits):
    """Sort stably by `bits` bits from bit `lowest` on: a radix sort, lowest digit first."""
    passes = max(1, -(-bits // DIGIT_BITS))
    digit_bits = -(-bits // passes)
    mask = np.uint64((1 << digit_bits) - 1)
    other = np.empty_like(keys)
    for digit in range(passes):
        shift = np.uint64(lowest + digit * digit_bits)
        places = np.zeros((1 << digit_bits) + 1, np.int64)
        for key in keys:
            places[np.int64((key >> shift) & mask) + 1] += 1
        places = np.cumsum(places)
        for key in keys:
            bucket = np.int64((key >> shift) & mask)
            other[places[bucket]] = key
            places[bucket] += 1
        keys, other = other, keys
    return keys


@numba.njit(cache=True, nogil=True, fastmath=_FUSED | {"reassoc"}, error_model="numpy")
# One function of over 60 lines, as it is one pass over a run of equal slots, and the compiler would
# inline its parts again.
def update(rows, state, slots, offsets, gradients, weights, optimizer, constants, thread, threads):
    """Sum the gradients of each row's lookups and apply the optimizer once to the row.

    A thread takes a range of slots, sorts the lookups in it, and goes through the runs of equal
    slots. `state` is ``[rows, width]`` for Adagrad, ``[rows, 1]`` for row-wise Adagrad, and
    ``[rows, 2 * width]`` for Adam. `constants` are the step size, eps, 1 − β₁ and 1 − β₂, all
    float32.

    A sort key of 64 bits has the slot in its high bits and the number of the lookup in its low
    bits. The caller checks with `sorts` that both fit.
    """
    lr, eps, new_mean, new_square = constants
    width = rows.shape[1]
    weighted = weights.size > 0
    low, high, own = _own_slots(slots, rows.shape[0], thread, threads)
    if own == 0:
        return
    # Write every lookup, but advance only if it belongs to this thread. A branch would cost more
    # than the writes, as it is hard to predict. The last write may be one past the end.
    keys = np.empty(own + 1, np.uint64)
    bags = np.empty(own + 1, np.int32)
    scales = np.empty(own + 1 if weighted else 0, np.float32)
    place, place_bits = 0, _bit_length(own)
    half = np.uint64(place_bits)
    for bag in range(offsets.size - 1):
        for j in range(offsets[bag], offsets[bag + 1]):
            slot = slots[j]
            keys[place] = (np.uint64(slot - low) << half) | np.uint64(place)
            bags[place] = bag
            if weighted:
                scales[place] = weights[j]
            place += np.int64((slot >= low) & (slot < high))
    keys = keys[:own]
    keys = _sort(keys, place_bits, _bit_length(high - low - 1))
    mask = np.uint64((1 << place_bits) - 1)
    total = np.empty(width, np.float32)
    i = 0
    while i < own:
        slot = low + np.int64(keys[i] >> half)
        for k in range(width):
            total[k] = 0.0
        while i < own and low + np.int64(keys[i] >> half) == slot:
            ahead = i + AHEAD
            if ahead < own:
                next_slot = low + np.int64(keys[ahead] >> half)
                next_bag = bags[np.int64(keys[ahead] & mask)]
                for k in range(0, width, LINE):
                    prefetch(gradients, (next_bag, k))
                    prefetch(rows, (next_slot, k))
                for k in range(0, state.shape[1], LINE):
                    prefetch(state, (next_slot, k))
            lookup = np.int64(keys[i] & mask)
            bag = bags[lookup]
            if weighted:
                for k in range(width):
                    total[k] += scales[lookup] * gradients[bag, k]
            else:
                for k in range(width):
                    total[k] += gradients[bag, k]
            i += 1
        if optimizer == SGD:
            for k in range(width):
                rows[slot, k] -= lr * total[k]
        elif optimizer == ADAGRAD:
            for k in range(width):
                state[slot, k] += total[k] * total[k]
                rows[slot, k] -= lr * total[k] / (np.sqrt(state[slot, k]) + eps)
        elif optimizer == ADAM:
            for k in range(width):
                gradient = total[k]
                mean = state[slot, k] + (gradient - state[slot, k]) * new_mean
                square = state[slot, width + k]
                square += (gradient * gradient - square) * new_square
                state[slot, k] = mean
                state[slot, width + k] = square
                rows[slot, k] -= lr * mean / (np.sqrt(square) + eps)
        else:
            square = np.float32(0.0)
            for k in range(width):
                square += total[k] * total[k]
            state[slot, 0] += square / np.float32(width)
            step = lr / (np.sqrt(state[slot, 0]) + eps)
            for k in range(width):
                rows[slot, k] -= step * total[k]
