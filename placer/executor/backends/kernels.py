# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, assignment"
"""Compiled CPU kernels: pooling, sorting lookups by slot, and the fused update.

Work is cut into more chunks than there are threads, each of about as many lookups, dealt
out in turn; no two chunks write the same row, so there are no atomics, and every sum runs
in the order of the lookups, whatever the number of threads.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

AHEAD = 12
"""Lookups between the prefetch of a row and its use: enough to hide a DRAM access."""

CHUNKS_PER_THREAD = 16
"""Rows differ in cost by how far away they are; finer chunks even that out."""

DIGIT_BITS = 11
"""Bits sorted per pass: 2,048 counters of a thread fit its L1 cache."""

SGD, ADAGRAD, ROWWISE_ADAGRAD = 0, 1, 2

_FUSED = {"contract"}
"""Multiply and add in one instruction; NaN and infinity keep their meaning."""


@intrinsic
def prefetch(typing_context: Any, matrix: Any, row: Any, column: Any) -> Any:
    """Ask for the cache line of ``matrix[row, column]`` before it is needed."""
    signature = numba.void(matrix, row, column)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0]
        array = context.make_array(kind)(context, builder, args[0])
        index = [
            context.cast(builder, value, given, numba.types.intp)
            for value, given in zip(args[1:], sig.args[1:], strict=True)
        ]
        pointer = cgutils.get_item_pointer(context, builder, kind, array, index)
        byte = ir.IntType(8).as_pointer()
        flag = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]),
            "llvm.prefetch.p0",
        )
        # Read, keep in all cache levels, data.
        builder.call(function, [builder.bitcast(pointer, byte), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return signature, codegen


@numba.njit(cache=True)
def _first_bag(offsets, chunk, chunks):
    """Where a chunk of bags starts, when chunks hold equal numbers of lookups and bags."""
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


@numba.njit(parallel=True, cache=True)
def translate(ids, slot_map, batch_starts, starts, rows, bases, map_starts, out, threads):
    """Slots of the ids of an arena's segments; the place of the first bad id, or −1.

    Segment s holds places ``starts[s]..starts[s + 1]`` of `out`, and its ids are those from
    ``batch_starts[s]`` on.
    """
    lookups = out.size
    bad = np.full(threads, lookups, np.int64)
    for thread in numba.prange(threads):
        place = lookups * thread // threads
        stop = lookups * (thread + 1) // threads
        segment = np.searchsorted(starts, place, side="right") - 1
        while place < stop:
            last = min(stop, starts[segment + 1])
            shift = batch_starts[segment] - starts[segment]
            base, first, limit = bases[segment], map_starts[segment], rows[segment]
            for j in range(place, last):
                row = np.int64(ids[j + shift])
                if row < 0 or row >= limit:
                    bad[thread] = min(bad[thread], j)
                elif first < 0:
                    out[j] = base + row
                else:
                    out[j] = slot_map[first + row]
            place = last
            segment += 1
    worst = bad.min()
    return worst if worst < lookups else -1


@numba.njit(parallel=True, cache=True, fastmath=_FUSED)
def pool(rows, slots, offsets, weights, out, threads):
    """Sum of each bag's rows into `out`; `weights` is empty where all are one."""
    width = rows.shape[1]
    lookups = slots.size
    chunks = threads * CHUNKS_PER_THREAD
    weighted = weights.size > 0
    for thread in numba.prange(threads):
        for chunk in range(thread, chunks, threads):
            for bag in range(
                _first_bag(offsets, chunk, chunks), _first_bag(offsets, chunk + 1, chunks)
            ):
                for k in range(width):
                    out[bag, k] = 0.0
                for j in range(offsets[bag], offsets[bag + 1]):
                    ahead = j + AHEAD
                    if ahead < lookups:
                        for k in range(0, width, 16):
                            prefetch(rows, slots[ahead], k)
                    slot = slots[j]
                    if weighted:
                        weight = weights[j]
                        for k in range(width):
                            out[bag, k] += weight * rows[slot, k]
                    else:
                        for k in range(width):
                            out[bag, k] += rows[slot, k]


@numba.njit(parallel=True, cache=True)
def bags_of(offsets, out, threads):
    """The bag of each lookup."""
    for thread in numba.prange(threads):
        for bag in range(
            _first_bag(offsets, thread, threads), _first_bag(offsets, thread + 1, threads)
        ):
            for j in range(offsets[bag], offsets[bag + 1]):
                out[j] = bag


