"""The embedding tables of a PyTorch model, and which table of a plan each of them is."""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from placer.errors import PlanMismatchError
from placer.executor.memory.arena import TORCH_DTYPES
from placer.tables import Pooling, Table
from placer.units import listed

EmbeddingModule = nn.Embedding | nn.EmbeddingBag
_SHOWN = 20
"""Modules that a message names."""
_POOLINGS: dict[str, Pooling] = {"sum": "sum", "mean": "mean", "max": "max"}


@dataclass(frozen=True, slots=True, eq=False)
class ModelTable:
    """One weight of a model and the modules that look it up."""

    weight: nn.Parameter  # Shape (rows, dim).
    modules: tuple[EmbeddingModule, ...]  # Several where their weights are tied.
    # Where these modules are in the model; a module may be at several places.
    paths: tuple[str, ...]

    @property
    def path(self) -> str:
        """The first of its paths."""
        return self.paths[0]

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """How its modules pool, each once."""
        return tuple(dict.fromkeys(pooling_of(module) for module in self.modules))


def pooling_of(module: EmbeddingModule) -> Pooling:
    """Return how a module pools, in placer's words."""
    return _POOLINGS[module.mode] if isinstance(module, nn.EmbeddingBag) else "none"


def model_tables(model: nn.Module) -> tuple[ModelTable, ...]:
    """Return all tables of a model, in the order of its modules.

    A module whose weight is computed by others, as parametrizations do, is none.
    """
    modules: dict[int, dict[int, EmbeddingModule]] = defaultdict(dict)
    paths: dict[int, list[str]] = defaultdict(list)
    weights: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, EmbeddingModule):
            continue
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        weights[id(weight)] = weight
        modules[id(weight)][id(module)] = module
        paths[id(weight)].append(path)
    return tuple(
        ModelTable(weight, tuple(modules[key].values()), tuple(paths[key]))
        for key, weight in weights.items()
    )


def match_tables(
    model: nn.Module,
    tables: Sequence[Table],
    names: Mapping[str, str],
    strict: bool,
    growing: Container[str] = (),
) -> dict[str, ModelTable]:
    """Return the model's table for each of a plan's, once all of them fit.

    A table is matched by the path of its module, which `names` may say, or by the end of the path
    if only one ends so. If `strict`, all tables of the model must be in the plan. Raises
    PlanMismatchError, which names all that does not fit: tables without module, modules without
    table, other shapes, types or pooling, and options that a placed table has not. Tables named
    in `growing` may have other rows than the plan's.
    """
    in_model = model_tables(model)
    by_path = {path: table for table in in_model for path in table.paths}
    by_end = _by_end(by_path)
    holders = _holders(model)
    planned = {table.name for table in tables}
    faults = [f"names has table {name!r}, which the plan lacks" for name in names.keys() - planned]
    matched: dict[str, ModelTable] = {}
    for table in tables:
        partner = _find(table.name, names.get(table.name), by_path, by_end)
        if isinstance(partner, str):
            faults.append(partner)
        else:
            found = _faults(table, partner, holders, table.name in growing)
            faults += [f"table {table.name!r}: {fault}" for fault in found]
            matched[table.name] = partner
    faults += _twice(matched)
    taken = {id(partner.weight) for partner in matched.values()}
    left = [table.path for table in in_model if id(table.weight) not in taken]
    if strict and left:
        faults.append(
            f"the plan has no table for {', '.join(map(repr, left))}; plan for all tables, or pass "
            "strict=False to leave these to an optimizer of yours"
        )
    if faults:
        raise PlanMismatchError(f"the plan does not fit the model: {'; '.join(faults)}")
    return matched


def _by_end(by_path: Mapping[str, ModelTable]) -> dict[str, dict[int, ModelTable]]:
    """Return tables by each end of their paths, and then by the `id` of their weights."""
    by_end: dict[str, dict[int, ModelTable]] = defaultdict(dict)
    for path, table in by_path.items():
        end = path
        while end:
            end = end.partition(".")[2]
            by_end[end][id(table.weight)] = table
    return by_end


def _holders(model: nn.Module) -> dict[int, list[tuple[int, str]]]:
    """By the `id` of each parameter: the modules that have it, by `id`, and its path there."""
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
    """Return the table, or what is wrong."""
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


def _twice(matched: Mapping[str, ModelTable]) -> list[str]:
    tables: dict[int, list[str]] = defaultdict(list)
    for name, partner in matched.items():
        tables[id(partner.weight)].append(name)
    return [
        f"tables {' and '.join(map(repr, several))} are both {matched[several[0]].path!r}"
        for several in tables.values()
        if len(several) > 1
    ]


def _faults(
    table: Table,
    partner: ModelTable,
    holders: Mapping[int, Sequence[tuple[int, str]]],
    grows: bool,
) -> list[str]:
    """Return what makes a model's table another than the plan's, or one that cannot be placed."""
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
        # A bag of one id is that id's row, however it is pooled.
        if feature.pooling not in partner.poolings and feature.pooling_factor > 1:
            own = partner.poolings[0]
            faults.append(
                f"the plan pools feature {feature.name!r} by {feature.pooling}, the model by "
                f"{' and '.join(partner.poolings)}: profile or plan with --pooling "
                f'{feature.name}={own}, or say pooling = "{own}" of its column in the schema'
            )
    for module in partner.modules:
        faults += _unsupported(module)
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
    if type(module).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        faults.append(f"{type(module).__name__} has a forward of its own, which would be lost")
    return faults
