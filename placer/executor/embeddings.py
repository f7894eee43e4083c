"""The base class of embeddings in one process and of embeddings that processes share."""

import copy
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from placer.errors import PlacerError, PlanMismatchError, check_kinds
from placer.executor.id_order import rows_from
from placer.executor.local.hit_rates import HitRates
from placer.executor.lookups.batch_reads import feature_reads
from placer.executor.memory.layout import check_plan, has_records
from placer.executor.tensor_names import UPDATES, check_shapes, check_weights, state_shapes
from placer.growing import KeyCounts
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, OptimizerName

if TYPE_CHECKING:
    from placer.executor.distributed.collectives import Kind, Volume
    from placer.executor.growing_keys import GrowingKeys
    from placer.executor.id_order import IdOrder, TableTensor


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Exclude a function from `torch.compile`, as `torch.compiler.disable` does.

    `torch.compiler.disable` imports ``torch._dynamo``, which takes two seconds. This decorator only
    calls it in programs that have imported the compiler already.

    >>> @uncompiled
    ... def twice(number):
    ...     return 2 * number
    >>> twice(3)
    6
    """

    disabled: list[Callable[Parameters, Result]] = []

    @functools.wraps(function)
    def outside(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
            # Otherwise, this wrapper is compiled anew for each function that it wraps.
            torch._dynamo.decorators.skip(outside)
        return disabled[0](*args, **kwargs)

    # The compiler calls functions with these attributes instead of tracing them.
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return outside


class Embeddings(nn.Module, ABC):
    """Embedding tables laid out by a plan, with the optimizer fused into the backward pass.

    `PlacedEmbeddings` holds all tables in one process, and `ShardedEmbeddings` shares them with
    other processes. `make_embeddings` chooses between them. Call either with a `BagBatch` to get
    pooled rows by feature.

    Attributes
    ----------
    plan : Plan
    device : torch.device
        Device that pools rows.
    optimizers : mapping of table name to optimizer
    features : tuple of FeatureRead
    rank, world : int
        This process's number, and the number of processes that share the tables.
    keys : GrowingKeys
        Key maps of the tables that grow.
    """

    rank, world = 0, 1
    keys: "GrowingKeys"
    _is_shared = False  # Whether other processes may hold some of the tables.

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        optimizer: OptimizerName | None,
        weights: Mapping[str, Tensor] | None,
        padding_idx: Mapping[str, int] | None,
        *,
        stochastic: bool,
    ) -> None:
        super().__init__()
        check_plan(plan)
        check_kinds(
            optimizer=(optimizer, str | None),
            weights=(weights, Mapping | None),
            padding_idx=(padding_idx, Mapping | None),
        )
        check_weights("weights", weights or {}, plan.tables)
        if optimizer is not None and optimizer not in OPTIMIZERS:
            raise PlanMismatchError(f"optimizer {optimizer!r} is none of {OPTIMIZERS}")
        self.plan, self.device, self._stochastic = plan, device, stochastic
        self.optimizers = {table.name: optimizer or table.optimizer for table in plan.tables}
        self.features = feature_reads(plan.tables, padding_idx or {})

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._is_shared or has_records(self.plan):
            raise PlacerError(
                "tables that have processes in common, rows on a drive or narrow rows cannot be "
                "deep-copied: make another module with the same plan, and load this one's "
                "state_dict and optimizer_state_dict"
            )
        made = memo[id(self)] = copy.copy(self)
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlacerError(
            f"{type(self).__name__} cannot be pickled, nor saved by torch.save: save its "
            "state_dict and optimizer_state_dict, or give it to "
            "placer.storage.checkpoint.save_model; load them into a module made with the plan"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse `to`, `cuda`, `half` and the like where they ask for another device or type."""
        before = torch.empty(0, device=self.device)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise PlanMismatchError(
                f"{type(self).__name__} cannot become {after.dtype} on {after.device}: it returns "
                f"{before.dtype} on {before.device}, and the plan says the types of its rows. Make "
                "it with device=..., and convert or move the other modules alone"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse to freeze the tables, which are no parameters: they would train nevertheless."""
        if not requires_grad:
            raise PlacerError(
                f"{type(self).__name__} has no parameters to freeze, and trains its tables in "
                "backward: look rows up under torch.no_grad(), which leaves tables as they are"
            )
        return super().requires_grad_(requires_grad)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the plan's features, in the order that batches must have."""
        return tuple(feature.name for feature in self.features)

    @property
    @abstractmethod
    def backend(self) -> str:
        """Name of the backend; empty if this process holds no rows."""

    @property
    def counts_updates(self) -> bool:
        """Whether results depend on the number of updates, as with Adam or stochastic rounding.

        Updates of rows in a narrower dtype than the table's are always rounded stochastically.
        """
        tables = self.plan.tables_by_name
        narrow = any(
            shard.dtype not in (None, tables[shard.table].dtype) for shard in self.plan.shards
        )
        return self._stochastic or narrow or "adam" in self.optimizers.values()

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the learning rate from the next backward pass on; call it in every process."""

    @abstractmethod
    def set_eps(self, eps: float) -> None:
        """Set eps, added to √state, from the next backward pass on; call it in every process."""

    @abstractmethod
    def prefetch(self, batch: Any) -> Any:
        """Find a batch's rows early; pass the result to `forward` instead of the batch."""

    @abstractmethod
    def hit_rates(self) -> HitRates | None:
        """Count the lookups of rows of this process that HBM served; waits for the device.

        Returns None for backends that keep all rows in one memory.
        """

    def count_by_table(self) -> None:  # Backends without tiers count nothing.
        """Also count hits by table from now on, with a few more kernels in counted steps.

        If several processes share the tables, this does nothing.
        """

    @abstractmethod
    def reset_hit_rates(self) -> None:
        """Set the counts of `hit_rates` to zero."""

    @abstractmethod
    def memory_use(self) -> dict[tuple[str, str], int]:
        """Return this process's bytes by (device id, purpose), to compare with the plan.

        Purposes are ``hbm``, ``dram`` and ``ssd``, for weights and optimizer state; ``pool``, for
        row caches with their directory; and ``row_maps``, on the device of the table's first shard.
        In one process, a replicated shard counts on its first device only. If processes share the
        tables, each process calls its devices ``gpu:0`` and ``host:0``.
        """

    def comm_stats(self) -> "dict[Kind, Volume]":
        """Return the bytes that this process has sent to other processes, by kind."""
        return {}

    def reset_comm_stats(self) -> None:
        """Set the counts of `comm_stats` to zero."""

    def routing_bytes(self) -> dict[str, int]:
        """Return bytes of each table's routing maps, which say where this process sends ids."""
        return {}

    def close(self) -> None:
        """Close the connections to other processes. No lookup works afterwards."""

    @abstractmethod
    def id_order(self) -> "IdOrder":
        """Return access to the tables by id in blocks of rows, as checkpoints need it."""

    @abstractmethod
    def update_count(self) -> int:
        """Return the number of updates in this process; waits for the device."""

    def set_update_count(self, updates: int) -> None:
        """Set the number of updates in this process."""
        self.id_order().set_update_count(updates)

    def key_counts(self) -> dict[str, KeyCounts]:
        """Return the counters of the keys of each table that grows; all processes must call it."""
        return self.keys.counts()

    def live_keys(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the keys of a growing table and their current rows: int64, shape (keys,).

        Rows ascend. All processes must call this, and each gets all keys.
        """
        keys, rows = self.keys.live(table)
        order = rows.argsort()
        return keys[order], rows[order]

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return optimizer state by ``<table>.<name>``, in id order under any plan.

        float32: ``sum`` of shape (rows,) for row-wise Adagrad and (rows, dim) for Adagrad,
        ``exp_avg`` and ``exp_avg_sq`` of shape (rows, dim) for Adam; SGD has none. ``updates``,
        int64 of shape (), is the number of updates, if Adam or stochastic rounding needs it. All
        processes must call this, and each gets the whole state.
        """
        order = self.id_order()
        state = {
            f"{tensor.table.name}.{tensor.name}": order.read(tensor) for tensor in order.states()
        }
        if self.counts_updates:
            state[UPDATES] = torch.tensor(order.update_count())
        return state

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `optimizer_state_dict`, under this or any other plan.

        For tables that grow, call `load_state_dict` first: it says which row each key has.

        Raises CheckpointError if a table's state is missing or has another shape. Then nothing has
        changed.
        """
        earlier = self.keys.earlier
        saved = {name: rows for name, (rows, _) in earlier.items() if name in self.optimizers}
        tables = [replace(one, rows=saved.get(one.name, one.rows)) for one in self.plan.tables]
        shapes = state_shapes(tables, self.optimizers, counted=UPDATES in state)
        check_shapes("the optimizer state does not fit", state, shapes)
        order = self.id_order()
        for tensor in order.states():
            self._overwrite(order, tensor, state[f"{tensor.table.name}.{tensor.name}"])
        for name in saved:
            del earlier[name]
        if UPDATES in shapes:
            self.set_update_count(int(state[UPDATES]))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        order = self.id_order()
        for weight in order.weights():
            destination[f"{prefix}{weight.table.name}.weight"] = order.read(weight)
        for name, values in self.keys.state().items():
            destination[f"{prefix}{name}"] = values

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *found: Any
    ) -> None:
        # Runs hooks; there is nothing of nn.Module's own to load.
        super()._load_from_state_dict(state_dict, prefix, metadata, False, *found)
        missing_keys, unexpected_keys, _ = found
        keys = {f"{prefix}{table.name}.weight": table.name for table in self.plan.tables}
        weights = {name: state_dict[key] for key, name in keys.items() if key in state_dict}
        maps = {f"{prefix}{name}": name for name in self.keys.names()}
        saved = {key: 1 + len(state_dict[key]) for key in maps if key in state_dict}
        tables = [
            replace(table, rows=saved.get(f"{prefix}{table.name}.keys.rows", table.rows))
            for table in self.plan.tables
        ]
        check_weights("checkpoint", weights, tables)
        names = {*keys, *maps}
        missing_keys.extend(key for key in (*keys, *maps) if key not in state_dict)
        unexpected_keys.extend(key for key in state_dict if key not in names)
        order = self.id_order()
        has_keys = all(key in state_dict for key in maps)
        if has_keys:
            self.keys.load_state({name: state_dict[key] for key, name in maps.items()})
        # PyTorch does not say here whether what is missing is allowed, and loads the rest itself.
        for weight in order.weights():
            name = weight.table.name
            if name in weights and (has_keys or name not in self.keys.maps):
                self._overwrite(order, weight, weights[name])

    def _overwrite(self, order: "IdOrder", tensor: "TableTensor", values: Tensor) -> None:
        """Overwrite a tensor, reordering its rows if loaded keys had another capacity."""
        if tensor.table.name in self.keys.earlier and len(values) != tensor.table.rows:
            _, earlier = self.keys.earlier[tensor.table.name]
            held = values.detach().cpu()
            read = rows_from(tensor, lambda *rows: held[slice(*rows)], earlier, self.keys.seed)
            values = read(0, tensor.shape[0])
        order.overwrite(tensor, values)
