"""The `triton` backend keeps the contract: in Triton's interpreter, or compiled for a GPU."""

from executor_cases import DEVICE
from executor_contract import BackendContract


class TestTriton(BackendContract):
    backend = "triton"
    device = DEVICE
    thread_samples = 4  # The interpreter has one thread.
