"""One table of a model, placed: lookups now, one update when the backward pass ends.

A module may be called more than once in a forward pass, and Adagrad's update of a sum is not
the sum of its updates. So backward only collects the gradients of all calls, and what ends the
whole pass (the callback with which DDP, too, waits for its last gradient) applies them at once;
or an optimizer's step does, where gradients accumulate over several passes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from placer.adapters.pytorch.lookups import Lookups
from placer.adapters.pytorch.options import Options
from placer.adapters.pytorch.ranks import refuse_unshared
from placer.adapters.pytorch.row_gradients import squared_norm
from placer.adapters.pytorch.saving import SaveWatch
from placer.adapters.pytorch.steps import watch_steps
from placer.errors import BackendError, DataError
from placer.executor import BagBatch, HitRates, make_embeddings
from placer.executor.optimizers.rule import check_constants
from placer.executor.scaled_gradients import refuse_scaled
from placer.executor.tensor_names import UPDATES
from placer.plan.plan import Plan
from placer.tables import OPTIMIZER_STATE, OptimizerName


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module: what it read, with the executor's graph, until it has a gradient."""

    number: int
    batch: BagBatch
    rows: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    """A call, and the gradient of its rows; without graph where it has to be made anew."""

    number: int
    batch: BagBatch
    rows: Tensor | None
    gradient: Tensor


