"""What the saved state of key maps is, and what it must be before kernels follow its numbers."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from placer.growing.options import SKETCH_CELLS, SKETCH_ROWS, Growing, Int

Bytes = npt.NDArray[np.uint8]


def sketch_blocks(blocks: int, part: int, parts: int) -> range:
    """Return which of all blocks of a sketch a part of the keys is counted in.

    Neighbours may both have a block, each for its own keys.

    >>> [list(sketch_blocks(4, part, 3)) for part in range(3)]
    [[0, 1], [1, 2], [2, 3]]
    """
    return range(part * blocks // parts, -(-(part + 1) * blocks // parts))


def sketch_of(
    saved: Bytes, saved_blocks: int, saved_parts: int, blocks: int, part: int, parts: int
) -> Bytes:
    """Return the sketch of a part of the keys, from those of all parts that there were.

    Where blocks or parts are others, a block has the most that any has which its keys were in:
    counts may become too many, never too few.
    """
    held = [sketch_blocks(saved_blocks, one, saved_parts) for one in range(saved_parts)]
    ends = np.append(0, np.cumsum([len(one) for one in held]))
    if (saved_blocks, saved_parts) == (blocks, parts):
        return saved[ends[part] : ends[part + 1]].copy()
    merged = np.zeros((saved_blocks + 1, *saved.shape[1:]), np.uint8)
    for blocks_of_part, (start, stop) in zip(held, pairwise(ends), strict=True):
        into = merged[blocks_of_part.start : blocks_of_part.stop]
        np.maximum(into, saved[start:stop], out=into)
    own = sketch_blocks(blocks, part, parts)
    numbers = np.arange(own.start, own.stop)
    spans = numbers * saved_blocks // blocks, -(-(numbers + 1) * saved_blocks // blocks)
    most: Bytes = np.maximum.reduceat(merged, np.column_stack(spans).ravel())[::2]
    return np.ascontiguousarray(most)


def lookups_before(keys: Int, rows: Int) -> Int:
    """Return the row of each lookup that came before its key got that row, in the same step.

    >>> lookups_before(np.array([7, 5, 7, 7, 9]), np.array([0, 2, 0, 1, 0]))
    array([1, 1])
    """
    known, first = np.unique(keys[rows > 0], return_index=True)
    before = keys[rows == 0]
    before = before[np.isin(before, known)]
    found: Int = rows[rows > 0][first[np.searchsorted(known, before)]]
    return found


def fits(rows: Int, counts: Int, sketch: Int, growing: Growing, kernels: Any) -> bool:
    """Return whether a state is one of a table that grows so.

    Parameters
    ----------
    rows, counts, sketch
        As `KeyMap.state` has them, without rows that had no key yet.
    growing : Growing
    kernels : module
        `placer.growing.kernels`.
    """
    if counts.ndim != 2 or counts.shape[1] != kernels.PLACES + 1 or not len(counts):
        return False
    used, parts = counts[:, kernels.USED], len(counts)
    blocks = growing.sketch_blocks
    sizes = np.array([len(sketch_blocks(blocks, part, parts)) for part in range(parts)])
    if used.min() < 0 or used.max() > growing.capacity or rows.shape != (used.sum(), 3):
        return False
    freed = rows[:, :2].copy().view(kernels.RECORD)[:, 0]["step"] < 0
    links = np.append(rows[freed, 0], counts[:, kernels.FREE])
    most = np.append(used.repeat(used)[freed], used)
    numbers = np.append(0, np.sort(rows[:, 2]))
    return bool(
        sketch.shape == (sizes.sum(), SKETCH_ROWS * SKETCH_CELLS // 8)
        and (counts[:, kernels.SKETCH] <= sizes * SKETCH_CELLS).all()
        and counts[:, [kernels.HAND, kernels.SWEEP, kernels.SKETCH, kernels.PLACES]].min() >= 0
        and ((links >= 0) & (links <= most)).all()
        and (np.diff(numbers) > 0).all()
        and numbers[-1] <= growing.capacity
    )
