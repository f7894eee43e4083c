"""The `triton` backend keeps the contract, in Triton's interpreter."""

from executor_contract import BackendContract


class TestTriton(BackendContract):
    backend = "triton"
    thread_samples = 12  # The interpreter has one thread.
