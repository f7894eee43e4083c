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
from placer.executor.memory.initial_weights import weights_of_keys
from placer.growing.key_map import KeyMap
from placer.growing.options import Growing, Int, KeyCounts
from placer.tables import Table

MOST_OPEN_STEPS = 64
"""Most steps that count as open, however many outputs somebody keeps without a backward pass."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KeyStep:
    """A step of the key maps: open until its rows are updated, or nobody refers to it any more.

    Attributes
    ----------
    number : int
    open_before : int
        How many of the steps before it are open, the closed ones between them included.
    """

    number: int
    open_before: int


class GrowingKeys:
    """The key maps of the tables of one process that grow.

    Parameters
    ----------
    growing : mapping of table name to Growing
    tables : mapping of table name to Table
    seed : int or None
        Of the weights that reset rows begin with; None: zeros.
    part, parts : int
        Which part of each table's keys is here, where several processes share them.

    Attributes
    ----------
    in_batches : bool
        Whether batches that are looked up have keys; else who looks them up has asked `rows_of`.
    earlier : dict of table name to (int, int64 array)
        Of tables whose loaded state had another capacity: their rows there, and which of these each
        row was, or −1.

    Raises
    ------
    PlanMismatchError
        If a table is unknown, or has another number of rows than its keys need.
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
        """Find the rows of keys once a call, however often rows are read and updated in it."""
        self.in_batches, self.seed = False, 0  # The seed that `PlacedEmbeddings` has by default.

    def rows_of(
        self,
        batch: BagBatch,
        features: tuple[FeatureRead, ...],
        open_before: int | None,
        id_order: Callable[[], IdOrder],
    ) -> BagBatch:
        """Return the batch with rows in the place of keys.

        In a step with so many open ones before it new keys get rows. A row that had another key is
        reset first. With None nothing changes, and keys without a row read row 0.
        """
        if not self.maps:
            return batch
        ids = batch.ids.cpu().to(torch.int64, copy=True)
        for name, span in self.spans(batch, features).items():
            keys = ids[span].numpy()
            if open_before is None:
                rows = self.maps[name].find(keys)
            else:
                rows = self._read(name, keys, open_before, id_order)
            ids[span] = torch.from_numpy(rows)
        return replace(batch, ids=ids.to(batch.ids.device))

    def spans(self, batch: BagBatch, features: tuple[FeatureRead, ...]) -> dict[str, slice]:
        """Return where a batch has the keys of each table: its features follow one another."""
        spans: dict[str, slice] = {}
        for feature, (start, stop) in zip(features, feature_bounds(batch, features), strict=True):
            if feature.table in self.maps:
                before = spans.get(feature.table)
                spans[feature.table] = slice(before.start if before else start, stop)
        return spans

    def open_step(self) -> KeyStep | None:
        """Open a step in which keys get rows; None where they only find them, as in evaluation."""
        if not (self.maps and self.in_batches and torch.is_grad_enabled()):
            return None
        self._steps += 1
        oldest = min((step.number for step in self._open), default=self._steps)
        step = KeyStep(self._steps, min(self._steps - oldest, MOST_OPEN_STEPS))
        self._open.add(step)
        return step

    def found(self, step: KeyStep | None) -> None:
        """Note that the keys of a step have rows, and that its forward pass will come."""
        if step is not None:
            self._ahead.add(step.number)

    def begin(self, step: KeyStep | None) -> None:
        """Note that the forward pass of a step begins: it is not ahead, nor are dropped batches."""
        if step is not None:
            self._ahead &= {one.number for one in self._open} - {step.number}

    def end_step(self, step: KeyStep | None) -> None:
        """Close a step: rows that only it read may be taken back."""
        if step is not None:
            self._open.discard(step)

    @property
    def ahead(self) -> int:
        """How many steps have rows for their keys, and wait for their forward pass."""
        return len(self._ahead)

    def drop_ahead(self) -> None:
        """Drop the steps that are ahead. Their batches will be looked up again."""
        for keys in self.maps.values():
            keys.give_up(self.ahead)
        self._steps -= self.ahead
        self._open -= {step for step in self._open if step.number in self._ahead}
        self._ahead.clear()

    def _forget_steps(self) -> None:
        self._steps = 0
        self._open: WeakSet[KeyStep] = WeakSet()
        self._ahead: set[int] = set()

    def _read(self, name: str, keys: Int, open_before: int, id_order: Callable[[], IdOrder]) -> Int:
        # One step always counts as open, so that results are equal with and without look-ahead.
        step = self.maps[name].read(keys, max(1, open_before))
        if step.reused.size:
            rows = torch.from_numpy(step.reused.copy())
            self._begin_again({name: (rows, step.new_keys)}, id_order())
        return step.rows

    def _begin_again(self, again: Mapping[str, tuple[Tensor, Int]], order: IdOrder) -> None:
        """Draw new weights for rows that these keys have now, and set optimizer state to zero."""
        weights = {}
        for name, (rows, keys) in again.items():
            table = order.plan.tables_by_name[name]
            drawn = torch.zeros(rows.numel(), table.dim, dtype=torch.float32)
            if self.seed is not None:
                drawn = weights_of_keys(table, self.seed, keys)
            weights[name] = rows, drawn
        order.start_rows(weights)

    def counts(self) -> dict[str, KeyCounts]:
        """Return the counters of each table's keys."""
        return {name: keys.counts for name, keys in self.maps.items()}

    def live(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the keys of a table that have rows, and these rows, ascending."""
        keys, rows = (torch.from_numpy(values) for values in self.maps[table].live())
        order = rows.argsort()
        return keys[order], rows[order]

    def state(self) -> dict[str, Tensor]:
        """Return the state of all key maps, by ``<table>.keys.<name>``: int64 tensors."""
        return {
            f"{table}.keys.{name}": torch.from_numpy(values)
            for table, keys in self.maps.items()
            for name, values in keys.state(self.ahead).items()
        }

    def names(self) -> list[str]:
        """Return the names of `state`."""
        return [f"{table}.keys.{name}" for table in self.maps for name in KeyMap.STATE]

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `state` gave; raise CheckpointError if it is not of these tables.

        It may be of another capacity: see `resized`.
        """
        missing = [name for name in self.names() if name not in state]
        if missing:
            raise CheckpointError(f"the checkpoint lacks {missing[0]!r} of a table that grows")
        state, earlier = self.resized(state)
        for table, keys in self.maps.items():
            self.earlier.pop(table, None)
            keys.load_state(_of_table(state, table))
        self.earlier |= earlier
        self._forget_steps()

    def resized(
        self, state: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], dict[str, tuple[int, Int]]]:
        """Return a state as it is with these capacities, and what `earlier` says of it.

        A larger table has all keys, and a smaller one the hottest; a warning says how many must go.
        """
        made, earlier = dict(state), dict[str, tuple[int, Int]]()
        for table, keys in self.maps.items():
            how, capacity = keys.growing, max(1, len(state[f"{table}.keys.rows"]))
            if capacity == how.capacity:
                continue
            was = KeyMap(replace(how, capacity=capacity))
            was.load_state(_of_table(state, table))
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
