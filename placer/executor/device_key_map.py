"""A key map with a copy on a device: the host's questions to the device, and its changes."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.executor.streams import on_host, sent
from placer.growing.key_map import KeyMap
from placer.growing.options import Growing, Int

LEAST_ROWS, ROWS_PER_KEY = 1024, 32
"""Rows in a question to the device: the minimum, and the number for each key without a row."""

_AT_ONCE = 1 << 20
"""Rows that are copied to the device at once; each takes 32 bytes during the copy."""

_MOST_PASSED = 17
"""Most rows that the clock hand examines for one key: its window and, if none is free, the next."""


class Lookups(NamedTuple):
    """Lookups of a batch, in its order: positions in the batch, keys, and rows found."""

    places: Int
    keys: Int
    rows: Int

    def at(self, chosen: "Int | npt.NDArray[np.bool_] | slice") -> "Lookups":
        """Return the chosen lookups."""
        return Lookups(*(values[chosen] for values in self))

    def within(self, span: slice) -> "Lookups":
        """Return the lookups at positions in `span`."""
        return self.at(slice(*np.searchsorted(self.places, (span.start, span.stop))))

    def with_others(self, others: "Lookups") -> "Lookups":
        """Return these lookups and others, in the order of the batch."""
        both = Lookups(*map(np.append, self, others))
        return both.at(both.places.argsort())


class Answer(NamedTuple):
    """The device's answer for each row: the last step that read it, and the number of such steps.

    `lookups` are this step's lookups of rows that may lose their keys.
    """

    last: Int
    reads: Int
    lookups: Lookups


class Given(NamedTuple):
    """The changes of a step.

    The lookups at `places` get `rows`. The rows `reused` now have other keys, `new_keys`. The rows
    `changed`, in the map's own numbers, must be sent to the device.
    """

    places: Int
    rows: Int
    reused: Int
    new_keys: Int
    changed: Int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCopy:
    """A device's copy of key maps."""

    slots: Tensor  # Int32.
    keys: Tensor  # Int64, by row.
    last: Tensor  # Int32, by row: the last step that read the row; −1 without a key.
    reads: Tensor  # Uint8, by row: number of steps that read the row.
    step: Tensor  # Int32: the number of the last step, by map.

    def part(self, slots: slice, rows: slice, number: int) -> "DeviceCopy":
        """Return views of one map's part."""
        return DeviceCopy(
            self.slots[slots], self.keys[rows], self.last[rows], self.reads[rows], self.step[number]
        )

    def index(self, values: Int) -> Tensor:
        """Return the values on the device, without waiting for it."""
        return sent(torch.from_numpy(values), self.step.device)

    def write(self, of_rows: Tensor, of_slots: Tensor) -> None:
        """Write a result of `DeviceKeyMap.changes`."""
        rows, keys, last, reads = of_rows
        self.keys[rows] = keys
        self.last[rows] = last.int()
        self.reads[rows] = reads.byte()
        self.slots[of_slots[0]] = of_slots[1].int()


Asked: TypeAlias = tuple[Int, int]
"""Rows whose reads the device is asked for, and a step: rows last read before it may lose keys."""

Walk: TypeAlias = Generator[Asked, Answer | None, Given | None]
"""A step of a map as a generator: it yields questions to the device, and returns the changes."""


