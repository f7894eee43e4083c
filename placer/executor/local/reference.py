"""The unplaced model: the same lookups in plain PyTorch, for comparison."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import check_ids, feature_reads, ready_to_read
from placer.executor.memory.arena import initial_weights
from placer.tables import OptimizerName, Table


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one state per row: ``state += mean(g²)``, ``w −= lr · g / (√state + eps)``.

    Takes matrices with dense or sparse gradients. Rows without a gradient stay unchanged.
    Gupta et al. 2014, "Training highly multiclass classifiers", JMLR 15.
    """

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                # Half-precision weights keep float32 state, float64 weights float64.
                dtype = torch.promote_types(weight.dtype, torch.float32)
                self.state[weight]["sum"] = torch.zeros(
                    weight.shape[0], dtype=dtype, device=weight.device
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all rows that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group["lr"], group["eps"])
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, lr: float, eps: float) -> None:
        total = self.state[weight]["sum"]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values().to(total.dtype)
        else:
            rows, values = torch.arange(weight.shape[0]), gradient.to(total.dtype)
        state = total[rows] + values.square().mean(1)
        total[rows] = state
        step = values / (state.sqrt() + eps).unsqueeze(1)
        weight[rows] = (weight[rows].to(total.dtype) - lr * step).to(weight.dtype)


class UnplacedEmbeddings(nn.Module):
    """Tables as plain parameters, read by `embedding_bag`; `PlacedEmbeddings` must equal them.

    It takes the same batches, returns the same outputs, and draws the same weights from a seed.
    Its optimizers are PyTorch's own and `RowWiseAdagrad`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        padding_idx: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.tables = tuple(tables)
        self._features = feature_reads(self.tables, padding_idx or {})
        self._index = {table.name: index for index, table in enumerate(self.tables)}
        parameters = []
        for table in self.tables:
            values = None if weights is None else weights.get(table.name)
            if values is None:
                chunks = [chunk for _, chunk in initial_weights(table, seed)]
                values = torch.cat(chunks) if chunks else torch.empty(0, table.dim)
                values = values.to(getattr(torch, table.dtype))
            parameters.append(nn.Parameter(values.detach().clone()))
        self.weights = nn.ParameterList(parameters)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the tables' features, in order."""
        return tuple(feature.name for feature in self._features)

    def table_weights(self) -> dict[str, Tensor]:
        """Return weights by table name."""
        return {
            table.name: weight.detach()
            for table, weight in zip(self.tables, self.weights, strict=True)
        }

    def optimizers(
        self,
        *,
        lr: float = 0.01,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        optimizer: OptimizerName | None = None,
    ) -> list[torch.optim.Optimizer]:
        """Return optimizers for all tables: each table's own kind, or `optimizer` for all."""
        groups: dict[str, list[nn.Parameter]] = {}
        for table, weight in zip(self.tables, self.weights, strict=True):
            groups.setdefault(optimizer or table.optimizer, []).append(weight)
        makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
            "sgd": lambda weights: torch.optim.SGD(weights, lr=lr),
            "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=lr, eps=eps),
            "rowwise_adagrad": lambda weights: RowWiseAdagrad(weights, lr=lr, eps=eps),
            "adam": lambda weights: torch.optim.SparseAdam(weights, lr=lr, betas=betas, eps=eps),
        }
        return [makers[name](weights) for name, weights in groups.items()]

    def forward(self, batch: BagBatch) -> dict[str, Tensor]:
        """Return pooled rows by feature; see `PlacedEmbeddings.forward`."""
        batch, bags = ready_to_read(batch, self._features, batch.ids.device)
        results = {}
        for index, feature in enumerate(self._features):
            start, stop = bags.spans[index]
            weight = self.weights[self._index[feature.table]]
            ids = batch.ids[start:stop]
            check_ids(ids, feature)
            scale = None if batch.weights is None else batch.weights[start:stop]
            if feature.pooling in ("sum", "mean"):
                rows = _bag_sums(ids, weight, bags.offsets_of(index) - start, scale)
            else:
                rows = nn.functional.embedding(ids, weight, sparse=True).float()
                rows = rows if scale is None else rows * scale.unsqueeze(1)
            results[feature.name] = bags.output(index, feature, rows)
        return results


def _bag_sums(ids: Tensor, weight: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    is_narrow = weight.dtype != torch.float32
    if is_narrow:
        weight = nn.functional.embedding(ids, weight, sparse=True).float()
        ids = torch.arange(ids.numel())
    return nn.functional.embedding_bag(
        ids.long(),
        weight,
        offsets,
        mode="sum",
        sparse=not is_narrow,
        per_sample_weights=scale,
        include_last_offset=True,
    )
