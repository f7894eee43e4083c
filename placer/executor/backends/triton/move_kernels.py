# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernels of the row cache's moves: rows between HBM and host memory, both ways at once."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["home"])
def exchange(
    hbm,
    dram,
    home,
    entries,
    incoming,
    outgoing,
    count,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy rows of WORDS words, ROWS moves at a time.

    Old and new rows are read together and then written together, so that traffic runs both
    ways over the link. No row leaves and enters in the same call.
    """
    number = tl.load(count)
    first = tl.program_id(0) * ROWS
    while first < number:
        index = first + tl.arange(0, ROWS)
        here = index < number
        entry = tl.load(entries + index, mask=here, other=0).to(tl.int64)
        new = tl.load(incoming + index, mask=here, other=0).to(tl.int64)
        old = tl.load(outgoing + index, mask=here, other=-1).to(tl.int64)
        leaves = old >= 0
        in_pool = (hbm + (home + entry) * WORDS)[:, None]
        target = (dram + (old - home) * WORDS)[:, None]
        source = (dram + (new - home) * WORDS)[:, None]
        for start in range(0, WORDS, BLOCK):
            word = (start + tl.arange(0, BLOCK))[None, :]
            inside = word < WORDS
            admitted = tl.load(source + word, mask=here[:, None] & inside)
            evicted = tl.load(in_pool + word, mask=leaves[:, None] & inside)
            # Nobody may overwrite what another thread of the program has still to read.
            tl.debug_barrier()
            tl.store(target + word, evicted, mask=leaves[:, None] & inside)
            tl.store(in_pool + word, admitted, mask=here[:, None] & inside)
        first += tl.num_programs(0) * ROWS
