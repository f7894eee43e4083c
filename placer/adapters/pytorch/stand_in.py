"""Modules that replace an `nn.Embedding` or `nn.EmbeddingBag` and look up placed tables."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer.adapters.pytorch.calls import Output, as_they_are, of_bags, of_rows, without
from placer.adapters.pytorch.models import EmbeddingModule
from placer.adapters.pytorch.table import PlacedTable
from placer.errors import DataError, PlanMismatchError
from placer.executor.embeddings import uncompiled
from placer.executor.lookups.batch_reads import mean_from_sum, segment_max
from placer.growing import KeyMap


class StandIn(nn.Module):
    """Looks up a placed table. It has no parameters for an optimizer or DDP.

    The module that it replaces is kept, without its weight, until the plan is removed.
    """

    original: EmbeddingModule
    """The replaced module. Its weight is empty, and calls of it fail."""

    def __init__(self, original: EmbeddingModule, table: PlacedTable) -> None:
        super().__init__()
        # Bypass `nn.Module`, which would make the original a submodule.
        self.__dict__["original"] = original
        self.table = table
        self.num_embeddings = original.num_embeddings
        self.embedding_dim = original.embedding_dim
        self.padding_idx = original.padding_idx
        self.training = original.training
        # Direct calls of the original raise and say why it is empty.
        original.forward = partial(_is_empty, table.name)  # type: ignore[method-assign]
        for name in list(vars(self)):  # Shared, so existing handles can still remove them.
            if "hook" in name:
                setattr(self, name, getattr(original, name))

    @property
    def weight(self) -> Tensor:
        """A copy of the whole weight, shape (rows, dim), on the table's device.

        Gradients flow through it to every row of the table. Writing to it does not change the
        table; use `load_state_dict`.
        """
        return self.table.all_rows().to(self.original.weight.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise PlanMismatchError(
                f"the weight of table {self.table.name!r} cannot be replaced, by assignment or "
                "functional_call, as a plan has placed its rows: overwrite them with "
                "load_state_dict, or call remove_plan first"
            )
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> "StandIn":
        """Freeze the table or train it again. A call on a parent module does not reach it."""
        self.original.weight.requires_grad_(requires_grad)  # For `remove_plan`.
        self.table.set_trainable(requires_grad)
        return self

    def extra_repr(self) -> str:
        """Return what `print(model)` shows for this module."""
        table = self.table
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, table={table.name!r}, "
            f"shards={len(table.plan.shards)}, optimizer={table.table.optimizer!r}, "
            f"backend={table.backend!r}, device={table.device}"
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        table = self.table
        if table.in_state_dict:
            for name, values in table.model_state().items():
                destination[f"{prefix}{name}"] = values
        if table.embeddings.rank == 0:  # Warn on one rank only.
            table.saves.model_saved(with_rows=table.in_state_dict, is_stateful=table.is_stateful)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *found: Any
    ) -> None:
        # Runs hooks; there is nothing of nn.Module's own to load.
        super()._load_from_state_dict(state_dict, prefix, metadata, False, *found)
        missing_keys, unexpected_keys, error_msgs = found
        key = f"{prefix}weight"
        names = {key: "weight"}
        if self.table.grows:
            names |= {f"{prefix}keys.{name}": f"keys.{name}" for name in KeyMap.STATE}
        if strict:
            unexpected_keys.extend(
                other for other in state_dict if other.startswith(prefix) and other not in names
            )
        missing = [other for other in names if other not in state_dict]
        if missing:  # Rows are useless without their keys.
            if self.table.in_state_dict:
                missing_keys.extend(missing)
            return
        # A state of another capacity has another number of rows.
        rows = (
            1 + len(state_dict[f"{prefix}keys.rows"]) if self.table.grows else self.num_embeddings
        )
        weight, shape = state_dict[key], (rows, self.embedding_dim)
        if tuple(weight.shape) != shape:
            error_msgs.append(
                f"size mismatch for {key}: {tuple(weight.shape)} in the checkpoint, {shape} in the "
                "model"
            )
            return
        self.table.load_model_state({name: state_dict[other] for other, name in names.items()})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StandIn":
        """Apply `model.to`, `.cuda` or `.half` to the table: move it, or refuse another type."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        dtype = self.original.weight.dtype
        after = fn(torch.empty(0, dtype=dtype, device=self.table.device))
        if after.dtype != dtype or after.device.type == "meta":
            raise PlanMismatchError(
                f"table {self.table.name!r} cannot become {after.dtype} on {after.device}: the "
                f"plan says {dtype}. Remove the plan first, or convert the rest of the model alone"
            )
        self.table.move(after.device)
        return self

    def _output(self, of_rows: Callable[[Tensor], Tensor], *shape: int) -> Output:
        """Return the output with the type of the original module and this shape."""
        dtype = self.original.weight.dtype
        shape = (*shape, self.embedding_dim)

        def made(rows: Tensor) -> Tensor:
            out = of_rows(rows).to(dtype)
            return out if out.shape == shape else out.view(shape)

        return Output(shape, dtype, made)


class PlacedEmbedding(StandIn):
    """Replaces an `nn.Embedding`."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids of any shape: shape (*ids, dim).

        Raises DataError if an id is no row of the table.
        """
        lookups, padding_idx = of_rows(input), self.padding_idx
        if padding_idx is None:
            return self.table.look_up(lookups, self._output(as_they_are, *input.shape))
        # As in torch, lookups read the padding row but do not train it. Read it even if no id is
        # padding: another rank may have padding, and all ranks must read it.
        padding, bags = self.table.row(padding_idx), lookups.batch_size
        kept = torch.nonzero(lookups.ids != padding_idx).squeeze(1).to(padding.device)

        def padded(rows: Tensor) -> Tensor:
            return padding.expand(bags, -1).index_put((kept,), rows)

        lookups = of_rows(without(lookups, padding_idx).ids)
        return self.table.look_up(lookups, self._output(padded, *input.shape))


class PlacedEmbeddingBag(StandIn):
    """Replaces an `nn.EmbeddingBag`."""

    def __init__(self, original: nn.EmbeddingBag, table: PlacedTable) -> None:
        super().__init__(original, table)
        self.mode = original.mode
        self.include_last_offset = original.include_last_offset

    @uncompiled
    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return pooled rows of each bag: shape (bags, dim).

        Raises DataError if an id is no row of the table, shapes do not fit together, or weights
        come with a mode other than sum.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise DataError(f"per_sample_weights go with mode 'sum', not with {self.mode!r}")
        lookups = of_bags(input, offsets, per_sample_weights, self.include_last_offset)
        if self.padding_idx is not None:
            lookups = without(lookups, self.padding_idx)
        offsets, bags = lookups.offsets, lookups.batch_size
        if self.mode == "max":
            lookups = of_rows(lookups.ids)  # Look up single rows and pool them below.

        def pooled(rows: Tensor) -> Tensor:
            if self.mode == "max":
                return segment_max(rows, offsets.to(rows.device))
            if self.mode == "mean":
                return mean_from_sum(rows, offsets.to(rows.device))
            return rows

        return self.table.look_up(lookups, self._output(pooled, bags))


def _is_empty(name: str, *_: Any, **__: Any) -> Tensor:
    raise PlanMismatchError(
        f"a plan has taken the weight of table {name!r} out of this module; call the one that "
        "stands in its place in the model, or remove the plan"
    )
