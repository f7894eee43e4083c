# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, assignment"
"""Compiled kernels of a key map: find keys, give them rows, and take rows back.

The map is an open-addressing hash table (`slots`) of row numbers with linear probing. A removed
key leaves no tombstone: the keys behind it move up (Knuth, The Art of Computer Programming 3, 6.4,
algorithm R). Everything else that is known of a row is one record of 32 bytes.

Rows with keys are in doubly linked circular lists, one for each power of two of how often they
were read. Of each list the row that was read longest ago comes first, so that both LRU (one list)
and LFU find the row to take back without a search. Records behind those of the rows are the heads
of the lists.
"""

import numba
import numpy as np

RECORD = np.dtype(
    [
        ("key", np.int64),
        ("step", np.int32),  # In which the row was read last; −1: it has no key.
        ("reads", np.uint32),
        ("before", np.int32),
        ("behind", np.int32),
        ("age", np.uint32),  # Of the counts when `reads` was last brought up to date.
        ("_", np.int32),
    ]
)

LISTS = 32

# Places of `state`.
STEP, USED, FREE, AGE, READS, HAND, HITS, MISSES, WAITING, REFUSED, ADMITTED, EVICTED, EXPIRED = (
    range(13)
)
PLACES = 13

SKETCH_ROWS = 4


@numba.njit(cache=True, nogil=True, inline="always")
def mix(key):
    """Spread the bits of a key: the finalizer of MurmurHash3."""
    bits = np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return bits ^ (bits >> np.uint64(33))


