"""Every kind of file has the bytes that it had when it was recorded."""

import golden_storage
import golden_store
import pytest
from fast_and_full import mostly_slow
from golden_files import without_pinned

RECORDED = golden_store.recorded("storage")
FIRST = {name.split(",")[0]: name for name in reversed(RECORDED["cases"])}
"""A case of each kind of file."""


def test_the_same_cases_are_recorded() -> None:
    assert list(golden_storage.storage()) == list(RECORDED["cases"])


@pytest.mark.parametrize("name", mostly_slow(RECORDED["cases"], *FIRST.values()))
def test_files_have_the_bytes_that_they_had(name: str) -> None:
    kept = [
        without_pinned(found, RECORDED["pinned"])
        for found in (golden_storage.stored(name), RECORDED["cases"][name])
    ]
    golden_store.assert_same(*kept)