class PlacedTable:
    """A table with its optimizer, which modules of a model look up.

    Copies and pickles carry the plan, the weights and the optimizer's state, and lay them out
    anew.

    Parameters
    ----------
    plan : Plan
        Of this table alone, read by one feature that sums.
    options : Options
    device : torch.device
        Where rows are pooled.
    weight : shape (rows, dim)
        In id order.
    trainable : bool
        Whether backward updates it.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        device: torch.device,
        weight: Tensor,
        trainable: bool = True,
    ) -> None:
        self.plan, self.trainable = plan, trainable
        self.waits = False  # For an optimizer's step, rather than the end of a backward pass.
        self.in_state_dict = True  # Of the model; else whoever saves it has a place for the table.
        self.updates_since_step = 0
        self.guard: RemovableHandle | None = None  # Of the parameter that was emptied.
        self._options = options
        self._calls: list[_Gradient] = []
        self._numbers = itertools.count()
        self._frozen_rows: dict[int, Tensor] = {}
        self._trains_all_rows = False
        self._lr_share = 1.0
        self.saves = SaveWatch(plan.tables[0].name)
        self._place(device, weight)
        if trainable:
            watch_steps(self)

    def _place(self, device: torch.device, weight: Tensor) -> None:
        (self.table,) = self.plan.tables
        self._frozen_rows.clear()
        self.device = device
        self.embeddings = make_embeddings(
            self.plan, device=device, weights={self.name: weight}, **self._options.arguments()
        )
        self.embeddings.set_lr(self.lr * self._lr_share)

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.name

    @property
    def backend(self) -> str:
        """Name of the backend; where ranks share the table, as it was passed in."""
        return self.embeddings.backend if self.embeddings.world == 1 else self._options.backend

    @property
    def optimizer(self) -> OptimizerName:
        """What updates it."""
        return self.table.optimizer

    @property
    def is_stateful(self) -> bool:
        """Whether its optimizer has a state."""
        return bool(OPTIMIZER_STATE[self.optimizer]) or self.embeddings.counts_updates

    def look_up(self, lookups: Lookups) -> Tensor:
        """Sum of the rows of each bag, times their weights: float32, shape (bags, dim).

        Raises
        ------
        DataError
            If an id is no row of the table.
        BackendError
            If there are several ranks by now, and this one has a table of its own.
        """
        weights = lookups.weights
        ids, offsets = lookups.ids, lookups.offsets
        scales = None if weights is None else weights.detach().to(self.device)
        batch = BagBatch(ids, offsets, lookups.bags, scales, (0, ids.numel())).to(self.device)
        learns = self.trainable or (weights is not None and weights.requires_grad)
        if not (learns and torch.is_grad_enabled()):
            with torch.no_grad():
                return self._rows(batch)
        refuse_unshared(self.name, self.embeddings.world)
        if self._calls and not self.waits and torch._C._current_graph_task_id() < 0:
            self._calls.clear()  # Left by a backward pass that failed.
        anchor = torch.zeros((), device=self.device, requires_grad=self.trainable)
        rows: Tensor = _Lookup.apply(anchor, weights, self, batch)  # type: ignore[no-untyped-call]
        return rows

    def row(self, index: int) -> Tensor:
        """A row that no lookup trains, such as the padding: float32, shape (dim,)."""
        if index not in self._frozen_rows or self._trains_all_rows:
            ids = torch.full((1,), index, device=self.device)
            with torch.no_grad():
                batch = BagBatch(ids, torch.arange(2, device=self.device), 1, None, (0, 1))
                self._frozen_rows[index] = self._rows(batch)[0]
        return self._frozen_rows[index]

    def all_rows(self) -> Tensor:
        """The whole weight, shape (rows, dim); gradients flow to it as to a parameter."""
        self._trains_all_rows |= torch.is_grad_enabled()
        ids = torch.arange(self.table.rows, device=self.device)
        return self.look_up(Lookups(ids, torch.arange(ids.numel() + 1, device=self.device)))

    def weight(self) -> Tensor:
        """A copy of the weight in id order, on the host."""
        weight: Tensor = self.embeddings.state_dict()[f"{self.name}.weight"]
        return weight

    def load_weight(self, weight: Tensor) -> None:
        """Overwrite the weight."""
        self.weight_changes()
        self.embeddings.load_state_dict({f"{self.name}.weight": weight.detach()})

    def weight_changes(self) -> None:
        """To be called where rows are overwritten: what is known of them is forgotten."""
        self._frozen_rows.clear()

    def optimizer_state(self) -> dict[str, Tensor]:
        """State by ``<table>.<name>``, and ``<table>.updates``; see `PlacedEmbeddings`."""
        state = self.embeddings.optimizer_state_dict()
        if UPDATES in state:
            state[f"{self.name}.{UPDATES}"] = state.pop(UPDATES)
        return state

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this table's part of a state, also of one that `PlacedEmbeddings` gave.

        Raises
        ------
        CheckpointError
            If it lacks the table's state, or has it in another shape.
        """
        keys = [f"{self.name}.{name}" for name in OPTIMIZER_STATE[self.optimizer]]
        own = {key: state[key] for key in keys if key in state}
        updates = state.get(f"{self.name}.{UPDATES}", state.get(UPDATES))
        if updates is not None:
            own[UPDATES] = updates
        self.embeddings.load_optimizer_state_dict(own)

    def hit_rates(self) -> HitRates | None:
        """How many lookups HBM served, where the backend has tiers and no ranks share them."""
        return self.embeddings.hit_rates() if self.embeddings.world == 1 else None

    def close(self) -> None:
        """Let go of connections to other ranks."""
        self.embeddings.close()

    @property
    def lr(self) -> float:
        """Learning rate, before a schedule's share of it."""
        return self._options.lr

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next update on."""
        check_constants(lr)
        self._options = replace(self._options, lr=lr)
        self.embeddings.set_lr(lr * self._lr_share)

    @property
    def eps(self) -> float:
        """What is added to √state."""
        return self._options.eps

    @property
    def says_eps(self) -> bool:
        """Whether a checkpoint must say it."""
        return self.optimizer != "sgd" and self.eps != self._options.unsaid_eps

    def restore_eps(self, saved: float | None) -> None:
        """Go on with the eps of a checkpoint; None is of one that does not say it."""
        eps = self._options.unsaid_eps if saved is None else saved
        self.embeddings.set_eps(eps)
        self._options = replace(self._options, eps=eps)

    def set_lr_share(self, share: float) -> None:
        """Which part of the learning rate updates take from the next one on."""
        if share != self._lr_share:
            self._lr_share = share
            self.embeddings.set_lr(self.lr * share)

    def move(self, device: torch.device) -> None:
        """Go to another device, with weights and state."""
        if device != self.device:
            state, weight = self.optimizer_state(), self.weight()
            self.close()
            self._place(device, weight)
            self.load_optimizer_state(state)

    def __getstate__(self) -> dict[str, Any]:
        self.saves.all_saved()
        return {
            "plan": self.plan,
            "options": asdict(self._options),
            "device": str(self.device),
            "weight": self.weight(),
            "optimizer": self.optimizer_state(),
            "trainable": self.trainable,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        device = torch.device(state["device"])
        if device.type == "cuda" and not torch.cuda.is_available():
            device = torch.device("cpu")  # The tensors were saved from the host.
        options = Options(**state["options"])
        self.__init__(  # type: ignore[misc]
            state["plan"], options, device, state["weight"], state["trainable"]
        )
        self.load_optimizer_state(state["optimizer"])

    def _rows(self, batch: BagBatch) -> Tensor:
        rows: Tensor = self.embeddings(batch)[self.name]
        return rows

    def _collect(self, call: _Call, gradient: Tensor) -> None:
        refuse_scaled()  # What updates the rows is a backward pass of its own.
        if call.rows is None:
            raise DataError(
                f"table {self.name!r}: a second backward pass through one forward; each updates "
                "the table, so run the forward again"
            )
        # Where the update comes later, the step ends here, unused, and its rows may move.
        rows = None if self.waits else call.rows
        call.rows = None
        if not self.waits and not self._calls:
            torch.autograd.Variable._execution_engine.queue_callback(self.update)
        self._calls.append(_Gradient(call.number, call.batch, rows, gradient))

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients of all calls at once."""
        if not self._calls:
            return
        self.saves.before_update()
        self.updates_since_step += 1
        calls, self._calls = sorted(self._calls, key=lambda call: call.number), []
        gradient = torch.cat([call.gradient for call in calls])
        batches, rows = [call.batch for call in calls], calls[0].rows
        if len(calls) > 1 or rows is None:
            rows = None
            calls.clear()  # With them end their steps, unused.
            with torch.enable_grad():
                rows = self._rows(_joined(batches))
        rows.backward(gradient)  # type: ignore[no-untyped-call]

    def drop_gradients(self) -> None:
        """Forget what backward passes have collected."""
        self._calls.clear()

    def squared_gradient_norm(self) -> Tensor:
        """Σ g² over all rows of what has been collected: float64, shape ().

        Raises
        ------
        BackendError
            If ranks share the table: the mean of their gradients is nowhere before the update.
        """
        if self.embeddings.world > 1:
            raise BackendError(
                f"table {self.name!r} is shared by {self.embeddings.world} ranks, which average "
                "gradients while they update: the norm is not known before. Clip the dense "
                "gradients alone, with torch.nn.utils.clip_grad_norm_"
            )
        return squared_norm([(call.batch, call.gradient) for call in self._calls])

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what has been collected."""
        for index, call in enumerate(self._calls):
            gradient = call.gradient
            by = factor.to(gradient.device, gradient.dtype)
            self._calls[index] = replace(call, gradient=gradient * by)


class _Lookup(torch.autograd.Function):
    """Rows of one call; backward hands their gradient to the table, which updates later."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, table: PlacedTable, batch: BagBatch
    ) -> Tensor:
        ctx.table, ctx.call, ctx.batch = table, None, batch
        ctx.device = None if weights is None else weights.device
        if not table.trainable:
            return table._rows(batch)
        # A graph of its own, which ends here and is walked when this pass has ended.
        with torch.enable_grad():
            rows = table._rows(batch)
        ctx.call = _Call(next(table._numbers), batch, rows)
        return rows.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights = None
        if ctx.needs_input_grad[1]:
            weights = _weight_gradients(ctx.table, ctx.batch, gradient).to(ctx.device)
        if ctx.call is not None:
            ctx.table._collect(ctx.call, gradient)
        return None, weights, None, None


