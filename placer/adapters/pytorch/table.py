"""One table of a model, placed: lookups now, one update when the backward pass ends.

A module may be called more than once in a forward pass, and Adagrad's update of a sum is not
the sum of its updates. So backward only collects the gradients of all calls, and what ends the
whole pass (the callback with which DDP, too, waits for its last gradient) applies them at once;
or an optimizer's step does, where gradients accumulate over several passes.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
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
    joined,
    of_each_lookup,
    of_rows,
    present_device,
)
from placer.adapters.pytorch.models import DrawnRows
from placer.adapters.pytorch.shared_tables import SharedTables, refuse_unshared
from placer.adapters.pytorch.watches import SaveWatch, watch_steps
from placer.errors import BackendError, DataError
from placer.executor import BagBatch, Embeddings, HitRates, make_embeddings
from placer.executor.optimizers.rule import check_constants
from placer.executor.scaled_gradients import refuse_scaled
from placer.executor.tensor_names import UPDATES
from placer.plan.plan import Plan
from placer.tables import OPTIMIZER_STATE

Weight = Tensor | DrawnRows
"""A table's weight in id order, or how it is drawn where there is none."""


class PlacedTable:
    """A table with its optimizer, which modules of a model look up.

    The plan is of this table alone, read by one feature that sums; `options` are those of
    `PlacedEmbeddings`. The weight is in id order; where ranks share the table, that of the first
    one counts. Copies and pickles carry the plan, the weights and the optimizer's state, and lay
    them out again.
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
        shared.tables[plan.tables[0].name] = self
        self.waits = False  # For an optimizer's step, rather than the end of a backward pass.
        self.in_state_dict = True  # Of the model; else whoever saves it has a place for the table.
        self.updates_since_step = 0
        self.guard: RemovableHandle | None = None  # Of the parameter that was emptied.
        self.lr: float = options["lr"]  # Before a schedule's share of it.
        self.eps: float = options["eps"]  # Added to √state.
        self.lr_share = 1.0
        self._options = options
        self.calls: list[Call] = []  # That have a gradient.
        self.open_calls = OpenCalls(self.calls)
        self.set_trainable(trainable)
        self.updates = 0  # So far, where ranks share it.
        self._numbers = itertools.count()
        self._frozen_rows: dict[int, Tensor] = {}
        self._trains_all_rows = False
        self.saves = SaveWatch(plan.tables[0].name)
        self._place(device, weight)
        watch_steps(self)

    def _place(self, device: torch.device, weight: Weight) -> None:
        (self.table,) = self.plan.tables
        self._frozen_rows.clear()
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
        return {**self._options, "lr": self.lr, "eps": self.eps}

    @property
    def embeddings(self) -> Embeddings:
        """What holds it; where ranks share it, all of them must ask in the same order."""
        return self.shared.of_table(self) if self._own is None else self._own

    @property
    def device(self) -> torch.device:
        """Where rows are pooled."""
        return self.shared.device if self._own is None else self._own.device

    @property
    def world(self) -> int:
        """How many ranks share it."""
        return self.shared.world if self._own is None else 1

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.name

    @property
    def backend(self) -> str:
        """Name of the backend; where ranks share the table, as it was passed in."""
        return str(self._options["backend"]) if self._own is None else self._own.backend

    @property
    def grows(self) -> bool:
        """Whether its ids are keys, which get rows as they are read."""
        return bool(self.plan.growing)

    @property
    def is_stateful(self) -> bool:
        """Whether its optimizer has a state."""
        has_state = bool(OPTIMIZER_STATE[self.table.optimizer])
        return has_state or self._options["rounding"] == "stochastic"

    def look_up(
        self, lookups: BagBatch, output: Output | None = None, are_rows: bool = False
    ) -> Tensor:
        """Sum of the rows of each bag, times their weights: float32, shape (bags, dim).

        `output` says what is made of that; `are_rows`, whether ids are rows of a table that may
        grow. Raises DataError if an id is no row of the table, and BackendError if there are
        several ranks by now, and this one has a table of its own.
        """
        weights, batch = lookups.weights, lookups.to(self.device)
        if batch.weights is not None:
            batch = replace(batch, weights=batch.weights.detach())
        if output is None:
            output = Output((lookups.batch_size, self.table.dim), torch.float32, as_they_are)
        trains = self.trainable and torch.is_grad_enabled()
        call = Call(self, next(self._numbers), batch, trains, output, has_keys=not are_rows)
        learns = self.trainable or (weights is not None and weights.requires_grad)
        if not (learns and torch.is_grad_enabled()):
            with torch.no_grad():
                if self._own is None:
                    return self.shared.look_up(call)
                self._find_rows(call, self._own)
                return output.of_rows(self.rows_of(call.batch))
        refuse_unshared(self.name, self.world)
        if self.calls and not self.waits and torch._C._current_graph_task_id() < 0:
            self.calls.clear()  # Left by a backward pass that failed.
        if self._own is not None:
            self._find_rows(call, self._own)
        if self._anchor.device != batch.ids.device:
            self._anchor = torch.zeros((), device=self.device, requires_grad=self.trainable)
        rows: Tensor = LookupNode.apply(self._anchor, weights, call)  # type: ignore[no-untyped-call]
        return rows if self._own is None else output.of_rows(rows)

    def _find_rows(self, call: Call, own: Embeddings) -> None:
        """Put rows in the place of a call's keys."""
        if not (own.keys.maps and call.has_keys):
            return
        open_before = self.open_calls.steps() if call.trains else None
        call.batch = own.keys.rows_of(call.batch, own.features, open_before, own.id_order)
        if call.trains:
            self.open_calls.add(call)

    def row(self, index: int) -> Tensor:
        """Return a row that no lookup trains, such as the padding: float32, shape (dim,)."""
        if self.grows:  # Zeros: all rows are other keys'.
            return torch.zeros(self.table.dim, dtype=torch.float32, device=self.device)
        if index not in self._frozen_rows or self._trains_all_rows:
            ids = torch.full((1,), index, device=self.device)
            output = Output((self.table.dim,), torch.float32, lambda rows: rows[0])
            with torch.no_grad():
                self._frozen_rows[index] = self.look_up(of_rows(ids), output, are_rows=True)
        return self._frozen_rows[index]

    def all_rows(self) -> Tensor:
        """Return the whole weight, shape (rows, dim); gradients flow to it as to a parameter."""
        self._trains_all_rows |= torch.is_grad_enabled()
        ids = torch.arange(self.table.rows, device=self.device)
        return self.look_up(of_rows(ids), are_rows=True)

    def weight(self) -> Tensor:
        """Return a copy of the weight in id order, on the host."""
        return self.model_state()["weight"]

    def model_state(self) -> dict[str, Tensor]:
        """A copy of the weight in id order, on the host, and of ``keys.*`` where it grows."""
        state = self.embeddings.state_dict()
        return {name.removeprefix(f"{self.name}."): values for name, values in state.items()}

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite what `model_state` gives."""
        self.weight_changes()
        own = {f"{self.name}.{name}": values.detach() for name, values in state.items()}
        self.embeddings.load_state_dict(own)

    def weight_changes(self) -> None:
        """To be called where rows are overwritten: what is known of them is forgotten."""
        self._frozen_rows.clear()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return state by ``<table>.<name>``, and ``<table>.updates``; see `PlacedEmbeddings`."""
        state = self.embeddings.optimizer_state_dict()
        if UPDATES in state:
            state[f"{self.name}.{UPDATES}"] = state.pop(UPDATES)
        return state

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this table's part of a state, also of one that `PlacedEmbeddings` gave."""
        keys = [f"{self.name}.{name}" for name in OPTIMIZER_STATE[self.table.optimizer]]
        own = {key: state[key] for key in keys if key in state}
        updates = state.get(f"{self.name}.{UPDATES}", state.get(UPDATES))
        if updates is not None:
            own[UPDATES] = updates
        self.embeddings.load_optimizer_state_dict(own)

    def hit_rates(self) -> HitRates | None:
        """Return how many lookups HBM served, where the backend has tiers and ranks share none."""
        return None if self._own is None else self._own.hit_rates()

    def set_trainable(self, trainable: bool) -> None:
        """Let lookups from now on train their rows, or leave these as they are."""
        self.trainable = trainable
        # What makes autograd walk a lookup; its own gradient is never there.
        self._anchor = torch.zeros((), requires_grad=trainable)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next update on."""
        check_constants(lr)
        self.lr = lr
        self.set_lr_share(self.lr_share)

    def set_lr_share(self, share: float) -> None:
        """Which part of the learning rate updates take from the next one on."""
        self.lr_share = share
        if self._own is not None:
            self._own.set_lr(self.lr_now)

    @property
    def lr_now(self) -> float:
        """Learning rate, times a schedule's share."""
        return self.lr * self.lr_share

    def set_eps(self, eps: float) -> None:
        """Change what is added to √state from the next update on."""
        self.eps = eps
        if self._own is not None:
            self._own.set_eps(eps)

    def move(self, device: torch.device) -> None:
        """Go to another device, with weights and state; with all tables that ranks share."""
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
            "shared": self.shared,
        }
        if (started := get_spawning_popen()) is not None:
            # That process opens the memory of these copies, which must be there until then.
            vars(started).setdefault("placed_tables", []).append(state)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        device, weight = present_device(state["device"]), state["model"]["weight"]
        self.__init__(  # type: ignore[misc]
            state["plan"], state["options"], device, weight, state["trainable"], state["shared"]
        )
        self.load_model_state(state["model"])
        self.load_optimizer_state(state["optimizer"])

    def rows_of(self, batch: BagBatch) -> Tensor:
        """Return what the executor gives for a batch, with its graph, in one process."""
        rows: Tensor = self.embeddings(batch)[self.name]
        return rows

    def collect(self, call: Call, gradient: Tensor) -> None:
        """Keep the gradient of a call until the table is updated."""
        refuse_scaled()  # What updates the rows is a backward pass of its own.
        if call.ended or call.gradient is not None:
            raise DataError(
                f"table {self.name!r}: a second backward pass through one forward; each updates "
                "the table, so run the forward again"
            )
        call.gradient = gradient
        if self.waits:
            call.let_go()  # As the update comes later, its step ends here, unused.
        elif self._own is None:
            self.shared.update_after_pass(self.name)
        elif not self.calls:
            torch.autograd.Variable._execution_engine.queue_callback(self.update)
        self.calls.append(call)

    def before_update(self) -> None:
        """To be called before its rows are updated."""
        self.saves.before_update()
        self.updates_since_step += 1

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients of all calls at once, where no other rank has some of them."""
        if not self.calls:
            return
        self.before_update()
        calls = sorted(self.calls, key=lambda call: call.number)
        self.calls.clear()
        gradient = torch.cat([call.gradient for call in calls if call.gradient is not None])
        rows, batch = calls[0].rows, joined(calls, self.device)
        if len(calls) > 1 or rows is None:
            rows = None
            for call in calls:
                call.let_go()  # With them end their steps, unused.
            with torch.enable_grad():
                rows = self.rows_of(batch)
        rows.backward(gradient)  # type: ignore[no-untyped-call]
        for call in calls:
            call.let_go()

    def squared_gradient_norm(self) -> Tensor:
        """Σ g² over all rows of what has been collected: float64, shape ().

        Raises BackendError if ranks share the table: the mean of their gradients is nowhere before
        the update.
        """
        if self.world > 1:
            raise BackendError(
                f"table {self.name!r} is shared by {self.world} ranks, which average "
                "gradients while they update: the norm is not known before. Clip the dense "
                "gradients alone, with torch.nn.utils.clip_grad_norm_"
            )
        gradients = [call.gradient for call in self.calls if call.gradient is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        batch = joined(self.calls, self.device)
        every = of_each_lookup(batch, torch.cat(gradients))
        if batch.weights is not None:
            every = every * batch.weights.unsqueeze(1)
        rows, places = torch.unique(batch.ids, return_inverse=True)
        sums = every.new_zeros((rows.numel(), every.shape[1])).index_add_(0, places, every)
        return sums.double().square().sum()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what has been collected."""
        for call in self.calls:
            if call.gradient is not None:
                call.gradient = call.gradient * factor.to(call.gradient.device, call.gradient.dtype)
