# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, assignment"
"""Compiled kernels of a key map: find keys, give them rows, and take rows back.

The map is an open-addressing hash table (`slots`) of row numbers with linear probing. A removed
key leaves no tombstone: the keys after it move up (Knuth, The Art of Computer Programming 3, 6.4,
algorithm R). Each row has one record of 16 bytes. Bits of a slot that row numbers do not need hold
bits of the key's hash, so a search rarely reads a record of another key. Nearly every access misses
the cache, so keys are found a block at a time, with slots and records prefetched.

A hand goes around the table to take rows back, as in CLOCK (Corbato 1968). It looks at `WINDOW`
rows at a time, and takes the row that was read longest ago, or least often. It halves the counts of
rows that it passes. So a read costs one access to a record, and taking a row back costs a few.
"""

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from placer.growing.options import SKETCH_CELLS, SKETCH_ROWS

RECORD = np.dtype(
    [
        ("key", np.int64),  # The row's key; for a free row, the next free row.
        ("step", np.int32),  # Last step that read the row; −1: it has no key.
        ("reads", np.int32),  # Number of steps that read it, halved by the hand.
    ]
)

# Places of `state`.
(
    STEP,
    USED,
    FREE,
    HAND,
    SWEEP,
    SKETCH,
    HITS,
    MISSES,
    WAITING,
    REFUSED,
    ADMITTED,
    EVICTED,
    EXPIRED,
    PLACES,  # Their number.
) = range(14)

WINDOW = 16
"""Number of rows of which one is taken back: 256 bytes, four cache lines."""

MOST_READS = 255

BLOCK = 128
"""Number of keys to prefetch slots and records for at a time."""


@intrinsic
def prefetch(_context, array, index):
    """Load an element of an array, at a tuple of indices, into the cache without waiting for it."""

    def generate(context, builder, signature, arguments):
        kind, place = signature.args
        held = context.make_array(kind)(context, builder, arguments[0])
        parts = cgutils.unpack_tuple(builder, arguments[1])
        index = [
            context.cast(builder, part, part_type, types.intp)
            for part, part_type in zip(parts, place, strict=True)
        ]
        pointer = cgutils.get_item_pointer(context, builder, kind, held, index, wraparound=False)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, number, number, number]),
            "llvm.prefetch.p0",
        )
        how = [number(value) for value in (0, 3, 1)]  # Read, keep in all cache levels, data.
        builder.call(function, [builder.bitcast(pointer, byte), *how])
        return context.get_dummy_value()

    return types.void(array, index), generate


@numba.njit(cache=True, nogil=True, inline="always")
def mix(key):
    """Mix the bits of a key with the finalizer of MurmurHash3."""
    bits = np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return bits ^ (bits >> np.uint64(33))


