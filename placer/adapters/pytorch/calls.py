"""Describe calls of embedding modules: their bags, their outputs, and their gradients."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from placer.errors import BackendError, DataError, PlacerError
from placer.executor import BagBatch, ShardedEmbeddings
from placer.executor.embeddings import uncompiled
from placer.executor.lookups.bag_batch import joined_weights

if TYPE_CHECKING:
    from placer.adapters.pytorch.table import PlacedTable


def bags_of(ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> BagBatch:
    """Return the bags of one call, for one feature. Gradients flow to the weights."""
    return BagBatch(ids, offsets, offsets.numel() - 1, weights, (0, ids.numel()))


def without(batch: BagBatch, padding_idx: int) -> BagBatch:
    """Return the bags without lookups of an id. Waits for the device."""
    keep = batch.ids != padding_idx
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    weights = None if batch.weights is None else batch.weights[keep]
    return bags_of(batch.ids[keep], before[batch.offsets], weights)


def of_rows(ids: Tensor) -> BagBatch:
    """Return a bag for each id of a tensor of any shape."""
    flat = _checked(ids).reshape(-1)
    return bags_of(flat, torch.arange(flat.numel() + 1, device=flat.device))


def of_bags(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool
) -> BagBatch:
    """Return the bags of a call of `nn.EmbeddingBag`.

    Ids have shape (bags, length), or (lookups,) with offsets of shape (bags,), or (bags + 1,) if
    offsets include the last one. Weights have the shape of the ids.
    """
    _checked(ids)
    if weights is not None and weights.shape != ids.shape:
        raise DataError(
            f"per_sample_weights of shape {tuple(weights.shape)} for ids of shape "
            f"{tuple(ids.shape)}; they must be the same"
        )
    scales = None if weights is None else weights.reshape(-1).float()
    flat = ids.reshape(-1)
    if ids.dim() == 2:
        if offsets is not None:
            raise DataError("ids of shape (bags, length) are bags already; leave offsets out")
        bags, length = ids.shape
        return bags_of(flat, torch.arange(bags + 1, device=ids.device) * length, scales)
    if ids.dim() != 1 or offsets is None:
        raise DataError(
            f"ids of shape {tuple(ids.shape)} {'without' if offsets is None else 'with'} offsets; "
            "ids are (bags, length), or (lookups,) with offsets"
        )
    starts = _checked(offsets).to(flat.device).long()
    if include_last_offset:
        # The caller may fill them anew before the update, for which means and maxima need them.
        return bags_of(flat, starts.clone(), scales)
    # Fill in place: a tensor from a Python number would wait for its copy to the GPU.
    end = torch.full((1,), flat.numel(), dtype=torch.int64, device=flat.device)
    return bags_of(flat, torch.cat([starts, end]), scales)


def of_each_lookup(batch: BagBatch, of_bags: Tensor) -> Tensor:
    """Repeat each bag's value for each of its lookups: shape (lookups, …)."""
    bags = torch.arange(batch.batch_size, device=of_bags.device)
    return of_bags[bags.repeat_interleave(batch.offsets.diff(), output_size=batch.ids.numel())]


