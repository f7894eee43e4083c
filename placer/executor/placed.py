"""The module that trains embedding tables where a plan puts them."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from placer.errors import CheckpointError, PlanMismatchError
from placer.executor.arena import TORCH_DTYPES, Rows, allocate
from placer.executor.backends import make_backend
from placer.executor.bags import BagBatch
from placer.executor.function import FusedLookup, Runtime
from placer.executor.initial import id_chunks, initial_weights
from placer.executor.layout import SlotRange, Strip, check_plan, lay_out
from placer.executor.pooling import mean_from_sum, segment_max
from placer.executor.step import (
    FeatureRead,
    arena_steps,
    check_batch,
    drop_padding,
    feature_bounds,
    feature_reads,
)
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, OptimizerName, Table

Kind = Literal["weights", "state"]


class PlacedEmbeddings(nn.Module):
    """Embedding tables laid out by a plan, with the optimizer fused into the backward pass.

    Behaves like one `nn.EmbeddingBag` (or `nn.Embedding`, for pooling ``none``) per feature,
    whose weights are shared where features read one table. Backward sums the gradients of
    each row over the whole step and applies the optimizer once to it; so the weights are no
    `nn.Parameter`, and no other optimizer must see them. Without grad mode nothing is
    updated. Each backward through one forward is one update; do not run it twice.

    All devices of the plan are emulated in this process. On a CPU both tiers are host memory,
    every lookup kind reads rows in place, and a replica is held once; what the plan says
    about capacity is enforced all the same. On CUDA the shards in HBM are on the plan's GPU
    (modulo the GPUs that there are), those in DRAM in pinned host memory, from where the
    distinct rows of each step are copied.

    Parameters
    ----------
    plan : Plan
    lr, eps : float
        Learning rate, and the term added to √state.
    optimizer : {"sgd", "adagrad", "rowwise_adagrad"} or None
        For all tables; None takes each table's own.
    device : str or torch.device
        Where rows are pooled: batches and outputs are there.
    seed : int
        Weights start uniform in ±1/√rows, drawn by seed and table name, so that they do not
        depend on the plan.
    weights : mapping of table name to tensor of shape (rows, dim), or None
        Initial weights in id order; tables that are not named are drawn.
    padding_idx : mapping of feature name to id, or None
        Lookups of this id are dropped: they add nothing, are not counted in a mean and get
        no gradient. It may lie outside the table, such as −1.
    backend : {"auto", "numba", "torch", "staged"}

    Raises
    ------
    PlanMismatchError
        If the plan is unsound, or `weights` names unknown tables or has other shapes.
    CapacityError
        If the plan puts more bytes on a device than it has.
    BackendError
        If the backend is not there.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        lr: float = 0.01,
        eps: float = 1e-8,
        optimizer: OptimizerName | None = None,
        device: str | torch.device = "cpu",
        seed: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        padding_idx: Mapping[str, int] | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_plan(plan)
        given = dict(weights or {})
        _check_tensors(plan, given, "weights", {table.name: _shape(table) for table in plan.tables})
        tables = {table.name: table.optimizer for table in plan.tables}
        if optimizer is not None:
            if optimizer not in OPTIMIZERS:
                raise PlanMismatchError(f"optimizer {optimizer!r} is none of {OPTIMIZERS}")
            tables = dict.fromkeys(tables, optimizer)
        self.plan = plan
        self.device = torch.device(device)
        kernels = make_backend(backend, self.device.type)
        self._optimizers = tables
        self._features = feature_reads(plan.tables, padding_idx or {})
        self._layout = lay_out(plan, tables, self.device)
        home = self._home if kernels.name == "staged" else None
        arenas = tuple(allocate(spec, home, self.device) for spec in self._layout.arenas)
        self._runtime = Runtime(arenas, kernels, lr, eps)
        for table in plan.tables:
            if table.name in given:
                self._write(table, "weights", given[table.name])
            else:
                for ids, values in initial_weights(table, seed):
                    self._write_chunk(table, "weights", ids, values)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Features of the plan's tables, in order: what batches must follow."""
        return tuple(feature.name for feature in self._features)

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._runtime.backend.name

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next backward pass on."""
        self._runtime.lr = lr

    def forward(self, batch: BagBatch) -> dict[str, Tensor]:
        """Pooled rows by feature: float32, shape (batch_size, dim).

        With pooling ``none`` the shape is (lookups, dim), in the order of the feature's
        lookups; padded ones are zero.

        Raises
        ------
        DataError
            If an id is no row of its table, or the batch is of other features.
        """
        check_batch(batch, self._features)
        keep: Tensor | None = None
        lookups = feature_bounds(batch, self._features)
        if any(feature.padding_idx is not None for feature in self._features):
            batch, keep = drop_padding(batch, self._features)
        translate = self._runtime.backend.translate
        steps = arena_steps(batch, self._features, self._layout, translate)
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        outputs = FusedLookup.apply(  # type: ignore[no-untyped-call]
            anchor, batch.weights, steps, self._runtime
        )
        strips: list[list[tuple[int, Tensor]]] = [[] for _ in self._features]
        segments = (segment for step in steps for segment in step.segments)
        for segment, output in zip(segments, outputs, strict=True):
            strips[segment.feature].append((segment.strip.cols[0], output))
        results = {}
        for index, feature in enumerate(self._features):
            parts = [part for _, part in sorted(strips[index], key=lambda strip: strip[0])]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            start, stop = lookups[index]
            kept = None if keep is None else keep[start:stop]
            results[feature.name] = _pool(feature, index, batch, whole, kept)
        return results

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Optimizer state by ``<table>.sum``, in id order whatever the plan.

        float32, shape (rows,) for row-wise Adagrad, (rows, dim) for Adagrad; SGD has none.
        """
        return {
            f"{table.name}.sum": self._read(table, "state")
            for table in self.plan.tables
            if self._optimizers[table.name] != "sgd"
        }

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `optimizer_state_dict` gave, under this or any other plan.

        Raises
        ------
        CheckpointError
            If a table's state is missing or of another shape; nothing is changed then.
        """
        shapes = {
            f"{table.name}.sum": self._state_shape(table)
            for table in self.plan.tables
            if self._optimizers[table.name] != "sgd"
        }
        faults = [f"{key} is missing" for key in shapes if key not in state]
        faults += [f"{key} is of no table of the plan" for key in state if key not in shapes]
        faults += [
            f"{key} has shape {tuple(state[key].shape)}, not {shape}"
            for key, shape in shapes.items()
            if key in state and tuple(state[key].shape) != shape
        ]
        if faults:
            raise CheckpointError(f"the optimizer state does not fit: {'; '.join(faults)}")
        for table in self.plan.tables:
            if f"{table.name}.sum" in shapes:
                self._write(table, "state", state[f"{table.name}.sum"])

    def memory_use(self) -> dict[tuple[str, str], int]:
        """Bytes held by (device id, tier), to compare with what the plan says.

        Tiers are ``hbm`` and ``dram``, the weights and optimizer state in them, and
        ``row_maps``, under the device that serves the table's first shard. A replicated
        shard counts on its first device alone, where this process holds it.
        """
        held: dict[tuple[str, str], int] = {}
        for arena in self._runtime.arenas:
            for part in arena.spec.ranges:
                size = arena.range_bytes(part)
                held[part.device, part.tier] = held.get((part.device, part.tier), 0) + size
        for name, strips in self._layout.strips.items():
            size = sum(strip.slots.nbytes for strip in strips if strip.slots is not None)
            if size:
                server = self.plan.shards_by_table[name][0].devices[0]
                held[server, "row_maps"] = held.get((server, "row_maps"), 0) + size
        return held

    def extra_repr(self) -> str:
        """What `print(model)` shows of it."""
        return (
            f"tables={len(self.plan.tables)}, features={len(self._features)}, "
            f"shards={len(self.plan.shards)}, backend={self.backend!r}, device={self.device}"
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in self.plan.tables:
            destination[f"{prefix}{table.name}.weight"] = self._read(table, "weights")

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = {f"{prefix}{table.name}.weight": table for table in self.plan.tables}
        given = {table.name: state_dict[key] for key, table in keys.items() if key in state_dict}
        shapes = {table.name: _shape(table) for table in self.plan.tables}
        _check_tensors(self.plan, given, "checkpoint", shapes)
        missing = [key for key in keys if key not in state_dict]
        missing_keys.extend(missing)
        if strict:
            unknown = [key for key in state_dict if key.startswith(prefix) and key not in keys]
            unexpected_keys.extend(unknown)
            if missing or unknown:
                return  # The caller raises; the weights stay as they are.
        for name, tensor in given.items():
            self._write(self.plan.tables_by_name[name], "weights", tensor)

    def _home(self, part: SlotRange) -> torch.device:
        """Where the rows of a range are when every tier has memory of its own."""
        if self.device.type == "cpu" or part.tier == "dram":
            return torch.device("cpu")
        gpus = [gpu.id for gpu in self.plan.topology.gpus]
        return torch.device(self.device.type, gpus.index(part.device) % torch.cuda.device_count())

    def _state_shape(self, table: Table) -> tuple[int, ...]:
        row_wise = self._optimizers[table.name] == "rowwise_adagrad"
        return (table.rows,) if row_wise else _shape(table)

    def _rows_of(self, strip: Strip, kind: Kind) -> Rows:
        arena = self._runtime.arenas[strip.arena]
        rows = arena.weights if kind == "weights" else arena.state
        assert rows is not None, "tables under SGD, which have no state, are left out before"
        return rows

    def _read(self, table: Table, kind: Kind) -> Tensor:
        """Weights or state of a table in id order, on the host."""
        if kind == "weights":
            result = torch.empty(_shape(table), dtype=TORCH_DTYPES[table.dtype])
        else:
            result = torch.empty(self._state_shape(table))
        for ids in id_chunks(table.rows):
            chunk = result[_span(ids)]
            for strip in self._layout.strips[table.name]:
                # Strips of a row that share its state hold equal copies of it.
                part = chunk[:, slice(*strip.cols)] if chunk.dim() == 2 else chunk
                slots = strip.slots_of(ids.to(self.device))
                part.copy_(self._rows_of(strip, kind).read(slots))
        return result

    def _write(self, table: Table, kind: Kind, values: Tensor) -> None:
        """Overwrite weights or state of a table, given in id order."""
        for ids in id_chunks(table.rows):
            self._write_chunk(table, kind, ids, values[_span(ids)])

    def _write_chunk(self, table: Table, kind: Kind, ids: Tensor, chunk: Tensor) -> None:
        for strip in self._layout.strips[table.name]:
            part = chunk[:, slice(*strip.cols)] if chunk.dim() == 2 else chunk
            slots = strip.slots_of(ids.to(self.device))
            self._rows_of(strip, kind).write(slots, part.to(self.device))


def _span(ids: Tensor) -> slice:
    """Consecutive ids as a slice."""
    return slice(int(ids[0]), int(ids[-1]) + 1)


def _shape(table: Table) -> tuple[int, int]:
    return table.rows, table.dim


def _check_tensors(
    plan: Plan, given: Mapping[str, Tensor], what: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `PlanMismatchError` naming every tensor that does not fit its table."""
    faults = [
        f"{name!r} is no table of the plan" for name in given if name not in plan.tables_by_name
    ]
    faults += [
        f"table {name!r} has shape {tuple(tensor.shape)}, the plan says {shapes[name]}"
        for name, tensor in given.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if faults:
        raise PlanMismatchError(f"{what}: {'; '.join(faults)}")


def _pool(
    feature: FeatureRead, index: int, batch: BagBatch, whole: Tensor, kept: Tensor | None
) -> Tensor:
    """A feature's output from the fused sums of its bags, or from its single lookups."""
    if feature.pooling == "sum":
        return whole
    if feature.pooling == "none":
        if kept is None or feature.padding_idx is None:
            return whole
        result = whole.new_zeros((kept.numel(), whole.shape[1]))
        return result.index_put((torch.nonzero(kept).squeeze(1),), whole)
    size = batch.batch_size
    offsets = batch.offsets[index * size : (index + 1) * size + 1]
    if feature.pooling == "mean":
        return mean_from_sum(whole, offsets)
    return segment_max(whole, offsets - offsets[0])