@numba.njit(parallel=True, cache=True)
def sort_by_slot(slots, bits, threads):
    """Lookups in the order of their slots, stable: ``slot << 32 | lookup``, uint64.

    A radix sort from the lowest digit, each thread counting and moving its own chunk.
    """
    lookups = slots.size
    keys = np.empty(lookups, np.uint64)
    other = np.empty(lookups, np.uint64)
    passes = max(1, -(-bits // DIGIT_BITS))
    digit_bits = -(-bits // passes)
    buckets = 1 << digit_bits
    counts = np.empty((threads, buckets), np.int64)
    for thread in numba.prange(threads):
        for j in range(lookups * thread // threads, lookups * (thread + 1) // threads):
            keys[j] = (np.uint64(slots[j]) << np.uint64(32)) | np.uint64(j)
    for digit in range(passes):
        shift = np.uint64(32 + digit * digit_bits)
        mask = np.uint64(buckets - 1)
        for thread in numba.prange(threads):
            for bucket in range(buckets):
                counts[thread, bucket] = 0
            for j in range(lookups * thread // threads, lookups * (thread + 1) // threads):
                counts[thread, np.int64((keys[j] >> shift) & mask)] += 1
        total = 0
        for bucket in range(buckets):
            for thread in range(threads):
                count = counts[thread, bucket]
                counts[thread, bucket] = total
                total += count
        for thread in numba.prange(threads):
            for j in range(lookups * thread // threads, lookups * (thread + 1) // threads):
                bucket = np.int64((keys[j] >> shift) & mask)
                other[counts[thread, bucket]] = keys[j]
                counts[thread, bucket] += 1
        keys, other = other, keys
    return keys


@numba.njit(cache=True)
def _first_run(keys, chunk, chunks):
    """Where a chunk of sorted lookups starts, moved on to the start of a run of one slot."""
    lookups = keys.size
    start = lookups * chunk // chunks
    while 0 < start < lookups and keys[start] >> np.uint64(32) == keys[start - 1] >> np.uint64(32):
        start += 1
    return start


@numba.njit(parallel=True, cache=True, fastmath=_FUSED | {"reassoc"}, error_model="numpy")
def update(rows, state, keys, bags, gradients, weights, optimizer, lr, eps, threads):
    """Sum the gradients of each run of equal slots and apply the optimizer to its row.

    `state` is ``[rows, width]`` for Adagrad, ``[rows, 1]`` for its row-wise form.
    """
    width = rows.shape[1]
    lookups = keys.size
    chunks = threads * CHUNKS_PER_THREAD
    weighted = weights.size > 0
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for thread in numba.prange(threads):
        total = np.empty(width, np.float32)
        for chunk in range(thread, chunks, threads):
            j = _first_run(keys, chunk, chunks)
            stop = _first_run(keys, chunk + 1, chunks)
            while j < stop:
                slot = np.int64(keys[j] >> half)
                for k in range(width):
                    total[k] = 0.0
                while j < stop and np.int64(keys[j] >> half) == slot:
                    ahead = j + AHEAD
                    if ahead < lookups:
                        next_slot = np.int64(keys[ahead] >> half)
                        next_bag = bags[np.int64(keys[ahead] & low)]
                        for k in range(0, width, 16):
                            prefetch(gradients, next_bag, k)
                            prefetch(rows, next_slot, k)
                        if optimizer != SGD:
                            for k in range(0, state.shape[1], 16):
                                prefetch(state, next_slot, k)
                    lookup = np.int64(keys[j] & low)
                    bag = bags[lookup]
                    if weighted:
                        weight = weights[lookup]
                        for k in range(width):
                            total[k] += weight * gradients[bag, k]
                    else:
                        for k in range(width):
                            total[k] += gradients[bag, k]
                    j += 1
                if optimizer == SGD:
                    for k in range(width):
                        rows[slot, k] -= lr * total[k]
                elif optimizer == ADAGRAD:
                    for k in range(width):
                        state[slot, k] += total[k] * total[k]
                        rows[slot, k] -= lr * total[k] / (np.sqrt(state[slot, k]) + eps)
                else:
                    square = np.float32(0.0)
                    for k in range(width):
                        square += total[k] * total[k]
                    state[slot, 0] += square / np.float32(width)
                    step = lr / (np.sqrt(state[slot, 0]) + eps)
                    for k in range(width):
                        rows[slot, k] -= step * total[k]
