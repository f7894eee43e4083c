"""Tables for inference: loaded by a plan, read, and never changed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from placer.executor import BagBatch, HitRates, PlacedEmbeddings
from placer.plan.plan import Plan
from placer.plan.verify import refuse_growing
from placer.storage.checkpoint.applied_tables import GROUP
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.checkpoint.table_blocks import NamedTables, load_stored
from placer.storage.run_state import WEIGHTS
from placer.storage.shards.shard_folder import MANIFEST, open_shards
from placer.storage.shards.shard_rows import checkpoint_of_shards
from placer.storage.tensor_rows import AnyTensor, TensorRows


class ReadOnlyTables(nn.Module):
    """Tables that answer lookups; they have no parameters, no gradients and no optimizer.

    Made by `load_read_only`. Rows move between the host's memory and the cache in HBM, as the plan
    says.

    Parameters
    ----------
    embeddings : PlacedEmbeddings
    """

    def __init__(self, embeddings: PlacedEmbeddings) -> None:
        super().__init__()
        self._embeddings = (embeddings,)  # In a tuple, so that no state dict gathers them.

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Features in the order that batches must follow."""
        return self._embeddings[0].feature_names

    @torch.no_grad()
    def forward(self, batch: BagBatch) -> dict[str, Tensor]:
        """Pooled rows by feature; see `PlacedEmbeddings`.

        Raises
        ------
        DataError
            If an id is no row of its table, or the batch is of other features.
        """
        pooled: dict[str, Tensor] = self._embeddings[0](batch)
        return pooled

    def hit_rates(self) -> HitRates | None:
        """How many lookups were served from HBM; None for backends without tiers."""
        return self._embeddings[0].hit_rates()


def load_read_only(plan: Plan, folder: str | os.PathLike[str], **options: Any) -> ReadOnlyTables:
    """Tables that are laid out by a plan, with the weights of a folder and no optimizer state.

    The folder is only read, rows at a time.

    Parameters
    ----------
    plan : Plan
        As `placer.plan.serving.serving_plan` makes it, or any other of one process.
    folder : path
        What `placer.storage.checkpoint.save_tables` wrote, or `placer export --to shards`; under
        any plan of these tables.
    **options
        ``device``, ``backend`` and ``cache_policy`` of `PlacedEmbeddings`.

    Raises
    ------
    CheckpointError
        If the folder is missing or damaged, or has not the plan's tables.

    Examples
    --------
    >>> import tempfile
    >>> from placer import Feature, Shard, Table, Topology, apply_plan
    >>> from placer.storage.checkpoint import save_tables
    >>> whole = Shard("0", (0, 9, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> table = Table("0", rows=9, dim=2, features=(Feature("0"),))
    >>> plan = Plan((table,), Topology.parse("1xh100"), (whole,))
    >>> model = nn.Sequential(nn.EmbeddingBag(9, 2, mode="sum"), nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tables(f"{folder}/tables", apply_plan(model, plan, backend="torch"))
    ...     tables = load_read_only(plan, f"{folder}/tables", backend="torch")
    >>> bags = {"0": (torch.tensor([3, 7]), torch.tensor([0, 2]), None)}
    >>> pooled = tables(BagBatch.from_features(bags, tables.feature_names))["0"]
    >>> torch.equal(pooled, model[0](torch.tensor([[3, 7]])))
    True
    """
    refuse_growing(plan, "a table that is only read")
    embeddings = PlacedEmbeddings(plan, optimizer="sgd", lr=0.0, **options)
    order = embeddings.id_order()
    named = NamedTables(order, {(GROUP, f"{t.table.name}.{t.name}"): t for t in order.tensors()})
    stored: Mapping[str, AnyTensor]
    if (Path(folder) / MANIFEST).exists():
        held = checkpoint_of_shards(open_shards(folder)).tensors[WEIGHTS]
        stored = {f"{GROUP}.{name}": rows for name, rows in held.items()}
    else:
        stored = read_tensors(Path(folder))
    known = {".".join(name) for name in named.tensors} & stored.keys()
    weights = {name: TensorRows.of(stored[name]) for name in known}
    load_stored(f"{folder} does not fit the plan", [named], weights)
    return ReadOnlyTables(embeddings)
