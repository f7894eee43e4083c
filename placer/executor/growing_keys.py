"""Translate the keys of growing tables into rows, and reset rows that change keys."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor

from placer.errors import CheckpointError, PlanMismatchError
from placer.executor.id_order import IdOrder
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import FeatureRead, feature_bounds
from placer.executor.memory.arena import weights_of_keys
from placer.growing.key_map import KeyMap, load_table
from placer.growing.options import MOST_OPEN_STEPS, Growing, Int, KeyCounts
from placer.tables import Table


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KeyStep:
    """A step of the key maps, open until its rows are updated or nothing refers to it."""

    number: int
    # Number of steps from the oldest open step to this one, closed steps included.
    open_before: int


class GrowingKeys:
    """The key maps of one process's growing tables.

    Raises PlanMismatchError if a table is unknown, or its number of rows does not fit its capacity.

    `seed`: seed of the weights of reset rows; None sets them to zero. `part`, `parts`: the part of
    each table's keys in this process, and the number of parts.

    `in_batches`: whether batches hold keys; otherwise the caller has replaced keys by `rows_of`.
    `earlier`: for tables whose loaded state had another capacity: the number of rows there, and the
    row there of each row here, or −1.
    """

    def __init__(
        self,
        growing: Mapping[str, Growing],
        tables: Mapping[str, Table],
        seed: int | None,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        for name, how in growing.items():
            if name not in tables:
                raise PlanMismatchError(
                    f"table {name!r} grows and the plan lacks it; there are {', '.join(tables)}"
                )
            if tables[name].rows != how.rows:
                raise PlanMismatchError(
                    f"table {name!r} has {tables[name].rows:,} rows in the plan; a capacity of "
                    f"{how.capacity:,} keys takes {how.rows:,}, as row 0 is of all other keys"
                )
        self.maps = {name: KeyMap(how, part, parts) for name, how in growing.items()}
        self.seed = seed
        self._forget_steps()
        self.in_batches = True
        self.earlier: dict[str, tuple[int, Int]] = {}

    def read_by_rows(self) -> None:
        """Let the caller replace keys by rows once, before it reads and updates rows repeatedly."""
        self.in_batches, self.seed = False, 0  # The default seed of `PlacedEmbeddings`.

    def rows_of(
        self,
        batch: BagBatch,
        features: tuple[FeatureRead, ...],
        open_before: int | None,
        id_order: Callable[[], IdOrder],
    ) -> BagBatch:
        """Return the batch with each key replaced by its row.

        `open_before` is the number of open steps before this one, whose rows keep their keys. New
        keys get rows, and reused rows are reset. If None, keys without a row read row 0.
        """
        if not self.maps:
            return batch
        ids = batch.ids.cpu().to(torch.int64, copy=True)
        again: dict[str, tuple[Tensor, Int]] = {}
        for name, span in self.spans(batch, features).items():
            keys = ids[span].numpy()
            if open_before is None:
                ids[span] = torch.from_numpy(self.maps[name].find(keys))
                continue
            # At least one step counts as open, so results are equal with and without look-ahead.
            step = self.maps[name].read(keys, max(1, open_before))
            if step.reused.size:
                again[name] = torch.from_numpy(step.reused.copy()), step.new_keys
            ids[span] = torch.from_numpy(step.rows)
        if again:
            self._begin_again(again, id_order())
        return replace(batch, ids=ids.to(batch.ids.device))

    def spans(self, batch: BagBatch, features: tuple[FeatureRead, ...]) -> dict[str, slice]:
        """Return each table's range of keys in a batch; features of a table follow one another."""
        spans: dict[str, slice] = {}
        for feature, (start, stop) in zip(features, feature_bounds(batch, features), strict=True):
            if feature.table in self.maps:
                before = spans.get(feature.table)
                spans[feature.table] = slice(before.start if before else start, stop)
        return spans

    def open_step(self) -> KeyStep | None:
        """Open a step in which new keys get rows. Return None if they get none (evaluation)."""
        if not (self.maps and self.in_batches and torch.is_grad_enabled()):
            return None
        self._steps += 1
        oldest = min((step.number for step in self._open), default=self._steps)
        step = KeyStep(self._steps, min(self._steps - oldest, MOST_OPEN_STEPS))
        self._open.add(step)
        return step

    def found(self, step: KeyStep | None) -> None:
        """Note that a step's keys have rows, and that it is ahead of its forward pass."""
        if step is not None:
            self._ahead.add(step.number)

    def begin(self, step: KeyStep | None) -> None:
        """Note that a step's forward pass begins: neither it nor dropped batches are ahead now."""
        if step is not None:
            self._ahead &= {one.number for one in self._open} - {step.number}

    def end_step(self, step: KeyStep | None) -> None:
        """Close a step: rows that only it read may be taken back."""
        if step is not None:
            self._open.discard(step)

    @property
    def ahead(self) -> int:
        """Number of steps whose keys have rows and whose forward pass has not begun."""
        return len(self._ahead)

    def drop_ahead(self) -> None:
        """Drop the steps that are ahead, as their batches will be looked up again."""
        for keys in self.maps.values():
            keys.give_up(self.ahead)
        self._steps -= self.ahead
        self._open -= {step for step in self._open if step.number in self._ahead}
        self._ahead.clear()

    def _forget_steps(self) -> None:
        self._steps = 0
        self._open: WeakSet[KeyStep] = WeakSet()
        self._ahead: set[int] = set()

    def _begin_again(self, again: Mapping[str, tuple[Tensor, Int]], order: IdOrder) -> None:
        """Draw new weights for the rows of these keys, and set their optimizer state to zero."""
        weights = {}
        for name, (rows, keys) in again.items():
            table = order.plan.tables_by_name[name]
            drawn = torch.zeros(rows.numel(), table.dim, dtype=torch.float32)
            if self.seed is not None:
                drawn = weights_of_keys(table, self.seed, keys)
            weights[name] = rows, drawn
        order.start_rows(weights)

    def counts(self) -> dict[str, KeyCounts]:
        """Return the key counters of each table."""
        return {name: keys.counts for name, keys in self.maps.items()}

    def live(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the keys of a table that have rows, and these rows."""
        if table not in self.maps:
            grow = ", ".join(self.maps) or "none"
            raise PlanMismatchError(f"table {table!r} does not grow; of these tables grow: {grow}")
        keys, rows = map(torch.from_numpy, self.maps[table].live())
        return keys, rows

    def state(self) -> dict[str, Tensor]:
        """Return the state of all key maps, by ``<table>.keys.<name>``: int64 tensors."""
        return {
            f"{table}.keys.{name}": torch.from_numpy(values)
            for table, keys in self.maps.items()
            for name, values in keys.state(self.ahead).items()
        }

    def names(self) -> list[str]:
        """Return the names of the tensors in `state`."""
        return [f"{table}.keys.{name}" for table in self.maps for name in KeyMap.STATE]

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `state`; raise CheckpointError if it lacks a tensor of these tables.

        The state may have another capacity: see `resized`.
        """
        missing = [name for name in self.names() if name not in state]
        if missing:
            raise CheckpointError(f"the checkpoint lacks {missing[0]!r} of a table that grows")
        state, earlier = self.resized(state)
        for table, keys in self.maps.items():
            self.earlier.pop(table, None)
            load_table(keys, table, _of_table(state, table))
        self.earlier |= earlier
        self._forget_steps()

    def resized(
        self, state: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], dict[str, tuple[int, Int]]]:
        """Return a state converted to these capacities, and its entries of `earlier`.

        A larger table keeps all keys. A smaller one keeps the hottest, and a warning counts the
        rest.
        """
        made, earlier = dict(state), dict[str, tuple[int, Int]]()
        for table, keys in self.maps.items():
            how, capacity = keys.growing, max(1, len(state[f"{table}.keys.rows"]))
            if capacity == how.capacity:
                continue
            was = KeyMap(replace(how, capacity=capacity))
            load_table(was, table, _of_table(state, table))
            own, rows, dropped = was.resized(how)
            earlier[table] = was.growing.rows, rows
            made |= {f"{table}.keys.{name}": torch.from_numpy(v) for name, v in own.state().items()}
            if dropped and keys.part == 0:
                warnings.warn(
                    f"table {table!r}: {dropped:,} of {was.counts.live:,} keys of the state are "
                    f"evicted, those used least, as its capacity is {how.capacity:,} now",
                    stacklevel=2,
                )
        return made, earlier


def _of_table(state: Mapping[str, Tensor], table: str) -> dict[str, Int]:
    return {name: state[f"{table}.keys.{name}"].cpu().numpy() for name in KeyMap.STATE}
