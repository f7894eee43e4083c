"""Counts by device: what each GPU and host looked up, copied, exchanged and held."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placer.errors import DataError
from placer.executor.distributed.placement.division import servers_of
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, device_memory
from placer.simulator.counts import Int, PartCounts, Totals
from placer.simulator.parts import Arrangement

Bool = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """What one device did over all steps."""

    device: str
    # Lookups that it served, and distinct rows among them, summed over steps. Of a lookup in
    # several column slices, each counts by its share of the columns; of a row, each counts once.
    lookups: int = 0
    rows: int = 0
    # Of rows that the plan keeps in HBM, or whose copy was there before the step.
    hbm_lookups: int = 0
    # Rows copied to HBM; rows of DRAM that were read and updated there over the link; and updated
    # copies that went back.
    staged_rows: int = 0
    in_place_rows: int = 0
    written_back_rows: int = 0
    # Weights and optimizer state read from and written to HBM: by lookups, gradients' rows by
    # updates, and copies.
    hbm_read_bytes: int = 0
    hbm_written_bytes: int = 0
    # Over the link from its host, and to it.
    link_in_bytes: int = 0
    link_out_bytes: int = 0
    # To and from other processes.
    sent_bytes: int = 0
    received_bytes: int = 0
    # Of a host: weights and optimizer state of its rows.
    dram_read_bytes: int = 0
    dram_written_bytes: int = 0
    # HBM entries for copies of rows; how many held one at most; and how many rows the steps in
    # flight wanted there at most.
    cache_entries: int = 0
    most_held: int = 0
    most_needed: int = 0
    # What the plan takes of its HBM with every entry in use, and the most that was.
    hbm_bytes: int = 0
    most_hbm_bytes: int = 0

    @property
    def hbm_share(self) -> float | None:
        """Share of its lookups that HBM served; None without any."""
        return self.hbm_lookups / self.lookups if self.lookups else None


@dataclass(frozen=True, slots=True)
class Served:
    """Lookups and rows of some steps by what served them."""

    # A lookup counts once. Where a row has several column slices, HBM serves as much of it as the
    # share of the columns that are there.
    lookups: int
    hbm_lookups: int
    # Distinct rows, summed over steps, that had to come from DRAM: copied, read there, or pooled by
    # the host.
    slow_rows: int

    @property
    def slow_lookups(self) -> int:
        """Lookups whose row was not in HBM."""
        return self.lookups - self.hbm_lookups


def served(arrangement: Arrangement, counts: PartCounts) -> Served:
    """Return lookups by tier over all parts."""
    slow = np.where(_is(arrangement, "device"), 0, counts.rows - counts.hit_rows)
    lookups, hbm = (round(one.sum()) for one in _lookups(arrangement, counts))
    return Served(lookups, hbm, int(slow.sum()))


def device_totals(
    arrangement: Arrangement, totals: Totals, cache_entries: Int
) -> tuple[DeviceTotals, ...]:
    """Return all that may serve, GPUs first, and then hosts with GPUs, in the topology's order."""
    plan, counts = arrangement.plan, totals.parts
    by_device: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for at, part in enumerate(arrangement.parts):
        one = {name: int(getattr(counts, name)[at]) for name in _COUNTS}
        server = by_device[part.device]
        gpu = plan.topology.gpus_by_id.get(part.device)
        home = part.device if gpu is None else gpu.host
        server["rows"] += one["rows"]
        for name in ("staged_rows", "written_back_rows"):
            server[name] += one[name]
        updated = one["update_rows"] if part.replicated else one["rows"]
        weights, whole = part.weight_bytes, part.row_bytes
        if part.lookup == "device":
            server["hbm_read_bytes"] += one["lookups"] * weights + updated * whole
            server["hbm_written_bytes"] += updated * whole
        elif part.lookup == "host":
            read = one["lookups"] * weights + updated * whole
            by_device[home]["dram_read_bytes"] += read
            by_device[home]["dram_written_bytes"] += updated * whole
            returned = one["vectors"] * 4 * (part.cols[1] - part.cols[0])
            if gpu is not None:
                server["link_in_bytes"] += returned
                server["link_out_bytes"] += returned
        else:
            left_lookups, left = one["in_place_lookups"], one["in_place_rows"]
            if part.lookup == "uva":
                left_lookups, left = one["lookups"], updated
            in_place = left_lookups * weights + left * whole
            copied, back = one["staged_rows"] * whole, one["written_back_rows"] * whole
            here = one["lookups"] - left_lookups, max(updated - left, 0)
            server["in_place_rows"] += left
            server["hbm_read_bytes"] += here[0] * weights + here[1] * whole + back
            server["hbm_written_bytes"] += here[1] * whole + copied
            server["link_in_bytes"] += copied + in_place
            server["link_out_bytes"] += back + left * whole
            by_device[home]["dram_read_bytes"] += copied + in_place
            by_device[home]["dram_written_bytes"] += back + left * whole
    _add_lookups(by_device, arrangement, counts)
    _add_exchange(by_device, arrangement, totals)
    _add_row_caches(by_device, arrangement, totals, cache_entries)
    devices = dict.fromkeys([*plan.topology.serving_numbers, *plan.topology.hosts_by_id])
    return tuple(DeviceTotals(device, **by_device[device]) for device in devices)


