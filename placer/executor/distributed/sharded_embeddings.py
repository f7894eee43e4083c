"""The module that trains embedding tables over many ranks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer.errors import PlanMismatchError
from placer.executor.distributed.assembly import Assembly, assemble
from placer.executor.distributed.canonical import SpreadTables
from placer.executor.distributed.collectives import Communicator, Kind, Volume
from placer.executor.distributed.combine import combine
from placer.executor.distributed.inputs_ahead import InputsAhead, SentBatch
from placer.executor.distributed.local_shards import LocalShard, local_shards_of
from placer.executor.distributed.serving import Serve
from placer.executor.distributed.sharded_batch import ShardedBatch, UnitStep
from placer.executor.id_order import IdOrder, OwnTables
from placer.executor.local.hit_rates import HitRates
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import PreparedBatch, feature_reads
from placer.executor.memory.arena import TORCH_DTYPES
from placer.executor.memory.layout import check_plan
from placer.executor.memory.row_cache import RowCacheStats
from placer.executor.optimizers.rule import STATE
from placer.executor.tensor_names import (
    UPDATES,
    check_shapes,
    check_weights,
    state_shapes,
    tensor_shape,
    weights_to_load,
)
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, OptimizerName


class ShardedEmbeddings(nn.Module):
    """`PlacedEmbeddings` over the ranks of `torch.distributed`: each holds its GPUs' shards.

    Called with this rank's own samples, it gives their pooled rows. Ids go to the ranks that
    hold their rows, pooled rows come back; gradients go the same way, and each row is updated
    once a step, from the samples of all ranks. The global batch is that of all ranks in their
    order, and training goes as in one process that has it whole.

    All ranks must call it, and run backward, equally often; their batches may differ in size, or
    be empty. Its collectives run in a process group of its own, those of batches sent ahead in
    another one. With one rank it is `PlacedEmbeddings`, and exchanges nothing.

    GPU i of the plan's N is rank ``i · world // N``, in the order of the topology; replicas that
    meet on one rank are one. Rows in DRAM are in the memory of the host that the rank runs on.

    Parameters
    ----------
    plan : Plan
        The same on all ranks.
    process_group : torch.distributed.ProcessGroup, optional
        Whose ranks share the plan; all ranks by default. Without `torch.distributed` there is
        one. Its timeout is that of the exchange.
    average_gradients : bool
        Whether the loss is the mean over each rank's samples, as under
        `DistributedDataParallel`, so that the ranks' gradients are averaged; else they are added.
    optimizer, device, seed, weights, padding_idx
        See `PlacedEmbeddings`. Of `weights` each rank keeps what it holds.
    **options
        lr, eps, betas, backend, cache_policy, rounding; see `PlacedEmbeddings`.

    Raises
    ------
    PlanMismatchError
        If the plan is unsound, ranks have different plans, or `weights` do not fit.
    CapacityError
        If the plan puts more bytes on a device than it has.
    BackendError
        If the backend is not there, or a rank is lost.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        process_group: "dist.ProcessGroup | None" = None,
        average_gradients: bool = True,
        optimizer: OptimizerName | None = None,
        device: str | torch.device = "cpu",
        seed: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        padding_idx: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.device = torch.device(device)
        self._alone: tuple[PlacedEmbeddings, ...] = ()  # In a tuple it is no submodule.
        world = 1
        if dist.is_available() and dist.is_initialized():
            world = dist.get_world_size(process_group)
        if world == 1:
            single = PlacedEmbeddings(
                plan,
                optimizer=optimizer,
                device=self.device,
                seed=seed,
                weights=weights,
                padding_idx=padding_idx,
                **options,
            )
            self._alone = (single,)
            self._held: tuple[PlacedEmbeddings, ...] = self._alone
            self._optimizers: Mapping[str, OptimizerName] = single.optimizers
            return
        check_plan(plan)
        if optimizer is not None and optimizer not in OPTIMIZERS:
            raise PlanMismatchError(f"optimizer {optimizer!r} is none of {OPTIMIZERS}")
        self._optimizers = {table.name: optimizer or table.optimizer for table in plan.tables}
        self._stochastic = options.get("rounding") == "stochastic"
        self._dims = {table.name: table.dim for table in plan.tables}
        given = dict(weights or {})
        check_weights("weights", given, plan.tables)
        features = feature_reads(plan.tables, padding_idx or {})
        self._features = features
        comm = Communicator(process_group, self.device)
        self._comm = comm
        scale = 1 / comm.world if average_gradients else 1.0
        self._parts: Assembly = assemble(
            plan, features, self._optimizers, comm, self.device, scale, options
        )
        self._inputs = InputsAhead(
            self._parts.inputs, lambda: Communicator(process_group, self.device)
        )
        self._held = self._parts.modules
        for name in self._parts.inputs.maps:
            if name in given:
                self._parts.canonical.scatter(name, "weight", given[name])
            else:
                self._parts.canonical.draw(name, seed)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Features of the plan's tables, in order: what batches must follow."""
        if self._alone:
            return self._alone[0].feature_names
        return tuple(feature.name for feature in self._features)

    @property
    def backend(self) -> str:
        """Name of the backend in use; empty where a rank holds nothing."""
        return self._held[0].backend if self._held else ""

    @property
    def rank(self) -> int:
        """This rank."""
        return 0 if self._alone else self._comm.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return 1 if self._alone else self._comm.world

    @property
    def optimizers(self) -> Mapping[str, OptimizerName]:
        """What trains each table, by its name."""
        return self._optimizers

    @property
    def counts_updates(self) -> bool:
        """Whether it matters how many updates there have been: to Adam, to stochastic rounding."""
        if self._alone:
            return self._alone[0].counts_updates
        return self._stochastic or "adam" in self._optimizers.values()

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next backward pass on; do so on every rank."""
        for module in self._held:
            module.set_lr(lr)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def send_ahead(self, batch: BagBatch) -> SentBatch | BagBatch:
        """Begin to exchange a batch's lookups; `prefetch` takes what this gives.

        The exchange goes on in a thread beside whatever comes next, such as the training of the
        batches before. All ranks must do it in the same order. An error that the exchange meets
        comes with `prefetch`. Alone there is nothing to exchange, and the batch comes back.
        """
        return batch if self._alone else self._inputs.send(batch)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prefetch(self, batch: BagBatch | SentBatch) -> ShardedBatch | PreparedBatch:
        """Exchange a batch's lookups and look for its rows, ahead of its forward pass.

        All ranks must do it at the same point of their loop; see `PlacedEmbeddings.prefetch` and
        `placer.executor.look_ahead`. Results are those without it, to the bit.

        Raises
        ------
        DataError
            On every rank, if one of them has a bad batch.
        BackendError
            If a rank is lost.
        """
        if self._alone:
            prefetched: PreparedBatch = self._alone[0].prefetch(batch)
            return prefetched
        if isinstance(batch, SentBatch):
            step = self._inputs.arrived(batch)
        else:
            step = self._inputs.now(batch, training=True)
        units = []
        for module, asked in zip(self._held, step.units, strict=True):
            prepared = module.prefetch(asked.batch)
            units.append(UnitStep(asked.batch, prepared, asked.source, asked.bounds))
        return step.with_units(tuple(units))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, batch: BagBatch | ShardedBatch | PreparedBatch) -> dict[str, Tensor]:
        """Pooled rows of this rank's samples by feature; see `PlacedEmbeddings.forward`.

        Raises
        ------
        DataError
            On every rank, if one of them has a bad batch.
        BackendError
            If a rank is lost.
        """
        if self._alone:
            assert not isinstance(batch, ShardedBatch), "made by another module"
            return self._alone[0](batch)  # type: ignore[no-any-return]
        assert not isinstance(batch, PreparedBatch), "made by another module"
        training = torch.is_grad_enabled()
        step = self._inputs.now(batch, training) if isinstance(batch, BagBatch) else batch
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        flat = Serve.apply(  # type: ignore[no-untyped-call]
            anchor, step.batch.weights, step, self._parts.served, training
        )
        inputs = self._parts.inputs
        return combine(flat, step, inputs.channels, self._features, inputs.maps, self._dims)

    def hit_rates(self) -> HitRates | None:
        """Of the rows held here: see `PlacedEmbeddings.hit_rates`; waits for the device.

        Replicated rows count once more when they are updated.
        """
        found = [rates for module in self._held if (rates := module.hit_rates()) is not None]
        if not found:
            return None
        return HitRates(
            sum(rates.lookups for rates in found),
            sum(rates.home_lookups for rates in found),
            sum((rates.row_cache for rates in found), RowCacheStats()),
        )

    def reset_hit_rates(self) -> None:
        """Count hits from here on."""
        for module in self._held:
            module.reset_hit_rates()

    def comm_stats(self) -> dict[Kind, Volume]:
        """Bytes that this rank sent so far, by kind; empty with one rank."""
        total: dict[Kind, Volume] = {}
        for comm in self._comms:
            for kind, volume in comm.volumes().items():
                total[kind] = total.get(kind, Volume()) + volume
        return total

    def reset_comm_stats(self) -> None:
        """Count bytes from here on."""
        for comm in self._comms:
            comm.reset_volumes()

    def routing_bytes(self) -> dict[str, int]:
        """Bytes of the tables by which this rank routes each table's ids."""
        maps = {} if self._alone else self._parts.inputs.maps
        return {name: table.nbytes for name, table in maps.items()}

    def close(self) -> None:
        """Let go of the connections to other ranks; nothing can be looked up any more.

        Waits for batches that were sent ahead and never trained on: at most for the timeout.
        """
        if not self._alone:
            self._inputs.close()
            self._comm.close()

    def memory_use(self) -> dict[tuple[str, str], int]:
        """Bytes held here by (``gpu:0`` or ``host:0`` of this rank, purpose).

        See `PlacedEmbeddings.memory_use`.
        """
        total: dict[tuple[str, str], int] = defaultdict(int)
        for module in self._held:
            for key, size in module.memory_use().items():
                total[key] += size
        return dict(total)

    def local_shards(self) -> Iterator[LocalShard]:
        """What this rank holds of each tensor, weights first: for checkpoints in pieces.

        With one rank there is nothing to put together: use `state_dict`.
        """
        if self._alone:
            return iter(())
        tensors = {
            table.name: ("weight", *STATE[self._optimizers[table.name]])
            for table in self.plan.tables
        }
        per_row = {
            name: optimizer == "rowwise_adagrad" for name, optimizer in self._optimizers.items()
        }
        return local_shards_of(self.plan, self._parts.targets, tensors, per_row, self.rank)

    def id_order(self) -> IdOrder:
        """The tables by id, some rows at a time: what checkpoints read and write."""
        if self._alone:
            return OwnTables(self._alone[0])
        return SpreadTables(
            self.plan, self._optimizers, self.counts_updates, self._parts.canonical, self._held
        )

    def update_count(self) -> int:
        """Updates so far: what Adam's bias correction and stochastic rounding depend on."""
        return max((module.update_count() for module in self._held), default=0)

    def set_update_count(self, updates: int) -> None:
        """Go on counting updates from here."""
        for module in self._held:
            module.set_update_count(updates)

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Whole state of all tables, on every rank; all of them must call it.

        As `PlacedEmbeddings.optimizer_state_dict`, and loads there.
        """
        if self._alone:
            return self._alone[0].optimizer_state_dict()
        state = {}
        for table in self.plan.tables:
            for name in STATE[self._optimizers[table.name]]:
                tensor = torch.zeros(tensor_shape(table, name, self._optimizers[table.name]))
                if table.rows:
                    self._parts.canonical.gather(table.name, name, tensor)
                state[f"{table.name}.{name}"] = tensor
        if self.counts_updates:
            state[UPDATES] = torch.tensor(self.id_order().update_count())
        return state

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `optimizer_state_dict` gave, under any plan; all ranks need it.

        Raises
        ------
        CheckpointError
            If a table's state is missing or of another shape; nothing is changed then.
        """
        if self._alone:
            self._alone[0].load_optimizer_state_dict(state)
            return
        shapes = state_shapes(self.plan.tables, self._optimizers, counted=UPDATES in state)
        check_shapes("the optimizer state does not fit", state, shapes)
        for table in self.plan.tables:
            for name in STATE[self._optimizers[table.name]] if table.rows else ():
                self._parts.canonical.scatter(table.name, name, state[f"{table.name}.{name}"])
        if UPDATES in shapes:
            self.set_update_count(int(state[UPDATES]))

    @property
    def _comms(self) -> tuple[Communicator, ...]:
        if self._alone:
            return ()
        ahead = self._inputs.comm
        return (self._comm,) if ahead is None else (self._comm, ahead)

    def extra_repr(self) -> str:
        """What `print(model)` shows of it."""
        tables, shards = len(self.plan.tables), len(self.plan.shards)
        return f"tables={tables}, shards={shards}, rank={self.rank} of {self.world}"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._alone:
            self._alone[0]._save_to_state_dict(destination, prefix, keep_vars)
            return
        for table in self.plan.tables:
            tensor = torch.zeros((table.rows, table.dim), dtype=TORCH_DTYPES[table.dtype])
            if table.rows:
                self._parts.canonical.gather(table.name, "weight", tensor)
            destination[f"{prefix}{table.name}.weight"] = tensor

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
        if self._alone:
            self._alone[0]._load_from_state_dict(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
            return
        given = weights_to_load(
            state_dict,
            prefix,
            self.plan.tables,
            strict=strict,
            missing_keys=missing_keys,
            unexpected_keys=unexpected_keys,
        )
        for name, tensor in given.items():
            if tensor.numel():
                self._parts.canonical.scatter(name, "weight", tensor)
