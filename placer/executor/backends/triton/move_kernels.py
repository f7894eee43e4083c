# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernel that moves rows between HBM and host memory, in both directions at once."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["home"])
def exchange(
    hbm,
    dram,
    state_hbm,
    state_dram,
    home,
    entries,
    incoming,
    outgoing,
    count,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_WORDS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
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