_COUNTS = (
    "lookups", "rows", "hit_lookups", "staged_rows", "in_place_lookups", "in_place_rows",
    "written_back_rows", "vectors", "update_rows",
)  # fmt: skip


def _lookups(arrangement: Arrangement, counts: PartCounts) -> tuple[Float, Float]:
    """Return lookups of each part, and those that HBM served, by its share of columns."""
    tables = arrangement.plan.tables
    shares = np.array(
        [(part.cols[1] - part.cols[0]) / tables[part.table].dim for part in arrangement.parts]
    )
    hbm = np.where(_is(arrangement, "device"), counts.lookups, counts.hit_lookups)
    return counts.lookups * shares, hbm * shares


def _add_lookups(
    by_device: Mapping[str, dict[str, int]], arrangement: Arrangement, counts: PartCounts
) -> None:
    lookups, hbm = _lookups(arrangement, counts)
    devices = np.array([part.device for part in arrangement.parts])
    for device in set(devices.tolist()):
        here = devices == device
        by_device[device]["lookups"] = round(lookups[here].sum())
        by_device[device]["hbm_lookups"] = round(hbm[here].sum())


def _is(arrangement: Arrangement, lookup: str) -> Bool:
    return np.array([part.lookup == lookup for part in arrangement.parts], dtype=bool)


