"""Stochastic rounding of half-precision weights, and the rules that use it."""

import math

import pytest
import torch
from executor_cases import plan_of
from fast_and_full import combinations, mostly_slow
from torch import Tensor

from placer import Feature, Table
from placer.executor import BagBatch, make_embeddings
from placer.executor.optimizers import Rule, random_bits, stochastic_round, updated
from placer.tables import OPTIMIZERS

HALVES = [torch.float16, torch.bfloat16]
NOISE = 16_384  # Updates over which means are taken.


def rounded(value: float, dtype: torch.dtype) -> Tensor:
    """One value rounded at each of `NOISE` updates, float64."""
    values = torch.full((NOISE,), value)
    return stochastic_round(values, dtype, torch.arange(NOISE)).double()


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The numbers of the type next to a value that is none itself."""
    near = torch.tensor(value, dtype=torch.float64).to(dtype)
    direction = math.inf if float(near) < value else -math.inf
    other = torch.nextafter(near, torch.tensor(direction, dtype=dtype))
    low, high = sorted((float(near), float(other)))
    return low, high


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "value", [0.7001, -0.7001, 1.0 + 2**-12, 1e-3, 3e-5, -3.21e-5, 4.7e-7, 3e-8, 2.0001, 1000.3]
)
def test_the_mean_is_the_value(value: float, dtype: torch.dtype) -> None:
    """3e-5 and less are below the smallest normal number of float16."""
    value = float(torch.tensor(value))
    low, high = neighbours(value, dtype)
    found = rounded(value, dtype)
    assert set(found.tolist()) <= {low, high}
    chance = (value - low) / (high - low)
    tolerance = 5 * math.sqrt(chance * (1 - chance) / NOISE)
    assert float((found == high).double().mean()) == pytest.approx(chance, abs=tolerance + 1e-4)


@pytest.mark.parametrize("dtype", HALVES)
def test_values_of_the_type_are_kept(dtype: torch.dtype) -> None:
    """All 65,536 of them, infinities and NaN too."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for t in (1, 2, 2**31 - 1, 2**31, 2**40):
        result = stochastic_round(every.float(), dtype, torch.tensor(t))
        torch.testing.assert_close(result, every, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(result.signbit() | result.isnan(), every.signbit() | every.isnan())


@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    """Also one whose low bits alone make it NaN, and one that a carry would turn into zero."""
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)
    for t in range(50):
        result = stochastic_round(patterns.view(torch.float32), dtype, torch.tensor(t))
        assert bool(result.isnan().all())


