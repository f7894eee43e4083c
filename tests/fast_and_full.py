"""What is left to `make test-full`, and what `make test` runs of it.

`make test` leaves out tests marked `slow` and takes hypothesis's profile "fast"; pytest without
options runs everything. The functions here say it of the cases of one test.
"""

from collections.abc import Collection, Sequence
from itertools import product

import pytest
from hypothesis import settings

FEWEST = 5
"""Examples that hypothesis tries at least."""


def examples(number: int) -> settings:
    """Settings of a test of that many examples; a tenth of them in the fast profile."""
    fast = settings.get_current_profile_name() == "fast"
    return settings(max_examples=min(number, max(FEWEST, number // 10)) if fast else number)


def mostly_slow(values: Collection[object], *fast: object) -> list[object]:
    """Values of a parameter, of which the fast tests take those named after them."""
    assert set(fast) <= set(values)
    return [v if v in fast else pytest.param(v, marks=pytest.mark.slow) for v in values]


def spread(names: str, *axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize by every combination; the fast tests take every value of every axis, once.

    The longest axis runs through its values, the others from their first value again and again.
    """
    longest = max(len(axis) for axis in axes)
    fast = {tuple(case % len(axis) for axis in axes) for case in range(longest)}
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(axis[index] for axis, index in zip(axes, places, strict=True)),
                marks=() if places in fast else pytest.mark.slow,
            )
            for places in product(*(range(len(axis)) for axis in axes))
        ],
    )
