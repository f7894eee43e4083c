"""AUC and log loss of predicted clicks."""

import numpy as np
import numpy.typing as npt

from placer.errors import DataError


def auc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
    """Area under the ROC curve: P(score of a click > score of a non-click), ties counting ½.

    Exact, from the ranks of the scores (the Mann–Whitney statistic, Hanley & McNeil 1982,
    doi:10.1148/radiology.143.1.7063747), not from thresholds. Labels are 1 for a click; where they
    are all alike there is none. Raises DataError if a score is not a number: it has no rank.
    """
    values = np.asarray(scores)
    clicked = np.asarray(labels) > 0.5
    if np.isnan(values).any():
        raise DataError(
            f"{int(np.isnan(values).sum())} of {values.size} scores are not numbers; "
            "the training has diverged, lower the learning rate"
        )
    clicks = int(clicked.sum())
    others = clicked.size - clicks
    if not clicks or not others:
        return None
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    # Half ranks are exact in float64; the mean rank of a group of ties is the middle of it.
    mean_ranks = np.cumsum(sizes) - (sizes - 1) / 2
    wins = mean_ranks[group[clicked]].sum() - clicks * (clicks + 1) / 2
    return float(wins / (clicks * others))


def log_loss(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
    """Mean binary cross-entropy in nats of logits, None without samples."""
    z = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels, dtype=np.float64)
    if not z.size:
        return None
    # log(1 + e^z) − y z, without overflow for large |z|.
    return float(np.mean(np.maximum(z, 0) - z * y + np.log1p(np.exp(-np.abs(z)))))


class HeldOut:
    """Collects logits and labels batch by batch, 5 bytes a sample, for the exact figures."""

    def __init__(self) -> None:
        self._logits: list[npt.NDArray[np.float32]] = []
        self._labels: list[npt.NDArray[np.bool_]] = []

    def add(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Add the samples of a batch; shapes (samples,)."""
        self._logits.append(logits)
        self._labels.append(labels > 0.5)

    @property
    def samples(self) -> int:
        """Samples collected so far."""
        return sum(batch.size for batch in self._labels)

    def auc(self) -> float | None:
        """See `auc`; None as well where nothing was collected."""
        return auc(*self._joined())

    def log_loss(self) -> float | None:
        """See `log_loss`."""
        return log_loss(*self._joined())

    def _joined(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        if not self._logits:
            return np.empty(0, np.float32), np.empty(0, bool)
        return np.concatenate(self._logits), np.concatenate(self._labels)
