"""The autograd node that pools rows in forward, and updates them in backward."""

import functools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from placer.errors import PlacerError
from placer.executor.backends.backend import Backend
from placer.executor.backends.torch_kernels import SliceReads
from placer.executor.growing_keys import GrowingKeys, KeyStep
from placer.executor.lookups.steps import ArenaStep
from placer.executor.memory.arena import Arena
from placer.executor.optimizers import Rule
from placer.executor.streams import phase

if TYPE_CHECKING:
    from placer.executor.distributed.row_sums import RowTotals

_marked: deque[int] = deque(maxlen=256)
"""Autograd's ids of backward passes that started at a loss scaled by a `torch.amp.GradScaler`.

A scaler multiplies the loss by a factor, such as 65,536, and divides the gradients by it before the
optimizer's step. Rows of placed tables are updated earlier, in the backward pass, so their
gradients would be too large. Therefore scaled losses get a hook that marks their backward pass, and
the update refuses marked passes.
"""


def watch_scalers() -> None:
    """Patch all GradScaler classes, so that existing and new scalers mark scaled losses."""
    for kind in _with_subclasses(torch.amp.GradScaler):
        own = kind.__dict__.get("scale")
        if own is not None and not hasattr(own, "_is_watched"):
            kind.scale = _watched(own)


def refuse_scaled() -> None:
    """Raise PlacerError if the running backward pass started at a scaled loss."""
    if _marked and torch._C._current_graph_task_id() in _marked:
        raise PlacerError(
            "the loss was scaled by a GradScaler, and placed tables are updated within the "
            "backward pass, by gradients that it has not unscaled: train in bfloat16, which needs "
            "no scaler, or with GradScaler(enabled=False)"
        )


