"""The bundled model."""

import pytest
import torch

from placer.errors import ProblemError
from placer.training.trainer import Dlrm, scale_dense


def test_logits_are_the_top_of_all_pairwise_products() -> None:
    model = Dlrm({"a": 3, "b": 3}, 2, bottom=(4,), top=(5,), seed=1)
    dense = torch.tensor([[1.0, 2.0], [0.0, 5.0]])
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    x = model.bottom(dense.log1p())
    pairs = torch.stack([(a * x).sum(1), (b * x).sum(1), (b * a).sum(1)], 1)
    expected = model.top(torch.cat([x, pairs], 1)).squeeze(1)
    torch.testing.assert_close(model(dense, {"a": a, "b": b}), expected)


def test_the_order_of_the_pooled_features_does_not_matter() -> None:
    model = Dlrm({"a": 3, "b": 3}, 0)
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    nothing = torch.empty(2, 0)
    assert torch.equal(model(nothing, {"a": a, "b": b}), model(nothing, {"b": b, "a": a}))


def test_narrow_tables_are_projected_to_the_model() -> None:
    model = Dlrm({"a": 8, "b.with.dots": 2}, 1)
    pooled = {"a": torch.randn(3, 8), "b.with.dots": torch.randn(3, 2)}
    assert model(torch.randn(3, 1), pooled).shape == (3,)
    assert model.dim == 8
    assert [tuple(p.weight.shape) for p in model.projections] == [(8, 2)]


def test_without_dense_columns_and_with_one_feature_gradients_reach_all_weights() -> None:
    model = Dlrm({"a": 4}, 0)
    pooled = torch.randn(6, 4, requires_grad=True)
    model(torch.empty(6, 0), {"a": pooled}).sum().backward()
    assert pooled.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_dense_values_are_scaled_by_signed_logarithm_and_missing_ones_are_zero() -> None:
    given = torch.tensor([0.0, torch.e - 1, -(torch.e - 1), float("nan")])
    torch.testing.assert_close(scale_dense(given), torch.tensor([0.0, 1.0, -1.0, 0.0]))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one, two, other = (Dlrm({"a": 4}, 3, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q, _ in pairs)
    assert not any(torch.equal(p, r) for p, _, r in pairs)


@pytest.mark.parametrize(
    ("dims", "hidden", "message"),
    [({}, (8,), "at least one categorical feature"), ({"a": 4}, (0,), "positive, not 0")],
)
def test_models_that_cannot_be_are_refused(
    dims: dict[str, int], hidden: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ProblemError, match=message):
        Dlrm(dims, 2, bottom=hidden)
