"""The `staged` backend keeps the contract."""

from executor_contract import BackendContract


class TestStaged(BackendContract):
    backend = "staged"
