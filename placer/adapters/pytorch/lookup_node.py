"""The autograd node of a call: rows forward, and their gradient to the table backward."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from placer.adapters.pytorch.calls import Call
from placer.adapters.pytorch.lookups import Lookups
from placer.executor import BagBatch

if TYPE_CHECKING:
    from placer.adapters.pytorch.table import PlacedTable


class LookupNode(torch.autograd.Function):
    """Rows of one call, or its output where ranks share the table.

    Backward hands their gradient to the table, which updates later.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, call: Call) -> Tensor:
        table, ctx.call = call.table, call
        ctx.device = None if weights is None else weights.device
        if table.world > 1:
            return table.shared.look_up(call)
        if not call.trains:
            return table.rows_of(call.batch)
        # A graph of its own, which ends here and is walked when this pass has ended.
        with torch.enable_grad():
            call.rows = table.rows_of(call.batch)
        return call.rows.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, call = None, ctx.call
        if ctx.needs_input_grad[1]:
            of_rows = gradient.float()
            weights = _weight_gradients(call.table, call.batch, of_rows).to(ctx.device)
        if call.trains:
            call.table.collect(call, gradient)
        return None, weights, None


def _weight_gradients(table: "PlacedTable", batch: BagBatch, gradient: Tensor) -> Tensor:
    """Of each lookup's weight its row · its bag's gradient: shape (lookups,)."""
    lookups = Lookups(batch.ids, batch.offsets).single()
    with torch.no_grad():
        rows = table.look_up(lookups)
    bags = torch.arange(batch.batch_size, device=gradient.device)
    source = bags.repeat_interleave(batch.offsets.diff(), output_size=batch.ids.numel())
    return (rows * gradient[source]).sum(1)
