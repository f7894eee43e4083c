"""Save and load whole models with placed tables, or only the placed tables."""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from placer.adapters.pytorch.applied import EPS, LR, AppliedPlan
from placer.adapters.pytorch.stand_in import StandIn
from placer.errors import CheckpointError, check_kinds
from placer.executor.embeddings import Embeddings
from placer.files.atomic import StrPath
from placer.storage.checkpoint.dcp_reader import read_tensors
from placer.storage.checkpoint.dcp_writer import save_folder
from placer.storage.checkpoint.table_blocks import Name, SavedTables
from placer.storage.tensor_rows import AnyTensor

MODEL, STATE = "model", "table_optimizer"
"""Groups of a saved model: its state dict, and the optimizer state of its tables."""
TABLES = "tables"
"""First part of the tensors' names in a folder of `save_tables`."""


def save_model(
    folder: StrPath, model: nn.Module, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Save a model with placed tables in the format of `torch.distributed.checkpoint`.

    Tables are saved as in the unplaced model, for any plan; docs/distributed.md has the names, and
    how plain PyTorch loads them. All ranks must call this with the same model and see the folder,
    which must not exist yet and appears when it is complete. Each rank writes its part, a block of
    rows at a time; none needs a whole table in memory.

    `model` is or contains `PlacedEmbeddings` or `ShardedEmbeddings`, or `placer.apply_plan` was
    applied to it. `tensors` has other tensors to save, under other names, such as the state of the
    dense layers' optimizer.

    Raises CheckpointError on all ranks if the folder exists or cannot be written, or if the model
    has no placed table, or a state that is no plain tensor. Raises BackendError if a rank is lost.
    The folder is then absent or complete.

    >>> import tempfile
    >>> from placer import Plan, Shard, Table, Topology
    >>> from placer.executor import PlacedEmbeddings
    >>> shard = Shard("t", (0, 6, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("t", 6, 2),), Topology.parse("1xh100"), (shard,))
    >>> model, other = (PlacedEmbeddings(plan, seed=seed, backend="torch") for seed in (0, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(f"{folder}/model", model, {"epoch": torch.tensor(3)})
    ...     load_model(f"{folder}/model", other)
    {'epoch': tensor(3)}
    >>> torch.equal(other.state_dict()["t.weight"], model.state_dict()["t.weight"])
    True
    """
    check_kinds(folder=(folder, str | PathLike), tensors=(tensors, Mapping | None))
    tables, dense = _parts_of(model)
    kept: dict[Name, AnyTensor] = {(MODEL, key): tensor.detach() for key, tensor in dense.items()}
    for key, tensor in (tensors or {}).items():
        if key.split(".")[0] in (MODEL, STATE):
            raise CheckpointError(f"the name {key!r} is one of the model's own; use another")
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{key!r} is a {type(tensor).__name__}, and a folder has tensors alone: give each "
                "tensor in it a name of its own, or save it by torch.save beside the folder"
            )
        kept[(key,)] = tensor
    save_folder(folder, tables.named, kept | tables.kept(), if_there="save to another folder")
    for module in model.modules():
        if isinstance(module, StandIn):
            module.table.saves.all_saved()


def load_model(
    folder: StrPath, model: nn.Module, *, optimizer_state: bool = True
) -> dict[str, Tensor]:
    """Load a folder of `save_model` into a model under any plan, with any number of ranks.

    It also loads a model of ``torch.distributed.checkpoint.save({"model": plain_model})``; pass
    ``optimizer_state=False`` then, which leaves the tables' optimizer state unchanged. Each rank
    reads its own rows. Ranks need not load at the same time, but all must load before one trains.
    Returns the other tensors that were saved.

    Raises CheckpointError if the folder is damaged, or tensors of the model are missing or have
    another shape or type. Names, shapes and types are checked before anything is changed.
    """
    check_kinds(folder=(folder, str | PathLike), model=(model, nn.Module))
    stored, (tables, parameters) = read_tensors(Path(folder)), _parts_of(model, optimizer_state)
    groups = (MODEL, STATE) if optimizer_state else (MODEL,)
    dense = {f"{MODEL}.{key}": tensor for key, tensor in parameters.items()}
    known = {key: rows for key, rows in stored.items() if key.split(".")[0] in groups}
    tables.load(f"{folder} does not fit the model", known, tensors=dense)
    with torch.no_grad():
        for key, tensor in dense.items():
            tensor.copy_(stored[key].whole())
    for module in model.modules():
        if isinstance(module, StandIn):
            module.table.weight_changes()
            module.table.saves.all_saved()
    others = sorted(key for key in stored if key.split(".")[0] not in (MODEL, STATE))
    return {key: stored[key].whole() for key in others}


def save_tables(folder: StrPath, applied: AppliedPlan, *, replace: bool = False) -> None:
    """Save the placed tables of a model, weights and optimizer state, without gathering them.

    The folder is in the format of `torch.distributed.checkpoint`, with names
    ``tables.<table>.weight`` and ``tables.<table>.<state>``. All ranks that share the tables must
    call this and see the folder. Each writes its part, a block of rows at a time. The folder
    appears when it is complete. With `replace`, it then takes the place of an existing folder.

    `applied` comes from `placer.apply_plan`. Call `applied.leave_state_dict()` to keep the weights
    out of the model's state dict, where they would be saved a second time.

    Raises CheckpointError on all ranks if the folder exists without `replace`, or cannot be
    written. Raises BackendError if a rank is lost. The folder is then absent or complete.

    >>> import tempfile
    >>> from torch import nn
    >>> from placer import Plan, Shard, Table, Topology, apply_plan
    >>> whole = Shard("0", (0, 9, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("0", rows=9, dim=2),), Topology.parse("1xh100"), (whole,))
    >>> model = nn.Sequential(nn.EmbeddingBag(9, 2), nn.Linear(2, 1))
    >>> applied = apply_plan(model, plan, lr=0.1, backend="torch")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tables(f"{folder}/tables", applied)
    ...     load_tables(f"{folder}/tables", applied)
    """
    check_kinds(folder=(folder, str | PathLike), applied=(applied, AppliedPlan))
    tables = _tables_of(applied)
    kept: dict[Name, AnyTensor] = {
        (TABLES, name): constant for name, constant in applied.constants().items()
    }
    advice = "" if replace else "save to another folder, or pass replace=True"
    save_folder(folder, tables.named, kept | tables.kept(), if_there=advice)
    for table in applied.tables.values():
        table.saves.all_saved()


def load_tables(folder: StrPath, applied: AppliedPlan) -> None:
    """Load a folder of `save_tables`, under any plan, with any number of ranks.

    Each rank reads its own rows.

    Raises CheckpointError if the folder is missing or damaged, or a tensor of the tables is missing
    or has another shape or type. This is checked before anything is changed.
    """
    check_kinds(folder=(folder, str | PathLike), applied=(applied, AppliedPlan))
    stored = read_tensors(Path(folder))
    numbers = [f"{TABLES}.{name}" for name in applied.constants()]
    what = f"{folder} does not fit the tables"
    _tables_of(applied).load(what, stored, numbers=numbers)
    for name, table in applied.tables.items():
        table.weight_changes()
        table.set_lr(float(stored[f"{TABLES}.{name}.{LR}"].whole()))
        table.set_eps(float(stored[f"{TABLES}.{name}.{EPS}"].whole()))
        table.saves.all_saved()


def _tables_of(applied: AppliedPlan) -> SavedTables:
    tables = SavedTables()
    for name, table in applied.tables.items():
        tables.add(table.embeddings, TABLES, TABLES, prefix=f"{name}.", cut=f"{name}.")
    return tables


def _parts_of(
    model: nn.Module, optimizer_state: bool = True
) -> tuple[SavedTables, dict[str, Tensor]]:
    """Return a model's tables, and its other parameters and buffers by their state dict key."""
    check_kinds(model=(model, nn.Module))
    tables, dense, seen = SavedTables(), dict[str, Tensor](), set[int]()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(module, StandIn):  # Its state dict omits its table's name.
            embeddings, cut = module.table.embeddings, f"{module.table.name}."
        elif isinstance(module, Embeddings):
            embeddings, cut = module, ""
        else:
            dense.update(_own_tensors(module, prefix))
            continue
        # Save the state of tied modules once.
        state = STATE if optimizer_state and id(embeddings) not in seen else None
        tables.add(embeddings, MODEL, state, prefix=prefix, cut=cut)
        seen.add(id(embeddings))
    if not tables.named:
        raise CheckpointError(
            "the model has no placed tables; save it with torch.distributed.checkpoint itself"
        )
    return tables, dense


def _own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module itself adds to a state dict."""
    own: dict[str, object] = {}
    module._save_to_state_dict(own, prefix, keep_vars=True)
    for key, value in own.items():
        if not isinstance(value, Tensor) or hasattr(value, "__get_tensor_shard__"):
            raise CheckpointError(
                f"{key} is a {type(value).__name__}, which is not saved here; save the tables' "
                "module alone, and the rest with torch.distributed.checkpoint"
            )
        yield key, value
