"""Place one table of a model: look rows up in forward, update once when the backward pass ends.

A module may be called several times in a forward pass, and Adagrad's update of a sum of gradients
is not the sum of its updates. So backward only collects the gradients of all calls. A callback at
the end of the backward pass, the kind that DDP uses, applies them together. If gradients accumulate
over several passes, the optimizer's step applies them.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from placer.adapters.pytorch.calls import (
    Call,
    LookupNode,
    OpenCalls,
    Output,
    as_they_are,
    by_lookup,
    joined,
    of_rows,
    present_device,
)
from placer.adapters.pytorch.models import DrawnRows
from placer.adapters.pytorch.shared_tables import SharedTables, refuse_unshared
from placer.adapters.pytorch.watches import SaveWatch, watch_steps
from placer.executor import BagBatch, Embeddings, HitRates, make_embeddings
from placer.executor.local.fused_lookup import refuse_scaled
from placer.executor.lookups.batch_reads import gradient_norm
from placer.executor.optimizers import check_constants
from placer.executor.tensor_names import UPDATES
from placer.plan.plan import Plan
from placer.tables import OPTIMIZER_STATE

Weight = Tensor | DrawnRows
"""A table's weight in id order, or what draws the weight of a table on the meta device."""


class PlacedTable:
    """A table with its optimizer, which modules of a model look up.

    `plan` has only this table, read by one feature that pools by sum. `options` go to
    `PlacedEmbeddings`. `weight` is in id order; if ranks share the table, only the first rank's
    weight is used. Copies and pickles hold the plan, the weights and the optimizer's state.
    """

    _anchor: Tensor

    def __init__(
        self,
        plan: Plan,
        options: Mapping[str, Any],
        device: torch.device,
        weight: Weight,
        trainable: bool,
        shared: SharedTables,
    ) -> None:
        self.plan, self.shared = plan, shared
        (self.table,) = plan.tables
        self.name = self.table.name
        shared.tables[self.name] = self
        self.grows = bool(plan.growing)  # Whether its ids are keys, which get rows when read.
        # The tables that an optimizer's step updates, with this one; empty if backward updates it.
        self.updated_with: list[PlacedTable] = []
        self.in_state_dict = True  # Whether the model's state dict has the weight.
        self.updates_since_step = 0
        self.guard: RemovableHandle | None = None  # Hook of the emptied parameter.
        self.lr: float = options["lr"]  # Without a scheduler's share.
        self.eps: float = options["eps"]  # Added to √state.
        self.lr_share = 1.0
        self.options = options
        has_state = bool(OPTIMIZER_STATE[self.table.optimizer])
        self.is_stateful = has_state or options["rounding"] == "stochastic"
        self.calls: list[Call] = []  # Calls that have a gradient.
        self.open_calls = OpenCalls(self.calls)
        self.set_trainable(trainable)
        self.updates = 0  # Number so far, if ranks share the table.
        self._numbers = itertools.count()
        self._frozen_rows: dict[int, Tensor] = {}
        self._trains_all_rows = False
        self.saves = SaveWatch(self.name)
        self._place(device, weight)
        watch_steps(self)

    def _place(self, device: torch.device, weight: Weight) -> None:
        self._own: Embeddings | None = None
        if self.shared.world > 1:
            self.shared.write(self, weight)
            return
        given = {self.name: weight} if isinstance(weight, Tensor) else {}
        self._own = make_embeddings(
            self.plan, device=device, weights=given, seed=None, **self._options_now()
        )
        if not isinstance(weight, Tensor):
            weight.write(self._own.id_order())
        self._own.keys.read_by_rows()
        self._own.set_lr(self.lr_now)

    def _options_now(self) -> dict[str, Any]:
        return {**self.options, "lr": self.lr, "eps": self.eps}

    @property
    def embeddings(self) -> Embeddings:
        """What holds the table. Ranks that share tables must read this in the same order."""
        return self.shared.of_table(self) if self._own is None else self._own

    @property
    def device(self) -> torch.device:
        """Device that pools rows."""
        return self.shared.device if self._own is None else self._own.device

    @property
    def waits(self) -> bool:
        """Whether an optimizer's step updates the table, not backward."""
        return bool(self.updated_with)

    @property
    def backend(self) -> str:
        """Name of the backend; if ranks share the table, the name that was asked for."""
        return str(self.options["backend"]) if self._own is None else self._own.backend

    def look_up(
        self, lookups: BagBatch, output: Output | None = None, are_rows: bool = False
    ) -> Tensor:
        """Return the weighted sum of the rows of each bag: float32, shape (bags, dim).

        `output` may convert the sums. `are_rows` says that ids are rows, not keys, of a table that
        grows. Raises DataError if an id is no row of the table. Raises BackendError if
        `torch.distributed` was initialized only after the plan was applied.
        """
        weights, batch = lookups.weights, lookups.to(self.device)
        if batch.weights is not None:
            batch = replace(batch, weights=batch.weights.detach())
        if output is None:
            output = Output((lookups.batch_size, self.table.dim), torch.float32, as_they_are)
        trains = self.trainable and torch.is_grad_enabled()
        call = Call(self, next(self._numbers), batch, trains, output, has_keys=not are_rows)
        call.trains_weights = torch.is_grad_enabled() and getattr(weights, "requires_grad", False)
        if not (trains or call.trains_weights):
            with torch.no_grad():
                if self._own is None:
                    return self.shared.look_up(call)
                self._find_rows(call, self._own)
                return output.of_rows(self.rows_of(call.batch))
        refuse_unshared(self.name, self.shared.world)
        if self.calls and not self.waits and torch._C._current_graph_task_id() < 0:
            self.calls.clear()  # A failed backward pass left them.
        if self._own is not None:
            self._find_rows(call, self._own)
        if self._anchor.device != batch.ids.device:
            self._anchor = torch.zeros((), device=self.device, requires_grad=self.trainable)
        rows: Tensor = LookupNode.apply(self._anchor, weights, call)  # type: ignore[no-untyped-call]
        return rows if self._own is None else output.of_rows(rows)

    def _find_rows(self, call: Call, own: Embeddings) -> None:
        """Replace a call's keys by their rows."""
        if not (own.keys.maps and call.has_keys):
            return
        open_before = self.open_calls.steps() if call.trains else None
        call.batch = own.keys.rows_of(call.batch, own.features, open_before, own.id_order)
        if call.trains:
            self.open_calls.add(call)

    def row(self, index: int) -> Tensor:
        """Return a row that lookups do not train, such as padding: float32, shape (dim,)."""
        if self.grows:  # Padding has no row here: other keys have all rows.
            return torch.zeros(self.table.dim, dtype=torch.float32, device=self.device)
        if index not in self._frozen_rows or self._trains_all_rows:
            ids = torch.full((1,), index, device=self.device)
            output = Output((self.table.dim,), torch.float32, lambda rows: rows[0])
            with torch.no_grad():
                self._frozen_rows[index] = self.look_up(of_rows(ids), output, are_rows=True)
        return self._frozen_rows[index]

    def all_rows(self) -> Tensor:
        """Return the whole weight, shape (rows, dim). Gradients flow to it as to a parameter."""
        self._trains_all_rows |= torch.is_grad_enabled()
        ids = torch.arange(self.table.rows, device=self.device)
        return self.look_up(of_rows(ids), are_rows=True)

    def weight(self) -> Tensor:
        """Return a copy of the weight in id order, on the host."""
        return self.model_state()["weight"]

    def model_state(self) -> dict[str, Tensor]:
        """Copy the weight in id order, and ``keys.*`` if the table grows, to the host."""
        state = self.embeddings.state_dict()
        return {name.removeprefix(f"{self.name}."): values for name, values in state.items()}

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the weight, and ``keys.*`` if the table grows, with those of `model_state`."""
        self.weight_changes()
        own = {f"{self.name}.{name}": values.detach() for name, values in state.items()}
        self.embeddings.load_state_dict(own)

    def weight_changes(self) -> None:
        """Forget cached rows; call this before rows are overwritten."""
        self._frozen_rows.clear()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return state by ``<table>.<name>``, and ``<table>.updates``; see `PlacedEmbeddings`."""
        state = self.embeddings.optimizer_state_dict()
        if UPDATES in state:
            state[f"{self.name}.{UPDATES}"] = state.pop(UPDATES)
        return state

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load this table's part of an optimizer state, also from `PlacedEmbeddings`."""
        # Also look for the state of other optimizers, which is refused.
        names = {name for several in OPTIMIZER_STATE.values() for name in several}
        own = {key: state[key] for name in names if (key := f"{self.name}.{name}") in state}
        updates = state.get(f"{self.name}.{UPDATES}", state.get(UPDATES))
        if updates is not None:
            own[UPDATES] = updates
        self.embeddings.load_optimizer_state_dict(own)

    def hit_rates(self) -> HitRates | None:
        """Return how many lookups HBM served; None if ranks share the table or without tiers."""
        return None if self._own is None else self._own.hit_rates()

    def set_trainable(self, trainable: bool) -> None:
        """Say whether lookups train their rows from now on."""
        self.trainable = trainable
        # Makes autograd run backward through lookups; it never gets a gradient.
        self._anchor = torch.zeros((), requires_grad=trainable)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next update on."""
        check_constants(lr)
        self.lr = lr
        self.set_lr_share(self.lr_share)

    def set_lr_share(self, share: float) -> None:
        """Multiply the learning rate by a scheduler's share from the next update on."""
        self.lr_share = share
        if self._own is not None:
            self._own.set_lr(self.lr_now)

    @property
    def lr_now(self) -> float:
        """Learning rate × the scheduler's share."""
        return self.lr * self.lr_share

    def set_eps(self, eps: float) -> None:
        """Change the epsilon that is added to √state from the next update on."""
        self.eps = eps
        if self._own is not None:
            self._own.set_eps(eps)

    def move(self, device: torch.device) -> None:
        """Move weights and state to another device. If ranks share tables, move all tables."""
        if device == self.device:
            return
        if self._own is None:
            self.shared.move(device)
            return
        state, rows = self.optimizer_state(), self.model_state()
        self._place(device, rows["weight"])
        self.load_model_state(rows)
        self.load_optimizer_state(state)

    def __getstate__(self) -> dict[str, Any]:
        self.saves.all_saved()
        state = {
            "plan": self.plan,
            "options": self._options_now(),
            "device": str(self.device),
            "model": self.model_state(),
            "optimizer": self.optimizer_state(),
            "trainable": self.trainable,
            "in_state_dict": self.in_state_dict,
            "shared": self.shared,
        }
        if (started := get_spawning_popen()) is not None:
            # Keep these copies in memory until the spawned process has opened them.
            vars(started).setdefault("placed_tables", []).append(state)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        device, weight = present_device(state["device"]), state["model"]["weight"]
        self.__init__(  # type: ignore[misc]
            state["plan"], state["options"], device, weight, state["trainable"], state["shared"]
        )
        self.in_state_dict = state["in_state_dict"]
        self.load_model_state(state["model"])
        self.load_optimizer_state(state["optimizer"])

    def rows_of(self, batch: BagBatch) -> Tensor:
        """Return the executor's pooled rows for a batch, with their graph, in one process."""
        rows: Tensor = self.embeddings(batch)[self.name]
        return rows

    def collect(self, call: Call, gradient: Tensor) -> None:
        """Keep the gradient of a call until the table is updated."""
        refuse_scaled()  # The update is a backward pass of its own.
        if call.gradient is not None:  # Two losses may share one forward pass.
            call.gradient = call.gradient + gradient
            return
        call.gradient, call.backward_pass = gradient, torch._C._current_graph_task_id()
        if self.waits:
            call.let_go()  # The update looks its rows up again later.
            # Until then, the caller may fill its tensors with the next batch.
            call.batch = joined([call], self.device)
        elif self._own is None:
            self.shared.update_after_pass(self.name)
        elif not self.calls or self.calls[-1].backward_pass != call.backward_pass:
            end = partial(self.update, call.backward_pass)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self.calls.append(call)

    def before_update(self) -> None:
        """Note that the table's rows are about to be updated."""
        self.saves.before_update()
        self.updates_since_step += 1

    @torch.no_grad()
    def update(self, backward_pass: int | None = None) -> None:
        """Apply the gradients of one backward pass, or of all, if ranks do not share the table."""
        # Another pass may have failed and left its calls.
        calls = [call for call in self.calls if backward_pass in (None, call.backward_pass)]
        if not calls:
            return
        self.before_update()
        self.calls[:] = [
            call for call in self.calls if backward_pass not in (None, call.backward_pass)
        ]
        calls.sort(key=lambda call: call.number)
        gradient = torch.cat([call.gradient for call in calls if call.gradient is not None])
        rows = calls[0].rows if len(calls) == 1 else None
        if rows is None:
            for call in calls:
                call.let_go()  # The joined lookup replaces them.
            with torch.enable_grad():
                rows = self.rows_of(joined(calls, self.device))
        rows.backward(gradient)  # type: ignore[no-untyped-call]
        for call in calls:
            call.let_go()

    def gradient_norm(self, norm_type: float) -> Tensor:
        """Return the norm of the collected gradients, if ranks do not share the table: shape ()."""
        gradients = [call.gradient for call in self.calls if call.gradient is not None]
        none = torch.zeros(0, self.table.dim, device=self.device)
        batch = joined(self.calls, self.device)
        return gradient_norm(*by_lookup(batch, torch.cat([none, *gradients])), norm_type)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the collected gradients."""
        for call in self.calls:
            if call.gradient is not None:
                call.gradient = call.gradient * factor.to(call.gradient.device, call.gradient.dtype)
