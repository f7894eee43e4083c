"""Share a model's tables among ranks, and serve the calls of many modules by one exchange.

One `ShardedEmbeddings` has all tables, so they need one process group. During the model's forward
pass, calls of its modules wait until something reads an output or the pass ends. Then all waiting
calls are looked up together. Ranks may wait with different numbers of calls, but must call modules
in the same order. Tables are also updated together.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer.adapters.pytorch.calls import (
    Call,
    Later,
    Output,
    Step,
    as_they_are,
    by_lookup,
    joined,
    own_graph,
    present_device,
)
from placer.errors import BackendError, DataError
from placer.executor import BagBatch, ShardedEmbeddings
from placer.executor.embeddings import uncompiled
from placer.plan.plan import Plan

if TYPE_CHECKING:
    from placer.adapters.pytorch.models import DrawnRows
    from placer.adapters.pytorch.table import PlacedTable

_NONE, _AS_READ, _ANEW = range(3)
"""Ways to update a table. None: it has no gradients. As read: use the graph of its last lookup, if
each table in that lookup has just one gradient. Anew: look its rows up again."""

_CALLS, _UPDATES, _CLIPS = range(3)
_DOING = ("calls modules", "updates tables", "clips gradients")
"""Kinds of exchanges that all ranks take part in, and how errors name them."""

_SAID = 8
"""How many numbers each rank sends about a call."""

_MOST_PARTS = 64
"""Number of sets of tables called together that are cached, beside each table alone."""


class SharedTables:
    """The tables of a model on one device, which ranks share if there are several.

    `plan` has only these tables. In it, one feature with the table's name reads each table, pooled
    by sum. `options` go to `PlacedEmbeddings`. With a `world` of one, tables do not use this class.
    Copies and pickles hold the plan, and `PlacedTable` holds the weights.
    """

    def __init__(self, plan: Plan, device: torch.device, options: Mapping[str, Any]) -> None:
        self.plan, self.device, self._options = plan, device, dict(options)
        self.tables: dict[str, PlacedTable] = {}
        several = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if several else 1
        self._numbers = {table.name: number for number, table in enumerate(plan.tables)}
        self._part = lru_cache(len(plan.tables) + _MOST_PARTS)(self._made_part)
        self._whole: ShardedEmbeddings | None = None
        self._closed = False
        self._waiting: list[Call] = []
        self._depth = 0  # Number of nested forward passes that are running.
        self._pass = -1  # Number of the backward pass that updates at its end.
        self._collected: set[str] = set()

    @property
    def whole(self) -> ShardedEmbeddings:
        """All tables, first filled with zeros. All ranks must read this together."""
        if self._whole is None:
            # Servers know the plan without the optimizer that `apply_plan` was given.
            first, *others = {table.optimizer for table in self.plan.tables}
            self._whole = ShardedEmbeddings(
                self.plan,
                device=self.device,
                seed=None,
                by_rows=True,
                optimizer=None if others else first,
                **self._options,
            )
        return self._whole

    def write(self, table: "PlacedTable", weight: "Tensor | DrawnRows") -> None:
        """Set a table's weight to the first rank's weight, or draw it if that rank has none."""
        ((is_given, *_), *_) = self.whole.said([isinstance(weight, Tensor)])
        order = self._part((table.name,)).id_order()
        if is_given:
            (tensor,) = order.weights()
            order.overwrite_from_first(tensor, weight if isinstance(weight, Tensor) else None)
            return
        if isinstance(weight, Tensor):
            raise DataError(
                f"table {table.name!r} is on the meta device on rank 0 and not on this one; make "
                "the model alike on all ranks"
            )
        ((weight.seed, *_), *_) = self.whole.said([weight.seed])
        weight.write(order)

    def of_table(self, table: "PlacedTable") -> ShardedEmbeddings:
        """Look up waiting calls, then return one table. Ranks must call this in the same order."""
        self.flush()
        part = self._part((table.name,))
        order = part.id_order()
        order.set_update_count(table.updates)
        order.counted = partial(setattr, table, "updates")
        return part

    def move(self, device: torch.device) -> None:
        """Move all tables to another device."""
        self.flush()
        old, self._whole, self.device = self.whole, None, device
        self._part.cache_clear()
        before, after = old.id_order(), self.whole.id_order()
        for tensor in before.tensors():
            after.overwrite(tensor, before.read(tensor))
        self.whole.keys.load_state(old.keys.state())
        for table in self.tables.values():
            table.weight_changes()  # Cached rows are on the old device.
        old.close()

    def close(self) -> None:
        """Close the connections to other ranks."""
        if self._whole is not None and not self._closed:
            self._whole.close()
        self._closed = True

    def watch(self, model: nn.Module) -> None:
        """Collect calls during the forward pass of a model."""
        if self.world > 1:
            model.register_forward_pre_hook(self.begin)
            model.register_forward_hook(self.end, always_call=True)

    @uncompiled
    def begin(self, *_: object) -> None:
        """Note that a forward pass of the model begins."""
        self._depth += 1

    @uncompiled
    def end(self, *_: object) -> None:
        """Note that a forward pass has ended, also by an error; look up waiting calls."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self.flush()

    def look_up(self, call: Call) -> Tensor:
        """Return the output of a call without its graph, computed now or when it is read."""
        self._waiting.append(call)
        if self._depth:
            call.batch = joined([call], self.device)  # The caller's ids may change until then.
            return Later.of(call)
        self.flush()
        return call.result().detach()

    def flush(self) -> None:
        """Look up the rows of all waiting calls."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            # Another rank may have called fewer modules before it read an output.
            ready = min(count for count, *_ in self._agreed(_CALLS, [len(waiting)]))
            try:
                with own_graph():
                    self._serve(waiting[:ready])
            except BaseException:
                for table in self.tables.values():
                    table.weight_changes()  # Cached rows may be among those not looked up.
                raise
            self._waiting = waiting[ready:]

    def update_after_pass(self, name: str) -> None:
        """Update a table when the current backward pass ends."""
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self._pass = task
            self._collected.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        self._collected.add(name)

    def _end_pass(self) -> None:
        names, self._collected, self._pass = self._collected, set(), -1
        self.update(names)

    @torch.no_grad()
    def update(self, names: Collection[str]) -> None:
        """Apply the gradients of these tables on all ranks, which must all call this."""
        self.flush()
        begun = {name: self.tables[name].calls[0].step for name in names if self.tables[name].calls}
        complete = {step for step in {*begun.values()} if step is not None and step.is_complete()}
        ways = {name: _AS_READ if step in complete else _ANEW for name, step in begun.items()}
        own = [ways.get(name, _NONE) for name in self._numbers]
        by_table = zip(self._numbers, zip(*self._agreed(_UPDATES, own), strict=True), strict=True)
        kinds = {name: set(said) for name, said in by_table if any(said)}
        for name in kinds:
            self.tables[name].before_update()
        read = [self.tables[name].calls for name, said in kinds.items() if said == {_AS_READ}]
        for step in _steps(call for calls in read for call in calls):
            _apply(step, [(call.result(), call.gradient) for call in step.calls])
        anew = [self._anew(self.tables[name]) for name, said in kinds.items() if said != {_AS_READ}]
        self._waiting = list(anew)
        self.flush()
        for step in _steps(anew):
            _apply(step, [pair for call in step.calls for pair in _made_anew(call)])
        for name in kinds:
            self.tables[name].calls.clear()
            self.tables[name].updates += self.whole.counts_updates

    @torch.no_grad()
    def gradient_norms(self, norm_type: float) -> list[Tensor]:
        """Return the norm of each table's averaged gradients; see `PlacedTable.gradient_norm`."""
        self.flush()
        tables = list(self.tables.values())
        called = zip(*self._agreed(_CLIPS, [len(table.calls) for table in tables]), strict=True)
        calls = [
            self._anew(table, trains=False)
            for table, counts in zip(tables, called, strict=True)
            if any(counts)
        ]
        self._waiting = list(calls)
        self.flush()
        norms = []
        for call in calls:
            call.rows = rows = call.result().requires_grad_()
            outputs, gradients = zip(*_made_anew(call), strict=True)
            (gradient,) = torch.autograd.grad(outputs, rows, gradients)
            norms.append(self.whole.gradient_norm(*by_lookup(call.batch, gradient), norm_type))
        return norms

    def _agreed(self, doing: int, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange numbers with all ranks; raise DataError if a rank is doing something else.

        Return each rank's numbers, with zeros up to one for each table. So messages of all kinds
        have one length: gloo ends the process if lengths differ.
        """
        none = [0] * (len(self._numbers) - len(numbers))
        said = self.whole.said([doing, *numbers, *none])
        other = next((rank for rank, theirs in enumerate(said) if theirs[0] != said[0][0]), None)
        if other is not None:
            raise DataError(
                f"rank 0 {_DOING[said[0][0]]} where rank {other} {_DOING[said[other][0]]}; all "
                "ranks must run forward, backward, clipping and the optimizer's steps equally often"
            )
        return [theirs[1:] for theirs in said]

    def _made_part(self, names: tuple[str, ...]) -> ShardedEmbeddings:
        return self.whole if len(names) == len(self._numbers) else self.whole.part(names)

    def _serve(self, calls: Sequence[Call]) -> None:
        """Look up calls that all ranks have made: calls of one size and kind together."""
        own: list[int] = []
        for call in calls:
            constants = struct.unpack("2q", struct.pack("2d", call.table.lr_now, call.table.eps))
            size, weighted = call.batch.batch_size, call.batch.weights is not None
            number, kind = self._numbers[call.table.name], call.trains + 2 * call.trains_weights
            open_steps = call.table.open_calls.steps()
            own += [number, kind, *constants, call.table.updates, size, weighted, open_steps]
        said = [
            [theirs[start : start + _SAID] for start in range(0, len(theirs), _SAID)]
            for theirs in self.whole.said(own)
        ]
        times = Counter(call.table.name for call in calls)
        groups: dict[tuple[object, ...], list[Call]] = defaultdict(list)
        seen: Counter[str] = Counter()
        opened = 0
        for call, *by_rank in zip(calls, *said, strict=True):
            name = call.table.name
            for rank, theirs in enumerate(by_rank):
                if theirs[:2] != by_rank[0][:2]:
                    raise DataError(
                        f"rank 0 {self._words(by_rank[0])} where rank {rank} "
                        f"{self._words(theirs)}; all ranks must call the same modules in the same "
                        "order, with gradients or without"
                    )
                if theirs[2:4] != by_rank[0][2:4]:  # Each rank updates the rows that it holds.
                    lr, eps = struct.unpack("2d", struct.pack("2q", *theirs[2:4]))
                    first_lr, first_eps = struct.unpack("2d", struct.pack("2q", *by_rank[0][2:4]))
                    raise DataError(
                        f"table {name!r}: rank 0 trains with lr={first_lr:g}, eps={first_eps:g} "
                        f"and rank {rank} with lr={lr:g}, eps={eps:g}; set the same on all ranks"
                    )
            sizes = tuple(theirs[5] for theirs in by_rank)
            weighted = any(theirs[6] for theirs in by_rank)
            # A table that is called twice is updated once, so its calls do not share a step.
            group = (times[name] > 1, seen[name], call.trains, *by_rank[0][2:5], sizes, weighted)
            groups[*group, call.has_keys].append(call)
            # Calls that this loop passed before are open, too.
            opened = max(opened, *(theirs[7] + seen[name] for theirs in by_rank))
            seen[name] += 1
        for members in groups.values():
            ordered = sorted(members, key=lambda call: self._numbers[call.table.name])
            self._look_up(ordered, opened)

    def _look_up(self, calls: Sequence[Call], open_steps: int) -> None:
        """Look up one call for each of some tables, in one exchange. Map keys to rows first."""
        names = tuple(call.table.name for call in calls)
        table = calls[0].table
        step = Step(self._part(names), tuple(calls), table.lr_now, table.eps, table.updates)
        step.set_constants()
        batches = [call.batch for call in calls]
        features = {
            name: (batch.ids, batch.offsets, batch.weights)
            for name, batch in zip(names, batches, strict=True)
        }
        batch = BagBatch.from_features(features, names)
        if calls[0].has_keys and step.embeddings.keys.maps:
            batch = step.embeddings.rows_of(batch, calls[0].trains, open_steps)
            sizes = [each.ids.numel() for each in batches]
            for call, ids in zip(calls, torch.split(batch.ids, sizes), strict=True):
                call.batch = replace(call.batch, ids=ids)
                if call.trains:
                    call.table.open_calls.add(call)
        with torch.set_grad_enabled(calls[0].trains):
            rows = step.embeddings(batch)
        for call in calls:
            call.rows = rows[call.table.name]
            call.step = step if call.trains else None

    def _anew(self, table: "PlacedTable", *, trains: bool = True) -> Call:
        """Return one call that joins all calls of a table, and release their lookups."""
        calls = tuple(sorted(table.calls, key=lambda call: call.number))
        for call in calls:
            call.let_go()
        batch = joined(calls, self.device)
        output = Output((batch.batch_size, table.table.dim), torch.float32, as_they_are)
        return Call(table, -1, batch, trains, output, calls)

    def _words(self, said: Sequence[int]) -> str:
        kind = ("", " to train it", " to train weights", " to train it and weights")[said[1]]
        return f"calls table {self.plan.tables[said[0]].name!r}{kind}"

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan, "device": str(self.device), "options": self._options}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        device = present_device(state["device"])
        self.__init__(state["plan"], device, state["options"])  # type: ignore[misc]


def unwatch(model: nn.Module) -> None:
    """Undo `SharedTables.watch`, also for a copied model."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), SharedTables):
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)