def by_lookup(batch: BagBatch, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each lookup, and its part of the gradient, shape (lookups, dim)."""
    every = of_each_lookup(batch, gradient)
    return batch.ids, every if batch.weights is None else every * batch.weights.unsqueeze(1)


def _checked(values: Tensor) -> Tensor:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise PlacerError(
            "placed tables cannot be called under vmap, grad and other transforms of torch.func, "
            "as their lookups are no pure functions; call remove_plan first"
        )
    if values.dtype not in (torch.int64, torch.int32):
        raise DataError(
            f"ids and offsets are int64 or int32, not {values.dtype}; use .to(torch.int64)"
        )
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The output that a module computes from the pooled rows of its bags."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Computes the output from float32 rows, shape (bags, dim), by differentiable operations.
    of_rows: Callable[[Tensor], Tensor]


def as_they_are(rows: Tensor) -> Tensor:
    """Return the rows unchanged, as `Output.of_rows` of a module that returns its pooled rows."""
    return rows


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """One call of a module."""

    table: "PlacedTable"
    number: int  # Place among the table's calls.
    batch: BagBatch  # The bags that it reads.
    trains: bool  # Whether its rows are updated.
    output: Output
    # If this is no call of a module: the calls whose bags it joins, in order.
    stands_for: "tuple[Call, ...]" = ()
    # The rows that it read, with the executor's graph, from its lookup until its gradient.
    rows: Tensor | None = None
    made: Tensor | None = None  # The module's output.
    step: "Step | None" = None  # Calls looked up with it, if ranks share the table.
    # Gradient of the rows; of the module's output if ranks share the table.
    gradient: Tensor | None = None
    backward_pass: int = -1  # Number of the pass that gave the gradient.
    ended: bool = False  # Whether it can no longer get a gradient.
    has_keys: bool = False  # Whether `batch` has keys of a table that grows, not rows.
    key_step: int = 0  # Step of the table's key map.
    trains_weights: bool = False  # Whether backward gives gradients to the weights of its lookups.

    def result(self) -> Tensor:
        """Return the module's output with its graph; look up the rows if they still wait."""
        if self.made is None:
            if self.rows is None:
                self.table.shared.flush()
            if self.rows is None:
                raise BackendError(
                    f"table {self.table.name!r}: the exchange in which its rows were looked up "
                    "failed; see the error before this one"
                )
            with torch.set_grad_enabled(self.trains), own_graph():
                self.made = self.output.of_rows(self.rows)
        return self.made

    def let_go(self) -> None:
        """Release the lookup without an update. Its rows may then move."""
        self.step, self.rows, self.ended = None, None, True
        self.made = None if self.made is None else self.made.detach()


def own_graph() -> saved_tensors_hooks:
    """Return a context in which autograd saves tensors without the hooks of the caller.

    Checkpointing would expect these saved tensors when it computes the caller's graph once more.
    """
    return saved_tensors_hooks(as_they_are, as_they_are)


class OpenCalls:
    """The training calls of a table that grows. Each call is one step of its key map.

    A call is open until its rows are updated, or until its output is gone, so that no gradient can
    come. Rows of open calls keep their keys. The calls in `collected` wait for the update.
    """

    def __init__(self, collected: list[Call]) -> None:
        self._collected = collected
        # By step, the oldest first.
        self._calls: WeakValueDictionary[int, Call] = WeakValueDictionary()
        self._steps = 0

    def steps(self) -> int:
        """Return the number of steps since the first open call, that call included."""
        while oldest := next(iter(self._calls.items()), None):
            step, call = oldest
            if not call.ended or call in self._collected:
                return self._steps - step + 1
            del self._calls[step]
        return 0

    def add(self, call: Call) -> None:
        """Begin a step of the key map with a call."""
        self._steps += 1
        call.key_step = self._steps
        self._calls[self._steps] = call


class LookupNode(torch.autograd.Function):
    """Returns the rows of a call, or its output if ranks share the table.

    Backward gives the gradient to the table, which is updated later.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, call: Call) -> Tensor:
        table, ctx.call = call.table, call
        ctx.save_for_backward(call.batch.ids, call.batch.weights)
        ctx.device = None if weights is None else weights.device
        if table.shared.world > 1:
            return table.shared.look_up(call)
        if not call.trains:
            return table.rows_of(call.batch)
        # A separate graph, which the update runs backward when this backward pass ends.
        with torch.enable_grad(), own_graph():
            call.rows = table.rows_of(call.batch)
        return call.rows.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, call = None, ctx.call
        is_again = call.ended or call.gradient is not None
        # While the table waits for its update, gradients of several losses add up.
        if call.trains and is_again and not (call.table.waits and call in call.table.calls):
            raise DataError(
                f"table {call.table.name!r}: a second backward pass through one forward; each "
                "updates the table, so run the forward again"
            )
        _ = ctx.saved_tensors  # Raises if they were changed since, as torch's lookups do.
        if ctx.needs_input_grad[1]:
            of_rows = gradient.float()
            weights = _weight_gradients(call.table, call.batch, of_rows).to(ctx.device)
        if call.trains:
            call.table.collect(call, gradient)
        return None, weights, None


def _weight_gradients(table: "PlacedTable", batch: BagBatch, gradient: Tensor) -> Tensor:
    """Return each lookup weight's gradient, its row · its bag's gradient: shape (lookups,)."""
    with torch.no_grad():
        rows = table.look_up(of_rows(batch.ids), are_rows=True)
    return (rows * of_each_lookup(batch, gradient)).sum(1)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Calls that were looked up together, with the same constants and number of updates."""

    embeddings: ShardedEmbeddings  # Holds the called tables, each once.
    calls: tuple[Call, ...]
    lr: float
    eps: float
    updates: int

    def set_constants(self) -> None:
        """Set the embeddings' constants and number of updates to those of these tables."""
        self.embeddings.set_lr(self.lr)
        self.embeddings.set_eps(self.eps)
        if self.embeddings.counts_updates:
            self.embeddings.set_update_count(self.updates)

    def is_complete(self) -> bool:
        """Return whether each table has just one gradient, from its call in this step."""
        return all(
            call.step is self
            and call.gradient is not None
            and call.table.calls == [call]
            and (call.table.lr_now, call.table.eps) == (self.lr, self.eps)
            and call.table.updates == self.updates
            for call in self.calls
        )


def joined(calls: Sequence[Call], device: torch.device) -> BagBatch:
    """Return the bags of several calls of a table as one batch, in order."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    batches, offsets, base = [call.batch for call in calls], [none], 0
    for batch in batches:
        offsets.append(batch.offsets[:-1] + base)
        base += batch.ids.numel()
    offsets.append(torch.full((1,), base, device=device))
    ids, bags = [batch.ids.long() for batch in batches], sum(batch.batch_size for batch in batches)
    weights = joined_weights(ids, [batch.weights for batch in batches])
    return BagBatch(torch.cat([none, *ids]), torch.cat(offsets), bags, weights, (0, base))


def present_device(name: str) -> torch.device:
    """Return a device by name, or the CPU if it is a GPU and this machine has none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return device


_KNOWN_BEFORE = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size"}
    | {"is_floating_point", "is_complex", "get_device", "register_hook", "retain_grad"}
)
"""Methods that do not need a tensor's values."""

