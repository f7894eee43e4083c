"""The module that trains embedding tables where a plan places them."""

import copy
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from placer.errors import DataError, PlanMismatchError
from placer.executor import Policy
from placer.executor.backends import make_backend
from placer.executor.embeddings import Embeddings, uncompiled
from placer.executor.id_order import LocalIdOrder
from placer.executor.local.captured_batches import CapturedBatches
from placer.executor.local.fused_lookup import FusedLookup, Runtime, watch_scalers
from placer.executor.local.hit_rates import HitRates
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import (
    ArenaReads,
    Bags,
    FeatureRead,
    arena_reads,
    feature_reads,
    keep_until_used,
    ready_to_read,
    tensors_of,
)
from placer.executor.lookups.steps import PreparedBatch
from placer.executor.memory.layout import has_records, lay_out
from placer.executor.optimizers import Rounding, check_constants
from placer.executor.streams import indexed, recorded
from placer.files.atomic import StrPath
from placer.growing import Growing
from placer.plan.plan import Plan
from placer.tables import OptimizerName

if TYPE_CHECKING:
    from placer.executor.distributed.row_sums import RowTotals

_MOST_AHEAD = 3
"""Most batches that the host prepares ahead of the device."""


class PlacedEmbeddings(Embeddings):
    """Embedding tables in one process, laid out by a plan and updated in the backward pass.

    Behaves like one `nn.EmbeddingBag` (or `nn.Embedding`, for pooling ``none``) per feature.
    Features of one table share weights. Backward sums each row's gradients over the step and
    applies the optimizer once, so weights are no `nn.Parameter`, and no other optimizer must see
    them. Without grad mode nothing is updated. Run backward only once for each forward pass.

    One device emulates all devices of the plan, and holds only one copy of replicated rows. The
    plan's capacity limits still apply.

    Raises PlanMismatchError if the plan is unsound, or if `weights` has unknown tables or wrong
    shapes. Raises CapacityError if the plan places more bytes on a device than it has, and
    BackendError if the backend is not available.

    Parameters
    ----------
    lr, eps : float
        Learning rate, and the term added to √state.
    betas : (float, float)
        Decay rates of Adam's averages of g and g².
    optimizer : {"sgd", "adagrad", "rowwise_adagrad", "adam"} or None
        Optimizer of all tables; None takes each table's own.
    device : str or torch.device
        Device that pools rows and holds the outputs.
    seed : int or None
        Initial weights are uniform in ±1/√rows, drawn from seed and table name, so that they do
        not depend on the plan. None sets them to zero.
    weights : mapping of table name to tensor of shape (rows, dim), or None
        Initial weights in id order; weights of other tables are drawn.
    padding_idx : mapping of feature name to id, or None
        Lookups of this id are dropped: they add nothing, do not count in a mean and get no
        gradient. The id may lie outside the table, such as −1.
    backend : {"auto", "numba", "torch", "triton", "tiered"}
        The kernels that read and update rows; see docs/executor.md. ``auto`` takes the fastest.
    cache_policy : {"lfu", "rank"}
        Which rows a row cache evicts: the least often looked up recently, or the last ones in
        the plan's row order.
    rounding : {"nearest", "stochastic"}
        Rounding of half-precision weights after an update.
    drive : str, Path or None
        Folder for rows that the plan places on ``ssd``. Its files are deleted with the process.
        None takes the system's folder for temporary files.
    growing : mapping of table name to Growing, or None
        Tables whose ids may be any int64; None takes those of the plan.
    whole_rows : RowTotals, optional
        Computes Σ g² over whole rows for row-wise Adagrad, if other processes hold columns of the
        same tables.

    Examples
    --------
    >>> from placer import Feature, Plan, Shard, Table, Topology
    >>> table = Table("words", rows=1000, dim=16, features=(Feature("words"),))
    >>> whole = Shard("words", (0, 1000, 1), (0, 16), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((table,), Topology.parse("1xh100"), (whole,))
    >>> embeddings = PlacedEmbeddings(plan, lr=0.1, backend="torch")
    >>> words = torch.tensor([3, 7, 7]), torch.tensor([0, 1, 3]), None
    >>> batch = BagBatch.from_features({"words": words}, embeddings.feature_names)
    >>> pooled = embeddings(batch)["words"]
    >>> pooled.shape
    torch.Size([2, 16])
    >>> pooled.sum().backward()  # Updates rows 3 and 7.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        plan: Plan,
        *,
        lr: float = 0.01,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        optimizer: OptimizerName | None = None,
        device: str | torch.device = "cpu",
        seed: int | None = 0,
        weights: Mapping[str, Tensor] | None = None,
        padding_idx: Mapping[str, int] | None = None,
        backend: str = "auto",
        cache_policy: Policy = "lfu",
        rounding: Rounding = "nearest",
        drive: StrPath | None = None,
        growing: Mapping[str, Growing] | None = None,
        whole_rows: "RowTotals | None" = None,
    ) -> None:
        super().__init__(
            plan,
            indexed(torch.device(device)),
            optimizer,
            weights,
            padding_idx,
            stochastic=rounding == "stochastic",
        )
        initial = dict(weights or {})
        for name, value, known in (
            ("rounding", rounding, get_args(Rounding)),
            ("cache_policy", cache_policy, get_args(Policy)),
        ):
            if value not in known:
                raise PlanMismatchError(f"{name} {value!r} is none of {known}")
        check_constants(lr, eps, betas)
        watch_scalers()
        kernels = make_backend(backend, self.device, cache_policy, needs_tiers=has_records(plan))
        sliced_elsewhere = () if whole_rows is None else whole_rows.dims
        self._layout = lay_out(plan, self.optimizers, self.device, sliced_elsewhere)
        grows = plan.growing if growing is None else growing
        self.keys = kernels.key_maps(grows, plan.tables_by_name, seed)
        folder = None if drive is None else Path(drive)
        self._runtime = Runtime(
            tuple(kernels.allocate(spec, folder) for spec in self._layout.arenas),
            kernels,
            eps,
            betas,
            self._stochastic,
            torch.tensor(lr, dtype=torch.float32, device=self.device),
            torch.zeros((), dtype=torch.int64, device=self.device),
            self.keys,
            whole_rows,
        )
        order = self.id_order()
        self._captured = CapturedBatches(self._runtime, self.features)
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        # A separate stream prepares batches while the step trains.
        self._stream: torch.cuda.Stream | None = None
        self._begun: deque[torch.cuda.Event] = deque()
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        for weight in order.weights():
            if weight.table.name in initial:
                order.overwrite(weight, initial[weight.table.name])
            elif seed is not None:
                order.draw(weight, seed)

    def part(self, plan: Plan, whole_rows: "RowTotals | None" = None) -> "PlacedEmbeddings":
        """Return a module of the plan's tables, which shares their memory with this one.

        It has its own learning rate and number of updates, and reads the plan's features.
        """
        names = [table.name for table in plan.tables]
        runtime, part = self._runtime, copy.copy(self)
        part.plan, part.features = plan, feature_reads(plan.tables, {})
        part.optimizers = {name: self.optimizers[name] for name in names}
        part._layout, held = self._layout.of_tables(names)
        part._runtime = replace(
            runtime,
            arenas=tuple(runtime.arenas[arena] for arena in held),
            lr=runtime.lr.clone(),
            updates=runtime.updates.clone(),
            whole_rows=whole_rows,
        )
        part._captured = CapturedBatches(part._runtime, part.features)
        return part

    def by_row(self) -> "PlacedEmbeddings":
        """Return a module that looks up single rows: one unpooled feature named like each table."""
        rows = copy.copy(self)
        rows.features = tuple(
            FeatureRead(table.name, table.name, table.rows, "none", None)
            for table in self.plan.tables
        )
        rows._captured = CapturedBatches(rows._runtime, rows.features)
        return rows

    @property
    def backend(self) -> str:
        return self._runtime.backend.name

    def update_count(self) -> int:
        return int(self._runtime.updates)

    def sum_by_lookup(self) -> None:
        """Give other ranks Σ g² of sliced rows for each lookup, as backends with tiers do."""
        self._runtime.backend.sums_by_lookup = True

    def set_lr(self, lr: float) -> None:
        check_constants(lr)
        self._runtime.lr.fill_(lr)

    def set_eps(self, eps: float) -> None:
        check_constants(0.0, eps)
        self._runtime.eps = eps

    @uncompiled
    def prefetch(self, batch: BagBatch) -> PreparedBatch:
        """Find a batch's rows and start to copy them to HBM, before its forward pass.

        Call this with the next batch before the forward pass of the current batch, as
        `placer.executor.look_ahead` does; docs/executor.md says what runs beside the current step
        then. Results are equal to the bit with and without it. The plan has staging rows for one
        batch ahead; with more batches, some rows may be read in place. The batch may be on the
        device or on the host. Pin it to copy it without waiting.

        Raises DataError if an id is no row of its table, or if the batch has other features. On a
        GPU a later call reports bad ids; until then they are skipped.
        """
        if self._stream is None:
            return self._prepare(batch, training=True)
        training, backend = torch.cuda.current_stream(self.device), self._runtime.backend
        # Copies of rows wait for the updates that are queued now. Finding the rows of a batch on
        # the host need not wait, so it runs beside the training step.
        backend.follow(training)
        if backend.is_written or any(tensor.is_cuda for tensor in tensors_of(batch)):
            self._stream.wait_stream(training)
            backend.is_written = False
        keep_until_used(batch, self._stream)
        self._begun.append(recorded())
        with torch.cuda.stream(self._stream):
            prepared = self._prepare(batch, training=True, behind=training)
            ready = recorded()
        # Running further ahead gains nothing, and needs memory for every batch.
        if len(self._begun) > _MOST_AHEAD:
            self._begun.popleft().synchronize()
        return replace(prepared, ready=ready)

    @uncompiled
    def forward(self, batch: BagBatch | PreparedBatch) -> dict[str, Tensor]:
        """Return pooled rows by feature: float32, shape (batch_size, dim).

        With pooling ``none`` the shape is (lookups, dim), in the order of the feature's lookups,
        with zeros for padded lookups. Raises DataError if an id is no row of its table, or if the
        batch has other features.
        """
        training = torch.is_grad_enabled()
        if not isinstance(batch, PreparedBatch):
            if self._stream is not None and not torch.cuda.is_current_stream_capturing():
                # This batch may read rows that are being staged for another batch.
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
            batch = self._prepare(batch, training)
            self._runtime.backend.is_written = True
        elif batch.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(batch.ready)
            keep_until_used(batch, stream)
        self.keys.begin(batch.key_step)
        steps = tuple(batch.steps)
        batch.steps.clear()
        if len(steps) != len(self._runtime.arenas):
            raise DataError("a batch is prepared for one forward pass: prefetch it once more")
        outputs = FusedLookup.apply(  # type: ignore[no-untyped-call]
            self._anchor, batch.bags.weights, steps, self._runtime, batch.key_step
        )
        if not training:
            self._runtime.backend.finish(steps)
            self.keys.end_step(batch.key_step)
        column_slices: list[dict[int, Tensor]] = [{} for _ in self.features]
        segments = (segment for step in steps for segment in step.reads.segments)
        for segment, output in zip(segments, outputs, strict=True):
            column_slices[segment.feature][segment.columns.cols[0]] = output
        results = {}
        for index, feature in enumerate(self.features):
            parts = [part for _, part in sorted(column_slices[index].items())]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            results[feature.name] = batch.bags.output(index, feature, whole)
        return results

    def hit_rates(self) -> HitRates | None:
        backend = self._runtime.backend
        if backend.in_one_memory:
            return None
        self.id_order().synchronize()
        held = (arena.row_cache for arena in self._runtime.arenas)
        return backend.counts.read([cache for cache in held if cache is not None])

    def count_by_table(self) -> None:
        self._runtime.backend.counts.by_table = True

    def reset_hit_rates(self) -> None:
        self._runtime.backend.counts.reset()
        for arena in self._runtime.arenas:
            if arena.row_cache is not None:
                arena.row_cache.reset_stats()

    def memory_use(self) -> dict[tuple[str, str], int]:
        held: dict[tuple[str, str], int] = defaultdict(int)
        for arena in self._runtime.arenas:
            for part in arena.spec.ranges:
                size = (part.stop - part.start) * arena.row_bytes(part.dtype)
                held[part.home, part.memory] += size
            if arena.row_cache is None:
                continue
            for shard in arena.spec.cache_ranges:
                entries = shard.staging_rows + shard.cache_rows
                size = arena.row_cache.directory.nbytes * entries
                share = size // max(arena.row_cache.entries, 1)
                held[shard.device, "pool"] += entries * arena.row_bytes() + share
        for name, column_slices in self._layout.column_slices.items():
            maps = [columns.slots for columns in column_slices if columns.slots is not None]
            if size := sum(slots.nbytes for slots in maps):
                server = self.plan.shards_by_table[name][0].devices[0]
                held[server, "row_maps"] += size
        return dict(held)

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows in parentheses."""
        return (
            f"tables={len(self.plan.tables)}, features={len(self.features)}, "
            f"shards={len(self.plan.shards)}, backend={self.backend!r}, device={self.device}"
        )

    def id_order(self) -> LocalIdOrder:
        self._runtime.backend.is_written = True
        return self._id_order()

    def _id_order(self) -> LocalIdOrder:
        return LocalIdOrder(self, self._layout, self._runtime)

    def _prepare(
        self, batch: BagBatch, training: bool, behind: torch.cuda.Stream | None = None
    ) -> PreparedBatch:
        """Check a batch and find its rows, on the current stream.

        `behind` is the stream that trains steps, if it is not the current stream.
        """
        batch, bags = ready_to_read(batch, self.features, self.device)
        runtime = self._runtime
        key_step = runtime.keys.open_step() if training else None
        if runtime.keys.in_batches:

            def order() -> LocalIdOrder:
                if behind is not None:
                    torch.cuda.current_stream(self.device).wait_stream(behind)
                return self._id_order()

            open_before = None if key_step is None else key_step.open_before
            batch = runtime.keys.rows_of(batch, self.features, open_before, order)
        steps = None
        if training:
            steps = self._captured.find(batch, bags, self._reads, behind)
        if steps is None:
            reads = self._reads(bags)
            steps = runtime.backend.prepare(runtime.arenas, batch, self.features, reads, training)
        runtime.keys.found(key_step)
        return PreparedBatch(bags, list(steps), key_step)

    def _reads(self, bags: Bags) -> tuple[ArenaReads, ...]:
        return arena_reads(bags, self.features, self._layout)
