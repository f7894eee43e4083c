"""Sizes and durations as people write them."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import PlacerError
from placer.report import console
from placer.report import section as form
from placer.units import counted, format_bytes, format_seconds, parse_bytes, significant
from solvers.report.whatif import gain


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


SHOWN = (
    form.size, form.seconds, form.share, form.count, form.rate, form.number, form.times, gain,
    console.readable, significant,
)  # fmt: skip


@given(st.floats(1e-18, 1e17) | st.floats(0.5, 2000.0), st.sampled_from(SHOWN))
def test_no_number_has_an_exponent(value: float, show: Callable[[float], str]) -> None:
    """``1e+03 MiB`` and ``6.66e-14%`` were written."""
    text = show(value)
    assert re.search(r"\de[+-]?\d", text) is None
    # No unit is left where the next one begins, and no zero that means nothing.
    number = re.search(r"[\d,.]+", text)
    assert "," not in number[0] or re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", number[0])


@given(st.floats(1e-3, 1e9), st.integers(1, 6))
def test_significant_digits_are_kept(value: float, digits: int) -> None:
    shown = float(significant(value, digits).replace(",", ""))
    assert shown == pytest.approx(value, rel=10.0**-digits * 5.0001)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (6.66e-16, "<0.001%"),
        (-6.66e-16, "0%"),
        (0.9999999, ">99.9%"),
        (12.3, "1,230%"),
    ],
)
def test_tiny_shares_say_that_they_are(value: float, text: str) -> None:
    assert form.share(value) == text


def test_one_of_a_thing_is_not_several() -> None:
    assert counted(1, "table") == "1 table"
    assert counted(0, "table") == "0 tables"
    assert counted(1200, "batch", "batches") == "1,200 batches"


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