_VIEWS = frozenset(["T", "mT", "H", "mH", "data", "real", "imag"])
"""Attributes that need a tensor's values."""

_OF_MEMORY = frozenset(
    {"tolist", "numpy", "data_ptr", "storage", "untyped_storage", "__array__", "__dlpack__"}
    | {"__deepcopy__", "__reduce_ex__"}
)
"""Methods that need a tensor with memory of its own."""


class Later(Tensor):
    """The output of a module whose rows are looked up when an operation needs its values.

    By then, other modules have been called, and one exchange between ranks serves all their calls.
    Its shape and type are known before. Operations on it return ordinary tensors.
    """

    call: Call

    @staticmethod
    def of(call: Call) -> "Later":
        """Return the output of a waiting call."""
        output, device = call.output, call.table.device
        later: Later = Tensor._make_wrapper_subclass(
            Later, output.shape, dtype=output.dtype, device=device
        )
        later.call = call
        return later

    @classmethod
    @uncompiled  # Otherwise, the compiler traces the exchange with other ranks.
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "__get__":
            is_seen = getattr(func.__self__, "__name__", "") in _VIEWS
        else:
            is_seen = name not in _KNOWN_BEFORE
        with torch._C.DisableTorchFunctionSubclass():
            if is_seen:  # `__torch_dispatch__` would be too late for autograd.
                tree_map_only(Later, lambda later: later.call.result(), (args, kwargs))
            if name in _OF_MEMORY:
                args, kwargs = tree_map_only(Later, torch.ops.aten.alias.default, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain, options = tree_map_only(Later, _values, (args, kwargs or {}))
        out = func(*plain, **options)
        return args[0] if func._schema.is_mutable else out


def _values(later: Later) -> Tensor:
    call = later.call
    if call.made is None:  # C++ extensions bypass `__torch_function__`.
        thread = threading.Thread(target=call.result)
        thread.start()
        thread.join()
    return call.result().detach()
