"""Load tables for inference by a plan, look them up, and update them by increments."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from placer.errors import CheckpointError, PlanMismatchError
from placer.executor import BagBatch, HitRates, PlacedEmbeddings
from placer.executor.id_order import TableTensor
from placer.executor.tensor_names import check_shapes
from placer.files.atomic import StrPath
from placer.growing import KeyMap
from placer.plan.plan import Plan
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.checkpoint.models import TABLES
from placer.storage.checkpoint.table_blocks import NamedTables, SavedTables
from placer.storage.manifest import MANIFEST
from placer.storage.tensor_rows import AnyTensor, TensorRows, chunk_rows, open_safetensors


class ReadOnlyTables(nn.Module):
    """Tables for lookups only, without parameters, gradients or an optimizer.

    `load_read_only` makes them. Rows move between the host's memory and the cache in HBM, as the
    plan says. `origin` has the ``checkpoint`` and ``step`` of the tables. The first increment must
    begin there.
    """

    def __init__(self, embeddings: PlacedEmbeddings, origin: Mapping[str, str]) -> None:
        super().__init__()
        self._embeddings = (embeddings,)  # In a tuple, so no state dict includes them.
        self._origin = origin

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of features, in the order that batches must have."""
        return self._embeddings[0].feature_names

    @torch.no_grad()
    def forward(self, batch: BagBatch) -> dict[str, Tensor]:
        """Return pooled rows by feature; see `PlacedEmbeddings`.

        Raises DataError if an id is no row of its table, or the batch has other features.
        """
        pooled: dict[str, Tensor] = self._embeddings[0](batch)
        return pooled

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ReadOnlyTables":
        self._embeddings[0]._apply(fn, recurse)  # Refuses another type or device.
        return self

    def hit_rates(self) -> HitRates | None:
        """Return how many lookups were served from HBM; None for backends without tiers."""
        return self._embeddings[0].hit_rates()

    def apply_increment(self, path: StrPath) -> None:
        """Apply a file of `placer export --since`: change its rows and keys.

        Call this between requests. Afterwards, tables equal those loaded from a whole export of the
        increment's checkpoint, bit by bit.

        Raises CheckpointError if the file is missing, damaged, of other tables or no increment, or
        does not begin at the tables' checkpoint. Nothing is changed then.
        """
        tensors, says = open_safetensors(Path(path))
        self._check_begin(path, says)
        plan, keys = self._embeddings[0].plan, self._embeddings[0].keys
        order = self._embeddings[0].id_order()
        rows = _checked_rows(path, list(order.weights()), plan, tensors)
        moved = {}
        for table in plan.growing:
            named = rows[table] > 0
            gone = tensors[f"{table}.deleted"].whole()
            with_row = tensors[f"{table}.keys"].whole()[named]
            numbers = torch.cat([rows[table][named], torch.zeros_like(gone)])
            moved[table] = torch.cat([with_row, gone]).numpy(), numbers.numpy()
            keys.maps[table].check(*moved[table])
        self._origin = {}  # Unknown until all rows are written.
        order.synchronize()
        for table, changes in moved.items():
            keys.maps[table].assign(*changes)
        for weight in order.weights():
            changed, ids = tensors[f"{weight.table.name}.weight"], rows[weight.table.name]
            for start, values in changed.blocks(chunk_rows(changed.row_bytes)):
                order.write_rows(weight.table, "weight", ids[start : start + len(values)], values)
        self._origin = says

    def _check_begin(self, path: StrPath, says: Mapping[str, str]) -> None:
        if not {"checkpoint", "step", "since_checkpoint", "since_step"} <= says.keys():
            raise CheckpointError(f"{path} is no increment; `placer export --since` writes them")
        if not {"checkpoint", "step"} <= self._origin.keys():
            raise CheckpointError(
                f"{path} follows an export, and the tables were not loaded from one: load them "
                "from the file of `placer export --to safetensors`"
            )
        if says["since_checkpoint"] != self._origin["checkpoint"]:
            raise CheckpointError(
                f"{path} leads from the checkpoint of step {says['since_step']} to that of step "
                f"{says['step']}, and the tables are of another one, of step "
                f"{self._origin['step']}: apply increments one after the other, as they were "
                "written, or load a whole export"
            )


