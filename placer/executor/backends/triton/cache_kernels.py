# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernels that find a step's staged and cached rows and give them entries of a row cache.

Only the device knows the numbers of runs, rows and misses, which are small beside the number of
lookups. A fixed number of programs shares this work, and leaves the rest of the arrays untouched.
"""

import triton
import triton.language as tl


@triton.jit
def first_at_least(ordered, size, values, BITS: tl.constexpr):
    """Count elements below each value among the first `size` sorted ones; size < 2 ** BITS."""
    below = (values * 0).to(tl.int32)
    for bit in tl.static_range(BITS):
        probe = below + (1 << (BITS - 1 - bit))
        inside = probe <= size
        held = tl.load(ordered + probe - 1, mask=inside, other=0)
        below = tl.where(inside & (held < values), probe, below)
    return below


@triton.jit(do_not_specialize=["size", "home", "stop"])
def find_edges(ordered, run, count, size, home, stop, first, last, in_home, BITS: tl.constexpr):
    """Find the first runs from slots `home` and `stop` on; count the lookups before `home`."""
    edges = tl.arange(0, 4)
    bounds = tl.where(edges == 0, 0, tl.where(edges == 1, home, stop))
    below = first_at_least(ordered, size, bounds, BITS)
    runs = tl.load(run + below, mask=below < size, other=0)
    runs = tl.where(below < size, runs, tl.load(count))
    tl.store(first + edges * 0, runs, mask=edges == 1)
    tl.store(last + edges * 0, runs, mask=edges == 2)
    before = tl.sum(tl.where(edges == 1, below, tl.where(edges == 0, -below, 0)), 0)
    tl.atomic_add(in_home, before.to(tl.int64))


@triton.jit(do_not_specialize=["home", "host_start", "entries"])
def place_runs(ordered, starts, count, home, host_start, entries, run_places, BLOCK: tl.constexpr):
    """Write the place of each run outside of the row cache."""
    number = tl.load(count)
    first = tl.program_id(0) * BLOCK
    while first < number:
        run = first + tl.arange(0, BLOCK)
        here = run < number
        slot = tl.load(ordered + tl.load(starts + run, mask=here, other=0), mask=here, other=0)
        place = tl.where(slot < home, slot, slot + entries)
        place = tl.where(slot < host_start, place, -1)
        tl.store(run_places + run, place.to(run_places.dtype.element_ty), mask=here)
        first += tl.num_programs(0) * BLOCK


@triton.jit
def read_rows(ordered, starts, first_run, last_run, slots, counts, BLOCK: tl.constexpr):
    """Write the slot and the number of lookups of each staged and cached row."""
    start_run = tl.load(first_run)
    number = tl.load(last_run) - start_run
    first = tl.program_id(0) * BLOCK
    while first < number:
        row = first + tl.arange(0, BLOCK)
        here = row < number
        start = tl.load(starts + start_run + row, mask=here, other=0)
        after = tl.load(starts + start_run + row + 1, mask=here, other=0)
        tl.store(slots + row, tl.load(ordered + start, mask=here, other=0), mask=here)
        tl.store(counts + row, after - start, mask=here)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["size", "ticket"])
def find_rows(
    first_run, last_run, slots, counts, sorted_slots, sorted_entries, size, last_used, priority,
    counters, entries, wanted, ticket,
    COUNTED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entry of each row, note its use, and mark rows without an entry as wanted."""
    number = tl.load(last_run) - tl.load(first_run)
    first = tl.program_id(0) * BLOCK
    lookups = first.to(tl.int64) * 0
    hit_lookups = lookups
    hits = lookups
    rows = lookups
    while first < number:
        row = first + tl.arange(0, BLOCK)
        here = row < number
        slot = tl.load(slots + row, mask=here, other=0)
        count = tl.load(counts + row, mask=here, other=0)
        position = first_at_least(sorted_slots, size, slot, BITS)
        here_held = here & (position < size)
        found = here_held & (tl.load(sorted_slots + position, mask=here_held, other=0) == slot)
        entry = tl.load(sorted_entries + position, mask=found, other=-1)
        tl.store(entries + row, entry, mask=here)
        tl.store(wanted + row, 1, mask=here & (found == 0))
        # Rows are distinct, so entries are too.
        tl.store(last_used + entry, ticket, mask=found)
        if COUNTED:
            before = tl.load(priority + entry, mask=found, other=0.0)
            tl.store(priority + entry, before + count.to(tl.float32), mask=found)
        lookups += tl.sum(count, 0)
        hit_lookups += tl.sum(tl.where(found, count, 0), 0)
        rows += tl.sum(here.to(tl.int32), 0)
        hits += tl.sum(found.to(tl.int32), 0)
        first += tl.num_programs(0) * BLOCK
    tl.atomic_add(counters, lookups)
    tl.atomic_add(counters + 1, hit_lookups)
    tl.atomic_add(counters + 2, rows)
    tl.atomic_add(counters + 3, hits)