@numba.njit(cache=True, nogil=True, inline="always")
def _home(key, size):
    """The slot at which a key's search begins."""
    return np.int64(((mix(key) >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32))


@numba.njit(cache=True, nogil=True, inline="always")
def _slot_of(slots, rows, key):
    """The slot that holds a key, or the empty one at which its search ends."""
    at = _home(key, slots.size)
    while slots[at] != 0 and rows[slots[at]].key != key:
        at += 1
        if at == slots.size:
            at = 0
    return at


@numba.njit(cache=True, nogil=True)
def find(keys, out, slots, rows):
    """The row of each key, 0 for those that have none; changes nothing."""
    for j in range(keys.size):
        out[j] = slots[_slot_of(slots, rows, keys[j])]


@numba.njit(cache=True, nogil=True)
def fill_slots(slots, rows, used):
    """Enter all keys of rows 1 to `used` into empty slots."""
    for row in range(1, used + 1):
        if rows[row].step >= 0:
            slots[_slot_of(slots, rows, rows[row].key)] = row


@numba.njit(cache=True, nogil=True)
def _remove(slots, rows, key):
    """Take a key out of the slots, and move up those whose search would end before them."""
    size = slots.size
    empty = _slot_of(slots, rows, key)
    at = empty
    while True:
        at = at + 1 if at + 1 < size else 0
        if slots[at] == 0:
            break
        home = _home(rows[slots[at]].key, size)
        # Stays if its home is cyclically in (empty, at].
        stays = empty < home <= at if empty < at else (empty < home or home <= at)
        if not stays:
            slots[empty] = slots[at]
            empty = at
    slots[empty] = 0


@numba.njit(cache=True, nogil=True, inline="always")
def _unlink(rows, row):
    before, behind = rows[row].before, rows[row].behind
    rows[before].behind = behind
    rows[behind].before = before


@numba.njit(cache=True, nogil=True, inline="always")
def _link_last(rows, head, row):
    last = rows[head].before
    rows[row].before = last
    rows[row].behind = head
    rows[last].behind = row
    rows[head].before = row


@numba.njit(cache=True, nogil=True, inline="always")
def _list_of(reads, by_reads):
    number = 0
    while by_reads and reads > 1:
        reads >>= 1
        number += 1
    return number


@numba.njit(cache=True, nogil=True)
def _age(rows, heads, state):
    """Halve all counts: each list takes the place of the one before, the first two join."""
    state[AGE] += 1
    first, second = heads[0], heads[1]
    if rows[second].behind != second:
        begin, end, last = rows[second].behind, rows[second].before, rows[first].before
        rows[last].behind = begin
        rows[begin].before = last
        rows[end].behind = first
        rows[first].before = end
        rows[second].before = second
        rows[second].behind = second
    for number in range(1, LISTS - 1):
        heads[number] = heads[number + 1]
    heads[LISTS - 1] = second


@numba.njit(cache=True, nogil=True)
def _release(slots, rows, state, row):
    """Take a row's key away."""
    _remove(slots, rows, rows[row].key)
    _unlink(rows, row)
    rows[row].step = -1
    rows[row].behind = state[FREE]
    state[FREE] = row


@numba.njit(cache=True, nogil=True)
def _expire(slots, rows, heads, state, ttl, open_since, most):
    """Take back rows that were read more than `ttl` steps ago, at most so many of them."""
    before = min(state[STEP] - ttl, open_since)
    for number in range(LISTS):
        head = heads[number]
        row = rows[head].behind
        while row != head and most > 0 and rows[row].step < before:
            following = rows[row].behind
            _release(slots, rows, state, row)
            state[EXPIRED] += 1
            most -= 1
            row = following


@numba.njit(cache=True, nogil=True)
def _evict(slots, rows, heads, state, open_since, first_list):
    """Take back a row that no step from `open_since` on reads.

    Returns its list, where the next search of the same step begins, as a step only adds to the rows
    that may not be taken back; `LISTS` if there is no such row.
    """
    for number in range(first_list, LISTS):
        head = heads[number]
        first_kept = 0
        row = rows[head].behind
        while row != head and row != first_kept:
            if rows[row].step < open_since:
                _release(slots, rows, state, row)
                state[EVICTED] += 1
                return number
            # Lists that were joined are not in order: it belongs among those read last.
            first_kept = first_kept if first_kept else row
            following = rows[row].behind
            _unlink(rows, row)
            _link_last(rows, head, row)
            row = following
    return LISTS


@numba.njit(cache=True, nogil=True)
def _count_unknown(sketch, key):
    """Count a read of a key that has no row, and return how often it was read by now.

    A count-min sketch with conservative updates (Estan and Varghese 2002,
    doi:10.1145/633025.633056): never too few, too many where keys share all their cells.
    """
    bits = mix(key)
    step = (bits >> np.uint64(32)) | np.uint64(1)
    width = np.uint64(sketch.shape[1])
    least = 255
    for i in range(SKETCH_ROWS):
        least = min(least, sketch[i, (bits + np.uint64(i) * step) % width])
    reads = min(255, least + 1)
    for i in range(SKETCH_ROWS):
        at = (bits + np.uint64(i) * step) % width
        sketch[i, at] = max(sketch[i, at], reads)
    return reads


@numba.njit(cache=True, nogil=True)
def _halve_sketch(sketch, state, cells):
    """Halve so many more cells of each row; over time each comes as often as any other."""
    for _ in range(min(cells, sketch.shape[1])):
        at = state[HAND]
        for i in range(SKETCH_ROWS):
            sketch[i, at] >>= 1
        state[HAND] = at + 1 if at + 1 < sketch.shape[1] else 0


@numba.njit(cache=True, nogil=True)
def read(
    keys, out, reused, slots, rows, heads, state, sketch,
    capacity, admission, by_reads, ttl, age_reads, open_since,
):  # fmt: skip
    """One step: the row of each key, 0 where it gets none.

    Returns how many rows were given to another key, which are the first of `reused`.
    """
    state[STEP] += 1
    step, reused_rows, first_list = state[STEP], 0, 0
    if ttl > 0:
        _expire(slots, rows, heads, state, ttl, open_since, keys.size + 1024)
    state[READS] += keys.size
    if by_reads and state[READS] >= age_reads:
        state[READS] = 0
        _age(rows, heads, state)
    if admission > 1:
        _halve_sketch(sketch, state, 1 + keys.size * sketch.shape[1] // age_reads)
    for j in range(keys.size):
        key = keys[j]
        row = slots[_slot_of(slots, rows, key)]
        if row != 0:
            state[HITS] += 1
            out[j] = row
            if rows[row].step == step:
                rows[row].reads += np.uint32(1)
                continue
            older = np.uint32(state[AGE]) - rows[row].age
            reads = rows[row].reads >> older if older < 32 else np.uint32(0)
            rows[row].reads = reads + np.uint32(1)
            rows[row].age = np.uint32(state[AGE])
            rows[row].step = step
            _unlink(rows, row)
            _link_last(rows, heads[_list_of(rows[row].reads, by_reads)], row)
            continue
        state[MISSES] += 1
        out[j] = 0
        if admission > 1 and _count_unknown(sketch, key) < admission:
            state[WAITING] += 1
            continue
        if state[FREE] == 0 and state[USED] < capacity:
            state[USED] += 1
            row = state[USED]
        else:
            if state[FREE] == 0:
                first_list = _evict(slots, rows, heads, state, open_since, first_list)
            row = state[FREE]
            if row == 0:
                state[REFUSED] += 1
                continue
            state[FREE] = rows[row].behind
            reused[reused_rows] = row
            reused_rows += 1
        state[ADMITTED] += 1
        out[j] = row
        rows[row].key = key
        rows[row].reads = np.uint32(1)
        rows[row].age = np.uint32(state[AGE])
        rows[row].step = step
        _link_last(rows, heads[0], row)
        slots[_slot_of(slots, rows, key)] = row
    return reused_rows
