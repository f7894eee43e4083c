"""Records of cold rows: what they hold, and that a row is the same after going home."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from fast_and_full import fewer
from hypothesis import given
from hypothesis import strategies as st

from placer.executor.cold_store import ColdStore, HostRecords, Records, StoredRows

NARROW = ("float16", "bfloat16", "int8")


def records(dtype: str, width: int, state_shape: tuple[int, ...] | None = None) -> Records:
    return Records(dtype, torch.float32, width, state_shape)  # type: ignore[arg-type]


def after_home(form: Records, rows: torch.Tensor) -> torch.Tensor:
    return form.weights(form.encode_weights(rows))


@given(
    st.lists(
        st.lists(st.floats(width=32, min_value=-6e4, max_value=6e4), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(NARROW),
    st.integers(0, 2**40),
)
def test_a_row_that_was_rounded_goes_home_and_back_unchanged(
    rows: list[list[float]], dtype: str, update: int
) -> None:
    weights, form = torch.tensor(rows), records(dtype, 3)
    for held in (after_home(form, weights), form.rounded(weights, torch.tensor(update))):
        assert torch.equal(after_home(form, held), held)
        assert torch.equal(form.rounded(held, torch.tensor(update + 1)), held)


def test_bytes_of_int8_are_those_of_fbgemm() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(40, 6, generator=generator) * torch.logspace(-6, 3, 40).unsqueeze(1)
    weights[3] = 0.0
    weights[4] = 1234.5
    weights[5] = torch.arange(0, 256, 51)  # All 256 levels, and no more, for steps of 1.
    held = records("int8", 6).encode_weights(weights).numpy()
    assert held.shape == (40, 6 + 4 + 4)
    scale, offset = held[:, 6:10].copy().view("<f4"), held[:, 10:].copy().view("<f4")
    decoded = held[:, :6].astype(np.float32) * scale + offset
    errors = np.abs(decoded - weights.numpy()).max(1, keepdims=True)
    assert (errors <= scale / 2).all()
    extent = (weights.amax(1) - weights.amin(1)).numpy()[:, None]
    varied = extent > 0
    assert (scale[varied] <= 2 * 2 * extent[varied] / 255).all(), "half of the levels at least"
    assert (scale[5], offset[5]) == (1.0, 0.0)


def test_records_hold_weights_then_state() -> None:
    form = records("float32", 2, (2, 2))
    weights, state = torch.randn(3, 2), torch.randn(3, 2, 2)
    held = torch.cat([form.encode_weights(weights), form.encode_state(state)], 1)
    assert form.nbytes == held.shape[1] == 8 + 16
    assert held.numpy().tobytes() == torch.cat([weights, state.reshape(3, 4)], 1).numpy().tobytes()
    assert torch.equal(form.weights(held), weights)
    assert torch.equal(form.state(held), state)


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_right_on_average_and_repeats(dtype: str) -> None:
    form = records(dtype, 3)
    weights = torch.tensor([[0.1234567, -1.0, 1.0]])
    drawn = torch.cat([form.rounded(weights, torch.tensor(n)) for n in range(fewer(4000, 1000))])[
        :, 0
    ]
    low, high = drawn.min(), drawn.max()
    assert low < weights[0, 0] < high
    assert set(drawn.tolist()) == {float(low), float(high)}
    assert abs(float(drawn.mean() - weights[0, 0])) < 0.05 * float(high - low)
    assert torch.equal(
        form.rounded(weights, torch.tensor(7)), form.rounded(weights, torch.tensor(7))
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_not_hidden(value: float) -> None:
    held = after_home(records("int8", 3), torch.tensor([[1.0, value, 2.0], [1.0, 2.0, 3.0]]))
    assert held[0].isnan().all()
    assert torch.equal(held[1], torch.tensor([1.0, 2.0, 3.0]))


def test_a_store_of_several_parts_keeps_what_is_not_written() -> None:
    forms = [records("float32", 4, (4,)), records("int8", 4, (4,)), records("float16", 4, (4,))]
    parts = [
        StoredRows(
            start,
            stop,
            form,
            HostRecords(torch.zeros(stop - start, form.nbytes, dtype=torch.uint8)),
        )
        for (start, stop), form in zip(pairwise((0, 5, 9, 20)), forms, strict=True)
    ]
    store = ColdStore(parts)
    rows = torch.tensor([19, 0, 8, 5, 4])
    assert all(not held.any() for held in store.read(rows) if held is not None), "zero at first"
    weights, state = torch.arange(20.0).view(5, 4), torch.rand(5, 4)
    store.write(rows, weights, state)
    store.write(rows[:3], state=state[:3] + 1)
    store.write(rows[3:], weights=weights[3:] * 2)
    held, held_state = store.read(rows)
    assert torch.equal(held, torch.cat([weights[:3], weights[3:] * 2]))
    assert torch.equal(held_state, torch.cat([state[:3] + 1, state[3:]]))
    assert not store.read(torch.tensor([1, 6, 18]))[0].any()
