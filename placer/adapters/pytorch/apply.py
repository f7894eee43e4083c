"""Apply a plan to a model, and remove it again."""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from placer.adapters.pytorch.applied import AppliedPlan
from placer.adapters.pytorch.models import DrawnRows, ModelTable, match_tables
from placer.adapters.pytorch.shared_tables import SharedTables, unwatch
from placer.adapters.pytorch.stand_in import PlacedEmbedding, PlacedEmbeddingBag, StandIn
from placer.adapters.pytorch.table import PlacedTable
from placer.errors import PlanMismatchError, check_kinds
from placer.executor import Policy
from placer.executor.lookups.batch_reads import read_by_one
from placer.executor.memory.layout import check_is_plan, check_plan
from placer.executor.optimizers import DEFAULTS, Rounding
from placer.files.atomic import StrPath
from placer.growing import Growing
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, OptimizerName


def apply_plan(
    model: nn.Module,
    plan: Plan,
    optimizer: OptimizerName | None = None,
    *,
    lr: float | None = None,
    eps: float | None = None,
    betas: tuple[float, float] | None = None,
    names: Mapping[str, str] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    strict: bool = True,
    backend: str = "auto",
    cache_policy: Policy = "lfu",
    rounding: Rounding = "nearest",
    drive: StrPath | None = None,
    growing: Mapping[str, Growing] | None = None,
) -> AppliedPlan:
    """Train a model's embedding tables where a plan puts them.

    Each `nn.EmbeddingBag` and `nn.Embedding` of the plan is replaced by a module that is called
    in the same way and starts from the same weights. When a backward pass ends, it updates its
    rows once for all its calls. The rest of the model is unchanged. Apply a plan before you wrap
    the model (DDP, FSDP) and before you make its optimizer, which then gets only the dense
    parameters.

    Raises PlanMismatchError if the plan is unsound or does not fit the model. The message lists all
    reasons. The model is unchanged. Raises CapacityError if a device lacks memory for the plan with
    this optimizer's state.

    Parameters
    ----------
    plan : Plan
        Names its tables by the paths of their modules, or by the ends of these paths.
    optimizer : {"sgd", "adagrad", "rowwise_adagrad", "adam"}, optional
        The optimizer of all tables. By default, each table has the plan's optimizer.
    lr, eps, betas
        Constants of the optimizer. By default, those of `torch.optim.SGD`, `torch.optim.Adagrad`,
        `torch.optim.SparseAdam`, and FBGEMM's row-wise Adagrad.
    backend, cache_policy, rounding, drive
        See `PlacedEmbeddings`.
    growing : mapping of table name to Growing, optional
        Tables that grow, instead of those in the plan: their modules take any int64 as an id. Such
        a module has capacity + 1 rows. Each training call of it is one step of its key map.
    names : mapping of table name to module path, optional
        Paths of tables whose names are not the ends of their paths.
    optimizers : iterable of torch.optim.Optimizer
        Existing optimizers. The tables' weights and their state are removed from them.
    strict : bool
        Whether it is an error if the plan lacks an embedding module.

    Examples
    --------
    >>> from placer import Plan, Shard, Table, Topology
    >>> table = Table("0", rows=1000, dim=16)
    >>> whole = Shard("0", (0, 1000, 1), (0, 16), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((table,), Topology.parse("1xh100"), (whole,))
    >>> model = nn.Sequential(nn.EmbeddingBag(1000, 16), nn.Linear(16, 1))
    >>> applied = apply_plan(model, plan, optimizer="adagrad", lr=0.05, backend="torch")
    >>> model(torch.tensor([[3, 7], [7, 9]])).sum().backward()  # Updates rows 3, 7 and 9.
    >>> int(applied.optimizer_state_dict()["0.sum"].sum(1).count_nonzero())
    3
    """
    # 1. Check the plan, and match its tables with the model's modules. Nothing changes yet.
    check_kinds(
        model=(model, nn.Module), optimizer=(optimizer, str | None), betas=(betas, Sequence | None),
        names=(names, Mapping | None), growing=(growing, Mapping | None),
        optimizers=(optimizers, Iterable),
    )  # fmt: skip
    _check_is_plain(model)
    check_is_plan(plan)
    optimizers = list(optimizers)
    for one in optimizers:
        check_kinds(optimizers=(one, torch.optim.Optimizer))
    for how in (growing or {}).values():
        check_kinds(growing=(how, Growing))
    if optimizer is not None:
        if optimizer not in OPTIMIZERS:
            raise PlanMismatchError(f"optimizer {optimizer!r} is none of {OPTIMIZERS}")
        plan = replace(plan, tables=tuple(replace(t, optimizer=optimizer) for t in plan.tables))
    if growing is not None:
        plan = replace(plan, growing=dict(growing))
    check_plan(plan)
    matched = match_tables(model, plan.tables, names or {}, strict, plan.growing)
    # 2. Move each table's weight to the memories that the plan names.
    constants = {"lr": lr, "eps": eps, "betas": betas}
    said: dict[str, Any] = {name: one for name, one in constants.items() if one is not None}
    said |= {"backend": backend, "cache_policy": cache_policy, "rounding": rounding, "drive": drive}
    placed = _place(model, plan, matched, said)
    # 3. Replace the modules by stand-ins, which look rows up in the placed tables.
    stand_ins: dict[int, nn.Module] = {}
    for name, partner in matched.items():
        for module in partner.modules:
            if isinstance(module, nn.EmbeddingBag):
                stand_ins[id(module)] = PlacedEmbeddingBag(module, placed[name])
            else:
                stand_ins[id(module)] = PlacedEmbedding(module, placed[name])
    _swap(model, stand_ins)
    # 4. Leave only the dense parameters to the optimizers.
    by_weight = {id(matched[name].weight): table for name, table in placed.items()}
    _take_out_of(optimizers, by_weight, said.keys())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        warnings.warn(
            "all trainable parameters of the model are in placed tables, which train in backward: "
            "it needs no optimizer, and torch makes none without parameters",
            stacklevel=2,
        )
    return AppliedPlan(placed)


