"""Sizes of the programs that run the Triton kernels."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """Sizes of the programs: derived for an H200; on an H100 none that were tried are 6% faster.

    To keep 4.8 TB/s busy at some 700 ns of latency, 25 KiB must be under way on each of 132
    multiprocessors, and two or three times that where reads wait for one another: offsets,
    places, rows. Compiled for sm_90, the defaults need about 64 registers at width 128, so that
    32 warps are resident, each with 2 KiB under way, and all rows are requested before the
    first is waited for: larger tiles are spread out by the assembler to save registers.

    Attributes
    ----------
    pool_bytes : int
        Bytes of rows that a warp of the forward pass reads at once, of different bags.
    pool_columns : int
        Columns of a program at most; wider rows are shared by several.
    update_elements : int
        Gradients that a warp of the backward pass reads at once, of different runs. A program
        sees whole rows, and wide ones get more warps.
    update_unroll, chunk_unroll : int
        Lookups of each run, and of each chunk of a long run, that are under way at once.
    rows : int
        Bags or runs side by side, however narrow: they all wait for the longest.
    sum_elements : int
        Elements of the sums of chunks that a program adds up at once.
    sum_warps : int
        Warps of such a program.
    resident_warps : int
        Warps per multiprocessor where a fixed number of programs shares the work.
    scan : int
        Blocks in which such a program looks for long runs at once.
    block : int
        Ids of a program that translates them, or moves that it looks through.
    exchange_programs : int
        Programs that copy rows over the link. 32 with 16 KiB each way are more than a PCIe 5
        link's 55 GB/s times 2 µs of latency, and leave the other multiprocessors alone.
    exchange_bytes : int
        Bytes of rows that such a program has under way each way.
    """

    pool_bytes: int = 2048
    pool_columns: int = 256
    update_elements: int = 256
    update_unroll: int = 2
    chunk_unroll: int = 4
    rows: int = 32
    sum_elements: int = 8192
    sum_warps: int = 8
    resident_warps: int = 32
    scan: int = 32
    block: int = 1024
    exchange_programs: int = 32
    exchange_bytes: int = 16384

    def tile_rows(self, elements: int, columns: int) -> int:
        """Rows of a tile of so many elements."""
        return max(1, min(self.rows, elements // columns))
