# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator, index"
"""Triton kernels that find the rows of keys, and note the rows that a step reads.

Slots, tags and hashes are those of `placer.growing.kernels`. A segment has a batch's keys of one
growing table: its first lookup, the table's number, the number of lookups, the table's first slot
and number of slots, its first row, and the bit mask of the row in a slot.
"""

import triton
import triton.language as tl


@triton.jit
def _note(chosen, position, key, row, noted, room):
    """Append lookups to `noted`, in any order: their number, places, keys and rows.

    If there is no room left, lookups are only counted.
    """
    taken = tl.sum(chosen.to(tl.int64), 0)
    start = tl.atomic_add(noted, taken, mask=taken > 0)
    at = start + tl.cumsum(chosen.to(tl.int64), 0)
    chosen = chosen & (at <= room)
    tl.store(noted + at, position, mask=chosen)
    tl.store(noted + room + at, key, mask=chosen)
    tl.store(noted + 2 * room + at, row, mask=chosen)


@triton.jit
def find(table, ids, slots, keys, out, digests, noted, room, BLOCK: tl.constexpr):
    """Write the row of each key, or 0; note the lookups without a row; and add to the digests."""
    segment = table + tl.program_id(1).to(tl.int64) * 8
    first = tl.load(segment)
    lookups = tl.load(segment + 2)
    slot_start = tl.load(segment + 3)
    size = tl.load(segment + 4)
    row_start = tl.load(segment + 5)
    mask = tl.load(segment + 6)
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < lookups
    key = tl.load(ids + first + position, mask=inside, other=0).to(tl.int64)
    bits = key.to(tl.uint64)
    bits = (bits ^ (bits >> 33)) * 0xFF51AFD7ED558CCD
    bits = (bits ^ (bits >> 33)) * 0xC4CEB9FE1A85EC53
    bits = bits ^ (bits >> 33)
    digest = tl.sum(tl.where(inside, (bits | 1).to(tl.int64), 0), 0)
    tl.atomic_add(digests + tl.load(segment + 1), digest)
    bits >>= 32
    at = ((bits * size.to(tl.uint64)) >> 32).to(tl.int64)
    tag = (bits * (mask + 1).to(tl.uint64)).to(tl.int64) & 0xFFFFFFFF
    row = position * 0
    slot = tl.load(slots + slot_start + at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    searching = inside & (slot != 0)
    while tl.max(searching.to(tl.int32), 0) > 0:
        same = searching & (slot - (slot & mask) == tag)
        held = tl.load(keys + row_start + (slot & mask), mask=same, other=0)
        found = same & (held == key)
        row = tl.where(found, slot & mask, row)
        at = tl.where(at + 1 == size, 0, at + 1)
        searching = searching & (found == 0)
        slot = tl.load(slots + slot_start + at, mask=searching, other=0).to(tl.int64) & 0xFFFFFFFF
        searching = searching & (slot != 0)
    tl.store(out + first + position, row, mask=inside)
    _note(inside & (row == 0), first + position, key, row, noted, room)


@triton.jit
def readers(table, ids, chosen, rows, noted, room, BLOCK: tl.constexpr):
    """Note the lookups of the chosen rows."""
    segment = table + tl.program_id(1).to(tl.int64) * 8
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tl.load(segment + 2)
    position += tl.load(segment)
    row = tl.load(rows + position, mask=inside, other=0)
    reads = tl.load(chosen + tl.load(segment + 5) + row, mask=inside & (row != 0), other=0) != 0
    key = tl.load(ids + position, mask=reads, other=0).to(tl.int64)
    _note(reads, position, key, row, noted, room)


@triton.jit
def note_reads(table, rows, steps, last, reads, BLOCK: tl.constexpr):
    """Set the last step of rows that are read, and increase their counts of steps, up to 255."""
    segment = table + tl.program_id(1).to(tl.int64) * 8
    lookups = tl.load(segment + 2)
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(steps + tl.load(segment + 1))
    row = tl.load(rows + tl.load(segment) + position, mask=position < lookups, other=0)
    at = tl.load(segment + 5) + row
    new = (row != 0) & (tl.load(last + at, mask=row != 0, other=0) != step)
    before = tl.atomic_xchg(last + at, step + row.to(tl.int32) * 0, mask=new)
    new = new & (before != step)  # Only one lookup of a row sees an older step.
    count = tl.load(reads + at, mask=new, other=0).to(tl.int32) + 1
    tl.store(reads + at, tl.minimum(count, 255).to(tl.uint8), mask=new)
