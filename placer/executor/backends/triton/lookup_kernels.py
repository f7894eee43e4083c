# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernels that turn ids to slots, pool rows, group lookups by row, and move rows.

In the forward pass, a program works on several bags side by side, and reads one lookup of each at a
time. So many reads are under way even if bags are short, and each bag is summed in the order of its
lookups.
"""

import triton
import triton.language as tl


@triton.jit
def row_address(hbm, dram, boundary, places, columns, STRIDE: tl.constexpr):
    """Return pointers to `columns` of the rows at `places`, int64, each in one of two memories.

    One load through selected pointers takes half the instructions and registers of two masked
    loads. Select whole tiles of pointers instead of row starts, so that the compiler knows that
    columns are contiguous and aligned, and reads 16 bytes at once.
    """
    here = hbm + (places * STRIDE)[:, None] + columns[None, :]
    there = dram + ((places - boundary) * STRIDE)[:, None] + columns[None, :]
    return tl.where((places < boundary)[:, None], here, there)


@triton.jit
def translate(ids, table, slot_map, out, fault, BLOCK: tl.constexpr):
    """Translate ids to slots. Program (p, s) has blocks p, p + programs, .. of segment s."""
    segment = table + tl.program_id(1).to(tl.int64) * 8
    first = tl.load(segment)
    first_out = tl.load(segment + 1)
    lookups = tl.load(segment + 2)
    rows = tl.load(segment + 3)
    near = tl.load(segment + 4)
    edge = tl.load(segment + 5)
    far = tl.load(segment + 6)
    map_start = tl.load(segment + 7)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < lookups:
        position = start + tl.arange(0, BLOCK)
        inside = position < lookups
        row = tl.load(ids + first + position, mask=inside, other=0).to(tl.int64)
        good = inside & (row >= 0) & (row < rows)
        # A block, as the interpreter turns a condition of scalar and block into an integer.
        by_map = map_start + row * 0 >= 0
        mapped = tl.load(slot_map + map_start + row, mask=good & by_map, other=0).to(tl.int64)
        followed = row + tl.where(row < edge, near, far)
        slot = tl.where(good, tl.where(by_map, mapped, followed), -1)
        tl.store(out + first_out + position, slot.to(out.dtype.element_ty), mask=inside)
        # A block without a fault does not touch the shared cache line.
        worst = tl.min(tl.where(inside & (good == 0), first + position, 9223372036854775807), 0)
        tl.atomic_min(fault, worst, mask=worst != 9223372036854775807)
        start += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["bags", "boundary"])
def pool(
    hbm, dram, boundary, places, offsets, weights, out, bags,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """Sum the rows of bags. Program (i, c) has block i of the bags and block c of the columns."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = bag < bags
    inside = column < WIDTH
    start = tl.load(offsets + bag, mask=here, other=0)
    length = tl.load(offsets + bag + 1, mask=here, other=0) - start
    longest = tl.max(length, 0)
    total = tl.zeros((BAGS, COLUMNS), tl.float32)
    step = longest * 0
    while step < longest:
        read = step < length
        place = tl.load(places + start + step, mask=read, other=-1).to(tl.int64)
        address = row_address(hbm, dram, boundary, place, column, WIDTH)
        mask = (place >= 0)[:, None] & inside[None, :]
        if weights is None:
            total += tl.load(address, mask=mask, other=0.0).to(tl.float32)
        else:
            weight = tl.load(weights + start + step, mask=read, other=0.0)[:, None]
            total += weight * tl.load(address, mask=mask, other=0.0).to(tl.float32)
        step += 1
    tl.store(
        out + bag[:, None] * WIDTH + column[None, :], total, mask=here[:, None] & inside[None, :]
    )