def _steps(calls: Iterable[Call]) -> Iterable[Step]:
    """Return the distinct steps of calls."""
    return dict.fromkeys(call.step for call in calls if call.step is not None)


def _made_anew(call: Call) -> list[tuple[Tensor, Tensor | None]]:
    """Return the output and gradient of each call that a joined call stands for."""
    rows = call.result()
    if not call.stands_for:  # Only other ranks called the table.
        return [(rows, torch.zeros_like(rows))]
    with torch.enable_grad():
        parts = torch.split(rows, [each.batch.batch_size for each in call.stands_for])
        return [
            (each.output.of_rows(own), each.gradient)
            for each, own in zip(call.stands_for, parts, strict=True)
        ]


def _apply(step: Step, made: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    step.set_constants()
    torch.autograd.backward([out for out, _ in made], [gradient for _, gradient in made])
    for call in step.calls:
        call.let_go()


def refuse_unshared(name: str, world: int) -> None:
    """Raise if the plan was applied before `torch.distributed` was initialized.

    Each rank would then train its own copy of the table, from its own samples only. DDP would not
    help: it averages gradients of parameters, and a placed table is no parameter.
    """
    if world > 1 or not (dist.is_available() and dist.is_initialized()):
        return
    ranks = dist.get_world_size()
    if ranks > 1:
        raise BackendError(
            f"table {name!r} was placed before torch.distributed was initialized, so that each of "
            f"{ranks} ranks would train a table of its own; call apply_plan after "
            "init_process_group: after Accelerator() or TrainingArguments() is made, in Lightning "
            "in the module's configure_model"
        )
