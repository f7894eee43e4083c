# mypy: disable-error-code="no-untyped-call, type-arg"
"""The backend in Triton: compiled for a GPU, or interpreted on the CPU for tests.

No call waits for the device, and every launch has a size that the host knows: where the amount
of work is known on the device alone, a fixed number of programs share it. A step can thus be
captured in a CUDA graph.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from placer.errors import BackendError
from placer.executor.backends.backend import Backend
from placer.executor.backends.torch_kernels import RowReads, SegmentTable
from placer.executor.backends.triton.staging import TritonStaging
from placer.executor.growing_keys import GrowingKeys
from placer.executor.lookups.batch_reads import ArenaReads
from placer.executor.lookups.row_runs import CHUNK, Runs, SortedSlots
from placer.executor.memory.arena import TieredRows
from placer.executor.memory.directory import Moves
from placer.executor.names import Policy
from placer.executor.optimizers.rule import Rule
from placer.growing import Growing
from placer.tables import Table

# Sizes of the programs: derived for an H200; on an H100 none that were tried are 6% faster. To keep
# 4.8 TB/s busy at some 700 ns of latency, 25 KiB must be under way on each of 132 multiprocessors,
# and two or three times that where reads wait for one another: offsets, places, rows. Compiled for
# sm_90, they need about 64 registers at width 128, so that 32 warps are resident, each with 2 KiB
# under way, and all rows are requested before the first is waited for: larger tiles are spread out
# by the assembler to save registers.

POOL_BYTES = 2048
"""Bytes of rows that a warp of the forward pass reads at once, of different bags."""

POOL_COLUMNS = 256
"""Columns of a program at most; wider rows are shared by several."""

UPDATE_ELEMENTS = 256
"""Gradients that a warp of the backward pass reads at once, of different runs. A program sees whole
rows, and wide ones get more warps."""

UPDATE_UNROLL, CHUNK_UNROLL = 2, 4
"""Lookups of each run, and of each chunk of a long run, that are under way at once."""

ROWS = 32
"""Bags or runs side by side, however narrow: they all wait for the longest."""

SUM_ELEMENTS, SUM_WARPS = 8192, 8
"""Elements of the sums of chunks that a program adds up at once, and its warps."""

RESIDENT_WARPS = 32
"""Warps per multiprocessor where a fixed number of programs shares the work."""

SCAN = 32
"""Blocks in which such a program looks for long runs at once."""

BLOCK, BLOCK_WARPS = 1024, 4
"""Ids that a program translates, or rows among which it finds staged and cached ones; its warps."""

SEGMENT_PROGRAMS = 256
"""Programs that share the lookups of a segment: a short one has work for few."""

BAGS = 256
"""Bags of a program that writes the bag of each lookup; it takes as long as its longest bag."""

EXCHANGE_PROGRAMS, EXCHANGE_BYTES, EXCHANGE_WARPS = 16, 16384, 8
"""Programs that copy rows over the link, bytes of rows that each has under way each way, and its
warps. On two H200 with half the bytes under way the link is 4 and 20% slower; with twice as many
it is no faster, and other kernels take twice as long: what the link has not taken yet stands in
their way to HBM. Programs are few because a matrix product wants the multiprocessors whole."""

MAX_WORDS = 2048
"""Words of a row that a program copies at once."""

MAX_MOVES = 256
"""Rows that a program copies at once, however narrow."""

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""What rows may be copied as, widest first. The compiler joins them to 16 bytes."""


