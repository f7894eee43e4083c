"""Find small batches by CUDA graphs, as the host starts kernels more slowly than the GPU runs them.

Batches that come in one shape, such as those with one id a feature, start the same kernels in the
same order. After a few of them, all that finds a batch's rows is captured as a graph. A later
batch of that shape is copied to where the graph reads, and one call starts it. The kernels are the
same, and so are the results, to the bit.
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
"""Batches of one shape that are prepared as usual before the shape is captured."""

MOST_LOOKUPS = 1 << 22
"""Larger batches keep the GPU busy for longer than the host needs to start their kernels."""

MOST_SHAPES = 2
"""A graph keeps some 30 bytes a lookup that others give back after their step."""

MOST_GRAPHS = 2
"""Graphs of one shape: one step may be open while the next one is found."""

Shape = tuple[int, torch.dtype, tuple[tuple[int, int], ...]]


@dataclass(slots=True, eq=False)
class CapturedBatch:
    """The graph of one shape of batches, and the tensors that it reads and writes."""

    ids: Tensor
    offsets: Tensor
    fault: Tensor
    steps: tuple[ArenaStep, ...]
    graph: torch.cuda.CUDAGraph
    # Of the last step, if something still refers to it.
    ticket: Callable[[], Ticket | None] = lambda: None


class CapturedBatches:
    """Captures how a module finds batches, where all its rows are in HBM."""

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
        """Return the step of a batch on the device, to be trained; None if it must be prepared.

        So it must if its shape is not captured, or if the last steps of that shape are still open:
        a graph would overwrite what they read. A graph also waits for what `behind` has queued,
        where steps are trained on that stream.
        """
        backend = self._runtime.backend
        shape = (batch.batch_size, batch.ids.dtype, bags.spans)
        if not self._can or not 0 < bags.lookups <= MOST_LOOKUPS or backend.counts.by_table:
            return None
        if batch.weights is not None or torch.cuda.is_current_stream_capturing():
            return None
        graphs = self._captured.get(shape, [])
        captured = next((each for each in graphs if not backend.is_open(each.ticket())), None)
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
        backend.watch(captured.fault, batch, self._features)
        ticket = backend.open_step()
        captured.ticket = weakref.ref(ticket)
        return tuple(replace(step, ticket=ticket) for step in captured.steps)

    def _capture(
        self, batch: BagBatch, bags: Bags, reads: Callable[[Bags], tuple[ArenaReads, ...]]
    ) -> CapturedBatch:
        """Record the graph for a batch; it does not run yet."""
        runtime = self._runtime
        ids, offsets = batch.ids.clone(), bags.offsets.clone()
        held = BagBatch(ids, offsets, batch.batch_size, bounds=batch.bounds)
        arena_reads = reads(replace(bags, offsets=offsets))
        graph = torch.cuda.CUDAGraph()
        # Relaxed: threads that load data may go on using the device.
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            fault = runtime.backend.new_fault()
            steps = runtime.backend.prepare(
                runtime.arenas, held, self._features, arena_reads, training=True, fault=fault
            )
            steps = tuple(self._with_sources(step) for step in steps)
        runtime.backend.finish(steps)
        return CapturedBatch(ids, offsets, fault, steps, graph)

    def _with_sources(self, step: ArenaStep) -> ArenaStep:
        assert step.runs is not None, "lookups that are trained on are sorted"
        return replace(step, sources=self._runtime.backend.sorted_bags(step.reads, step.runs))