@numba.njit(cache=True, nogil=True, inline="always")
def _home(key, size):
    """Return the slot at which a key's search begins."""
    return np.int64(((mix(key) >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32))


@numba.njit(cache=True, nogil=True, inline="always")
def _mask(rows):
    """Return the mask of the bits of a slot that hold a row's number."""
    mask = np.uint32(1)
    while mask < rows.size - 1:
        mask = np.uint32(2 * mask + 1)
    return mask


@numba.njit(cache=True, nogil=True, inline="always")
def _tag(key, mask):
    """Return the other bits of a slot: the key's hash bits after those that choose the slot."""
    return np.uint32((mix(key) >> np.uint64(32)) * (np.uint64(mask) + np.uint64(1)))


@numba.njit(cache=True, nogil=True, inline="always")
def _slot_of(slots, rows, mask, key):
    """Return the slot that holds a key, or the empty slot at which its search ends."""
    at, tag = _home(key, slots.size), _tag(key, mask)
    while slots[at] != 0 and (
        slots[at] & ~mask != tag or rows[np.int64(slots[at] & mask)].key != key
    ):
        at += 1
        if at == slots.size:
            at = 0
    return at


@numba.njit(cache=True, nogil=True, inline="always")
def _row_of(slots, rows, mask, key):
    """Return the row of a key, 0 if it has none."""
    return np.int64(slots[_slot_of(slots, rows, mask, key)] & mask)


@numba.njit(cache=True, nogil=True)
def _guess(keys, out, slots, rows, mask):
    """Guess the row of each key by the first slot with its hash bits. It is nearly always right."""
    for j in range(keys.size):
        prefetch(slots, (_home(keys[j], slots.size),))
    for j in range(keys.size):
        at, tag = _home(keys[j], slots.size), _tag(keys[j], mask)
        while slots[at] != 0 and slots[at] & ~mask != tag:
            at += 1
            if at == slots.size:
                at = 0
        out[j] = slots[at] & mask
        prefetch(rows, (out[j],))


@numba.njit(cache=True, nogil=True)
def parts_of(keys, out, parts):
    """Compute the part of each key, by bits of its hash that do not choose its slot."""
    for j in range(keys.size):
        low = mix(keys[j]) & np.uint64(0xFFFFFFFF)
        out[j] = np.int64((low * np.uint64(parts)) >> np.uint64(32))


@numba.njit(cache=True, nogil=True)
def digest_of(keys):
    """Return the sum of the keys' hashes; each hash is odd, so that no key adds nothing."""
    total = np.uint64(0)
    for j in range(keys.size):
        total += mix(keys[j]) | np.uint64(1)
    return np.int64(total)


@numba.njit(cache=True, nogil=True)
def draw(keys, seed, bound, out):
    """Draw float32 values uniform in ±bound for each key. A key always gets the same values."""
    for j in range(keys.size):
        first = mix(mix(keys[j]) + seed)
        for column in range(out.shape[1]):
            bits = mix(first + np.uint64(column) * np.uint64(0x9E3779B97F4A7C15))
            out[j, column] = bound * (np.float64(bits >> np.uint64(40)) * 2.0**-23 - 1.0)


@numba.njit(cache=True, nogil=True)
def find(keys, out, slots, rows):
    """Find the row of each key, 0 if it has none, without changing the map."""
    mask = _mask(rows)
    for first in range(0, keys.size, BLOCK):
        end = min(first + BLOCK, keys.size)
        _guess(keys[first:end], out[first:end], slots, rows, mask)
        for j in range(first, end):
            if rows[out[j]].key != keys[j] or rows[out[j]].step < 0 or out[j] == 0:
                out[j] = _row_of(slots, rows, mask, keys[j])


@numba.njit(cache=True, nogil=True, inline="always")
def _note(log, slot):
    """Log a changed slot. ``log[0]`` counts changes, even those that the log has no room for."""
    log[0] += 1
    if log[0] < log.size:
        log[log[0]] = slot


@numba.njit(cache=True, nogil=True, inline="always")
def _enter(slots, rows, mask, row, log):
    """Enter the key of a row, which must not be in the slots yet."""
    key = rows[row].key
    slot = _slot_of(slots, rows, mask, key)
    slots[slot] = np.uint32(row) | _tag(key, mask)
    _note(log, slot)


@numba.njit(cache=True, nogil=True)
def fill_slots(slots, rows, used, log):
    """Enter all keys of rows 1 to `used` into empty slots."""
    mask = _mask(rows)
    for row in range(1, used + 1):
        if rows[row].step >= 0:
            _enter(slots, rows, mask, row, log)


@numba.njit(cache=True, nogil=True)
def _release(slots, rows, state, row, log):
    """Take a row's key away, and move up keys that a search would now miss."""
    size, mask = slots.size, _mask(rows)
    empty = _slot_of(slots, rows, mask, rows[row].key)
    at = empty
    while True:
        at = at + 1 if at + 1 < size else 0
        if slots[at] == 0:
            break
        home = _home(rows[np.int64(slots[at] & mask)].key, size)
        # A key stays if its home is cyclically in (empty, at].
        stays = empty < home <= at if empty < at else (empty < home or home <= at)
        if not stays:
            slots[empty] = slots[at]
            _note(log, empty)
            empty = at
    slots[empty] = 0
    _note(log, empty)
    rows[row].step = -1
    rows[row].key = state[FREE]
    state[FREE] = row


@numba.njit(cache=True, nogil=True)
def assign(keys, numbers, slots, rows, state, log):
    """Give each key its row, or none for row 0. The earlier keys of these rows lose them."""
    mask = _mask(rows)
    for j in range(keys.size):
        for row in (_row_of(slots, rows, mask, keys[j]), numbers[j]):
            if row != 0 and rows[row].step >= 0:
                _release(slots, rows, state, row, log)
    for j in range(keys.size):
        if numbers[j] != 0:
            rows[numbers[j]].key = keys[j]
            rows[numbers[j]].step = 0
            _enter(slots, rows, mask, numbers[j], log)


@numba.njit(cache=True, nogil=True)
def _expire(slots, rows, state, log, before, most):
    """Look at `most` more rows, and take back rows that were last read before step `before`."""
    for _ in range(min(most, state[USED])):
        state[SWEEP] = state[SWEEP] % state[USED] + 1
        row = state[SWEEP]
        if 0 <= rows[row].step < before:
            _release(slots, rows, state, row, log)
            state[EXPIRED] += 1


@numba.njit(cache=True, nogil=True)
def _evict(slots, rows, state, log, by_reads, open_since):
    """Take back a row that no step from `open_since` on reads; return whether there was one."""
    # No constants, for which `_release` would be compiled anew.
    best, best_reads = np.int64(0), np.int64(0)
    for looked_at in range(state[USED]):
        if best != 0 and (looked_at >= WINDOW or (by_reads and best_reads == 0)):
            break
        state[HAND] = state[HAND] % state[USED] + 1
        row = state[HAND]
        if rows[row].step < 0 or rows[row].step >= open_since:
            continue
        reads = rows[row].reads if by_reads else 0
        rows[row].reads >>= 1
        if (
            best == 0
            or reads < best_reads
            or (reads == best_reads and rows[row].step < rows[best].step)
        ):
            best, best_reads = row, reads
    if best != 0:
        _release(slots, rows, state, best, log)
        state[EVICTED] += 1
    return best != 0


@numba.njit(cache=True, nogil=True)
def _count_unknown(sketch, first_block, blocks, key):
    """Count a read of a key without a row, and return its number of reads so far.

    The sketch is a count-min sketch with conservative updates (Estan and Varghese 2002,
    doi:10.1145/633025.633056). Counts are never too low, and too high if keys share all cells. A
    key's cells are in one block. The bits that choose its part choose the block, too, so counts can
    move with parts.
    """
    bits = mix(key)
    block = np.int64(((bits & np.uint64(0xFFFFFFFF)) * np.uint64(blocks)) >> np.uint64(32))
    block, columns = block - first_block, np.int64(bits >> np.uint64(32))
    least = 255
    for i in range(SKETCH_ROWS):
        least = min(least, sketch[block, i, (columns >> (5 * i)) % SKETCH_CELLS])
    reads = min(255, least + 1)
    for i in range(SKETCH_ROWS):
        at = (columns >> (5 * i)) % SKETCH_CELLS
        sketch[block, i, at] = max(sketch[block, i, at], reads)
    return reads


@numba.njit(cache=True, nogil=True)
def _halve_sketch(sketch, state, cells):
    """Halve the next `cells` cells of each of the sketch's rows, going around.

    The rows are a quarter apart, so the cells of a key are not all halved at once.
    """
    size = sketch.shape[0] * SKETCH_CELLS
    for _ in range(min(cells, size)):
        for i in range(SKETCH_ROWS):
            at = (state[SKETCH] + i * size // SKETCH_ROWS) % size
            sketch[at // SKETCH_CELLS, i, at % SKETCH_CELLS] >>= 1
        state[SKETCH] = (state[SKETCH] + 1) % size


@numba.njit(cache=True, nogil=True)
def begin_step(
    lookups, slots, rows, state, sketch, log, admission, ttl, forget_reads, open_since
):  # fmt: skip
    """Begin a step of `lookups` lookups: expire rows, and halve counts of keys without a row."""
    state[STEP] += 1
    if ttl > 0:
        _expire(slots, rows, state, log, min(state[STEP] - ttl, open_since), lookups + 1024)
    if admission > 1:
        cells = sketch.shape[0] * SKETCH_CELLS
        _halve_sketch(sketch, state, 1 + lookups * cells // forget_reads)


@numba.njit(cache=True, nogil=True)
def read(
    keys, out, reused, slots, rows, state, sketch, log, first_block, blocks,
    capacity, admission, by_reads, open_since, hand, limit,
):  # fmt: skip
    """Read keys of the current step, and write the row of each to `out`, 0 if it gets none.

    Stop at a key that needs a row if the hand has passed over `limit` rows since `hand`.

    Return how many rows were given to another key, listed first in `reused`; and how many keys were
    read.
    """
    step, reused_rows, is_full = state[STEP], 0, False
    mask = _mask(rows)
    for j in range(keys.size):
        if j % BLOCK == 0:
            end = min(j + BLOCK, keys.size)
            _guess(keys[j:end], out[j:end], slots, rows, mask)
        key, row = keys[j], out[j]
        if row == 0 or rows[row].key != key or rows[row].step < 0:
            row = _row_of(slots, rows, mask, key)
        if row != 0:
            state[HITS] += 1
            out[j] = row
            if rows[row].step != step:
                rows[row].step = step
                rows[row].reads = min(MOST_READS, rows[row].reads + 1)
            continue
        needs_hand = state[FREE] == 0 and state[USED] == capacity and not is_full
        if needs_hand and (state[HAND] - hand) % capacity > limit:
            return reused_rows, j
        state[MISSES] += 1
        out[j] = 0
        if admission > 1 and _count_unknown(sketch, first_block, blocks, key) < admission:
            state[WAITING] += 1
            continue
        if state[FREE] == 0 and state[USED] < capacity:
            state[USED] += 1
            row = state[USED]
        else:
            # If no row can be taken back now, none can later in the step.
            if state[FREE] == 0 and not is_full:
                is_full = not _evict(slots, rows, state, log, by_reads, open_since)
            row = state[FREE]
            if row == 0:
                state[REFUSED] += 1
                continue
            state[FREE] = rows[row].key
            reused[reused_rows] = row
            reused_rows += 1
        state[ADMITTED] += 1
        out[j] = row
        rows[row].key = key
        rows[row].step = step
        rows[row].reads = 0
        _enter(slots, rows, mask, row, log)
    return reused_rows, keys.size
