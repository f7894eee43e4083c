"""Find the embedding tables of a PyTorch model, match them with a plan, and draw weights."""

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placer.errors import PlanMismatchError
from placer.executor.id_order import IdOrder, blocks_of
from placer.executor.memory.arena import TORCH_DTYPES
from placer.tables import DType, Pooling, Table
from placer.units import listed

EmbeddingModule = nn.Embedding | nn.EmbeddingBag
_SHOWN = 20
"""Most modules that a message names."""
_PROBE_ROWS, _SPARE_ROWS = 16, 16
"""Number of rows in a trial draw, and of spare rows after each block; padding is the last of these.
Both keep sizes multiples of 16: only then are normal numbers the same for any number of draws."""
_POOLINGS: dict[str, Pooling] = {"sum": "sum", "mean": "mean", "max": "max"}


@dataclass(frozen=True, slots=True, eq=False)
class ModelTable:
    """One weight of a model and the modules that look it up."""

    weight: nn.Parameter  # Shape (rows, dim).
    modules: tuple[EmbeddingModule, ...]  # Several if their weights are tied.
    # Paths of these modules in the model. A module may have several.
    paths: tuple[str, ...]

    @property
    def path(self) -> str:
        """First path of the table."""
        return self.paths[0]

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """Distinct poolings of its modules."""
        return tuple(dict.fromkeys(pooling_of(module) for module in self.modules))


def pooling_of(module: EmbeddingModule) -> Pooling:
    """Return placer's name for the pooling of a module."""
    return _POOLINGS[module.mode] if isinstance(module, nn.EmbeddingBag) else "none"


