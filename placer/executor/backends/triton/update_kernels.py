# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernels of the backward pass: they sum gradients by row, and update rows.

`update_runs` takes the runs of at most `CHUNK` lookups. For longer runs, `sum_chunks` writes the
sum of each chunk to a workspace, and `update_long_runs` adds these sums. No run's sum depends on
its position among the runs: short runs and chunks are summed lookup by lookup, and tiles of chunks
are counted from the run's first chunk.

With OPTIMIZER "squares" nothing is updated. Instead, Σ g² of each run is written to `squares`.
"""

import triton
import triton.language as tl

from placer.executor.backends.triton.lookup_kernels import row_address

_NO_RUN = tl.constexpr(2147483647)


@triton.jit
def _sum_lookups(
    gradients, sources, scales, start, length,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of `length` lookups from `start` on, for ROWS runs side by side."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    longest = tl.max(length, 0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    step = longest * 0
    while step < longest:
        for ahead in tl.static_range(UNROLL):
            read = step + ahead < length
            lookup = start + step + ahead
            source = tl.load(sources + lookup, mask=read, other=0).to(tl.int64)
            address = (gradients + source * WIDTH)[:, None] + column[None, :]
            part = tl.load(address, mask=read[:, None] & inside[None, :], other=0.0)
            if scales is not None:
                part *= tl.load(scales + lookup, mask=read, other=0.0)[:, None]
            total += part
        step += UNROLL
    return total


@triton.jit
def _mix(x):
    """Mix bits as `placer.executor.optimizers` does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_stochastically(value, updates, TYPE: tl.constexpr):
    """Return the same bits as `placer.executor.optimizers.stochastic_round`."""
    LOST: tl.constexpr = 16 if TYPE == tl.bfloat16 else 13  # noqa: SIM300
    below: tl.constexpr = (1 << LOST) - 1
    key = _mix((updates + 1).to(tl.uint32))
    bits = _mix(value.to(tl.uint32, bitcast=True) ^ key) & below
    magnitude = tl.abs(value)
    lift = 0.0
    if TYPE == tl.float16:  # noqa: SIM300
        lift = tl.where(magnitude < 6.103515625e-05, 6.103515625e-05, 0.0)
        magnitude += lift
    raw = magnitude.to(tl.uint32, bitcast=True) + bits
    rounded = ((raw >> LOST) << LOST).to(tl.float32, bitcast=True) - lift
    sign = value.to(tl.uint32, bitcast=True) & 0x80000000
    rounded = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    finite = tl.abs(value) < float("inf")
    return tl.where(finite, rounded, value).to(TYPE)


@triton.jit
def _round_to_nearest(value, TYPE: tl.constexpr):
    """Round `value` to TYPE; by hand for bfloat16, which Triton's interpreter truncates."""
    if TYPE == tl.bfloat16:  # noqa: SIM300
        raw = value.to(tl.uint32, bitcast=True)
        even = (raw + 0x7FFF + ((raw >> 16) & 1)) & 0xFFFF0000
        # A carry would turn NaN into a number.
        value = tl.where(value == value, even.to(tl.float32, bitcast=True), value)
    return value.to(TYPE)


@triton.jit
def _read(
    hbm, dram, state_hbm, state_dram, boundary,
    place,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OPTIMIZER: tl.constexpr,
):  # fmt: skip
    """Return the weights of the rows at `place`, shape (rows,), and their optimizer state."""
    column = tl.arange(0, BLOCK)
    mask = (place >= 0)[:, None] & (column < WIDTH)[None, :]
    address = row_address(hbm, dram, boundary, place, column, WIDTH)
    weights = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    first, second = weights, weights  # Placeholders.
    if OPTIMIZER == "rowwise_adagrad":
        address = _element_address(state_hbm, state_dram, boundary, place)
        first = tl.load(address, mask=place >= 0, other=0.0)
    elif OPTIMIZER == "adagrad":
        address = row_address(state_hbm, state_dram, boundary, place, column, WIDTH)
        first = tl.load(address, mask=mask, other=0.0)
    elif OPTIMIZER == "adam":
        address = row_address(state_hbm, state_dram, boundary, place, column, 2 * WIDTH)
        first = tl.load(address, mask=mask, other=0.0)
        second = tl.load(address + WIDTH, mask=mask, other=0.0)
    # Several warps may hold copies of a small tile, and one of them writes. All must read before
    # that, and the compiler must not move reads down.
    tl.debug_barrier()
    return weights, first, second


