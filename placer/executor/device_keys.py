"""Key maps of which a device has a copy: it finds keys, and the host gives rows to new ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from placer.executor.backends.torch_kernels import SegmentTable
from placer.executor.growing_keys import GrowingKeys
from placer.executor.id_order import IdOrder
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import FeatureRead
from placer.executor.streams import on_host, recorded
from placer.growing.key_map import Growing, Int, KeyMap
from placer.tables import Table

BLOCK, WARPS = 128, 1
"""Keys of a program, and its warps: four searches of each thread are under way at once."""

LEAST_ROWS, ROWS_PER_KEY = 1024, 32
"""Rows whose reads the host asks for at a time: at least, and for each key that may need one."""

_SHAPES = 16
"""So many shapes of batches are remembered."""

_MOST_PASSED = 17
"""Rows that the hand may take and passes for one: those of its window and, if there are none, the
next."""


class DeviceKeyMap(KeyMap):
    """A key map whose slots and keys are on a device too, where alone all reads are counted.

    What the host knows of a row's reads is as old as the last step in which it had to know.

    Parameters
    ----------
    growing : Growing
    slots, keys, last, reads, step : Tensor
        On the device: the slots; of each row its key, the step in which it was read last, and the
        steps that read it; the number of the last step.
    """

    def __init__(self, growing: Growing, *there: Tensor) -> None:
        self._there = there
        super().__init__(growing)
        self.push()

    def push(self) -> None:
        """Copy all to the device."""
        slots, keys, *_, step = self._there
        step.fill_(int(self._state[self._kernels.STEP]))
        slots.copy_(torch.from_numpy(self._slots.view(np.int32)))
        self._log = np.zeros(1 + self._slots.size // 16, np.int64)
        self._send(np.arange(keys.numel()))

    def pull(self) -> None:
        """Copy to the host what the device knows of reads."""
        self._refresh(self._behind(0, self.growing.rows))

    def state(self, ahead: int = 0) -> dict[str, Int]:
        self.pull()
        return super().state(ahead)

    def load_state(self, state: dict[str, Int]) -> None:
        super().load_state(state)
        self.push()

    @property
    def is_numbered(self) -> bool:
        """Whether rows of the table have other numbers than those of this map."""
        return self._numbers is not None

    def table_rows(self, rows: Tensor) -> Tensor:
        """Return rows of the table, from those of this map, if it is numbered."""
        assert self._numbers is not None
        return self._index(self._numbers.astype(np.int64))[rows]

    def expires(self, lookups: int, open_steps: int) -> Tensor:
        """Return whether the next step takes back rows that were not read for long: bool."""
        before, swept = self._expiring(lookups, open_steps)
        last = self._there[2][self._index(swept)]
        return ((last >= 0) & (last < before)).any()

    def train(
        self, keys: Tensor, rows: Tensor, open_steps: int, misses: bool, expires: bool
    ) -> tuple[Int, Int]:
        """Make a step whose keys the device has found, and give rows to those that have none.

        The host reads, in their order, these keys and all others whose row it might take back
        before they are read. For the rest it does not matter when they are.

        Parameters
        ----------
        keys, rows : shape (lookups,), on the device
            What is read, and its row of this map; 0, where it has none, is overwritten.
        open_steps : int
            See `KeyMap.read`.
        misses, expires : bool
            Whether there are keys without a row, and what `expires` gave.

        Returns
        -------
        reused, new_keys
            See `StepRows`.
        """
        state, kernels, lookups = self._state, self._kernels, keys.numel()
        sent = [np.zeros(0, np.int64)]
        if self.growing.ttl:
            before, swept = self._expiring(lookups, open_steps)
            if expires:
                self._refresh(swept)
                step = self._rows["step"][swept]
                sent.append(swept[(step >= 0) & (step < before)])
            elif swept.size:
                state[kernels.SWEEP] = swept[-1]
        open_since = self._begin_step(lookups, open_steps, self.growing.ttl if expires else 0)
        state[kernels.HITS] += lookups
        if not (misses or expires):
            return sent[0], sent[0]
        waiting = self._lookups_of(np.append(sent[-1], 0), rows)
        hand, passed, limit, reused = int(state[kernels.HAND]), 0, -1, sent[:1]
        while True:
            places = self._index(waiting)
            values = on_host(keys[places].long()).numpy()
            found, taken, done = self._read(values, open_since, hand, limit)
            state[kernels.HITS] -= done
            rows[places[:done]] = self._index(found).to(rows.dtype)
            sent.append(found)
            reused.append(taken)
            waiting = waiting[done:]
            if not waiting.size:
                break
            # The hand comes to rows of whose reads the device alone knows all.
            size = max(LEAST_ROWS, ROWS_PER_KEY * waiting.size, passed)
            chunk = self._behind(hand, size, passed)
            self._refresh(chunk)
            sent.append(chunk)
            step = self._rows["step"][chunk]
            is_old = (step >= 0) & (step < open_since)
            is_read = on_host(self._among(rows)[self._index(chunk)]).numpy()
            also = self._lookups_of(chunk[is_old & is_read], rows)
            waiting = np.sort(np.append(waiting, also))
            certain = np.flatnonzero(is_old & ~is_read)
            limit = passed + int(certain[-_MOST_PASSED]) if certain.size >= _MOST_PASSED else -1
            passed += chunk.size
            if passed == state[kernels.USED]:
                limit = passed
        self._send(np.unique(np.concatenate(sent)))
        again = np.concatenate(reused)
        return self._numbered(again), self._rows["key"][again]

    def _behind(self, hand: int, most: int, passed: int = 0) -> Int:
        """Return the rows behind a hand, once around at most, but for those that it has passed."""
        used = int(self._state[self._kernels.USED])
        return (hand + np.arange(passed, min(used, passed + most))) % max(1, used) + 1

    def _expiring(self, lookups: int, open_steps: int) -> tuple[int, Int]:
        """Return since when a row that the next step looks at must have been read, and these."""
        step = int(self._state[self._kernels.STEP]) + 1
        swept = self._behind(int(self._state[self._kernels.SWEEP]), lookups + 1024)
        return step - max(self.growing.ttl, open_steps), swept

    def _index(self, values: Int) -> Tensor:
        return torch.from_numpy(values).to(self._there[0].device)

    def _among(self, rows: Tensor) -> Tensor:
        """Return of each row of the map whether it is among these: bool, shape (rows,)."""
        found = torch.zeros(self.growing.rows, dtype=torch.bool, device=rows.device)
        return found.index_fill_(0, rows, True)

    def _lookups_of(self, read: Int, rows: Tensor) -> Int:
        """Return which lookups are of some of the rows."""
        return on_host(self._among(self._index(read))[rows].nonzero().squeeze(1)).numpy()

    def _refresh(self, rows: Int) -> None:
        """Get the reads of rows from the device, but for those that this step has read already."""
        *_, last, reads, _ = self._there
        index = self._index(rows)
        came = on_host(torch.stack((last[index], reads[index].int()))).numpy()
        step = self._rows["step"][rows]
        is_old = (step >= 0) & (step < self._state[self._kernels.STEP])
        for name, values in zip(("step", "reads"), came, strict=True):
            self._rows[name][rows[is_old]] = values[is_old]

    def _send(self, rows: Int) -> None:
        """Send what the host knows of rows, and all slots that have changed."""
        slots, keys, last, reads, _ = self._there
        index, records = self._index(rows), self._rows[rows]
        for there, name in ((keys, "key"), (last, "step"), (reads, "reads")):
            there[index] = self._index(records[name].copy()).to(there.dtype)
        changed = self._log[1 : 1 + self._log[0]]
        if changed.size < self._log[0]:
            slots.copy_(torch.from_numpy(self._slots.view(np.int32)))
        else:
            slots[self._index(changed)] = self._index(self._slots[changed].view(np.int32))
        self._log[0] = 0


class DeviceKeys(GrowingKeys):
    """Key maps that a device has too: a step whose keys all have rows is made there.

    Parameters
    ----------
    growing, tables, seed
        See `GrowingKeys`.
    device : torch.device
    run : callable
        Launches kernels: `TritonBackend.run`.
    """

    def __init__(
        self,
        growing: Mapping[str, Growing],
        tables: Mapping[str, Table],
        seed: int | None,
        device: torch.device,
        run: Callable[..., None],
    ) -> None:
        from placer.executor.backends.triton import key_kernels

        super().__init__(growing, tables, seed)
        self._kernels, self._device, self._run = key_kernels, device, run
        self._used: torch.cuda.Event | None = None
        self._segments = lru_cache(_SHAPES)(partial(SegmentTable.of, device))
        slots, rows = (
            list(accumulate((getattr(how, size) for how in growing.values()), initial=0))
            for size in ("slot_count", "rows")
        )
        self._steps = torch.zeros(len(growing), dtype=torch.int32, device=device)
        self._slots = torch.zeros(slots[-1], dtype=torch.int32, device=device)
        self._keys, self._last, self._reads = (
            torch.zeros(rows[-1], dtype=dtype, device=device)
            for dtype in (torch.int64, torch.int32, torch.uint8)
        )
        self._places: dict[str, tuple[int, ...]] = {}
        with self._in_turn():
            for number, (name, how) in enumerate(growing.items()):
                own = slice(rows[number], rows[number + 1])
                self.maps[name] = DeviceKeyMap(
                    how,
                    self._slots[slots[number] : slots[number + 1]],
                    *(values[own] for values in (self._keys, self._last, self._reads)),
                    self._steps[number],
                )
                mask = (1 << how.capacity.bit_length()) - 1
                self._places[name] = number, slots[number], how.slot_count, own.start, mask

    def rows_of(
        self,
        batch: BagBatch,
        features: tuple[FeatureRead, ...],
        training: bool,
        id_order: Callable[[], IdOrder],
    ) -> BagBatch:
        maps = {name: own for name, own in self.maps.items() if isinstance(own, DeviceKeyMap)}
        spans = self.spans(batch, features)
        if not spans or len(maps) < len(self.maps):  # Who serves has maps of its own.
            return super().rows_of(batch, features, training, id_order)
        with self._in_turn():
            if training and any(own.known_steps for own in maps.values()):
                for own in maps.values():
                    own.pull()
                batch = super().rows_of(batch, features, training, id_order)
                for own in maps.values():
                    own.push()
                return batch
            ids = batch.ids.to(self._device, non_blocking=True)
            rows = self._found(ids, spans, maps, training, id_order)
        return replace(batch, ids=rows.to(batch.ids.device))

    def _found(
        self,
        ids: Tensor,
        spans: Mapping[str, Sequence[slice]],
        maps: Mapping[str, DeviceKeyMap],
        training: bool,
        id_order: Callable[[], IdOrder],
    ) -> Tensor:
        """Return ids with rows in the place of keys; they are on the device."""
        segments = []
        for name, parts in spans.items():
            number, *places = self._places[name]
            segments += [(part.start, number, part.stop - part.start, *places, 0) for part in parts]
        table = self._segments(tuple(segments))
        grid = -(-table.longest // BLOCK), len(segments)
        rows, misses = ids.to(torch.int64, copy=True), torch.zeros_like(self._steps)
        self._run(
            self._kernels.find, grid,
            ids, table.table, self._slots, self._keys, rows, misses, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        if training:
            begun = self._train(ids, rows, misses, spans, maps)
            self._run(
                self._kernels.note_reads, grid,
                rows, table.table, self._steps, self._last, self._reads,
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            for name, (reused, keys) in begun.items():
                if reused.size:
                    self._begin_again(name, torch.from_numpy(reused), keys, id_order())
            self._open_step()
        for name, parts in spans.items():
            for part in parts if maps[name].is_numbered else ():
                rows[part] = maps[name].table_rows(rows[part])
        return rows

    def _train(
        self,
        ids: Tensor,
        rows: Tensor,
        misses: Tensor,
        spans: Mapping[str, Sequence[slice]],
        maps: Mapping[str, DeviceKeyMap],
    ) -> dict[str, tuple[Int, Int]]:
        """Make the step of each map, once the host knows which of them needs it."""
        open_steps, begun = max(1, self.open_steps), {}
        expiring = {
            name: maps[name].expires(sum(part.stop - part.start for part in parts), open_steps)
            for name, parts in spans.items()
            if maps[name].growing.ttl
        }
        flags = (flag.int().view(1) for flag in expiring.values())
        known = on_host(torch.cat((misses, *flags))).tolist()
        expires = dict(zip(expiring, known[len(misses) :], strict=True))
        for name, parts in spans.items():
            number = self._places[name][0]
            keys, own = (
                values[parts[0]] if len(parts) == 1 else torch.cat([values[part] for part in parts])
                for values in (ids, rows)
            )
            asked = known[number] > 0, bool(expires.get(name))
            begun[name] = maps[name].train(keys, own, open_steps, *asked)
            if any(asked) and len(parts) > 1:
                sizes = [part.stop - part.start for part in parts]
                for part, values in zip(parts, torch.split(own, sizes), strict=True):
                    rows[part] = values
        if len(begun) == len(self._steps):
            self._steps += 1
        else:
            for name in begun:
                self._steps[self._places[name][0]] += 1
        return begun

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Work on the maps behind what other streams do with them."""
        if self._used is not None:
            torch.cuda.current_stream(self._device).wait_event(self._used)
        yield
        if self._device.type == "cuda":
            self._used = recorded()

    def state(self) -> dict[str, Tensor]:
        with self._in_turn():
            return super().state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        with self._in_turn():
            super().load_state(state)