class DeviceKeyMap(KeyMap):
    """A key map with a copy of its slots and keys on a device, which counts the reads of rows.

    The host asks for the reads of a row only if an eviction or expiry rule needs them.

    `copy`: the views of this map.
    """

    def __init__(self, growing: Growing, copy: DeviceCopy) -> None:
        self._copy = copy
        super().__init__(growing)
        self.push()

    def push(self) -> None:
        """Copy the whole map to the device."""
        self._copy.step.fill_(int(self._state[self._kernels.STEP]))
        self._copy.slots.copy_(torch.from_numpy(self._slots.view(np.int32)))
        self._log = np.zeros(1 + self._slots.size // 16, np.int64)
        for part in np.array_split(np.arange(self.growing.rows), -(-self.growing.rows // _AT_ONCE)):
            self._copy.write(*map(self._copy.index, self.changes(part)))
        numbers = self._numbers
        self.numbers = None if numbers is None else self._copy.index(numbers.astype(np.int64))
        _synchronize(self._copy.step.device)

    def pull(self) -> None:
        """Copy the device's counts of reads to the host."""
        _synchronize(self._copy.step.device)
        rows = self._behind(0, self.growing.rows)
        index = self._copy.index(rows)
        came = (on_host(values[index]).numpy() for values in (self._copy.last, self._copy.reads))
        self._refresh(rows, *came)

    def state(self, ahead: int = 0) -> dict[str, Int]:
        self.pull()
        return super().state(ahead)

    def load_state(self, state: dict[str, Int]) -> None:
        super().load_state(state)
        self.push()

    def train(self, lookups: int, waiting: Lookups, open_steps: int, digest: int) -> Walk:
        """Take a step after the device has looked up its keys; give rows to keys without one.

        The host reads the `waiting` lookups, which found no row, in the order of the batch. If this
        step may take back the row of another lookup, the host reads that lookup too. The order of
        all other lookups changes nothing. `digest` is `digest_of` all keys. The generator returns
        None if nothing has changed.
        """
        state, kernels, ttl = self._state, self._kernels, self.growing.ttl
        changed = [np.zeros(0, np.int64)]
        if ttl:
            before = int(state[kernels.STEP]) + 1 - max(ttl, open_steps)
            swept = self._behind(int(state[kernels.SWEEP]), lookups + 1024)
            answer = yield swept, before
            assert answer is not None, "every question is answered"
            step = self._refresh(swept, answer.last, answer.reads)
            expires = (step >= 0) & (step < before)
            if expires.any():
                changed.append(swept[expires])
                waiting = waiting.with_others(answer.lookups)
            else:
                state[kernels.SWEEP], ttl = swept[-1] if swept.size else 0, 0
        open_since = self._begin_step(lookups, open_steps, ttl, digest)
        state[kernels.HITS] += lookups
        if not (waiting.places.size or ttl):
            self._without.append(changed[0])
            return None
        hand, passed, limit = int(state[kernels.HAND]), 0, -1
        places, rows, reused, without = ([changed[0]] for _ in range(4))
        while waiting.places.size:
            found, taken, done = self._read(waiting.keys, open_since, hand, limit)
            state[kernels.HITS] -= done
            places.append(waiting.places[:done])
            rows.append(found)
            without.append(waiting.keys[:done][found == 0])
            reused.append(taken)
            waiting = waiting.at(slice(done, None))
            if not waiting.places.size:
                break
            # The clock hand needs the reads of these rows, which only the device has in full.
            more = max(LEAST_ROWS, ROWS_PER_KEY * waiting.places.size, passed)
            chunk = self._behind(hand, more, passed)
            answer = yield chunk, open_since
            assert answer is not None, "every question is answered"
            last, reads, readers = answer
            changed.append(chunk)
            step = self._refresh(chunk, last, reads)
            is_old = (step >= 0) & (step < open_since)
            waiting = waiting.with_others(readers.at(np.isin(readers.rows, chunk[is_old])))
            certain = np.flatnonzero(is_old & ~np.isin(chunk, readers.rows))
            limit = passed + int(certain[-_MOST_PASSED]) if certain.size >= _MOST_PASSED else -1
            passed += chunk.size
            if passed == state[kernels.USED]:
                limit = passed
        self._without.append(np.concatenate(without))
        given, again = np.concatenate(rows), np.concatenate(reused)
        to_send = np.unique(np.concatenate([*changed, given]))
        new_keys = self._rows["key"][again]
        return Given(np.concatenate(places), given, self._numbered(again), new_keys, to_send)

    def _behind(self, hand: int, most: int, passed: int = 0) -> Int:
        """Return up to `most` rows ahead of the clock hand, skipping `passed`, within one round."""
        used = int(self._state[self._kernels.USED])
        return (hand + np.arange(passed, min(used, passed + most))) % max(1, used) + 1

    def _refresh(self, rows: Int, last: Int, reads: Int) -> Int:
        """Copy the device's counts for rows that the host has not read in this step.

        Returns the last step that read each row, −1 if the row has no key.
        """
        step = self._rows["step"][rows]
        is_old = (step >= 0) & (step < self._state[self._kernels.STEP])
        for name, values in (("step", last), ("reads", reads)):
            self._rows[name][rows[is_old]] = values[is_old]
        return self._rows["step"][rows]

    def changes(self, rows: Int) -> tuple[Int, Int]:
        """Return the host's records of rows, and all changed slots, for `DeviceCopy.write`."""
        records, changed = self._rows[rows], self._log[1 : 1 + self._log[0]]
        if changed.size < self._log[0]:
            changed = np.arange(self._slots.size)
        self._log[0] = 0
        of_rows = np.stack((rows, *(records[name] for name in ("key", "step", "reads"))))
        return of_rows, np.stack((changed, self._slots[changed].view(np.int32)))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
