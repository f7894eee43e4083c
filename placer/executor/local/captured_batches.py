"""Find the rows of small batches with CUDA graphs, as launches take longer than their kernels.

Batches of one shape, such as batches with one id per feature, start the same kernels in the same
order. After a few of them, the kernels that find a batch's rows are captured as a graph. A later
batch of that shape is copied to the graph's input tensors, and one call starts the graph. Results
are equal to the bit, as the kernels are the same.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from placer.executor.local.fused_lookup import Runtime
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import ArenaReads, Bags, FeatureRead
from placer.executor.lookups.steps import ArenaStep, Ticket

SEEN = 3
"""Prepare this many batches of one shape as usual before capturing the shape."""

MOST_LOOKUPS = 1 << 22
"""Do not capture larger batches: their kernels run for longer than their launches take."""

MOST_SHAPES = 2
"""Most shapes to capture. A graph keeps about 30 bytes per lookup after its step."""

MOST_GRAPHS = 2
"""Most graphs of one shape: one step may be open while the next step's rows are found."""

Shape = tuple[int, torch.dtype, tuple[tuple[int, int], ...]]


@dataclass(slots=True, eq=False)
class CapturedBatch:
    """The graph of one shape of batches, and the tensors that it reads and writes."""

    ids: Tensor
    offsets: Tensor
    fault: Tensor
    steps: tuple[ArenaStep, ...]
    graph: torch.cuda.CUDAGraph
    # Returns the ticket of the last step, if something still refers to it.
    ticket: Callable[[], Ticket | None] = lambda: None


class CapturedBatches:
    """CUDA graphs that find the rows of batches, for a module with all rows in HBM."""

    def __init__(self, runtime: Runtime, features: Sequence[FeatureRead]) -> None:
        self._runtime, self._features = runtime, features
        self._captured: dict[Shape, list[CapturedBatch]] = {}
        self._last: Shape | None = None
        self._seen = 0
        self._can = runtime.backend.can_be_captured and all(
            arena.spec.home == arena.spec.rows and not arena.spec.key.splits_rows
            for arena in runtime.arenas
        )

    def find(
        self,
        batch: BagBatch,
        bags: Bags,
        reads: Callable[[Bags], tuple[ArenaReads, ...]],
        behind: torch.cuda.Stream | None = None,
    ) -> tuple[ArenaStep, ...] | None:
        """Run a graph on a training batch and return its steps; None if no graph can run.

        No graph can run if the shape is not captured, or if all its graphs serve open steps: a
        graph would overwrite tensors that these steps read. If steps train on the stream `behind`,
        a graph also waits for the work queued there.
        """
        backend = self._runtime.backend
        shape = (batch.batch_size, batch.ids.dtype, bags.spans)
        if not self._can or not 0 < bags.lookups <= MOST_LOOKUPS or backend.counts.by_table:
            return None
        if batch.weights is not None or torch.cuda.is_current_stream_capturing():
            return None
        graphs = self._captured.get(shape, [])
        captured = next(
            (each for each in graphs if not backend.window.is_open(each.ticket())), None
        )
        if captured is None:
            self._seen = self._seen + 1 if shape == self._last else 1
            self._last = shape
            if self._seen <= SEEN or len(graphs) == MOST_GRAPHS:
                return None
            if not graphs and len(self._captured) == MOST_SHAPES:
                return None
            captured = self._capture(batch, bags, reads)
            self._captured[shape] = [*graphs, captured]
        else:
            if behind is not None:
                torch.cuda.current_stream(batch.ids.device).wait_stream(behind)
            captured.ids.copy_(batch.ids)
            captured.offsets.copy_(bags.offsets)
            backend.counts.add_captured(sum(step.reads.lookups for step in captured.steps))
        captured.graph.replay()
        backend.faults.watch(captured.fault, batch, self._features)
        ticket = backend.window.open()
        captured.ticket = weakref.ref(ticket)
        return tuple(replace(step, ticket=ticket) for step in captured.steps)

    def _capture(
        self, batch: BagBatch, bags: Bags, reads: Callable[[Bags], tuple[ArenaReads, ...]]
    ) -> CapturedBatch:
        """Capture the graph for a batch without running it."""
        runtime = self._runtime
        ids, offsets = batch.ids.clone(), bags.offsets.clone()
        held = BagBatch(ids, offsets, batch.batch_size, bounds=batch.bounds)
        arena_reads = reads(replace(bags, offsets=offsets))
        graph = torch.cuda.CUDAGraph()
        # Relaxed, so that data loading threads may use the device during the capture.
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            fault = runtime.backend.faults.new()
            steps = runtime.backend.prepare(
                runtime.arenas, held, self._features, arena_reads, training=True, fault=fault
            )
            steps = tuple(self._with_sources(step) for step in steps)
        runtime.backend.finish(steps)
        return CapturedBatch(ids, offsets, fault, steps, graph)

    def _with_sources(self, step: ArenaStep) -> ArenaStep:
        assert step.runs is not None, "lookups that are trained on are sorted"
        return replace(step, sources=self._runtime.backend.sorted_bags(step.reads, step.runs))
