# mypy: disable-error-code="no-untyped-call, type-arg"
"""The Triton backend: its kernels pool, update and move rows."""

import math
from collections.abc import Mapping, Sequence

import torch
import triton
from torch import Tensor

from placer.executor.backends.torch_kernels import RowReads, SegmentTable
from placer.executor.backends.triton import lookup_kernels, update_kernels
from placer.executor.backends.triton.staging import BLOCK, BLOCK_WARPS, TritonStaging
from placer.executor.growing_keys import GrowingKeys
from placer.executor.lookups.steps import CHUNK
from placer.executor.memory.arena import TieredRows
from placer.executor.memory.row_cache import Moves
from placer.executor.optimizers import Rule
from placer.growing import Growing
from placer.tables import Table

# Program sizes are derived for an H200. On an H100, no other size that was tried is 6% faster. To
# keep 4.8 TB/s busy at about 700 ns of latency, each of 132 multiprocessors needs 25 KiB under way.
# It needs two or three times that, as reads depend on one another: offsets, places, rows. Kernels
# for sm_90 need about 64 registers at width 128. So 32 warps are resident, each with 2 KiB under
# way, and request all rows before waiting for the first. With larger tiles the assembler would
# spread the requests, to save registers.

POOL_BYTES = 2048
"""Bytes of rows, of different bags, that a warp of the forward pass reads at once."""

POOL_COLUMNS = 256
"""Most columns of a program; several programs share wider rows."""

UPDATE_ELEMENTS = 256
"""Gradients, of different runs, that a warp of the backward pass reads at once. A program has whole
rows, and more warps if they are wide."""

UPDATE_UNROLL, CHUNK_UNROLL = 2, 4
"""Lookups of a run, and of a chunk of a long run, to read at once."""

ROWS = 32
"""Most bags or runs side by side in a program, as they all wait for the longest."""

SUM_ELEMENTS, SUM_WARPS = 8192, 8
"""Elements of chunks' sums that a program adds at once, and its warps."""

SCAN = 32
"""Blocks in which a program looks for long runs at once."""

SEGMENT_PROGRAMS = 256
"""Most programs that share the lookups of a segment."""

EXCHANGE_PROGRAMS, EXCHANGE_BYTES, EXCHANGE_WARPS = 16, 16384, 8
"""Programs that copy rows over the link, bytes under way in each direction for each program, and
its warps. On two H200s, half the bytes make the link 4% and 20% slower. Twice the bytes make it no
faster, and other kernels take twice as long, because waiting requests block their way to HBM. There
are few programs, because matrix products need whole multiprocessors."""

MAX_WORDS = 2048
"""Most words of a row that a program copies at once."""

