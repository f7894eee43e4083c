# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernels that group the lookups of a step by row; see `placer.executor.lookups.steps`.

Each kernel is one pass over the lookups. PyTorch needs about thirty operators for all.
"""

import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["bags"])
def bags_of_lookups(offsets, out, bags, BLOCK: tl.constexpr):
    """Write the bag of each lookup."""
    bag = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = bag < bags
    start = tl.load(offsets + bag, mask=here, other=0)
    length = tl.load(offsets + bag + 1, mask=here, other=0) - start
    longest = tl.max(length, 0)
    step = longest * 0
    while step < longest:
        tl.store(out + start + step, bag, mask=step < length)
        step += 1