def _weight_gradients(table: PlacedTable, batch: BagBatch, gradient: Tensor) -> Tensor:
    """Of each lookup's weight its row · its bag's gradient: shape (lookups,)."""
    lookups = Lookups(batch.ids, batch.offsets).single()
    with torch.no_grad():
        rows = table.look_up(lookups)
    bags = torch.arange(batch.batch_size, device=gradient.device)
    source = bags.repeat_interleave(batch.offsets.diff(), output_size=batch.ids.numel())
    return (rows * gradient[source]).sum(1)


def _joined(batches: Sequence[BagBatch]) -> BagBatch:
    """All bags of several calls, one after the other."""
    ids, offsets, base = [], [], 0
    for batch in batches:
        ids.append(batch.ids.long())
        offsets.append(batch.offsets[:-1] + base)
        base += batch.ids.numel()
    offsets.append(torch.full((1,), base, device=ids[0].device))
    weights = None
    if any(batch.weights is not None for batch in batches):
        weights = torch.cat(
            [
                torch.ones(batch.ids.numel(), device=ids[0].device)
                if batch.weights is None
                else batch.weights
                for batch in batches
            ]
        )
    bags = sum(batch.batch_size for batch in batches)
    return BagBatch(torch.cat(ids), torch.cat(offsets), bags, weights, (0, base))