@triton.jit
def _element_address(hbm, dram, boundary, places):
    return tl.where(places < boundary, hbm + places, dram + (places - boundary))


@triton.jit
def _apply(
    weights, first, second, gradient, run,
    hbm, dram, state_hbm, state_dram, boundary,
    place,
    mean_squares, rate, updates, eps, gain1, gain2,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Apply the rule to the results of `_read`, and write rows and state back."""
    column = tl.arange(0, BLOCK)
    active = place >= 0
    mask = active[:, None] & (column < WIDTH)[None, :]
    step = tl.load(rate)
    if OPTIMIZER == "rowwise_adagrad":
        if mean_squares is None:
            first += tl.sum(gradient * gradient, 1) / WIDTH
        else:
            first += tl.load(mean_squares + run, mask=active, other=0.0)
        tl.store(_element_address(state_hbm, state_dram, boundary, place), first, mask=active)
        change = gradient * (step / (tl.sqrt(first) + eps))[:, None]
    elif OPTIMIZER == "adagrad":
        first += gradient * gradient
        address = row_address(state_hbm, state_dram, boundary, place, column, WIDTH)
        tl.store(address, first, mask=mask)
        change = step * gradient / (tl.sqrt(first) + eps)
    elif OPTIMIZER == "adam":
        first += (gradient - first) * gain1
        second += (gradient * gradient - second) * gain2
        address = row_address(state_hbm, state_dram, boundary, place, column, 2 * WIDTH)
        tl.store(address, first, mask=mask)
        tl.store(address + WIDTH, second, mask=mask)
        change = step * first / (tl.sqrt(second) + eps)
    else:
        change = step * gradient
    address = row_address(hbm, dram, boundary, place, column, WIDTH)
    if STOCHASTIC:
        new = _round_stochastically(weights - change, tl.load(updates), hbm.dtype.element_ty)
    else:
        new = _round_to_nearest(weights - change, hbm.dtype.element_ty)
    tl.store(address, new, mask=mask)


# The update kernels are long functions, because each is one pass over runs with its values in
# registers, and the compiler would inline its parts again.
@triton.jit(do_not_specialize=["boundary"])
def update_runs(
    hbm, dram, state_hbm, state_dram, boundary,
    starts, count, places, sources, scales, gradients,
    mean_squares, squares, rate, updates, eps, gain1, gain2,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr, OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Sum and update runs of at most CHUNK lookups, ROWS at a time.

    Only the device knows the number of runs, so a fixed number of programs share them.
    """
    runs = tl.load(count)
    first_run = tl.program_id(0) * ROWS
    while first_run < runs:
        run = first_run + tl.arange(0, ROWS)
        here = run < runs
        start = tl.load(starts + run, mask=here, other=0)
        length = tl.load(starts + run + 1, mask=here, other=0) - start
        place = tl.load(places + run, mask=here, other=-1).to(tl.int64)
        short = length <= CHUNK
        place = tl.where(short, place, -1)
        length = tl.where(place >= 0, length, 0)
        if OPTIMIZER != "squares":
            # Request rows first, so that they arrive with the gradients.
            weights, first, second = _read(
                hbm, dram, state_hbm, state_dram, boundary, place, WIDTH, BLOCK, OPTIMIZER
            )
        total = _sum_lookups(gradients, sources, scales, start, length, WIDTH, BLOCK, ROWS, UNROLL)
        if OPTIMIZER == "squares":
            tl.store(squares + run, tl.sum(total * total, 1), mask=here & short)
        else:
            _apply(
                weights, first, second, total, run,
                hbm, dram, state_hbm, state_dram, boundary, place,
                mean_squares, rate, updates, eps, gain1, gain2,
                WIDTH, BLOCK, OPTIMIZER, STOCHASTIC,
            )  # fmt: skip
        first_run += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["blocks"])