def _watched(scale: Any) -> Any:
    @functools.wraps(scale)
    def marking(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        for one in tree_leaves(scaled) if self.is_enabled() else ():
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(  # type: ignore[no-untyped-call]
                    lambda _: _marked.append(torch._C._current_graph_task_id())
                )
        return scaled

    marking._is_watched = True  # type: ignore[attr-defined]
    return marking


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    below: list[type[Any]] = kind.__subclasses__()
    return [kind, *(one for child in below for one in _with_subclasses(child))]


@dataclass(slots=True, eq=False)
class Runtime:
    """The memory, kernels and constants that steps use."""

    arenas: tuple[Arena, ...]
    backend: Backend
    # Constants of the optimizers; see `Rule`.
    eps: float
    betas: tuple[float, float]
    stochastic: bool
    # On the computing device, shape (): learning rate, float32, and number of updates, int64.
    lr: Tensor
    updates: Tensor
    keys: GrowingKeys  # Of tables that grow.
    whole_rows: "RowTotals | None" = None  # For tables with other columns in other processes.
    passes: int = 0  # Backward passes so far.

    def rule(self, arena: Arena) -> Rule:
        """Return an arena's optimizer with its current constants."""
        optimizer = arena.spec.key.optimizer
        return Rule(optimizer, self.lr, self.eps, self.updates, *self.betas, self.stochastic)


class FusedLookup(torch.autograd.Function):
    """Sum the rows of each segment of each arena; in backward, update the rows in place.

    Inputs are an anchor and the weights of the batch's lookups. The anchor requires a gradient, so
    that autograd runs the node; the tables' weights are no inputs. Outputs are one float32 tensor
    per segment, arena by arena.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        steps: Sequence[ArenaStep],
        runtime: Runtime,
        key_step: KeyStep | None,
    ) -> tuple[Tensor, ...]:
        ctx.steps, ctx.runtime, ctx.key_step = steps, runtime, key_step
        ctx.passes = runtime.passes
        # Backward refuses what the caller has changed since.
        ctx.save_for_backward(weights, *(step.reads.offsets for step in steps))
        outputs: list[Tensor] = []
        with phase("forward"):
            for arena, step in zip(runtime.arenas, steps, strict=True):
                pooled = runtime.backend.forward(arena, step, step.reads.spread(weights))
                bags = [part.bags[1] - part.bags[0] for part in step.reads.segments]
                # Autograd treats these as no views, so callers may modify one output in place.
                outputs += [part.data for part in torch.split_with_sizes(pooled, bags)]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_scaled()
        runtime: Runtime = ctx.runtime
        check_pass(ctx.steps is None, ctx.needs_input_grad[1] and ctx.passes < runtime.passes)
        weights: Tensor | None = ctx.saved_tensors[0]
        weight_gradients = None
        with phase("backward"):
            parts = iter(output_gradients)
            gradients = [
                runtime.backend.join(arena, [next(parts) for _ in step.reads.segments])
                for arena, step in zip(runtime.arenas, ctx.steps, strict=True)
            ]
            if weights is not None and ctx.needs_input_grad[1]:
                weight_gradients = _weight_gradients(runtime, ctx.steps, gradients, weights)
        with phase("update"):
            runtime.passes += 1
            runtime.updates.add_(1)
            update(runtime, ctx.steps, gradients, weights)
        runtime.backend.finish(ctx.steps)
        runtime.keys.end_step(ctx.key_step)
        # An output that the user keeps holds this node, but must not hold the step.
        ctx.steps = None
        return None, weight_gradients, None, None, None


def check_pass(has_run: bool, lacks_rows: bool) -> None:
    """Raise if a backward pass ran before, or if rows for the weights' gradients have changed."""
    if has_run:
        raise PlacerError(
            "a second backward pass through one forward pass: the first has updated its rows; "
            "look the batch up again"
        )
    if lacks_rows:
        raise PlacerError(
            "gradients of lookups' weights are of the rows as they were looked up, and another "
            "backward pass has updated them since: run the backward pass of a batch before the "
            "next forward pass, or join both batches to one"
        )


def _weight_gradients(
    runtime: Runtime, steps: Sequence[ArenaStep], gradients: Sequence[Tensor], weights: Tensor
) -> Tensor:
    result = torch.zeros_like(weights)
    for arena, step, gradient in zip(runtime.arenas, steps, gradients, strict=True):
        by_lookup = runtime.backend.weight_gradients(arena, step, gradient)
        for segment in step.reads.segments:
            result[slice(*segment.batch)] += by_lookup[slice(*segment.lookups)]
    return result


def update(
    runtime: Runtime,
    steps: Sequence[ArenaStep],
    gradients: Sequence[Tensor],
    weights: Tensor | None,
) -> None:
    """Update the rows of a step, arena by arena."""
    sliced: dict[str, dict[tuple[int, int], SliceReads]] = defaultdict(dict)
    for arena, step, gradient in zip(runtime.arenas, steps, gradients, strict=True):
        if not step.reads.lookups:
            continue
        spread = step.reads.spread(weights)
        rule = runtime.rule(arena)
        if not arena.spec.key.splits_rows:
            runtime.backend.update(arena, step, gradient, spread, rule)
            continue
        sources = runtime.backend.bags_of_lookups(step.reads)
        for segment in step.reads.segments:
            column_slices = sliced[segment.columns.table]
            reads = column_slices.setdefault(
                segment.columns.cols, SliceReads(arena, step, [], sources, gradient, spread, rule)
            )
            reads.lookups.append(slice(*segment.lookups))
    updates = {
        table: runtime.backend.sliced_update(list(column_slices.values()))
        for table, column_slices in sliced.items()
    }
    squares = {table: own for table, (_, own) in updates.items()}
    dims = {
        table: sum(stop - start for start, stop in column_slices)
        for table, column_slices in sliced.items()
    }
    if runtime.whole_rows is not None:
        squares = {**squares, **runtime.whole_rows.total(squares)}
        dims = {**dims, **runtime.whole_rows.dims}
    for table, (parts, _) in updates.items():
        mean_squares = squares[table] / dims[table]
        for arena, row_reads, rule in parts:
            runtime.backend.update_rows(arena.weights, arena.state, row_reads, rule, mean_squares)
