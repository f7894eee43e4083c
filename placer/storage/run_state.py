"""What a training run saves in a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from placer.growing.key_map import Growing
from placer.tables import Table

if TYPE_CHECKING:
    from placer.storage.tensor_rows import AnyTensor

WEIGHTS, STATES, KEYS = "embeddings", "embedding_optimizer", "key_maps"
"""Groups of a checkpoint: ``<table>.weight``, ``<table>.<name of the state>``, and the key maps of
tables that grow."""


def table_settings(tables: Iterable[Table]) -> dict[str, Any]:
    """What a run's settings say of its tables."""
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
    """What a run's settings say of tables that grow: what a key map cannot change."""
    return {
        name: {"capacity": how.capacity, "admission": how.admission}
        for name, how in growing.items()
    }


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come.

    Attributes
    ----------
    step : int
        Steps taken.
    epoch : int
        Passes over the log that are complete.
    samples : int
        Samples of the log read in the current pass, held-out ones included.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All that a run needs to go on.

    Attributes
    ----------
    position : Position
    settings : mapping of str to JSON value
        What must be the same when the run goes on, by name: the model's shape, the batch, …
    tensors : mapping of group to mapping of name to tensor
        In memory, or to be read in rows. When saved, those that all processes have alike; when
        read, those of the tables too. Groups have no dot in their name.
    data : mapping of str to JSON value
        What the log is known by; empty where nothing is known.
    sha256 : str
        What files of this checkpoint are known by; empty where it was not read from files.
    """

    position: Position
    settings: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, "AnyTensor"]]
    data: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""
