"""Describe what a training run saves in a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from placer.growing.options import Growing
from placer.tables import Table

if TYPE_CHECKING:
    from placer.storage.tensor_rows import AnyTensor

WEIGHTS, STATES, KEYS = "embeddings", "embedding_optimizer", "key_maps"
"""Groups of tensors in a checkpoint: ``<table>.weight``, ``<table>.<name of the state>``, and the
key maps of tables that grow."""


def table_settings(tables: Iterable[Table]) -> dict[str, Any]:
    """Return the part of a run's settings that describes its tables."""
    return {
        table.name: {
            "rows": table.rows,
            "dim": table.dim,
            "dtype": table.dtype,
            "optimizer": table.optimizer,
            "features": [[feature.name, feature.pooling] for feature in table.features],
        }
        for table in tables
    }


def growing_settings(growing: Mapping[str, Growing]) -> dict[str, Any]:
    """Return a run's settings of tables that grow, which a resumed run must keep."""
    return {
        name: {"capacity": how.capacity, "admission": how.admission}
        for name, how in growing.items()
    }


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has trained."""

    step: int = 0  # Steps taken.
    epoch: int = 0  # Complete passes over the log.
    samples: int = 0  # Samples read in the current pass, held-out ones included.


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything that a run needs to continue."""

    position: Position
    # Settings that a resumed run must keep, by name: the model's shape, the batch size, …
    settings: Mapping[str, Any]
    # Tensors by group and name, in memory or to be read in rows. To save, only tensors that are
    # equal in all processes; when read, also those of tables. Names of groups have no dot.
    tensors: Mapping[str, Mapping[str, "AnyTensor"]]
    # What identifies the log; empty if unknown.
    data: Mapping[str, Any] = field(default_factory=dict)
    # Hash that identifies the checkpoint's files; empty if it was not read from files.
    sha256: str = ""
