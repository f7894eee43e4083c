"""The networks of the learned cost model: from features of tables to factors of unit costs.

Each member of an ensemble is the sum of two small perceptrons. One takes the free features.
The other takes all features, with weights that are not negative from the monotone features on,
and a tanh between: partially monotone networks (Daniels and Velikova, 2010,
doi:10.1109/TNN.2010.2044803). So factors never fall when a monotone feature rises.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cost_models.learned.features import FREE_FEATURES, MONOTONE_FEATURES

Float = npt.NDArray[np.float64]
Array = npt.NDArray[np.float32]

HIDDEN = 32
"""Units in each hidden layer of the perceptron of free features."""

MONOTONE_HIDDEN = 16
"""Units in the one hidden layer of the monotone perceptron."""

BOUND = float(np.log(4.0))
"""Features alone change a unit cost by at most this factor, up or down, as a logarithm."""


@dataclass(frozen=True, slots=True, eq=False)
class Networks:
    """Parameters of all `m` members, for `k` unit costs; float32.

    Attributes
    ----------
    mean, scale : shape (free + monotone features,)
        Features are centred and divided by these; scales are positive.
    low, high : shape (free + monotone features,)
        Range of the features that the members were trained on.
    level : shape (m, k)
        Logarithm of a factor that is the same for all tables.
    w1, b1, w2, b2, w3
        Layers of the free perceptron: shapes (m, free, h), (m, 1, h), (m, h, h), (m, 1, h),
        (m, h, k).
    u, v, c, w
        The monotone one: (m, free, n) and (m, monotone, n) into its hidden layer, (m, 1, n),
        (m, n, k). `v` and `w` are not negative.
    """

    mean: Array
    scale: Array
    low: Array
    high: Array
    level: Array
    w1: Array
    b1: Array
    w2: Array
    b2: Array
    w3: Array
    u: Array
    v: Array
    c: Array
    w: Array

    @property
    def members(self) -> int:
        """Number of members of the ensemble."""
        return int(self.level.shape[0])

    @property
    def arrays(self) -> dict[str, Array]:
        """All parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def log_factors(self, free: Float, monotone: Float) -> Float:
        """Logarithms of the factors of unit costs, shape (members, tables, k)."""
        x = (np.concatenate((free, monotone), axis=1) - self.mean) / self.scale
        split = free.shape[1]
        known, skew = x[:, :split], x[:, split:]
        hidden = np.maximum(known @ self.w1 + self.b1, 0.0)
        hidden = np.maximum(hidden @ self.w2 + self.b2, 0.0)
        rising = np.tanh(known @ self.u + skew @ self.v + self.c)
        moved = BOUND * np.tanh(hidden @ self.w3 + rising @ self.w)
        factors: Float = self.level[:, None, :] + moved
        return factors

    def novelty(self, free: Float, monotone: Float) -> Float:
        """How far each table is outside the training data, shape (tables,).

        The largest distance of a feature from its range, in standard deviations; 0 inside.
        """
        x = np.concatenate((free, monotone), axis=1)
        beyond = np.maximum(np.maximum(self.low - x, x - self.high), 0.0) / self.scale
        far: Float = beyond.max(axis=1).astype(np.float64)
        return far


def shapes(members: int, units: int) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter."""
    free, monotone = len(FREE_FEATURES), len(MONOTONE_FEATURES)
    h, n, every = HIDDEN, MONOTONE_HIDDEN, (free + monotone,)
    return {
        "mean": every,
        "scale": every,
        "low": every,
        "high": every,
        "level": (members, units),
        "w1": (members, free, h),
        "b1": (members, 1, h),
        "w2": (members, h, h),
        "b2": (members, 1, h),
        "w3": (members, h, units),
        "u": (members, free, n),
        "v": (members, monotone, n),
        "c": (members, 1, n),
        "w": (members, n, units),
    }


NOT_NEGATIVE = ("v", "w")
"""Parameters without negative values, which make the factors monotone."""

TRAINED = ("level", "w1", "b1", "w2", "b2", "w3", "u", "v", "c", "w")
"""Parameters that training moves, by member."""
