"""What a training run saves in a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from placer.growing.options import Growing
from placer.tables import Table

if TYPE_CHECKING:
    from placer.storage.tensor_rows import AnyTensor

WEIGHTS, STATES, KEYS = "embeddings", "embedding_optimizer", "key_maps"
"""Groups of a checkpoint: ``<table>.weight``, ``<table>.<name of the state>``, and the key maps of
tables that grow."""


def table_settings(tables: Iterable[Table]) -> dict[str, Any]:
    """Return what a run's settings say of its tables."""
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
    """Return what a run's settings say of tables that grow: what a key map cannot change."""
    return {
        name: {"capacity": how.capacity, "admission": how.admission}
        for name, how in growing.items()
    }


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come."""

    step: int = 0  # Steps taken.
    epoch: int = 0  # Passes over the log that are complete.
    samples: int = 0  # Samples of the log read in the current pass, held-out ones included.


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a run needs to go on."""

    position: Position
    # What must be the same when the run goes on, by name: the model's shape, the batch, …
    settings: Mapping[str, Any]
    # In memory, or to be read in rows. When saved, those that all processes have alike; when read,
    # those of the tables too. Groups have no dot in their name.
    tensors: Mapping[str, Mapping[str, "AnyTensor"]]
    # What the log is known by; empty where nothing is known.
    data: Mapping[str, Any] = field(default_factory=dict)
    # What files of this checkpoint are known by; empty where it was not read from files.
    sha256: str = ""
