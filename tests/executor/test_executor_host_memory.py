"""Host memory: as long as asked, zeroed, and given back. Registering it with CUDA needs a GPU."""

import gc
import math
import mmap
from pathlib import Path

import pytest
import torch

from placer.errors import CapacityError
from placer.executor.memory.host_memory import HUGE_PAGE_BYTES, host_rows

CPU = torch.device("cpu")
STATM = Path("/proc/self/statm")


def process_bytes() -> tuple[int, int]:
    """Addresses that the process has mapped, and memory behind them."""
    mapped, resident = STATM.read_text().split()[:2]
    return int(mapped) * mmap.PAGESIZE, int(resident) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (0,),
        (0, 16),
        (5, 3),
        (HUGE_PAGE_BYTES // 4 - 1,),
        (HUGE_PAGE_BYTES // 2,),
        (HUGE_PAGE_BYTES // 4 + 1, 7),
        (1_000_003,),
    ],
)
def test_rows_are_zero_writable_and_of_the_size_asked(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows = host_rows(shape, dtype, CPU)
    assert rows.shape == shape
    assert rows.dtype == dtype
    assert rows.is_contiguous()
    assert rows.untyped_storage().nbytes() == math.prod(shape) * dtype.itemsize
    assert not rows.count_nonzero()
    rows.fill_(1)
    assert rows.count_nonzero() == math.prod(shape)


def test_what_one_arena_is_written_no_other_holds() -> None:
    first, second = (host_rows((1 << 20,), torch.float32, CPU) for _ in range(2))
    first.fill_(3)
    assert not second.count_nonzero()
    del first
    assert not host_rows((1 << 20,), torch.float32, CPU).count_nonzero()


@pytest.mark.skipif(not STATM.exists(), reason="the system has no /proc")
def test_pages_come_with_the_first_write_and_go_with_the_last_view() -> None:
    size = (64 << 20) + 4  # Rounded up to a power of two it would be twice as much.
    gc.collect()  # What tests before left would go while this one counts.
    mapped, resident = process_bytes()
    rows = host_rows((size // 4,), torch.float32, CPU)
    mapped_now, resident_now = process_bytes()
    assert size <= mapped_now - mapped < 1.1 * size
    assert resident_now - resident < 0.1 * size
    view = rows.fill_(1)[7:9]
    del rows
    gc.collect()
    assert view.tolist() == [1, 1]
    assert process_bytes()[1] - resident > 0.9 * size
    del view
    gc.collect()
    mapped_now, resident_now = process_bytes()
    assert mapped_now - mapped < 0.1 * size
    assert resident_now - resident < 0.1 * size


def test_more_memory_than_there_is_says_how_much_was_asked() -> None:
    with pytest.raises(CapacityError, match=r"1,125,899,906,842,624 bytes.*less dram"):
        host_rows((1 << 50,), torch.uint8, CPU)
