"""The `torch` backend keeps the contract."""

from executor_contract import BackendContract


class TestTorch(BackendContract):
    backend = "torch"
