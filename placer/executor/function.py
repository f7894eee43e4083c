"""The autograd node: rows forward, gradients and the fused update backward."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from placer.executor.arena import Arena
from placer.executor.backends._base import Backend, sources_of
from placer.executor.rule import Rule, apply_rule, row_sums, runs
from placer.executor.step import ArenaStep


@dataclass(slots=True, eq=False)
class Runtime:
    """What a step works on; `lr` may change between steps."""

    arenas: tuple[Arena, ...]
    backend: Backend
    lr: float
    eps: float

    def rule(self, arena: Arena) -> Rule:
        """The optimizer of an arena as it stands."""
        return Rule(arena.spec.key.optimizer, self.lr, self.eps)


class FusedLookup(torch.autograd.Function):
    """Sums of rows of each segment of each arena; backward updates the rows in place.

    Inputs are an anchor that requires a gradient, without which autograd would skip the
    node (the weights are no inputs of it), and the weights of the batch's lookups. Outputs
    are one float32 tensor a segment, arena by arena.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        steps: Sequence[ArenaStep],
        runtime: Runtime,
    ) -> tuple[Tensor, ...]:
        ctx.steps, ctx.runtime = steps, runtime
        ctx.save_for_backward(*(() if weights is None else (weights,)))
        outputs: list[Tensor] = []
        for arena, step in zip(runtime.arenas, steps, strict=True):
            pooled = runtime.backend.forward(arena, step, step.spread(weights))
            outputs.extend(_own_tensor(pooled, *segment.bags) for segment in step.segments)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        runtime: Runtime = ctx.runtime
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        weights = saved[0] if saved else None
        gradients: list[Tensor] = []
        taken = 0
        for arena, step in zip(runtime.arenas, ctx.steps, strict=True):
            parts = output_gradients[taken : taken + len(step.segments)]
            taken += len(parts)
            gradients.append(runtime.backend.join(arena, step, parts))
        weight_gradients = None
        if weights is not None and ctx.needs_input_grad[1]:
            weight_gradients = _weight_gradients(runtime, ctx.steps, gradients, weights)
        _update(runtime, ctx.steps, gradients, weights)
        return None, weight_gradients, None, None


def _own_tensor(pooled: Tensor, start: int, stop: int) -> Tensor:
    """Rows `start..stop` as a tensor that autograd does not take for a view of its siblings.

    So callers may modify an output in place, as they may any module's.
    """
    width = pooled.shape[1]
    return torch.empty(0, dtype=pooled.dtype, device=pooled.device).set_(
        pooled.untyped_storage(),
        pooled.storage_offset() + start * width,
        (stop - start, width),
        (width, 1),
    )


def _weight_gradients(
    runtime: Runtime, steps: Sequence[ArenaStep], gradients: Sequence[Tensor], weights: Tensor
) -> Tensor:
    result = torch.zeros_like(weights)
    for arena, step, gradient in zip(runtime.arenas, steps, gradients, strict=True):
        by_lookup = runtime.backend.weight_gradients(arena, step, gradient)
        for segment in step.segments:
            result[slice(*segment.batch)] += by_lookup[slice(*segment.lookups)]
    return result


def _update(
    runtime: Runtime,
    steps: Sequence[ArenaStep],
    gradients: Sequence[Tensor],
    weights: Tensor | None,
) -> None:
    cut: dict[str, dict[tuple[int, int], list[_StripReads]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for arena, step, gradient in zip(runtime.arenas, steps, gradients, strict=True):
        if not step.slots.numel():
            continue
        spread = step.spread(weights)
        if not arena.spec.key.row_cut:
            runtime.backend.update(arena, step, gradient, spread, runtime.rule(arena))
            continue
        sources = sources_of(step)
        for segment in step.segments:
            reads = slice(*segment.lookups)
            cut[segment.strip.table][segment.strip.cols].append(
                _StripReads(
                    arena,
                    step.slots[reads],
                    sources[reads],
                    gradient,
                    None if spread is None else spread[reads],
                )
            )
    for strips in cut.values():
        _update_cut_table(runtime, list(strips.values()))


@dataclass(frozen=True, slots=True, eq=False)
class _StripReads:
    """One feature's lookups in one strip of a table that is cut by columns."""

    arena: Arena
    slots: Tensor
    sources: Tensor
    gradients: Tensor
    weights: Tensor | None


def _update_cut_table(runtime: Runtime, strips: list[list[_StripReads]]) -> None:
    """Row-wise Adagrad of a table whose rows are spread over several strips.

    The state grows by mean(g²) over the whole row, so all strips are summed before one is
    updated. The same lookups read every strip, hence the order found for one serves all.
    """
    order, _, starts = runs(torch.cat([reads.slots for reads in strips[0]]))
    sums = []
    for strip in strips:
        sources = torch.cat([reads.sources for reads in strip])[order]
        weights = None
        if strip[0].weights is not None:
            weights = torch.cat([reads.weights for reads in strip if reads.weights is not None])
            weights = weights[order]
        sums.append(row_sums(strip[0].gradients, sources, weights, starts))
    dim = sum(part.shape[1] for part in sums)
    squares = torch.stack([(part * part).sum(1) for part in sums]).sum(0)
    for strip, part in zip(strips, sums, strict=True):
        arena = strip[0].arena
        slots = torch.cat([reads.slots for reads in strip])[order][starts]
        apply_rule(runtime.rule(arena), arena, slots, part, squares / dim)
