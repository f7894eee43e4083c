"""Key maps with copies on a device: the device finds keys, and the host gives rows to new keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from placer.executor.backends.torch_kernels import SegmentTable
from placer.executor.device_key_map import (
    Answer,
    Asked,
    DeviceCopy,
    DeviceKeyMap,
    Given,
    Lookups,
    Walk,
)
from placer.executor.growing_keys import GrowingKeys
from placer.executor.id_order import IdOrder
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import FeatureRead
from placer.executor.streams import on_host, recorded
from placer.growing.options import Growing, Int
from placer.tables import Table

BLOCK, WARPS = 128, 1
"""Keys of a kernel program, and its warps: each thread runs four searches at once."""

FIRST = 4096
"""Lookups that a kernel can note at first. If it finds more, it runs again with more room."""

_SHAPES = 16
"""Number of batch shapes whose segment tables are cached."""


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """A batch's keys on the device, each table's range of them, and their rows."""

    spans: dict[str, slice]
    table: SegmentTable
    ids: Tensor
    rows: Tensor


class DeviceKeys(GrowingKeys):
    """Key maps with copies on a device that finds keys; the host gives rows to new keys.

    The host waits for the device once a step, to get the lookups without a row. It waits again, for
    all tables together, if rows may have to be taken back.

    `growing`, `tables`, `seed`: see `GrowingKeys`. `run`: launches kernels: `TritonBackend.run`.
    """

    def __init__(
        self,
        growing: Mapping[str, Growing],
        tables: Mapping[str, Table],
        seed: int | None,
        device: torch.device,
        run: Callable[..., None],
    ) -> None:
        super().__init__(growing, tables, seed)
        self._device, self._run = device, run
        self._used: torch.cuda.Event | None = None
        self._segments = lru_cache(_SHAPES)(partial(SegmentTable.of, device))
        slots, rows = (
            list(accumulate((getattr(how, size) for how in growing.values()), initial=0))
            for size in ("slot_count", "rows")
        )
        zeros = partial(torch.zeros, device=device)
        self._copy = DeviceCopy(
            slots=zeros(slots[-1], dtype=torch.int32),
            keys=zeros(rows[-1], dtype=torch.int64),
            last=zeros(rows[-1], dtype=torch.int32),
            reads=zeros(rows[-1], dtype=torch.uint8),
            step=zeros(len(growing), dtype=torch.int32),
        )
        # For each table: its number, its first slot and number of slots, its first row, and the bit
        # mask of the row in a slot.
        self._places: dict[str, tuple[int, int, int, int, int]] = {}
        for number, (name, how) in enumerate(growing.items()):
            own = slice(*slots[number : number + 2]), slice(*rows[number : number + 2]), number
            self.maps[name] = DeviceKeyMap(how, self._copy.part(*own))
            mask = (1 << how.capacity.bit_length()) - 1
            self._places[name] = number, slots[number], how.slot_count, rows[number], mask

    @property
    def _kernels(self) -> ModuleType:  # No attribute, because modules cannot be deep-copied.
        from placer.executor.backends.triton import key_kernels

        return key_kernels

    def rows_of(
        self,
        batch: BagBatch,
        features: tuple[FeatureRead, ...],
        open_before: int | None,
        id_order: Callable[[], IdOrder],
    ) -> BagBatch:
        spans = self.spans(batch, features)
        held = {name: self.maps[name] for name in spans}
        maps = {name: own for name, own in held.items() if isinstance(own, DeviceKeyMap)}
        if not maps or len(maps) < len(held):  # A server has maps on the host only.
            return super().rows_of(batch, features, open_before, id_order)
        if open_before is not None and any(own.known_steps for own in maps.values()):
            for own in maps.values():
                own.pull()
            batch = super().rows_of(batch, features, open_before, id_order)
            for own in maps.values():
                own.push()
            return batch
        if self._used is not None:  # The step before may have run on another stream.
            torch.cuda.current_stream(self._device).wait_event(self._used)
        ids = batch.ids.to(self._device, non_blocking=True)
        table = self._segments(
            tuple(
                (span.start, number, span.stop - span.start, *places, 0)
                for span, (number, *places) in ((spans[name], self._places[name]) for name in spans)
            )
        )
        keys = _Keys(spans, table, ids, ids.to(torch.int64, copy=True))
        known = self._copy
        digests = torch.empty(len(self.maps), dtype=torch.int64, device=self._device)

        def find(noted: Tensor, room: int) -> None:
            arguments = known.slots, known.keys, keys.rows, digests.zero_(), noted, room
            self._launch(self._kernels.find, table, ids, *arguments)

        if open_before is None:
            find(self._room(FIRST), FIRST)
        else:
            missing, found = self._noted(find, digests)
            again = self._give_rows(keys, missing, open_before, found)
            known.step.add_(1)
            note_reads = self._kernels.note_reads
            self._launch(note_reads, table, keys.rows, known.step, known.last, known.reads)
            if again:
                self._begin_again(again, id_order())
        for name, span in spans.items():
            if (numbers := maps[name].numbers) is not None:
                keys.rows[span] = numbers[keys.rows[span]]
        if self._device.type == "cuda":
            self._used = recorded()
        return replace(batch, ids=keys.rows.to(batch.ids.device))

    def _launch(self, kernel: object, table: SegmentTable, *arguments: Tensor | int) -> None:
        grid = -(-table.longest // BLOCK), table.table.shape[0]
        self._run(kernel, grid, table.table, *arguments, BLOCK=BLOCK, num_warps=WARPS)

    def _room(self, lookups: int) -> Tensor:
        """Return a tensor in which a kernel can note this many lookups."""
        return torch.zeros(1 + 3 * lookups, dtype=torch.int64, device=self._device)

    def _noted(self, launch: Callable[[Tensor, int], None], *others: Tensor) -> tuple[Lookups, Int]:
        """Return the lookups that a kernel notes, and `others`, on the host; waits for both."""
        room = FIRST
        while True:
            noted = self._room(room)
            launch(noted, room)
            found = on_host(torch.cat((noted, *others)) if others else noted).numpy()
            size = int(found[0])
            if size <= room:
                break
            room = -(-size // FIRST) * FIRST
        lookups = Lookups(*found[1 : 1 + 3 * room].reshape(3, -1)[:, :size])
        return lookups.at(lookups.places.argsort()), found[1 + 3 * room :]

    def _give_rows(
        self, keys: _Keys, missing: Lookups, open_before: int, digests: Int
    ) -> dict[str, tuple[Tensor, Int]]:
        """Take a step of all maps, and write the rows of lookups that had none.

        Returns each table's reused rows, which had other keys before, and their new keys.
        """
        walks: dict[str, Walk] = {}
        for name, span in keys.spans.items():
            own, open_steps = missing.within(span), max(1, open_before)
            walks[name] = self._map(name).train(
                span.stop - span.start, own, open_steps, int(digests[self._places[name][0]])
            )
        given: dict[str, Given] = {}
        answers: dict[str, Answer | None] = dict.fromkeys(walks)
        while answers:
            asked: dict[str, Asked] = {}
            for name, answer in answers.items():
                try:
                    asked[name] = walks[name].send(answer)
                except StopIteration as end:
                    if end.value is not None:
                        given[name] = end.value
            answers = self._answers(keys, asked) if asked else {}
        if given:
            self._write(keys.rows, given)
        again = {name: given[name] for name in walks if name in given and given[name].reused.size}
        return {name: (torch.from_numpy(own.reused), own.new_keys) for name, own in again.items()}

    def _map(self, name: str) -> DeviceKeyMap:
        own = self.maps[name]
        assert isinstance(own, DeviceKeyMap), "the device has copies of all maps"
        return own

    def _answers(self, keys: _Keys, asked: Mapping[str, Asked]) -> dict[str, Answer | None]:
        """Answer the questions of several tables with one wait for the device."""
        known, sizes = self._copy, [rows.size for rows, _ in asked.values()]
        starts = np.repeat([self._places[name][3] for name in asked], sizes)
        befores = np.repeat([before for _, before in asked.values()], sizes)
        chosen = np.concatenate([rows for rows, _ in asked.values()]) + starts
        index, before = known.index(np.stack((chosen, befores)))
        last, reads = known.last[index].long(), known.reads[index].long()
        may_go = torch.zeros(known.last.shape, dtype=torch.bool, device=self._device)
        may_go[index] = (last >= 0) & (last < before)
        readers = partial(self._launch, self._kernels.readers, keys.table, keys.ids, may_go)
        lookups, came = self._noted(partial(readers, keys.rows), last, reads)
        all_last, all_reads = came.reshape(2, -1)
        answers: dict[str, Answer | None] = {}
        for name, size, end in zip(asked, sizes, np.cumsum(sizes), strict=True):
            own = slice(end - size, end)
            readers_of = lookups.within(keys.spans[name])
            answers[name] = Answer(all_last[own], all_reads[own], readers_of)
        return answers

    def _write(self, rows: Tensor, given: Mapping[str, Given]) -> None:
        """Write the rows of lookups, and send the changes of the maps to the device."""
        parts: list[list[Int]] = []
        for name, own in given.items():
            _, first_slot, _, first_row, _ = self._places[name]
            of_rows, of_slots = self._map(name).changes(own.changed)
            of_rows[0] += first_row
            of_slots[0] += first_slot
            parts.append([np.stack((own.places, own.rows)), of_rows, of_slots])
        joined = [np.concatenate(part, axis=1) for part in zip(*parts, strict=True)]
        flat = self._copy.index(np.concatenate([part.reshape(-1) for part in joined]))
        pieces = torch.split_with_sizes(flat, [part.size for part in joined])
        of_lookups, *changes = (
            piece.view(part.shape) for piece, part in zip(pieces, joined, strict=True)
        )
        rows[of_lookups[0]] = of_lookups[1]
        self._copy.write(*changes)