def applied_plan(model: nn.Module) -> AppliedPlan:
    """Return the placed tables of a model, also of a copied or loaded model.

    Raises PlanMismatchError if no plan is applied to the model.
    """
    check_kinds(model=(model, nn.Module))
    tables = {
        module.table.name: module.table for module in model.modules() if isinstance(module, StandIn)
    }
    if not tables:
        raise PlanMismatchError("no plan is applied to the model; call apply_plan first")
    return AppliedPlan(tables)


def remove_plan(model: nn.Module) -> dict[str, Tensor]:
    """Give a model its own embedding modules back, with the trained weights.

    These are the same modules and parameters as before the plan. An optimizer that still holds the
    parameters goes on with them. If `apply_plan` removed them from an optimizer, add them again.

    Raises PlanMismatchError if no plan is applied to the model.

    Returns
    -------
    dict of str to Tensor
        The optimizer state of the tables; see `AppliedPlan.optimizer_state_dict`. For tables that
        grow also ``<table>.keys.*``, which say which key has which row.
    """
    applied = applied_plan(model)
    state = applied.optimizer_state_dict()
    for table in applied.tables.values():
        state |= table.embeddings.keys.state()
    originals: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, StandIn):
            original = module.original
            original.__dict__.pop("forward", None)
            original.train(module.training)
            if not original.weight.numel():  # With tied weights, refill only once.
                _refill(original.weight, module.table)
            originals[id(module)] = original
    _swap(model, originals)
    unwatch(model)
    for table in applied.tables.values():
        table.saves.all_saved()
        table.shared.close()
    return state


def _check_is_plain(model: nn.Module) -> None:
    if any(isinstance(module, StandIn) for module in model.modules()):
        raise PlanMismatchError("a plan is applied to the model already; call remove_plan first")
    if isinstance(model, StandIn | nn.Embedding | nn.EmbeddingBag):
        raise PlanMismatchError("the model is an embedding itself; give the module that holds it")
    if torch.get_default_device().type == "meta":
        raise PlanMismatchError(
            "torch's default device is meta, whose tensors hold no values; the model may be made "
            "there, but apply the plan after torch.set_default_device('cpu')"
        )
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise PlanMismatchError(
                f"the model is wrapped in {type(module).__name__}, which holds its parameters; "
                "apply the plan before that"
            )


def _place(
    model: nn.Module, plan: Plan, matched: Mapping[str, ModelTable], said: Mapping[str, Any]
) -> dict[str, PlacedTable]:
    """Move a model's weights to where the plan puts them. On an error, move all back."""
    placed: dict[str, PlacedTable] = {}
    is_drawn = any(partner.weight.is_meta for partner in matched.values())
    seed = int(torch.randint(2**62, ())) if is_drawn else 0
    model_of = object()  # Identifies the model without keeping it alive.
    # Tables on the meta device go to the device of the model's other parameters.
    present = (each.device for each in model.parameters() if not each.is_meta)
    home, by_device = next(present, torch.empty(0).device), defaultdict(list)
    for name, partner in matched.items():
        by_device[home if partner.weight.is_meta else partner.weight.device].append(name)
    try:
        for device, names in by_device.items():
            # Stand-ins compute mean and max from sums and single rows.
            whole = read_by_one(plan.of_tables(names))
            # Constants that the user leaves out are the optimizer's defaults.
            options = [{**asdict(DEFAULTS[table.optimizer]), **said} for table in whole.tables]
            shared = SharedTables(whole, device, options[0])
            shared.watch(model)
            for name, own in zip(names, options, strict=True):
                weight = matched[name].weight
                values: Tensor | DrawnRows = weight.detach()
                if weight.is_meta:
                    values = DrawnRows(matched[name].modules[0], name, seed)
                placed[name] = PlacedTable(
                    whole.of_tables([name]), own, device, values, weight.requires_grad, shared
                )
                placed[name].saves.model = model_of
                _empty(weight, placed[name])  # So only one table is in memory twice.
    except BaseException:
        for name, table in placed.items():
            _refill(matched[name].weight, table)
        unwatch(model)
        raise
    return placed


