"""What kernels over two memories do: one set in plain PyTorch, one in Triton."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from placer.executor.lookups.row_runs import Runs
from placer.executor.memory.directory import Moves
from placer.executor.memory.tiers import TieredRows
from placer.executor.optimizers.rule import Rule


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Where the ids of an arena's lookups are and how they become slots.

    Attributes
    ----------
    table : int64, shape (segments, 8), on the computing device
        Columns: first id within the batch, first lookup within the arena's step, number of
        lookups, rows of the table, `near`, `edge` and `far` of its `Follows`, and where the
        table's part of the arena's slot map starts (−1 where slots follow ids).
    longest : int
        Lookups of the longest segment.
    lookups : int
        Lookups of all segments.
    """

    table: Tensor
    longest: int
    lookups: int


@dataclass(frozen=True, slots=True, eq=False)
class RowReads:
    """Which gradients each row of a step sums, for one arena.

    Attributes
    ----------
    runs : Runs
    places : shape (lookups,)
        The place of each run, by run; −1 for a run that is nobody's. Beyond the number of runs
        the values mean nothing.
    sources : int32 or int64, shape (lookups,)
        The row of the gradients that each sorted lookup adds.
    scales : float32, shape (lookups,), or None
        Weight of each sorted lookup.
    gradients : float32, shape (bags, width), contiguous
    """

    runs: Runs
    places: Tensor
    sources: Tensor
    scales: Tensor | None
    gradients: Tensor


class TierKernels(Protocol):
    """All are deterministic and write no row from two programs."""

    name: str

    def translate(
        self, ids: Tensor, segments: SegmentTable, slot_map: Tensor, out: Tensor, fault: Tensor
    ) -> None:
        """Slots of an arena's lookups.

        Parameters
        ----------
        ids : int32 or int64, shape (lookups of the batch,)
        segments : SegmentTable
        slot_map : int32 or int64
            Maps of the arena's tables, one after the other (`ArenaSpec.slot_map`).
        out : int32 or int64, shape (segments.lookups,)
            Receives the slots; −1 for an id that is no row of its table.
        fault : int64, shape (1,)
            Lowered to the first place within the batch of such an id.
        """
        ...

    def pool(
        self, rows: TieredRows, places: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor
    ) -> None:
        """Sum of each bag's rows, each times its weight, in float32.

        Parameters
        ----------
        rows : TieredRows
            Weights, shape (.., width): float32, float16 or bfloat16.
        places : int32 or int64, shape (lookups,)
            −1 adds nothing.
        offsets : int64, shape (bags + 1,)
        weights : float32, shape (lookups,), or None
        out : float32, shape (bags, width), contiguous
        """
        ...

    def weight_gradients(
        self, rows: TieredRows, places: Tensor, bags: Tensor, gradients: Tensor, out: Tensor
    ) -> None:
        """Row · gradient of its bag, for each lookup: float32, shape (lookups,); 0 at place −1."""
        ...

    def squares(self, reads: RowReads, out: Tensor) -> None:
        """Σ g² of the summed gradient of each run, into float32 `out` of shape (lookups,)."""
        ...

    def update(
        self,
        weights: TieredRows,
        state: TieredRows | None,
        reads: RowReads,
        rule: Rule,
        mean_squares: Tensor | None = None,
    ) -> None:
        """Sum the gradients of each row and apply the rule once to it.

        `state` has shape (..,) for row-wise Adagrad, (.., width) for Adagrad, (.., 2 · width)
        for Adam. `mean_squares`, float32 by run, replaces the mean of g² in row-wise Adagrad,
        where the arena holds only a column slice of the rows.
        """
        ...

    def exchange(self, matrices: Sequence[TieredRows], moves: Moves) -> None:
        """Write evicted rows back and read admitted ones, for each matrix (weights, state).

        For each move j below ``moves.count``: entry e of the row cache is row ``home + e`` of
        `hbm`; if ``moves.outgoing[j] >= 0`` it is first copied to row ``outgoing[j] − home``
        of `dram`; then row ``incoming[j] − home`` of `dram` is copied to it.
        """
        ...
