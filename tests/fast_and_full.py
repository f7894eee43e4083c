"""Which cases of a test `make test` runs, and which are left to `make test-full`.

`make test` leaves out what is marked `slow` and takes hypothesis's profile "fast"; pytest without
options runs everything.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations as subsets
from itertools import product

import pytest
from hypothesis import settings

FEWEST = 3
"""Examples that hypothesis tries at least."""


def is_fast() -> bool:
    """Whether hypothesis's profile is that of the fast tests."""
    return settings.get_current_profile_name() == "fast"


def examples(number: int) -> settings:
    """Settings of a test of that many examples; a tenth of them in the fast profile."""
    return settings(max_examples=fewer(number, min(number, max(FEWEST, number // 10))))


def fewer(number: int, fast: int) -> int:
    """A number of cases, or of steps, and how many of them are enough for the fast tests."""
    return fast if is_fast() else number


def mostly_slow(values: Collection[object], *fast: object) -> list[object]:
    """Values of one parameter, all of them slow but those named after them."""
    assert set(fast) <= set(values)
    return _wanted([value if value in fast else _slow(value) for value in values])


def some(values: Iterable[str], *fast: str) -> list[str]:
    """Names of jobs that processes do one after the other; in the fast tests those named."""
    return [value for value in values if value in fast or not is_fast()]


def covering(cases: Iterable[Sequence[object]]) -> list[object]:
    """Cases of several parameters, all of them slow but a few in which every value occurs.

    >>> cases = covering([(1, "a"), (1, "b"), (2, "a"), (2, "b")])
    >>> [case.values for case in cases if not case.marks]
    [(1, 'a'), (2, 'b')]
    """
    cases = [tuple(case) for case in cases]
    fast = set(_few(cases, 1))
    return _wanted([pytest.param(*case) if case in fast else _slow(case) for case in cases])


def combinations(names: str, *values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrize by combinations of values, all of them slow but a few with every value.

    Of two parameters these are all combinations; of more, enough for every two values to meet.
    """
    return pytest.mark.parametrize(names, covering(_few(list(product(*values)), 2)))


def _few(cases: list[tuple[object, ...]], together: int) -> list[tuple[object, ...]]:
    """As few of the cases as have all that so many values of one case at a time have together.

    >>> _few([(1, "a", 0), (1, "b", 0), (2, "a", 0), (2, "b", 0)], 1)
    [(1, 'a', 0), (2, 'b', 0)]
    """
    parts = {case: {*subsets(enumerate(case), together)} for case in cases}
    unseen = set().union(*parts.values())
    found = set()
    while unseen:
        most = max(cases, key=lambda case: len(unseen & parts[case]))
        found.add(most)
        unseen -= parts[most]
    return [case for case in cases if case in found]


def _wanted(cases: list[object]) -> list[object]:
    """All cases; where some are fast, in the fast profile those alone, as others take time to read.

    Without a fast case, a parameter keeps its slow ones: without any its test would be skipped.
    """
    fast = [case for case in cases if not getattr(case, "marks", ())]
    return fast if fast and is_fast() else cases


def _slow(case: object) -> object:
    """A value, or a tuple of one value for each of several parameters."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