def _checked_rows(
    path: StrPath, weights: Sequence[TableTensor], plan: Plan, tensors: Mapping[str, TensorRows]
) -> dict[str, Tensor]:
    """Check an increment's tensors, and return the rows that it changes, by table."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}

    def expect(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> None:
        shapes[name], dtypes[name] = shape, dtype

    for weight in weights:
        name = weight.table.name
        count, deleted = (
            tensors[each].rows if each in tensors else 0
            for each in (f"{name}.rows", f"{name}.deleted")
        )
        expect(f"{name}.rows", count)
        expect(f"{name}.weight", count, *weight.shape[1:], dtype=weight.dtype)
        if name in plan.growing:
            expect(f"{name}.keys", count)
            expect(f"{name}.deleted", deleted)
    check_shapes(f"{path} does not fit the tables", tensors, shapes, dtypes)
    rows = {weight.table.name: tensors[f"{weight.table.name}.rows"].whole() for weight in weights}
    for weight in weights:
        own = rows[weight.table.name]
        if own.numel() and (
            own[0] < 0 or own[-1] >= weight.table.rows or not (own.diff() > 0).all()
        ):
            raise CheckpointError(
                f"{path} is damaged: rows of table {weight.table.name!r} do not ascend, or it has "
                f"only {weight.table.rows:,}"
            )
    return rows


def _check_folder(folder: Path, plan: Plan) -> None:
    """Raise unless a folder may be of `save_tables`; say what to give instead."""
    if not folder.exists():
        raise CheckpointError(f"there is no {folder}")
    give = "give the file of `placer export --to safetensors`"
    if (folder / MANIFEST).exists() or any(folder.glob(f"step-*/{MANIFEST}")):
        raise CheckpointError(f"{folder} has checkpoints of `placer train`: {give} of one of them")
    for name in plan.growing:
        raise PlanMismatchError(
            f"table {name!r} grows: its rows mean nothing without its key map, which a folder of "
            f"tables does not have; {give}"
        )


def load_read_only(plan: Plan, folder: StrPath, **options: Any) -> ReadOnlyTables:
    """Load a folder's weights, without optimizer state, into tables placed by a plan.

    `folder` comes from `placer.storage.checkpoint.save_tables`, under any plan of these tables. Or
    it is a file of `placer export --to safetensors`: tables that grow need such a file, and so does
    `ReadOnlyTables.apply_increment`. It is read a number of rows at a time. Make `plan` with
    `placer.plan.serving.serving_plan`, or use any plan of one process.
    Options are ``device``, ``backend``, ``cache_policy`` and ``padding_idx`` of `PlacedEmbeddings`;
    features need their ``padding_idx`` here if their modules had one, as plans do not say it.

    Raises CheckpointError if the folder is missing or damaged, or lacks tables of the plan.

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
    stored: Mapping[str, AnyTensor]
    origin: Mapping[str, str] = {}
    path = Path(folder)
    if path.is_file():
        held, origin = open_safetensors(path)
        stored = {f"{TABLES}.{name}": rows for name, rows in held.items()}
    else:
        _check_folder(path, plan)
        stored = read_tensors(path)
    embeddings = PlacedEmbeddings(plan, optimizer="sgd", lr=0.0, seed=None, **options)
    order = embeddings.id_order()
    named = NamedTables(order, {(TABLES, f"{t.table.name}.{t.name}"): t for t in order.tensors()})
    for table, how in plan.growing.items():
        keys, rows = (held.get(f"{table}.{name}") for name in ("keys", "rows"))
        if keys is None or rows is None:
            raise CheckpointError(f"{folder} lacks the keys of table {table!r}, which grows")
        embeddings.keys.maps[table] = KeyMap.of(how, keys.whole().numpy(), rows.whole().numpy())
    known = {".".join(name) for name in named.tensors} & stored.keys()
    weights = {name: TensorRows.of(stored[name]) for name in known}
    SavedTables([named]).load(f"{folder} does not fit the plan", weights)
    return ReadOnlyTables(embeddings, origin)