@triton.jit(do_not_specialize=["boundary", "shift"])
def bar_rows(
    their_first, their_last, their_places, boundary, shift, first_run, last_run, slots, wanted,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark rows that another step reads in place, from `boundary` on, as not wanted."""
    start_run = tl.load(their_first)
    number = tl.load(their_last) - start_run
    size = tl.load(last_run) - tl.load(first_run)
    first = tl.program_id(0) * BLOCK
    while first < number:
        row = first + tl.arange(0, BLOCK)
        here = row < number
        place = tl.load(their_places + start_run + row, mask=here, other=0)
        in_place = here & (place >= boundary)
        slot = place - shift
        position = first_at_least(slots, size, slot, BITS)
        in_place = in_place & (position < size)
        ours = in_place & (tl.load(slots + position, mask=in_place, other=0) == slot)
        tl.store(wanted + position, 0, mask=ours)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["entries", "cached_start", "vacant", "ticket", "oldest"])
def order_entries(
    slots, last_used, priority, keys, available, entries, cached_start, vacant, ticket, oldest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the keys of `RowCache._evictable`, and count the entries that can be taken."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = entry < entries
    slot = tl.load(slots + entry, mask=here, other=0)
    used = tl.load(last_used + entry, mask=here, other=0)
    bits = tl.load(priority + entry, mask=here, other=0.0).to(tl.int32, bitcast=True)
    key = tl.where(slot < cached_start, -tl.maximum(ticket - used, 1), bits)
    free = slot == vacant
    may = here & (free | (used < oldest))
    key = tl.where(may, tl.where(free, -2147483648, key), 2147483647)
    tl.store(keys + entry, key, mask=entry <= entries)
    tl.atomic_add(available, tl.sum(may.to(tl.int32), 0))


@triton.jit(do_not_specialize=["size", "rows", "vacant"])
def leaving_slots(
    order, slots, turns, available, out, size, rows, vacant, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the slots of taken entries in the order of eviction; fill the rest with `vacant`."""
    number = tl.minimum(tl.load(turns + rows - 1), tl.load(available))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    leaves = place < tl.minimum(number, size)
    entry = tl.load(order + place, mask=leaves, other=0)
    slot = tl.load(slots + entry, mask=leaves, other=0)
    tl.store(out + place, tl.where(leaves, slot, vacant), mask=place < size)


@triton.jit(do_not_specialize=["rows", "most", "nobody", "ticket"])
def fill_entries(
    order, by_slot, turns, available, rows, incoming, priority, slots, last_used, priorities, dirty,
    moved, outgoing, count, written_back, most, nobody, ticket, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give the taken entries to rows, as `RowCache._admit` does."""
    number = tl.minimum(tl.load(turns + rows - 1), tl.load(available))
    move = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = move < most
    here = inside & (move < number)
    entry = tl.load(order + tl.load(by_slot + move, mask=here, other=0), mask=here, other=nobody)
    new = tl.load(incoming + move, mask=here, other=-1)
    old = tl.load(slots + entry, mask=here, other=-1)
    leaves = here & (tl.load(dirty + entry, mask=here, other=0) != 0)
    tl.store(moved + move, tl.where(here, entry, -1).to(tl.int32), mask=inside)
    tl.store(incoming + move, new, mask=inside)
    tl.store(outgoing + move, tl.where(leaves, old, -1), mask=inside)
    tl.store(slots + entry, new, mask=here)
    tl.store(last_used + entry, ticket, mask=here)
    new_priority = tl.load(priority + move, mask=here, other=0).to(tl.float32)
    tl.store(priorities + entry, new_priority, mask=here)
    tl.store(dirty + entry, 0, mask=here)
    tl.store(count + move, number, mask=inside & (move == 0))
    tl.atomic_add(written_back, tl.sum(leaves.to(tl.int64), 0))


@triton.jit
def admit_rows(
    first_run, last_run, slots, counts, wanted, turns, available, order, by_slot, entries,
    incoming, lookups, in_place,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Give entry number `turns` − 1 to each wanted row, as far as entries are available.

    `turns` is the running count of wanted rows.
    """
    number = tl.load(last_run) - tl.load(first_run)
    most = tl.load(available)
    first = tl.program_id(0) * BLOCK
    left = first.to(tl.int64) * 0
    while first < number:
        row = first + tl.arange(0, BLOCK)
        here = row < number
        turn = tl.load(turns + row, mask=here, other=0) - 1
        admitted = here & (tl.load(wanted + row, mask=here, other=0) != 0) & (turn < most)
        entry = tl.load(entries + row, mask=here, other=0)
        left += tl.sum((here & (entry < 0) & (admitted == 0)).to(tl.int32), 0)
        place = tl.load(by_slot + turn, mask=admitted, other=0)
        taken = tl.load(order + place, mask=admitted, other=-1)
        tl.store(entries + row, taken.to(tl.int32), mask=admitted)
        tl.store(incoming + turn, tl.load(slots + row, mask=admitted, other=0), mask=admitted)
        tl.store(lookups + turn, tl.load(counts + row, mask=admitted, other=0), mask=admitted)
        first += tl.num_programs(0) * BLOCK
    tl.atomic_add(in_place, left)


@triton.jit(do_not_specialize=["home"])
def move_to_entries(
    first_run, last_run, entries, home, run_places, dirty,
    TRAINED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the places of rows with an entry, and mark their copies as changed if TRAINED."""
    start_run = tl.load(first_run)
    number = tl.load(last_run) - start_run
    first = tl.program_id(0) * BLOCK
    while first < number:
        row = first + tl.arange(0, BLOCK)
        entry = tl.load(entries + row, mask=row < number, other=-1)
        place = entry.to(run_places.dtype.element_ty) + home
        tl.store(run_places + start_run + row, place, mask=entry >= 0)
        if TRAINED:
            tl.store(dirty + entry, 1, mask=entry >= 0)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["lookups"])
def place_lookups(order, runs, run_places, places, lookups, BLOCK: tl.constexpr):
    """Write the place of each lookup, in the batch's order."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = position < lookups
    run = tl.load(runs + position, mask=here, other=0)
    place = tl.load(run_places + run, mask=here, other=0)
    tl.store(places + tl.load(order + position, mask=here, other=0), place, mask=here)