@triton.jit(do_not_specialize=["lookups", "boundary"])
def weight_gradients(
    hbm, dram, boundary, places, bags, gradients, out, lookups,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Write row · gradient of the bag of each lookup. Program i has block i of the lookups."""
    lookup = tl.program_id(0).to(tl.int64) * LOOKUPS + tl.arange(0, LOOKUPS)
    here = lookup < lookups
    place = tl.load(places + lookup, mask=here, other=-1).to(tl.int64)
    read = place >= 0
    bag = tl.load(bags + lookup, mask=read, other=0).to(tl.int64)
    gradient_start = (gradients + bag * WIDTH)[:, None]
    products = tl.zeros((LOOKUPS, COLUMNS), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = read[:, None] & (column < WIDTH)[None, :]
        address = row_address(hbm, dram, boundary, place, column, WIDTH)
        row = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        products += row * tl.load(gradient_start + column[None, :], mask=mask, other=0.0)
    tl.store(out + lookup, tl.sum(products, 1), mask=here)


@triton.jit(do_not_specialize=["lookups"])
def mark_runs(ordered, order, new_order, begins, lookups, BLOCK: tl.constexpr):
    """Convert the order to int32; write 1 to `begins` where a run begins, except the first."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = position < lookups
    tl.store(new_order + position, tl.load(order + position, mask=here, other=0), mask=here)
    slot = tl.load(ordered + position, mask=here, other=0)
    later = here & (position > 0)
    before = tl.load(ordered + position - 1, mask=later, other=0)
    tl.store(begins + position, (later & (slot != before)).to(tl.int32), mask=here)


@triton.jit(do_not_specialize=["lookups"])
def start_runs(run, starts, count, covering, lookups, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the start of each run, and the run at the first position of each block."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = position < lookups
    number = tl.load(run + position, mask=here, other=0)
    before = tl.load(run + position - 1, mask=here & (position > 0), other=-1)
    tl.store(starts + number, position, mask=here & (number != before))
    tl.store(covering + position // CHUNK, number, mask=here & (position % CHUNK == 0))
    last = here & (position == lookups - 1)
    tl.store(starts + number + 1, position + 1, mask=last)
    tl.store(count + position * 0, number + 1, mask=last)


@triton.jit(do_not_specialize=["blocks"])
def find_long_runs(starts, covering, long_runs, blocks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the long run that begins in each block of CHUNK positions, or −1.

    Such a run contains the next block's first position, so it is the run at that position.
    """
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    followed = block + 1 < blocks
    following = tl.load(covering + block + 1, mask=followed, other=0)
    begin = tl.load(starts + following, mask=followed, other=0)
    length = tl.load(starts + following + 1, mask=followed, other=0) - begin
    from_here = begin - block * CHUNK
    is_long = followed & (from_here >= 0) & (from_here < CHUNK) & (length > CHUNK)
    tl.store(long_runs + block, tl.where(is_long, following, -1), mask=block < blocks)


@triton.jit(do_not_specialize=["home"])
def exchange(
    hbm, dram, state_hbm, state_dram, home, entries, incoming, outgoing, count,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, STATE_WORDS: tl.constexpr,
    STATE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy rows of WORDS words, and their state of STATE_WORDS words, in up to BLOCKS blocks.

    A program reads rows of both directions at once, then writes them, so that the link is busy in
    both directions. No row leaves and enters in the same call.
    """
    number = tl.load(count)
    first = tl.program_id(0) * ROWS
    while first < number:
        index = first + tl.arange(0, ROWS)
        here = index < number
        entry = tl.load(entries + index, mask=here, other=0).to(tl.int64) + home
        new = tl.load(incoming + index, mask=here, other=0).to(tl.int64) - home
        old = tl.load(outgoing + index, mask=here, other=-1).to(tl.int64)
        leaves = old >= 0
        old -= home
        for block in tl.static_range(BLOCKS):
            if block * BLOCK < WORDS:
                word = block * BLOCK + tl.arange(0, BLOCK)
                entering = here[:, None] & (word < WORDS)[None, :]
                leaving = leaves[:, None] & (word < WORDS)[None, :]
                source = dram + (new * WORDS)[:, None] + word[None, :]
                in_hbm = hbm + (entry * WORDS)[:, None] + word[None, :]
                admitted = tl.load(source, mask=entering)
                evicted = tl.load(in_hbm, mask=leaving)
            if block * STATE_BLOCK < STATE_WORDS:
                state_word = block * STATE_BLOCK + tl.arange(0, STATE_BLOCK)
                state_entering = here[:, None] & (state_word < STATE_WORDS)[None, :]
                state_leaving = leaves[:, None] & (state_word < STATE_WORDS)[None, :]
                state_source = state_dram + (new * STATE_WORDS)[:, None] + state_word[None, :]
                state_in_hbm = state_hbm + (entry * STATE_WORDS)[:, None] + state_word[None, :]
                state_admitted = tl.load(state_source, mask=state_entering)
                state_evicted = tl.load(state_in_hbm, mask=state_leaving)
            # All threads must read before any overwrites.
            tl.debug_barrier()
            if block * BLOCK < WORDS:
                target = dram + (old * WORDS)[:, None] + word[None, :]
                tl.store(target, evicted, mask=leaving)
                tl.store(in_hbm, admitted, mask=entering)
            if block * STATE_BLOCK < STATE_WORDS:
                state_target = state_dram + (old * STATE_WORDS)[:, None] + state_word[None, :]
                tl.store(state_target, state_evicted, mask=state_leaving)
                tl.store(state_in_hbm, state_admitted, mask=state_entering)
        first += tl.num_programs(0) * ROWS
