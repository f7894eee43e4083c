"""The `tiered` backend keeps the contract."""

from executor_cases import DEVICE
from executor_contract import BackendContract


class TestTiered(BackendContract):
    backend = "tiered"
    device = DEVICE
