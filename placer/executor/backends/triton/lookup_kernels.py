# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernels of the forward pass: ids to slots, sums of bags, gradients of weights.

A program works on several bags side by side, and reads one lookup of each at a time. So many reads
are under way even if bags are short, and each bag is summed in the order of its lookups.
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
    hbm,
    dram,
    boundary,
    places,
    offsets,
    weights,
    out,
    bags,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAGS: tl.constexpr,
):
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
    hbm,
    dram,
    boundary,
    places,
    bags,
    gradients,
    out,
    lookups,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOOKUPS: tl.constexpr,
):
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
