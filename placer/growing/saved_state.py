"""Check the saved state of key maps before kernels use it, and convert its sketches."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from placer.growing.options import MOST_OPEN_STEPS, SKETCH_CELLS, SKETCH_ROWS, Growing, Int

Bytes = npt.NDArray[np.uint8]


def sketch_of(saved: Bytes, was: Growing, maps: int, how: Growing, part: int, parts: int) -> Bytes:
    """Return the sketch of a part of the keys, from the saved sketches of all maps.

    If the number of blocks or parts differs, a new block takes the maximum over all old blocks that
    its keys were in. So counts may become too high, never too low.
    """
    held = [was.sketch_blocks(one, maps) for one in range(maps)]
    ends = np.append(0, np.cumsum([len(one) for one in held]))
    earlier, blocks = len(was.sketch_blocks()), len(how.sketch_blocks())
    if (earlier, maps) == (blocks, parts):
        return saved[ends[part] : ends[part + 1]].copy()
    merged = np.zeros((earlier + 1, *saved.shape[1:]), np.uint8)
    for own, (start, stop) in zip(held, pairwise(ends), strict=True):
        into = merged[own.start : own.stop]
        np.maximum(into, saved[start:stop], out=into)
    numbers = np.array(how.sketch_blocks(part, parts), np.int64)
    spans = numbers * earlier // blocks, -(-(numbers + 1) * earlier // blocks)
    most: Bytes = np.maximum.reduceat(merged, np.column_stack(spans).ravel())[::2]
    return np.ascontiguousarray(most)


def fits(rows: Int, counts: Int, sketch: Int, growing: Growing, kernels: Any) -> bool:
    """Return whether a saved state is valid for a table; `rows` are rows that had a key."""
    if counts.ndim != 2 or not len(counts):
        return False
    if counts.shape[1] != kernels.PLACES + 1 + MOST_OPEN_STEPS:
        return False
    used, parts = counts[:, kernels.USED], len(counts)
    sizes = np.array([len(growing.sketch_blocks(part, parts)) for part in range(parts)])
    if used.min() < 0 or used.max() > growing.capacity or rows.shape != (used.sum(), 3):
        return False
    freed = rows[:, :2].copy().view(kernels.RECORD)[:, 0]["step"] < 0
    links = np.append(rows[freed, 0], counts[:, kernels.FREE])
    most = np.append(used.repeat(used)[freed], used)
    numbers = np.append(0, np.sort(rows[:, 2]))
    return bool(
        sketch.shape == (sizes.sum(), SKETCH_ROWS * SKETCH_CELLS // 8)
        and counts[:, kernels.PLACES].max() <= MOST_OPEN_STEPS
        and (counts[:, kernels.SKETCH] <= sizes * SKETCH_CELLS).all()
        and counts[:, [kernels.HAND, kernels.SWEEP, kernels.SKETCH, kernels.PLACES]].min() >= 0
        and ((links >= 0) & (links <= most)).all()
        and (np.diff(numbers) > 0).all()
        and numbers[-1] <= growing.capacity
    )