def model_tables(model: nn.Module) -> tuple[ModelTable, ...]:
    """Return all tables of a model, in the order of its modules.

    A module without its own weight parameter, as with parametrizations, is no table.
    """
    held: dict[int, tuple[nn.Parameter, dict[int, EmbeddingModule], list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight") if isinstance(module, EmbeddingModule) else None
        if weight is not None:
            _, modules, paths = held.setdefault(id(weight), (weight, {}, []))
            modules[id(module)] = module
            paths.append(path)
    return tuple(
        ModelTable(weight, tuple(modules.values()), tuple(paths))
        for weight, modules, paths in held.values()
    )


def match_tables(
    model: nn.Module,
    tables: Sequence[Table],
    names: Mapping[str, str],
    strict: bool,
    growing: Container[str] = (),
) -> dict[str, ModelTable]:
    """Return the model's table for each table of a plan, by the plan's name.

    A table matches the module with its path, which `names` may give, or the only module with a path
    that ends in its name. If `strict`, all tables of the model must be in the plan. Tables named in
    `growing` grow. Raises PlanMismatchError, which lists everything that does not fit: tables
    without a module, modules without a table, other shapes, types or pooling, and options that
    placed tables do not support.
    """
    in_model = model_tables(model)
    by_path = {path: table for table in in_model for path in table.paths}
    by_end = _by_end(by_path)
    holders = _holders(model)
    planned = {table.name for table in tables}
    faults = [f"names has table {name!r}, which the plan lacks" for name in names.keys() - planned]
    matched: dict[str, ModelTable] = {}
    by_weight: dict[int, list[str]] = defaultdict(list)
    for table in tables:
        partner = _find(table.name, names.get(table.name), by_path, by_end)
        if isinstance(partner, str):
            faults.append(partner)
        else:
            found = _faults(table, partner, holders, table.name in growing)
            faults += [f"table {table.name!r}: {fault}" for fault in found]
            matched[table.name] = partner
            by_weight[id(partner.weight)].append(table.name)
    faults += [
        f"tables {' and '.join(map(repr, several))} are both {matched[several[0]].path!r}"
        for several in by_weight.values()
        if len(several) > 1
    ]
    left = [table.path for table in in_model if id(table.weight) not in by_weight]
    if strict and left:
        faults.append(
            f"the plan has no table for {', '.join(map(repr, left))}; plan for all tables, or pass "
            "strict=False to leave these to an optimizer of yours"
        )
    if faults:
        raise PlanMismatchError(f"the plan does not fit the model: {'; '.join(faults)}")
    return matched


def _by_end(by_path: Mapping[str, ModelTable]) -> dict[str, dict[int, ModelTable]]:
    """Return tables by each suffix of their paths, then by the `id` of their weights."""
    by_end: dict[str, dict[int, ModelTable]] = defaultdict(dict)
    for path, table in by_path.items():
        end = path
        while end:
            end = end.partition(".")[2]
            by_end[end][id(table.weight)] = table
    return by_end


def _holders(model: nn.Module) -> dict[int, list[tuple[int, str]]]:
    """Return by `id` of a parameter its holders: the `id` of the module, and the path there."""
    holders: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            holders[id(parameter)].append((id(module), f"{path}.{name}" if path else name))
    return holders


def _find(
    name: str,
    path: str | None,
    by_path: Mapping[str, ModelTable],
    by_end: Mapping[str, Mapping[int, ModelTable]],
) -> ModelTable | str:
    """Return the model's table, or a message that says what is wrong."""
    if path is not None:
        if path in by_path:
            return by_path[path]
        return f"names says that table {name!r} is {path!r}, where no embedding module is"
    if name in by_path:
        return by_path[name]
    ends = by_end.get(name, {})
    if len(ends) == 1:
        return next(iter(ends.values()))
    if ends:
        several = " and ".join(repr(table.path) for table in ends.values())
        return f"table {name!r} may be {several}; say which with names={{{name!r}: ...}}"
    shown = listed(list(map(repr, by_path)), _SHOWN) or "no embedding modules"
    return f"table {name!r} has no module; there are {shown}"


def _faults(
    table: Table,
    partner: ModelTable,
    holders: Mapping[int, Sequence[tuple[int, str]]],
    grows: bool,
) -> list[str]:
    """Return how a model's table differs from the plan's, and why it cannot be placed."""
    weight, faults = partner.weight, []
    if tuple(weight.shape) != (table.rows, table.dim):
        shape = " × ".join(map(str, weight.shape))
        advice = (
            f"; make the module with {table.rows} rows, its capacity and row 0" if grows else ""
        )
        faults.append(f"the plan has {table.rows} × {table.dim}, the model {shape}{advice}")
    if weight.dtype != TORCH_DTYPES[table.dtype]:
        faults.append(f"the plan has {table.dtype}, the model {weight.dtype}")
    if type(weight.data) is not torch.Tensor or weight.device.type not in ("cpu", "cuda", "meta"):
        faults.append(
            f"its weight is a {type(weight.data).__name__} on {weight.device}; place tables that "
            "are whole, on a CPU, a GPU or the meta device, before the model is sharded"
        )
    for feature in table.features:
        # All poolings of one id give the same row.
        if feature.pooling not in partner.poolings and feature.pooling_factor > 1:
            own = partner.poolings[0]
            faults.append(
                f"the plan pools feature {feature.name!r} by {feature.pooling}, the model by "
                f"{' and '.join(partner.poolings)}: profile or plan with --pooling "
                f'{feature.name}={own}, or say pooling = "{own}" of its column in the schema'
            )
    for module in partner.modules:
        faults += _unsupported(module)
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        faults.append(
            "its weight has hooks, which placed tables do not call, as it gets no gradient there: "
            "remove the hooks, or hook the module's outputs"
        )
    if len({module.padding_idx for module in partner.modules}) > 1:
        faults.append("modules with tied weights have different padding_idx")
    members = {id(module) for module in partner.modules}
    faults += [
        f"its weight is {path!r} too, which is no embedding"
        for module, path in holders[id(weight)]
        if module not in members
    ]
    return faults


def _unsupported(module: EmbeddingModule) -> list[str]:
    faults = []
    if module.max_norm is not None:
        faults.append("max_norm changes rows while they are read; placed tables do not")
    if module.scale_grad_by_freq:
        faults.append("scale_grad_by_freq is not supported")
    plain = nn.Embedding.forward, nn.EmbeddingBag.forward
    if "forward" in vars(module) or type(module).forward not in plain:
        faults.append(f"{type(module).__name__} has a forward of its own, which would be lost")
    held = {**module._parameters, **module._buffers, **module._modules}
    others = [name for name, one in held.items() if name != "weight" and one is not None]
    if others:
        faults.append(f"{type(module).__name__} holds {listed(others, 3)}, which would be lost")
    return faults


def dtype_of(dtype: torch.dtype, name: str) -> DType:
    """Return placer's name for the type of a table's weight."""
    for known, candidate in TORCH_DTYPES.items():
        if candidate == dtype:
            return known  # type: ignore[return-value]  # its keys are just these
    raise PlanMismatchError(f"table {name!r} is of {dtype}; placed are {', '.join(TORCH_DTYPES)}")


class DrawnRows:
    """Draws the initial weights of a table with the `reset_parameters` of its module.

    Each block of `CHUNK_ROWS` rows is drawn on its own, seeded by a seed, the table's name and the
    block's first row. So weights do not depend on the plan or the number of ranks, and no process
    holds the whole table. docs/pytorch.md says more, also of padding and of initializers that
    cannot draw blocks.
    """

    def __init__(self, module: EmbeddingModule, name: str, seed: int) -> None:
        self._module, self._name, self.seed = module, name, seed
        self._is_by_block = _is_by_block(module)
        if not self._is_by_block:
            warnings.warn(
                f"the reset_parameters of {type(module).__name__} is not the same law for each row "
                f"of table {name!r}, which is on the meta device: its weights are drawn uniform in "
                "1 / sqrt(rows) around 0; load a checkpoint, or give it a weight on the CPU",
                stacklevel=5,
            )

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows of one block, with the ids ``start..stop``."""
        module = self._module
        digest = hashlib.sha256(f"{self.seed}/{self._name}/{start}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        if self._is_by_block:
            block = _drawn(module, stop - start, seed)
        else:
            generator = torch.Generator().manual_seed(seed)
            bound = module.num_embeddings**-0.5
            shape = stop - start, module.embedding_dim
            block = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        if module.padding_idx is not None and start <= module.padding_idx < stop:
            block[module.padding_idx - start] = 0
        return block

    def write(self, order: IdOrder) -> None:
        """Draw and write the blocks of the only table that have rows in this process."""
        (tensor, *_) = order.tensors()
        for block in blocks_of(tensor):
            if order.holds(block):
                order.write(block, self.rows(block.start, block.stop))


def _is_by_block(module: EmbeddingModule) -> bool:
    """Return whether a module draws rows alike for any number and place of rows."""
    try:
        few, many = (_drawn(module, rows, 0) for rows in (_PROBE_ROWS, 2 * _PROBE_ROWS))
        other = _drawn(module, _PROBE_ROWS, 1)
    except Exception:
        return False
    fixed = (few == other).all(1)
    is_alike = bool((few == few[0]).all()) if bool(fixed.all()) else not bool(fixed.any())
    return is_alike and torch.equal(few, many[:_PROBE_ROWS])


@torch.no_grad()
def _drawn(module: EmbeddingModule, rows: int, seed: int) -> Tensor:
    """Draw `rows` rows with the module's `reset_parameters`, as if it had no others."""
    shell: Any = type(module).__new__(type(module))
    shell.__dict__.update(module.__dict__)
    whole = rows + _SPARE_ROWS
    weight = torch.empty(whole, module.embedding_dim, dtype=module.weight.dtype, device="cpu")
    shell._parameters = {"weight": nn.Parameter(weight)}
    if module.padding_idx is not None:
        shell.padding_idx = whole - 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shell.reset_parameters()
    drawn: Tensor = shell.weight.detach()[:rows]
    return drawn
