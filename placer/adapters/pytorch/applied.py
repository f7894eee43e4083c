"""The placed tables of a model, together: their state, their learning rate, their updates."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer.adapters.pytorch.shared_tables import SharedTables
from placer.adapters.pytorch.table import PlacedTable
from placer.errors import CheckpointError, PlacerError
from placer.executor import HitRates
from placer.growing import KeyCounts
from placer.summary import Summarized
from placer.units import listed

LR, EPS = "lr", "eps"
"""Keys of a table's constants in a state dict."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateHandle:
    """Ends what `AppliedPlan.update_with` began."""

    remove: Callable[[], None]
    """Applies what has accumulated; from there on backward passes update the tables."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AppliedPlan(Summarized):
    """The placed tables of a model.

    With its `state_dict` and `load_state_dict` trainers save and resume what the model's own state
    dict does not have: `Stateful` of `torch.distributed.checkpoint` asks for no more, nor does
    Accelerate's ``register_for_checkpointing``.
    """

    tables: Mapping[str, PlacedTable]

    def summary(self) -> dict[str, str]:
        """See `Summarized`."""
        names = list(self.tables)
        return {"tables": str(len(names)), "named": listed(names, 3)}

    def set_lr(self, lr: float) -> None:
        """Change the learning rate of all tables from the next update on.

        Under `update_with`, a schedule's share is taken of it.
        """
        for table in self.tables.values():
            table.set_lr(lr)

    def update_with(
        self, optimizer: torch.optim.Optimizer, *, follow_lr: bool = True
    ) -> "UpdateHandle":
        """Update the tables in `optimizer.step()` from here on, not in each backward pass.

        So gradients accumulate over backward passes as those of parameters do, and
        `optimizer.zero_grad()` drops them. With `follow_lr`, the tables' learning rate changes in
        the proportion in which a scheduler changes that of the optimizer's first group. The
        `remove` of what is returned leads back to updates in backward.
        """
        tables = list(self.tables.values())
        group = optimizer.param_groups[0]
        start = float(group["lr"])

        def update(*_: object) -> None:
            # Read again: `load_state_dict` makes other groups.
            group = optimizer.param_groups[0]
            first = float(group.get("initial_lr", start))  # Which a scheduler writes there.
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
            optimizer.__dict__.pop("zero_grad", None)
            update_tables(tables)
            for table in tables:
                table.waits = False
                table.set_lr_share(1.0)

        for table in tables:
            table.waits = True
        hook = optimizer.register_step_post_hook(update)
        optimizer.zero_grad = drop  # type: ignore[method-assign]
        return UpdateHandle(remove)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip gradients of parameters and of tables together, as if all were parameters.

        What `torch.nn.utils.clip_grad_norm_` does of the 2-norm; returns the norm before, shape ().
        `parameters` are the dense ones: ``model.parameters()``. Tables must be updated with the
        optimizer, as their gradients are gone by then otherwise.

        Raises PlacerError if `update_with` was not called; if ranks share the tables.

        Examples
        --------
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
        parameters = [each for each in parameters if each.grad is not None]
        gradients = [each.grad for each in parameters if each.grad is not None]
        dense = torch.nn.utils.get_total_norm(gradients)
        squares = [table.squared_gradient_norm() for table in self.tables.values()]
        total = (sum(squares, dense.double().square()).sqrt()).to(dense.dtype)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                "the total norm of gradients is not finite, so they cannot be clipped"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for table in self.tables.values():
            table.scale_gradients(factor)
        return total

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the model's state dict lacks, so that training resumes exactly.

        `optimizer_state_dict`, and `constants`. A row cache is not part of it: results do not
        depend on where rows lie. All ranks must call it.
        """
        return self.optimizer_state_dict() | self.constants()

    def constants(self) -> dict[str, Tensor]:
        """Learning rate of each table, ``<table>.lr``, and the eps beside √state, ``<table>.eps``.

        Both are float64.
        """
        values = {f"{name}.{LR}": table.lr for name, table in self.tables.items()}
        values |= {f"{name}.{EPS}": table.eps for name, table in self.tables.items()}
        return {name: torch.tensor(one, dtype=torch.float64) for name, one in values.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave, under this or any other plan.

        Raises CheckpointError if a table's state, learning rate or eps is missing, or of another
        shape.
        """
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
        """Leave the tables' weights out of the model's state dict from here on.

        For tables that are too large to be gathered: `placer.storage.checkpoint.save_tables` then
        saves them, weights included, and the model's state dict has the dense layers alone.
        """
        for table in self.tables.values():
            table.in_state_dict = False

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return optimizer state by ``<table>.<name>``, in id order whatever the plan, on the host.

        What `PlacedEmbeddings.optimizer_state_dict` has, but each table counts its updates:
        ``<table>.updates``.
        """
        state: dict[str, Tensor] = {}
        for table in self.tables.values():
            state |= table.optimizer_state()
            if table.in_state_dict:  # Else the rows are missing.
                table.saves.all_saved()
        return state

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `optimizer_state_dict` gave, under this or any other plan.

        Raises CheckpointError if a table's state is missing or of another shape.
        """
        for table in self.tables.values():
            table.load_optimizer_state(state)
            table.saves.all_saved()

    def key_counts(self) -> dict[str, KeyCounts]:
        """Counters of the keys of each table that grows; all ranks must call it."""
        counts: dict[str, KeyCounts] = {}
        for table in self.tables.values():
            counts |= table.embeddings.key_counts()
        return counts

    def live_keys(self, table: str) -> tuple[Tensor, Tensor]:
        """Return keys of a table that grows, and the rows that they have now; see `Embeddings`."""
        return self.tables[table].embeddings.live_keys(table)

    def close(self) -> None:
        """Let go of the connections to other ranks; nothing can be looked up any more.

        Where hosts without a GPU serve tables, `placer.executor.serve_tables` returns there. All
        ranks that train must call it. In one process it does nothing.
        """
        for table in self.tables.values():
            table.shared.close()

    def hit_rates(self) -> dict[str, HitRates]:
        """Return how many lookups of each table HBM served, where the backend has tiers."""
        rates = {name: table.hit_rates() for name, table in self.tables.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}


def update_tables(tables: Iterable[PlacedTable]) -> None:
    """Apply the gradients that tables have collected; those that ranks share at once."""
    shared: dict[int, tuple[SharedTables, list[str]]] = {}
    for table in tables:
        if table.world > 1:
            shared.setdefault(id(table.shared), (table.shared, []))[1].append(table.name)
        else:
            table.update()
    for together, names in shared.values():
        together.update(set(names))
