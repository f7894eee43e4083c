"""How many rows are handled at a time, wherever tables are read or written in blocks."""

from collections.abc import Iterator

CHUNK_BYTES = 32 << 20
"""Most bytes of rows that are in memory at a time, where one process copies them."""
BLOCK_BYTES = 16 << 20
"""Most bytes of a tensor that a process writes to a checkpoint at a time."""
MOST_ROWS = 1 << 17  # Of short rows, their ids and ranks are what takes memory.
READ_ROWS = 1 << 16
"""Rows that readers of checkpoints ask for at a time."""


def chunk_rows(row_bytes: int) -> int:
    """Return rows of a chunk, where one takes so many bytes."""
    return max(1, min(MOST_ROWS, CHUNK_BYTES // max(row_bytes, 1)))


def block_rows(row_bytes: int) -> int:
    """Return a checkpoint block's rows: a power of two, so that reads take whole blocks.

    >>> block_rows(512), block_rows(1 << 30)
    (32768, 1)
    """
    most = min(READ_ROWS, BLOCK_BYTES // max(row_bytes, 1))
    return 1 << max(most.bit_length() - 1, 0)


def row_blocks(rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield first row and end of each block of so many rows.

    >>> list(row_blocks(10, 4))
    [(0, 4), (4, 8), (8, 10)]
    """
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