def _devices_of(arrangement: Arrangement) -> list[str]:
    """Return the device that stands for each process: the first of its GPUs, or the server."""
    gpus, trainers = arrangement.plan.topology.gpus, arrangement.trainers
    first = [gpus[-(-process * len(gpus) // trainers)].id for process in range(trainers)]
    return [*first, *servers_of(arrangement.plan)[: arrangement.processes - trainers]]


def _add_exchange(
    by_device: Mapping[str, dict[str, int]], arrangement: Arrangement, totals: Totals
) -> None:
    every = sum(totals.sent.values(), np.zeros((arrangement.processes,) * 2, np.int64))
    kept = np.diag(every)
    for process, device in enumerate(_devices_of(arrangement)):
        by_device[device]["sent_bytes"] += int(every[process].sum() - kept[process])
        by_device[device]["received_bytes"] += int(every[:, process].sum() - kept[process])


def _add_row_caches(
    by_device: Mapping[str, dict[str, int]], arrangement: Arrangement, totals: Totals, entries: Int
) -> None:
    memory = device_memory(arrangement.plan)
    spare: dict[str, int] = defaultdict(int)
    for number, members in enumerate(arrangement.row_caches.values()):
        gpu = arrangement.parts[members[0]].device
        held = int(totals.most_held[number])
        entry_bytes = arrangement.parts[members[0]].row_bytes + ROW_CACHE_ENTRY_BYTES
        spare[gpu] += (int(entries[number]) - held) * entry_bytes
        by_device[gpu]["cache_entries"] += int(entries[number])
        by_device[gpu]["most_held"] += held
        by_device[gpu]["most_needed"] += int(totals.most_needed[number])
    for gpu_id in arrangement.plan.topology.gpus_by_id:
        by_device[gpu_id]["hbm_bytes"] = memory[gpu_id].total_bytes
        by_device[gpu_id]["most_hbm_bytes"] = memory[gpu_id].total_bytes - spare[gpu_id]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Counts and time of one step."""

    # See `placer.simulator.summary.Served`.
    lookups: int
    hbm_lookups: int
    slow_rows: int
    # HBM entries for copies of rows, all row caches together; see `StepCounts`.
    held: int
    needed: int
    # With copies beside the step before, and one after the other.
    step_s: float
    sum_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """Some consecutive steps."""

    name: str
    steps: int
    hbm_share: float  # Share of lookups whose row was in HBM; 1 without any.
    # Lookups a step whose row was not, and distinct rows a step that came from DRAM.
    slow_lookups: float
    slow_rows: float
    # Of the step times.
    mean_s: float
    p99_s: float

    @classmethod
    def of(cls, name: str, records: Sequence[StepRecord]) -> "Window":
        """Return the window of at least one step."""
        steps, lookups = len(records), sum(one.lookups for one in records)
        hbm = sum(one.hbm_lookups for one in records)
        seconds = np.array([one.step_s for one in records])
        return cls(
            name,
            steps,
            hbm / lookups if lookups else 1.0,
            (lookups - hbm) / steps,
            sum(one.slow_rows for one in records) / steps,
            float(seconds.mean()),
            float(np.quantile(seconds, 0.99)),
        )


@dataclass(frozen=True, slots=True)
class Drifted:
    """A window under a plan, beside its first window and under another plan."""

    window: Window
    first: Window
    other: Window | None = None  # The same steps under the other plan.
    migration_s: float | None = None  # What it takes to get from the one to the other.

    @property
    def lost_share(self) -> float:
        """Share of lookups that HBM served in the first window, minus this one's."""
        return self.first.hbm_share - self.window.hbm_share

    @property
    def break_even_steps(self) -> float | None:
        """Steps like these after which the migration has paid; None if it never does.

        0 where nothing moves.
        """
        if self.other is None or self.migration_s is None:
            return None
        if self.migration_s == 0:
            return 0.0
        saved = self.window.mean_s - self.other.mean_s
        return self.migration_s / saved if saved > 0 else None


def equal_windows(name: str, records: Sequence[StepRecord], windows: int) -> list[Window]:
    """Equal windows of a log's steps, the last ones a step longer where they do not divide.

    Raises DataError if there are fewer steps than windows.
    """
    if len(records) < windows:
        raise DataError(
            f"{name} has {len(records)} steps, which do not make {windows} windows; ask for "
            "fewer windows, or for a smaller batch"
        )
    ends = [len(records) * number // windows for number in range(windows + 1)]
    if windows == 1:
        return [Window.of(name, records)]
    return [
        Window.of(f"{name} {number + 1}/{windows}", records[ends[number] : ends[number + 1]])
        for number in range(windows)
    ]


def drifted(
    windows: Sequence[Window], others: Sequence[Window] | None, migration_s: float | None
) -> tuple[Drifted, ...]:
    """Return each window beside the first, and beside the other plan's where there is one."""
    return tuple(
        Drifted(window, windows[0], None if others is None else others[number], migration_s)
        for number, window in enumerate(windows)
    )
