"""Sizes and durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import PlacerError
from placer.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5kib", 1536),
        ("2097152", 2097152),
        (4096, 4096),
        ("0", 0),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_are_read(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "8 gigs", "-1GiB", "1,5GiB", "8GiB/s"])
def test_what_is_no_size_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(PlacerError, match="not a size in bytes") as refused:
        parse_bytes(text)
    assert repr(text) in str(refused.value)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(PlacerError, match="-5"):
        parse_bytes(-5)


@given(st.integers(0, 2**50))
def test_a_size_that_was_written_is_read_back_to_three_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count).replace(",", "")) == pytest.approx(count, rel=6e-3)


def test_sizes_never_need_an_exponent() -> None:
    assert format_bytes(1023 * 2**20) == "1023 MiB"
    assert format_bytes(999 * 2**10) == "999 KiB"
    assert format_bytes(0) == "0 B"


def test_sizes_that_round_up_to_the_next_unit_are_in_it() -> None:
    assert format_bytes(2**30 - 100) == "1 GiB"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(2**40 - 1) == "1 TiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12, "12 s"),
        (1.234e-3, "1.23 ms"),
        (4.56e-5, "45.6 us"),
        (2e-9, "2 ns"),
        (9.999e-4, "1 ms"),
        (0.99951, "1 s"),
        (999.6, "1,000 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