def _empty(weight: nn.Parameter, table: PlacedTable) -> None:
    """Free a weight. A gradient that reaches it other than by lookups raises from then on."""
    name = table.name

    @unserializable_hook  # type: ignore[untyped-decorator]
    def refuse(gradient: Tensor) -> None:
        raise PlanMismatchError(
            f"the weight of table {name!r} is trained outside of its lookups, as by a penalty on "
            "all its rows, through a parameter that was taken before the plan was applied; set "
            "such penalties to 0, or compute them from the module's .weight"
        )

    weight.grad = None
    none = torch.empty((0, *weight.shape[1:]), dtype=weight.dtype, device=table.device)
    if weight.is_meta:  # Meta data cannot move to another device.
        torch.utils.swap_tensors(weight, nn.Parameter(none, weight.requires_grad))  # type: ignore[no-untyped-call]
    else:
        weight.data = none
    if weight.requires_grad:
        table.guard = weight.register_hook(refuse)  # type: ignore[no-untyped-call]


def _refill(weight: Tensor, table: PlacedTable) -> None:
    if table.guard is not None:
        table.guard.remove()
    weight.grad = None
    weight.data = table.weight().to(table.device)


def _swap(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Replace modules wherever the model holds them. `replacements` is by the `id` of a module."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in replacements:
                parent._modules[name] = replacements[id(child)]


_OPTIONS = (
    "weight_decay", "momentum", "lr_decay", "initial_accumulator_value", "maximize", "amsgrad",
)  # fmt: skip
"""Options of torch's optimizers that tables do not have."""

_KINDS: Mapping[str, OptimizerName] = {
    "SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam", "AdamW": "adam", "SparseAdam": "adam",
}  # fmt: skip


def _take_out_of(
    optimizers: Iterable[torch.optim.Optimizer],
    tables: Mapping[int, PlacedTable],
    said: Collection[str],
) -> None:
    """Remove the tables from optimizers; warn of what these would have done and tables do not.

    `tables` is by the `id` of the weight. `said` names the options that the user has given.
    """
    for optimizer in optimizers:
        kind = _KINDS.get(type(optimizer).__name__)
        for group in optimizer.param_groups:
            held = [tables[id(p)] for p in group["params"] if id(p) in tables]
            told = dict.fromkeys(
                words for table in held for words in _unlike(group, kind, table, said)
            )
            for words in told:
                warnings.warn(words, stacklevel=3)
            group["params"] = [p for p in group["params"] if id(p) not in tables]
        removed = [optimizer.state.pop(p) for p in list(optimizer.state) if id(p) in tables]
        if steps := max((float(state.get("step", 0)) for state in removed), default=0):
            warnings.warn(
                f"tables begin without the optimizer's state of their {steps:g} steps so far: read "
                "it from optimizer.state[module.weight] before apply_plan, and pass it to "
                "load_optimizer_state_dict of what apply_plan returns",
                stacklevel=3,
            )


def _unlike(
    group: Mapping[str, Any],
    kind: OptimizerName | None,
    table: PlacedTable,
    said: Collection[str],
) -> Iterable[str]:
    """Yield a warning for each option of an optimizer's group that a table does not have."""
    own = table.table.optimizer
    for name in _OPTIONS:
        if group.get(name):
            why = f", whose optimizer is {own!r} without it"
            if name == "weight_decay":
                why = ": a step updates the rows that it reads and no others"
            yield f"{name}={group[name]} does not act on placed tables{why}"
    for name in ("lr", "eps", "betas"):
        if name in said or name not in group or (name != "lr" and kind != own):
            continue
        value = group[name] if name == "betas" else float(group[name])
        if value != table.options[name]:
            yield (
                f"{name}={value} does not act on placed tables: these train with {own!r} and "
                f"{name}={table.options[name]}, as apply_plan was given no {name}="
            )