MAX_MOVES = 256
"""Most rows that a program copies at once."""

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Dtypes in which rows can be copied, widest first. The compiler joins words to 16 bytes."""


class TritonBackend(TritonStaging):
    """Computes the same as `Backend` with a few Triton kernels instead of a hundred operators.

    It runs on a GPU, and on the CPU in Triton's interpreter. All matrices must be contiguous. For a
    GPU, rows in host memory must be pinned or registered with CUDA.

    Raises BackendError if the device is the CPU and the interpreter is off.
    """

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
            lookup_kernels.translate, grid,
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
            lookup_kernels.pool, (-(-bags // tile), -(-width // columns)),
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
            lookup_kernels.weight_gradients, (-(-lookups // tile),),
            *_memories(rows), places, bags, gradients, out, lookups,
            WIDTH=width, COLUMNS=columns, LOOKUPS=tile, num_warps=1,
        )  # fmt: skip

    def squares(self, reads: RowReads, out: Tensor) -> None:
        # The kernel uses neither rows nor a rule, so pass placeholders.
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
        is_narrow = weights.store is not None and weights.store.is_narrow
        if weights.is_read_in_store or is_narrow:
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

    def exchange(self, matrices: Sequence[TieredRows], moves: Moves) -> None:
        parts = [(_words(rows.hbm), _words(rows.dram)) for rows in matrices]
        if not moves.entries.numel() or not parts[0][1].numel():
            return
        (hbm, dram), (state_hbm, state_dram) = parts[0], parts[-1]
        words = hbm.shape[1]
        state_words = state_hbm.shape[1] if len(parts) > 1 else 0
        columns = min(triton.next_power_of_2(words), MAX_WORDS)
        tile = EXCHANGE_BYTES // (columns * hbm.element_size())
        tile = max(1, min(MAX_MOVES, tile))
        state_columns = min(triton.next_power_of_2(max(state_words, 1)), max(columns, 1))
        blocks = max(-(-words // columns), -(-state_words // state_columns))
        programs = min(EXCHANGE_PROGRAMS, -(-moves.entries.numel() // tile))
        self.run(
            lookup_kernels.exchange, (programs,),
            hbm, dram, state_hbm, state_dram, matrices[0].home,
            moves.entries, moves.incoming, moves.outgoing, moves.count,
            WORDS=words, BLOCK=columns, STATE_WORDS=state_words, STATE_BLOCK=state_columns,
            BLOCKS=blocks, ROWS=tile, num_warps=EXCHANGE_WARPS,
        )  # fmt: skip

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
        """Launch the three kernels that sum and update runs."""
        runs, blocks = reads.runs, reads.runs.covering.numel()
        width = reads.gradients.shape[1]
        block = triton.next_power_of_2(width)
        tile = _tile_rows(UPDATE_ELEMENTS, block)
        warps = min(16, max(1, tile * block // UPDATE_ELEMENTS))
        shape = {"CHUNK": CHUNK, "WIDTH": width, "BLOCK": block}
        by_row = {"ROWS": tile, "num_warps": warps}
        rule = {"OPTIMIZER": optimizer, "STOCHASTIC": stochastic}
        gradients = (reads.sources, reads.scales, reads.gradients)
        effects = (mean_squares, squares, *constants)
        self.run(
            update_kernels.update_runs, self.shared(-(-runs.lookups // tile), warps),
            *matrices, runs.starts, runs.count, reads.places,
            *gradients, *effects, **shape, **by_row, **rule, UNROLL=UPDATE_UNROLL,
        )  # fmt: skip
        if runs.lookups <= CHUNK:
            return
        partials = torch.empty((2 * blocks, width), dtype=torch.float32, device=self._device)
        self.run(
            update_kernels.sum_chunks, self.shared(-(-2 * blocks // tile), warps),
            partials, runs.starts, runs.covering, runs.long_runs, blocks,
            reads.places, *gradients, **shape, **by_row, UNROLL=CHUNK_UNROLL,
        )  # fmt: skip
        chunks = _tile_rows(SUM_ELEMENTS, block)
        self.run(
            update_kernels.update_long_runs, self.shared(blocks, SUM_WARPS),
            *matrices, runs.starts, runs.long_runs, blocks,
            reads.places, partials, *effects, **shape, **rule,
            CHUNKS=chunks, SCAN=SCAN, num_warps=SUM_WARPS,
        )  # fmt: skip

    def _pool_tile(self, rows: TieredRows, width: int) -> tuple[int, int]:
        """Return the columns and rows that a warp of the forward pass reads at once."""
        columns = min(triton.next_power_of_2(width), POOL_COLUMNS)
        elements = POOL_BYTES // rows.hbm.element_size()
        return columns, _tile_rows(elements, columns)


def _tile_rows(elements: int, columns: int) -> int:
    return max(1, min(ROWS, elements // columns))


def _memories(rows: TieredRows) -> tuple[Tensor, Tensor, int]:
    """Return both matrices and the boundary. If one is empty, return the other one twice.

    Kernels do not read an empty matrix, but must not get its null pointer.
    """
    hbm = rows.hbm if rows.hbm.numel() else rows.dram
    dram = rows.dram if rows.dram.numel() else rows.hbm
    return hbm, dram, rows.boundary


def _words(matrix: Tensor) -> Tensor:
    """View rows as the widest integers that divide them: shape (rows, words)."""
    flat = matrix.reshape(matrix.shape[0], math.prod(matrix.shape[1:]))
    row_bytes = flat.shape[1] * flat.element_size()
    word = next(word for word in WORDS if row_bytes % word.itemsize == 0)
    return flat.view(word)