def sum_chunks(
    partials,
    starts, covering, long_runs, blocks, places, sources, scales, gradients,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum each chunk of the long runs into `partials`, shape (2 · blocks, WIDTH).

    Chunks have CHUNK lookups, counted from the run's start. So at most two start in block b of
    CHUNK positions: a later chunk of the run at the block's first position (row b), and the first
    chunk of a run that begins in the block (row blocks + b).
    """
    item_start = tl.program_id(0) * ROWS
    while item_start < 2 * blocks:
        item = item_start + tl.arange(0, ROWS)
        first_chunk = item >= blocks
        block = tl.where(first_chunk, item - blocks, item)
        here = block < blocks
        run = tl.load(long_runs + block, mask=here & first_chunk, other=-1)
        cover = tl.load(covering + block, mask=here & (item < blocks), other=-1)
        run = tl.where(first_chunk, run, cover)
        begin = tl.load(starts + run, mask=run >= 0, other=-1)
        block_start = block * CHUNK
        # For a run that began before `block_start`, the first chunk that starts from there on.
        further = tl.where((run >= 0) & (begin < block_start), block_start + begin % CHUNK, -1)
        start = tl.where(first_chunk, begin, further)
        exists = start >= 0
        stop = tl.load(starts + run + 1, mask=exists, other=0)
        place = tl.load(places + run, mask=exists, other=-1)
        length = tl.minimum(stop - start, CHUNK)
        length = tl.where(exists & (place >= 0) & (length > 0), length, 0)
        total = _sum_lookups(gradients, sources, scales, start, length, WIDTH, BLOCK, ROWS, UNROLL)
        column = tl.arange(0, BLOCK)
        address = (partials + item.to(tl.int64) * WIDTH)[:, None] + column[None, :]
        tl.store(address, total, mask=(length > 0)[:, None] & (column < WIDTH)[None, :])
        item_start += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["boundary", "blocks"])
def update_long_runs(
    hbm, dram, state_hbm, state_dram, boundary,
    starts, long_runs, blocks, places, partials,
    mean_squares, squares, rate, updates, eps, gain1, gain2,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    SCAN: tl.constexpr, OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Add up the chunks of each long run, CHUNKS at a time, and update its row.

    Long runs are often neighbours. Program p looks at blocks p, p + programs, .., SCAN at a time,
    to share them among programs.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    seen = 0
    while program + seen * tl.num_programs(0) < blocks:
        candidate = program + (seen + tl.arange(0, SCAN)) * tl.num_programs(0)
        found = tl.load(long_runs + candidate, mask=candidate < blocks, other=-1)
        run = tl.min(tl.where(found >= 0, found, _NO_RUN), 0)
        while run < _NO_RUN:
            begin = tl.load(starts + run)
            chunks = (tl.load(starts + run + 1) - begin + CHUNK - 1) // CHUNK
            place = tl.zeros((1,), tl.int64) + tl.load(places + run).to(tl.int64)
            chunks = tl.where(tl.max(place, 0) >= 0, chunks, 0)
            total = tl.zeros((CHUNKS, BLOCK), tl.float32)
            done = chunks * 0
            while done < chunks:
                chunk = done + tl.arange(0, CHUNKS)
                row = begin // CHUNK + tl.where(chunk == 0, blocks, chunk)
                address = (partials + row.to(tl.int64) * WIDTH)[:, None] + column[None, :]
                mask = (chunk < chunks)[:, None] & inside[None, :]
                total += tl.load(address, mask=mask, other=0.0)
                done += CHUNKS
            gradient = tl.sum(total, 0)[None, :]
            if OPTIMIZER == "squares":
                tl.store(squares + run + tl.arange(0, 1), tl.sum(gradient * gradient, 1))
            else:
                weights, first, second = _read(
                    hbm, dram, state_hbm, state_dram, boundary, place, WIDTH, BLOCK, OPTIMIZER
                )
                _apply(
                    weights, first, second, gradient, run + tl.arange(0, 1),
                    hbm, dram, state_hbm, state_dram, boundary, place,
                    mean_squares, rate, updates, eps, gain1, gain2,
                    WIDTH, BLOCK, OPTIMIZER, STOCHASTIC,
                )  # fmt: skip
            run = tl.min(tl.where(found > run, found, _NO_RUN), 0)
        seen += SCAN
