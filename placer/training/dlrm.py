"""The bundled model: DLRM (Naumov et al. 2019, arXiv:1906.00091)."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from placer.errors import ProblemError
from placer.training.config import Activation

_ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class Dlrm(nn.Module):
    """Bottom MLP over the dense columns, dot interaction with the embeddings, top MLP.

    With x the bottom MLP's output and e_f the pooled embedding of feature f, the logit is
    ``top([x, ⟨u, v⟩ for all pairs u ≠ v of x, e_1, …, e_F])``. The embeddings themselves are not
    part of this module, so that it trains alike on placed and on unplaced ones.

    `feature_dims` are the widths of the features' pooled embeddings, in the model's order. Tables
    narrower or wider than the model's `dim`, by default the widest table's, are projected to it by
    a linear map without bias, as in mixed dimension embeddings (Ginart et al. 2019,
    arXiv:1909.11810). Without dense columns, x is a learned vector: the bottom MLP of nothing is
    its bias.

    `bottom` and `top` are the widths of hidden layers; ReLU is the paper's activation. Initial
    weights are normal with variance 2 / (inputs + outputs), as in the reference implementation; the
    caller's random state is left alone. Raises ProblemError if there is no feature, or a width is
    not positive.
    """

    def __init__(
        self,
        feature_dims: Mapping[str, int],
        dense_columns: int,
        *,
        dim: int | None = None,
        bottom: Sequence[int] = (64, 32),
        top: Sequence[int] = (64, 32),
        activation: Activation = "relu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not feature_dims:
            raise ProblemError("a DLRM needs at least one categorical feature")
        widths = [*feature_dims.values(), *bottom, *top, *([] if dim is None else [dim])]
        if min(widths) < 1:
            raise ProblemError(f"widths of tables and layers must be positive, not {min(widths)}")
        self.feature_names = tuple(feature_dims)
        self.dense_columns = dense_columns
        self.dim = dim if dim is not None else max(feature_dims.values())
        vectors = len(feature_dims) + 1
        generator = torch.Generator().manual_seed(seed)
        active = _ACTIVATIONS[activation]
        if dense_columns:
            self.bottom = _mlp([dense_columns, *bottom, self.dim], generator, active)
            self.bottom.append(active())
        else:
            start = torch.randn(self.dim, generator=generator) / math.sqrt(self.dim)
            self.constant = nn.Parameter(start)
        # Names of features may hold dots, which names of modules may not.
        self.projections = nn.ModuleList(
            _linear(width, self.dim, generator, bias=False)
            for width in feature_dims.values()
            if width != self.dim
        )
        narrow = [index for index, width in enumerate(feature_dims.values()) if width != self.dim]
        self._projection_of = {feature: position for position, feature in enumerate(narrow)}
        pairs = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)
        self.top = _mlp([self.dim + pairs.shape[1], *top, 1], generator, active)

    def forward(self, dense: Tensor, pooled: Mapping[str, Tensor]) -> Tensor:
        """Return logits of a batch, float32, shape (samples,).

        `dense` has shape (samples, dense_columns), as in the log, NaN where missing (see
        `scale_dense`); `pooled` a tensor of shape (samples, width) for each feature.
        """
        if self.dense_columns:
            x = self.bottom(scale_dense(dense))
        else:
            x = self.constant.expand(dense.shape[0], -1)
        vectors = [x]
        for index, name in enumerate(self.feature_names):
            vector = pooled[name].float()
            position = self._projection_of.get(index)
            vectors.append(vector if position is None else self.projections[position](vector))
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, Tensor)
        crossed = products.index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([x, crossed], dim=1)).squeeze(1)
        return logits


def scale_dense(dense: Tensor) -> Tensor:
    """sign(x) · log(1 + |x|), and 0 where x is missing.

    Counts span many magnitudes; the logarithm is what the DLRM paper's preprocessing takes,
    continued here to the few negative values of real logs.
    """
    return torch.nan_to_num(dense.sign() * dense.abs().log1p(), nan=0.0)


def _mlp(
    widths: Sequence[int], generator: torch.Generator, active: type[nn.Module]
) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [_linear(inputs, outputs, generator), active()]
    return nn.Sequential(*layers[:-1])


def _linear(
    inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = True
) -> nn.Linear:
    # Made without memory first: torch's own initialisation would draw from the global state.
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0, math.sqrt(2 / (inputs + outputs)), generator=generator)
        if bias:
            layer.bias.normal_(0, math.sqrt(1 / outputs), generator=generator)
    return layer