@pytest.mark.parametrize("dtype", HALVES)
def test_any_value_goes_to_a_neighbour(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    top = 3.3e38 if dtype == torch.bfloat16 else 65_000.0
    size = torch.rand(100_000, generator=generator, dtype=torch.float64)
    values = torch.exp(size * math.log(top / 1e-12)).mul_(1e-12).float()
    values *= torch.where(torch.rand(values.shape, generator=generator) < 0.5, -1, 1)
    result = stochastic_round(values, dtype, torch.tensor(5))
    # Rounding errs by less than the distance to the neighbour beyond.
    beyond = torch.nextafter(result, torch.full_like(result, math.inf)).double()
    before = torch.nextafter(result, torch.full_like(result, -math.inf)).double()
    assert bool(((before < values.double()) & (values.double() < beyond)).all())


def test_float32_is_left_alone() -> None:
    values = torch.randn(10)
    assert torch.equal(stochastic_round(values, torch.float32, torch.tensor(1)), values)


def test_bits_are_as_random_as_coins() -> None:
    """Each bit is one half of the time; neighbouring updates and values are independent."""
    values = torch.linspace(0.5, 1.0, 4096)
    by_update = torch.stack([random_bits(values, torch.tensor(t)) for t in range(16)])
    coins = torch.stack([(by_update >> bit) & 1 for bit in range(32)]).double() * 2 - 1
    count = by_update.numel()
    assert float(coins.mean((1, 2)).abs().max()) < 5 / count**0.5
    along_updates = (coins[:, 1:] * coins[:, :-1]).mean((1, 2))
    along_values = (coins[:, :, 1:] * coins[:, :, :-1]).mean((1, 2))
    between_bits = (coins[1:] * coins[:-1]).mean((1, 2))
    for correlation in (along_updates, along_values, between_bits):
        assert float(correlation.abs().max()) < 5 / (count * 15 / 16) ** 0.5


@combinations("dtype, optimizer", HALVES, OPTIMIZERS)
def test_half_weights_follow_a_float32_run(dtype: torch.dtype, optimizer: str) -> None:
    """With updates below half the distance to the neighbour, nearest does not move at all."""
    generator = torch.Generator().manual_seed(1)
    shape = 64, 8
    start = (torch.rand(shape, generator=generator) * 0.2 + 0.75).to(dtype)
    neighbour = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    # Adam's and Adagrad's first steps are as long as lr.
    lr = neighbour / 4
    runs = {
        "float32": (start.float(), False),
        "nearest": (start, False),
        "stochastic": (start, True),
    }
    results = {}
    for name, (weights, stochastic) in runs.items():
        state = {
            "sgd": None,
            "adagrad": torch.zeros(shape),
            "rowwise_adagrad": torch.zeros(shape[0]),
            "adam": torch.zeros(shape[0], 2 * shape[1]),
        }[optimizer]
        gradients = torch.Generator().manual_seed(2)
        for t in range(1, 33):
            gradient = torch.rand(shape, generator=gradients) * 0.4 + 0.8
            rule = Rule(optimizer, torch.tensor(lr), 1e-8, torch.tensor(t), stochastic=stochastic)
            weights, state = updated(rule, weights, state, gradient)
            assert weights.dtype == (torch.float32 if name == "float32" else dtype)
        results[name] = weights.double()
    distance = float((start.double() - results["float32"]).mean())
    assert distance > 2 * neighbour
    assert torch.equal(results["nearest"], start.double())
    error = results["stochastic"] - results["float32"]
    deviation = neighbour / 2 * 32**0.5
    assert abs(float(error.mean())) < 5 * deviation / error.numel() ** 0.5
    assert float(error.abs().max()) < 6 * deviation


def test_adams_corrections_hold_their_digits() -> None:
    """1 − 0.999ᵗ in float32 would be off in the fifth digit at t = 1."""
    for t in (1, 2, 10, 1000, 10**7):
        rule = Rule("adam", torch.tensor(0.1), 1e-8, torch.tensor(t))
        wanted = 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        assert float(rule.step_size()) == pytest.approx(wanted, rel=2e-7)
    assert Rule("sgd", torch.tensor(0.1), 1e-8, torch.tensor(3)).step_size() == torch.tensor(0.1)


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float16"], "bfloat16"))
def test_small_updates_of_a_plans_own_tables_are_not_lost(dtype: str) -> None:
    """Each is far less than half of what is between a weight and its neighbour."""
    table = Table("t", 1, 256, dtype=dtype, optimizer="sgd", features=(Feature("t"),))
    lookups = {"t": (torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]), None)}
    # Equal weights would be rounded alike.
    before = 1 + torch.arange(256).reshape(1, 256) / 256
    moved = {}
    for rounding in ("stochastic", "nearest"):
        options = {} if rounding == "stochastic" else {"rounding": rounding}
        model = make_embeddings(
            plan_of([table]), lr=1e-5, backend="torch", weights={"t": before}, **options
        )
        batch = BagBatch.from_features(lookups, model.feature_names)
        for _ in range(200):
            model(batch)["t"].sum().backward()
        start = before.to(getattr(torch, dtype)).double()
        moved[rounding] = float((start - model.state_dict()["t.weight"].double()).mean())
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(200 * 1e-5, rel=0.25)
