"""Handle all placed tables of a model: their state, learning rate and updates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placer.adapters.pytorch.shared_tables import SharedTables
from placer.adapters.pytorch.table import PlacedTable
from placer.errors import CheckpointError, PlacerError, PlanMismatchError, check_kinds
from placer.executor import HitRates
from placer.executor.embeddings import uncompiled
from placer.growing import KeyCounts
from placer.units import Summarized, listed

LR, EPS = "lr", "eps"
"""Names of a table's constants in a state dict, after ``<table>.``."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateHandle:
    """Undoes `AppliedPlan.update_with`."""

    remove: Callable[[], None]
    """Apply the accumulated gradients. From then on, backward passes update the tables."""


class AppliedPlan(Summarized):
    """The placed tables of a model.

    Trainers save and resume with `state_dict` and `load_state_dict` what the model's own state dict
    lacks. This is all that `Stateful` of `torch.distributed.checkpoint` and Accelerate's
    ``register_for_checkpointing`` need. It is no dataclass, because Lightning's Fabric takes those
    apart.
    """

    def __init__(self, tables: Mapping[str, PlacedTable]) -> None:
        self.tables = tables

    def summary(self) -> dict[str, str]:
        """See `Summarized`."""
        names = list(self.tables)
        return {"tables": str(len(names)), "named": listed(names, 3)}

    def set_lr(self, lr: float) -> None:
        """Change the learning rate of all tables from the next update on.

        Under `update_with`, a scheduler's share multiplies it.
        """
        for table in self.tables.values():
            table.set_lr(lr)

    def update_with(
        self, optimizer: torch.optim.Optimizer, *, follow_lr: bool = True
    ) -> "UpdateHandle":
        """Update the tables in `optimizer.step()` from now on, not in each backward pass.

        Then the tables' gradients accumulate over backward passes, as gradients of parameters do,
        and `optimizer.zero_grad()` drops them. With `follow_lr`, a scheduler that changes the
        learning rate of the optimizer's first group changes the tables' rate by the same factor.
        Their own rate is that at the scheduler's base rate, or at the ``max_lr`` of `OneCycleLR`.
        Call `remove` of the returned handle to update in backward again. A later call of
        `update_with` replaces this one; the older handle's `remove` then does nothing.
        """
        check_kinds(optimizer=(optimizer, torch.optim.Optimizer))
        # Accelerate's `prepare` wraps optimizers, without the hooks of their steps.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        tables = list(self.tables.values())
        group = optimizer.param_groups[0]
        start = float(group["lr"])

        @uncompiled  # The optimizer's step may be compiled.
        def update(*_: object) -> None:
            # Look the group up again: `load_state_dict` makes new groups.
            group = optimizer.param_groups[0]
            # Schedulers note where they begin; `OneCycleLR` begins far below the usual rate.
            first = float(group.get("max_lr", group.get("initial_lr", start)))
            if follow_lr and not first and group["lr"]:
                raise PlacerError(
                    "tables cannot follow a learning rate that was 0 when update_with was called: "
                    "call it when the optimizer has its usual rate, before a warm-up, or pass "
                    "follow_lr=False and change the tables' rate by set_lr"
                )
            share = float(group["lr"]) / first if follow_lr and first else 1.0
            for table in tables:
                if share != table.lr_share:
                    table.set_lr_share(share)
            update_tables(tables)

        zero_grad = optimizer.zero_grad

        def drop(*arguments: Any, **options: Any) -> None:
            for table in tables:
                table.calls.clear()
            zero_grad(*arguments, **options)

        def remove() -> None:
            hook.remove()
            if optimizer.zero_grad is drop:  # Another plan may have wrapped it since.
                optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
            update_tables(tables)
            for table in tables:
                table.updated_with = []
                table.set_lr_share(1.0)
            tables.clear()

        for table in tables:
            if table.waits:  # An earlier call's optimizer no longer updates it.
                table.updated_with.remove(table)
            table.updated_with = tables
        hook = optimizer.register_step_post_hook(update)
        optimizer.zero_grad = drop  # type: ignore[method-assign]
        return UpdateHandle(remove)

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip gradients of parameters and tables together, as if tables were parameters.

        This is `torch.nn.utils.clip_grad_norm_` with the same arguments: it returns the norm before
        clipping, shape (). `parameters` are the dense ones: ``model.parameters()``. Call
        `update_with` first: otherwise, the tables' gradients are already used up. If ranks share
        tables, all of them must call this, and it looks the step's rows up once more.

        Raises PlacerError if `update_with` was not called.

        >>> from torch import nn
        >>> from placer import Plan, Shard, Table, Topology, apply_plan
        >>> whole = Shard("0", (0, 9, 1), (0, 2), ("gpu:0",), "hbm", "device")
        >>> plan = Plan((Table("0", rows=9, dim=2),), Topology.parse("1xh100"), (whole,))
        >>> model = nn.Sequential(nn.EmbeddingBag(9, 2, mode="sum"), nn.Linear(2, 1))
        >>> applied = apply_plan(model, plan, lr=0.1, backend="torch")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = applied.update_with(optimizer)
        >>> model(torch.tensor([[3, 7]])).sum().backward()
        >>> norm = applied.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> optimizer.step()
        """
        if not all(table.waits for table in self.tables.values() if table.trainable):
            raise PlacerError(
                "tables are updated in the backward pass, so that no gradient of theirs is left to "
                "clip; call update_with(optimizer) first"
            )
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for one in several:
            check_kinds(parameters=(one, Tensor))
        for norm in gradient_norms(self.tables.values(), float(norm_type)):
            several.append(torch.empty_like(norm))  # Stands for a table, whose norm this is.
            several[-1].grad = norm
        total = nn.utils.clip_grad_norm_(several, max_norm, norm_type, error_if_nonfinite, foreach)
        whole = total.full_tensor() if hasattr(total, "full_tensor") else total  # Of FSDP.
        factor = (max_norm / (whole + 1e-6)).clamp(max=1.0)
        for table in self.tables.values():
            table.scale_gradients(factor)
        return total

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the model's state dict lacks, so that training resumes exactly.

        It joins `optimizer_state_dict` and `constants`. It has no row caches, because results do
        not depend on where rows are. All ranks must call this.
        """
        return self.optimizer_state_dict() | self.constants()

    def constants(self) -> dict[str, Tensor]:
        """Return each table's ``<table>.lr``, its learning rate, and ``<table>.eps``, as float64.

        Epsilon is added to the root of the optimizer's state.
        """
        values = {f"{name}.{LR}": table.lr for name, table in self.tables.items()}
        values |= {f"{name}.{EPS}": table.eps for name, table in self.tables.items()}
        return {name: torch.tensor(one, dtype=torch.float64) for name, one in values.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, under this or any other plan.

        Raises CheckpointError if a table's state, learning rate or eps is missing or has another
        shape.
        """
        check_kinds(state_dict=(state_dict, Mapping))
        missing = self.constants().keys() - state_dict.keys()
        if missing:
            raise CheckpointError(
                f"the state of the tables lacks {', '.join(sorted(missing))}; load a state that "
                "only has the optimizer's with load_optimizer_state_dict"
            )
        self.load_optimizer_state_dict(state_dict)
        for name, table in self.tables.items():
            table.set_lr(float(state_dict[f"{name}.{LR}"]))
            table.set_eps(float(state_dict[f"{name}.{EPS}"]))

    def leave_state_dict(self) -> None:
        """Leave the tables' weights out of the model's state dict from now on.

        Use this for tables that are too large to gather. Then save the tables with
        `placer.storage.checkpoint.save_tables`; the model's state dict has only the dense layers.
        """
        for table in self.tables.values():
            table.in_state_dict = False

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return optimizer state by ``<table>.<name>``, in id order for any plan, on the host.

        This is like `PlacedEmbeddings.optimizer_state_dict`, but each table has its own number of
        updates, ``<table>.updates``.
        """
        state: dict[str, Tensor] = {}
        for table in self.tables.values():
            state |= table.optimizer_state()
            if table.in_state_dict:  # Otherwise, rows are not saved.
                table.saves.all_saved()
        return state

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `optimizer_state_dict` returned, under this or any other plan.

        Raises CheckpointError if a table's state is missing or has another shape.
        """
        check_kinds(state=(state, Mapping))
        for table in self.tables.values():
            table.load_optimizer_state(state)
            table.saves.all_saved()

    def key_counts(self) -> dict[str, KeyCounts]:
        """Return counters of the keys of each table that grows; all ranks must call this."""
        counts: dict[str, KeyCounts] = {}
        for table in self.tables.values():
            counts |= table.embeddings.key_counts()
        return counts

    def live_keys(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the keys of a table that grows, and their present rows; see `Embeddings`."""
        if table not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise PlanMismatchError(f"no placed table is called {table!r}; there are: {known}")
        return self.tables[table].embeddings.live_keys(table)

    def close(self) -> None:
        """Close the connections to other ranks; afterwards, no row can be looked up.

        On hosts without a GPU that serve tables, `placer.executor.serve_tables` then returns. All
        ranks that train must call this. In one process, it does nothing.
        """
        for table in self.tables.values():
            table.shared.close()

    def hit_rates(self) -> dict[str, HitRates]:
        """Return how many lookups HBM served, for each table of a backend with tiers."""
        rates = {name: table.hit_rates() for name, table in self.tables.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}


def update_tables(tables: Iterable[PlacedTable]) -> None:
    """Apply the gradients that tables have collected; update tables that ranks share together."""
    own, shared = _by_owner(tables)
    for table in own:
        table.update()
    for together, names in shared.items():
        together.update(names)


def gradient_norms(tables: Iterable[PlacedTable], norm_type: float) -> list[Tensor]:
    """Return the norms of the gradients that tables have collected: float32, each of shape ()."""
    own, shared = _by_owner(tables)
    norms = [table.gradient_norm(norm_type) for table in own]
    for together in shared:
        norms += together.gradient_norms(norm_type)
    return norms


def _by_owner(
    tables: Iterable[PlacedTable],
) -> tuple[list[PlacedTable], dict[SharedTables, set[str]]]:
    """Return the tables of this process alone, and the names of those that ranks share."""
    own: list[PlacedTable] = []
    shared: dict[SharedTables, set[str]] = defaultdict(set)
    for table in tables:
        if table.shared.world > 1:
            shared[table.shared].add(table.name)
        else:
            own.append(table)
    return own, shared
