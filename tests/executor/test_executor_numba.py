"""The `numba` backend keeps the contract."""

import pytest
from executor_contract import BackendContract

pytest.importorskip("numba")


class TestNumba(BackendContract):
    backend = "numba"