class TritonBackend(TritonStaging):
    """A handful of Triton kernels for what takes a hundred PyTorch operators, with equal results.

    Runs on a GPU, and on the CPU in Triton's interpreter. All matrices must be contiguous. Rows in
    host memory must be pinned, or registered with CUDA, where the device is a GPU.

    Parameters
    ----------
    device, policy, host
        See `Backend`.

    Raises
    ------
    BackendError
        If Triton is missing, or the device is the CPU and the interpreter is off.
    """

    def __init__(
        self, device: torch.device, policy: Policy = "lfu", host: Backend | None = None
    ) -> None:
        super().__init__(device, policy, host)
        self.name = "triton"
        try:
            import triton
        except ImportError as error:
            raise BackendError(
                "backend 'triton' needs triton: pip install 'embedding-placer[gpu]'"
            ) from error
        from placer.executor.backends.triton import (
            cache_kernels,
            lookup_kernels,
            move_kernels,
            run_kernels,
            update_kernels,
        )

        compiled = isinstance(lookup_kernels.pool, triton.JITFunction)
        if device.type == "cpu" and compiled:
            raise BackendError(
                "backend 'triton' on device 'cpu' needs Triton's interpreter: "
                "set TRITON_INTERPRET=1 before Python starts"
            )
        self._lookup: ModuleType = lookup_kernels
        self._update: ModuleType = update_kernels
        self._exchange: ModuleType = move_kernels
        self._cache = cache_kernels
        self._runs: ModuleType = run_kernels
        self._multiprocessors = 0
        self.can_be_captured = device.type == "cuda"
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._multiprocessors = properties.multi_processor_count

    def key_maps(
        self, growing: Mapping[str, Growing], tables: Mapping[str, Table], seed: int | None
    ) -> GrowingKeys:
        if not growing:
            return super().key_maps(growing, tables, seed)
        from placer.executor.device_keys import DeviceKeys  # Needs Numba.

        return DeviceKeys(growing, tables, seed, self._device, self.run)

    def translate(
        self, ids: Tensor, segments: SegmentTable, slot_map: Tensor, out: Tensor, fault: Tensor
    ) -> None:
        grid = (min(-(-segments.longest // BLOCK), SEGMENT_PROGRAMS), segments.table.shape[0])
        self.run(
            self._lookup.translate, grid,
            ids, segments.table, slot_map, out, fault, BLOCK=BLOCK, num_warps=BLOCK_WARPS,
        )  # fmt: skip

    def pool(
        self, rows: TieredRows, places: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor
    ) -> None:
        if rows.is_read_in_store:
            super().pool(rows, places, offsets, weights, out)
            return
        bags, width = out.shape
        columns, tile = self._pool_tile(rows, width)
        self.run(
            self._lookup.pool, (-(-bags // tile), -(-width // columns)),
            *_memories(rows), places, offsets, weights, out, bags,
            WIDTH=width, COLUMNS=columns, BAGS=tile,
            num_warps=1,
        )  # fmt: skip

    def dot_rows(
        self, rows: TieredRows, places: Tensor, bags: Tensor, gradients: Tensor, out: Tensor
    ) -> None:
        if rows.is_read_in_store:
            super().dot_rows(rows, places, bags, gradients, out)
            return
        lookups, width = out.numel(), gradients.shape[1]
        columns, tile = self._pool_tile(rows, width)
        self.run(
            self._lookup.weight_gradients, (-(-lookups // tile),),
            *_memories(rows), places, bags, gradients, out, lookups,
            WIDTH=width, COLUMNS=columns, LOOKUPS=tile, num_warps=1,
        )  # fmt: skip

    def squares(self, reads: RowReads, out: Tensor) -> None:
        # Neither rows nor a rule are looked at.
        matrices = (reads.gradients,) * 4 + (0,)
        constants = (reads.gradients, reads.gradients, 0.0, 0.0, 0.0)
        self._sum_and_apply(reads, matrices, "squares", False, None, out, constants)

    def update_rows(
        self,
        weights: TieredRows,
        state: TieredRows | None,
        reads: RowReads,
        rule: Rule,
        mean_squares: Tensor | None = None,
    ) -> None:
        if weights.is_read_in_store or weights.is_rounded:
            super().update_rows(weights, state, reads, rule, mean_squares)
            return
        hbm, dram, boundary = _memories(weights)
        state_hbm, state_dram, _ = _memories(weights if state is None else state)
        constants = (rule.step_size(), rule.updates, rule.eps, 1 - rule.beta1, 1 - rule.beta2)
        stochastic = rule.stochastic and hbm.dtype != torch.float32
        matrices = (hbm, dram, state_hbm, state_dram, boundary)
        self._sum_and_apply(
            reads, matrices, rule.optimizer, stochastic, mean_squares, None, constants
        )

    def find_runs(self, slots: Tensor) -> tuple[Runs, SortedSlots]:
        lookups = slots.numel()
        if not lookups:
            return super().find_runs(slots)
        ordered, positions = torch.sort(slots, stable=True)
        order, run = (torch.empty_like(slots, dtype=torch.int32) for _ in range(2))
        self.each(self._runs.mark_runs, lookups, ordered, positions, order, run, lookups)
        del positions
        run.cumsum_(0)
        starts, count = run.new_empty(lookups + 1), run.new_empty(1)
        covering = run.new_empty(-(-lookups // CHUNK))
        long_runs, blocks = torch.empty_like(covering), covering.numel()
        self.each(
            self._runs.start_runs, lookups, run, starts, count, covering, lookups, CHUNK=CHUNK
        )
        self.each(
            self._runs.find_long_runs, blocks, starts, covering, long_runs, blocks, CHUNK=CHUNK
        )
        return Runs(order, starts, count, covering, long_runs), SortedSlots(ordered, run)

    def bags_of_lookups(self, reads: ArenaReads) -> Tensor:
        out = torch.empty(reads.lookups, dtype=torch.int32, device=self._device)
        tiles = (-(-reads.bags // BAGS),)
        self.run(
            self._runs.bags_of_lookups, tiles, reads.offsets, out, reads.bags,
            BLOCK=BAGS, num_warps=BLOCK_WARPS,
        )  # fmt: skip
        return out

    def exchange(self, matrices: Sequence[TieredRows], moves: Moves) -> None:
        parts = [(_words(rows.hbm), _words(rows.dram)) for rows in matrices]
        if not moves.entries.numel() or not parts[0][1].numel():
            return
        (hbm, dram), (state_hbm, state_dram) = parts[0], parts[-1]
        words = hbm.shape[1]
        state_words = state_hbm.shape[1] if len(parts) > 1 else 0
        columns = min(_power_of_two(words), MAX_WORDS)
        tile = EXCHANGE_BYTES // (columns * hbm.element_size())
        tile = max(1, min(MAX_MOVES, tile))
        state_columns = min(_power_of_two(state_words), max(columns, 1))
        blocks = max(-(-words // columns), -(-state_words // state_columns))
        programs = min(EXCHANGE_PROGRAMS, -(-moves.entries.numel() // tile))
        self.run(
            self._exchange.exchange, (programs,),
            hbm, dram, state_hbm, state_dram, matrices[0].home,
            moves.entries, moves.incoming, moves.outgoing, moves.count,
            WORDS=words, BLOCK=columns, STATE_WORDS=state_words, STATE_BLOCK=state_columns,
            BLOCKS=blocks, ROWS=tile, num_warps=EXCHANGE_WARPS,
        )  # fmt: skip

    def each(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch over `size` elements, which the host knows: one program for each block."""
        grid = (-(-size // BLOCK),)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def walk(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch over at most `size` elements, which a fixed number of programs shares."""
        grid = self.shared(-(-size // BLOCK), BLOCK_WARPS)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def _sum_and_apply(
        self,
        reads: RowReads,
        matrices: tuple[Tensor, Tensor, Tensor, Tensor, int],
        optimizer: str,
        stochastic: bool,
        mean_squares: Tensor | None,
        squares: Tensor | None,
        constants: tuple[Tensor, Tensor, float, float, float],
    ) -> None:
        """Launch the three kernels that walk through the runs."""
        runs = reads.runs
        width = reads.gradients.shape[1]
        block = _power_of_two(width)
        tile = _tile_rows(UPDATE_ELEMENTS, block)
        warps = min(16, max(1, tile * block // UPDATE_ELEMENTS))
        shape = {"CHUNK": CHUNK, "WIDTH": width, "BLOCK": block}
        by_row = {"ROWS": tile, "num_warps": warps}
        rule = {"OPTIMIZER": optimizer, "STOCHASTIC": stochastic}
        gradients = (reads.sources, reads.scales, reads.gradients)
        effects = (mean_squares, squares, *constants)
        self.run(
            self._update.update_runs, self.shared(-(-runs.lookups // tile), warps),
            *matrices, runs.starts, runs.count, reads.places,
            *gradients, *effects, **shape, **by_row, **rule, UNROLL=UPDATE_UNROLL,
        )  # fmt: skip
        if runs.lookups <= CHUNK:
            return
        partials = torch.empty((2 * runs.blocks, width), device=self._device)
        self.run(
            self._update.sum_chunks, self.shared(-(-2 * runs.blocks // tile), warps),
            partials, runs.starts, runs.covering, runs.long_runs, runs.blocks,
            reads.places, *gradients, **shape, **by_row, UNROLL=CHUNK_UNROLL,
        )  # fmt: skip
        chunks = _tile_rows(SUM_ELEMENTS, block)
        self.run(
            self._update.update_long_runs, self.shared(runs.blocks, SUM_WARPS),
            *matrices, runs.starts, runs.long_runs, runs.blocks,
            reads.places, partials, *effects, **shape, **rule,
            CHUNKS=chunks, SCAN=SCAN, num_warps=SUM_WARPS,
        )  # fmt: skip

    def _pool_tile(self, rows: TieredRows, width: int) -> tuple[int, int]:
        """Return columns and rows that a warp of the forward pass reads at once."""
        columns = min(_power_of_two(width), POOL_COLUMNS)
        elements = POOL_BYTES // rows.hbm.element_size()
        return columns, _tile_rows(elements, columns)

    def shared(self, tiles: int, warps: int) -> tuple[int]:
        """Programs that share so many tiles: as many as are resident, or one for each tile.

        The interpreter runs one after the other: two are enough to show that they share.
        """
        most = self._multiprocessors * max(1, RESIDENT_WARPS // warps)
        return (min(tiles, most or 2),)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch, unless there is nothing to do."""
        if math.prod(grid):
            with self._current_device():
                # Whether a product and a sum are fused is not left to each kernel's compilation.
                kernel[grid](*arguments, enable_fp_fusion=False, **options)

    def _current_device(self) -> AbstractContextManager[Any]:
        """Let Triton launch on the tensors' device: it takes torch's current one."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            return torch.cuda.device(self._device)
        return nullcontext()


def _tile_rows(elements: int, columns: int) -> int:
    """Return rows of a tile of so many elements."""
    return max(1, min(ROWS, elements // columns))


def _power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def _memories(rows: TieredRows) -> tuple[Tensor, Tensor, int]:
    """Return both matrices and the boundary; where one is empty, the other stands in for it.

    Nobody reads what is empty, but no kernel gets a null pointer.
    """
    hbm = rows.hbm if rows.hbm.numel() else rows.dram
    dram = rows.dram if rows.dram.numel() else rows.hbm
    return hbm, dram, rows.boundary


def _words(matrix: Tensor) -> Tensor:
    """Return the rows' bytes as the widest integers that divide a row: shape (rows, words)."""
    flat = matrix.reshape(matrix.shape[0], math.prod(matrix.shape[1:]))
    row_bytes = flat.shape[1] * flat.element_size()
    word = next(word for word in WORDS if row_bytes % word.itemsize == 0)
    return flat.view(word)
