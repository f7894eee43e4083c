"""Key maps of which a device has a copy: it finds keys, and the host gives rows to new ones."""

from collections.abc import Callable, Mapping
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
from placer.growing.key_map import KeyMap
from placer.growing.options import Growing, Int
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
    """A key map with a copy of its slots and keys on a device, which counts the reads of rows.

    The host asks the device for the reads of a row only when a rule needs them.

    Parameters
    ----------
    growing : Growing
    slots, keys, last, reads, step : Tensor
        On the device: the slots; of each row its key, the step in which it was read last, and the
        steps that read it; the number of the last step.
    """

    def __init__(self, growing: Growing, *there: Tensor) -> None:
        self._device_slots, self._keys, self._last, self._reads, self._step = there
        super().__init__(growing)
        self.push()

    def push(self) -> None:
        """Copy all to the device."""
        self._step.fill_(int(self._state[self._kernels.STEP]))
        self._device_slots.copy_(torch.from_numpy(self._slots.view(np.int32)))
        self._log = np.zeros(1 + self._slots.size // 16, np.int64)
        self._send(np.arange(self.growing.rows))
        numbers = self._numbers
        self.numbers = None if numbers is None else self._index(numbers.astype(np.int64))
        _synchronize(self._step.device)

    def pull(self) -> None:
        """Copy to the host what the device knows of reads."""
        _synchronize(self._step.device)
        self._refresh(self._behind(0, self.growing.rows))

    def state(self, ahead: int = 0) -> dict[str, Int]:
        self.pull()
        return super().state(ahead)

    def load_state(self, state: dict[str, Int]) -> None:
        super().load_state(state)
        self.push()

    def train(self, keys: Tensor, rows: Tensor, open_steps: int, misses: bool) -> tuple[Int, Int]:
        """Take a step whose keys the device has found, and give rows to keys that have none.

        A key without a row has row 0 in `rows`, which is overwritten. The host reads those keys in
        the order of the batch. It also reads the keys whose rows it may take back before the
        batch comes to them; the order of all others changes nothing. Returns `reused` and
        `new_keys` of `StepRows`.
        """
        state, kernels, lookups, ttl = self._state, self._kernels, keys.numel(), self.growing.ttl
        sent = [np.zeros(0, np.int64)]
        if ttl:
            before = int(state[kernels.STEP]) + 1 - max(ttl, open_steps)
            swept = self._behind(int(state[kernels.SWEEP]), lookups + 1024)
            last = self._last[self._index(swept)]
            if ((last >= 0) & (last < before)).any():
                self._refresh(swept)
                old = self._rows["step"][swept]
                sent.append(swept[(old >= 0) & (old < before)])
            else:
                state[kernels.SWEEP], ttl = swept[-1] if swept.size else 0, 0
        open_since = self._begin_step(lookups, open_steps, ttl)
        state[kernels.HITS] += lookups
        if not (misses or ttl):
            self._without.append(sent[0])
            return sent[0], sent[0]
        waiting = self._lookups_of(np.append(sent[-1], 0), rows)
        hand, passed, limit, reused = int(state[kernels.HAND]), 0, -1, sent[:1]
        without = sent[:1]
        while True:
            places = self._index(waiting)
            values = on_host(keys[places].long()).numpy()
            found, taken, done = self._read(values, open_since, hand, limit)
            state[kernels.HITS] -= done
            rows[places[:done]] = self._index(found).to(rows.dtype)
            sent.append(found)
            without.append(values[:done][found == 0])
            reused.append(taken)
            waiting = waiting[done:]
            if not waiting.size:
                break
            # The hand comes to rows of whose reads the device alone knows all.
            more = max(LEAST_ROWS, ROWS_PER_KEY * waiting.size, passed)
            chunk = self._behind(hand, more, passed)
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
        self._without.append(np.concatenate(without))
        self._send(np.unique(np.concatenate(sent)))
        again = np.concatenate(reused)
        return self._numbered(again), self._rows["key"][again]

    def _behind(self, hand: int, most: int, passed: int = 0) -> Int:
        """Return the rows behind a hand, once around at most, but for those that it has passed."""
        used = int(self._state[self._kernels.USED])
        return (hand + np.arange(passed, min(used, passed + most))) % max(1, used) + 1

    def _index(self, values: Int) -> Tensor:
        return torch.from_numpy(values).to(self._step.device)

    def _among(self, rows: Tensor) -> Tensor:
        """Return of each row of the map whether it is among these: bool, shape (rows,)."""
        found = torch.zeros(self.growing.rows, dtype=torch.bool, device=rows.device)
        return found.index_fill_(0, rows, True)

    def _lookups_of(self, read: Int, rows: Tensor) -> Int:
        """Return which lookups are of some of the rows."""
        return on_host(self._among(self._index(read))[rows].nonzero().squeeze(1)).numpy()

    def _refresh(self, rows: Int) -> None:
        """Get the reads of rows from the device, but for those that this step has read already."""
        index = self._index(rows)
        came = on_host(torch.stack((self._last[index], self._reads[index].int()))).numpy()
        step = self._rows["step"][rows]
        is_old = (step >= 0) & (step < self._state[self._kernels.STEP])
        for name, values in zip(("step", "reads"), came, strict=True):
            self._rows[name][rows[is_old]] = values[is_old]

    def _send(self, rows: Int) -> None:
        """Send what the host knows of rows, and all slots that have changed."""
        index, records = self._index(rows), self._rows[rows]
        names = ((self._keys, "key"), (self._last, "step"), (self._reads, "reads"))
        for there, name in names:
            there[index] = self._index(records[name].copy()).to(there.dtype)
        changed = self._log[1 : 1 + self._log[0]]
        if changed.size < self._log[0]:
            changed = np.arange(self._slots.size)
        self._device_slots[self._index(changed)] = self._index(self._slots[changed].view(np.int32))
        self._log[0] = 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceKeys(GrowingKeys):
    """Key maps with copies on a device, which finds keys; the host gives rows to new ones.

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
        self._steps, self._slots, self._keys, self._last, self._reads = (
            torch.zeros(size, dtype=dtype, device=device)
            for size, dtype in (
                (len(growing), torch.int32),
                (slots[-1], torch.int32),
                (rows[-1], torch.int64),
                (rows[-1], torch.int32),
                (rows[-1], torch.uint8),
            )
        )
        self._places: dict[str, tuple[int, ...]] = {}
        for number, (name, how) in enumerate(growing.items()):
            first_slot, own = slots[number], slice(rows[number], rows[number + 1])
            of_rows = (values[own] for values in (self._keys, self._last, self._reads))
            own_slots = self._slots[first_slot : slots[number + 1]]
            self.maps[name] = DeviceKeyMap(how, own_slots, *of_rows, self._steps[number])
            mask = (1 << how.capacity.bit_length()) - 1
            self._places[name] = number, first_slot, how.slot_count, own.start, mask

    def rows_of(
        self,
        batch: BagBatch,
        features: tuple[FeatureRead, ...],
        training: bool,
        id_order: Callable[[], IdOrder],
    ) -> BagBatch:
        spans = self.spans(batch, features)
        held = {name: self.maps[name] for name in spans}
        maps = {name: own for name, own in held.items() if isinstance(own, DeviceKeyMap)}
        if not maps or len(maps) < len(held):  # Who serves has maps of its own.
            return super().rows_of(batch, features, training, id_order)
        if training and any(own.known_steps for own in maps.values()):
            for own in maps.values():
                own.pull()
            batch = super().rows_of(batch, features, training, id_order)
            for own in maps.values():
                own.push()
            return batch
        if self._used is not None:  # Perhaps on another stream.
            torch.cuda.current_stream(self._device).wait_event(self._used)
        ids = batch.ids.to(self._device, non_blocking=True)
        rows, misses = ids.to(torch.int64, copy=True), torch.zeros_like(self._steps)
        table = self._segments(
            tuple(
                (span.start, number, span.stop - span.start, *places, 0)
                for span, (number, *places) in ((spans[name], self._places[name]) for name in spans)
            )
        )
        grid = -(-table.longest // BLOCK), len(spans)
        self._run(
            self._kernels.find, grid,
            ids, table.table, self._slots, self._keys, rows, misses, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        if training:
            known, begun = on_host(misses).tolist(), {}
            for name, span in spans.items():
                missing = known[self._places[name][0]] > 0
                open_steps = max(1, self.open_steps)
                begun[name] = maps[name].train(ids[span], rows[span], open_steps, missing)
            self._steps += 1
            self._run(
                self._kernels.note_reads, grid,
                rows, table.table, self._steps, self._last, self._reads,
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            for name, (reused, keys) in begun.items():
                if reused.size:
                    self._begin_again(name, torch.from_numpy(reused), keys, id_order())
            self._open_step()
        for name, span in spans.items():
            if (numbers := maps[name].numbers) is not None:
                rows[span] = numbers[rows[span]]
        if self._device.type == "cuda":
            self._used = recorded()
        return replace(batch, ids=rows.to(batch.ids.device))
