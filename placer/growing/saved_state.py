"""What the saved state of key maps must be before kernels follow its numbers unchecked."""

from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]


def fits(
    rows: Int, counts: Int, sketch: Int, capacity: int, sketch_shape: tuple[int, int], kernels: Any
) -> bool:
    """Return whether a state is one of a table with this capacity.

    Parameters
    ----------
    rows, counts, sketch
        As `KeyMap.state` has them, without rows that had no key yet.
    capacity : int
    sketch_shape : (rows, width)
        Of each map's sketch.
    kernels : module
        `placer.growing.kernels`.
    """
    if counts.ndim != 2 or counts.shape[1] != kernels.PLACES or not len(counts):
        return False
    used, (sketch_rows, width) = counts[:, kernels.USED], sketch_shape
    if used.min() < 0 or used.max() > capacity or rows.shape != (used.sum(), 3):
        return False
    freed = rows[:, :2].copy().view(kernels.RECORD)[:, 0]["step"] < 0
    links = np.append(rows[freed, 0], counts[:, kernels.FREE])
    most = np.append(used.repeat(used)[freed], used)
    numbers = np.append(0, np.sort(rows[:, 2]))
    return bool(
        sketch.shape == (len(counts), -(-sketch_rows * width // 8))
        and ((counts[:, kernels.SKETCH] >= 0) & (counts[:, kernels.SKETCH] < width)).all()
        and counts[:, [kernels.HAND, kernels.SWEEP]].min() >= 0
        and ((links >= 0) & (links <= most)).all()
        and (np.diff(numbers) > 0).all()
        and numbers[-1] <= capacity
    )
