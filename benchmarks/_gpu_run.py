"""Everything that `gpu.py` times, in order of importance, within its time."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from _gpu_check import KINDS, Equivalence, Kind, check_kinds
from _gpu_contenders import (
    EmbeddingBags,
    HostMemory,
    PlacedSteps,
    TrainingSteps,
    on_host,
    placed,
)
from _gpu_measure import (
    TIMED_STEPS,
    WARM_UP_STEPS,
    Copies,
    Timing,
    host_waits,
    time_steps,
    why,
)
from _gpu_model import SKEWS, Batches, Model, Skew, dcnv2, draw, gradients, make_plan, shrunk
from torch import Tensor

from placer.plan.fields import Lookup
from placer.plan.memory import device_memory

HBM_SHARES = (1.0, 0.1, 0.015, 0.0, 0.25)
"""Shares of the rows."""

WITH_TARGET = HBM_SHARES[:3]
"""Those that are timed first."""

BAGS_IN_HBM = "nn.EmbeddingBag + Adagrad"

LONG_WARM_UP_STEPS = 20
"""More steps before the clock: entries of row caches take many to settle, and so does the host's
pace with small batches."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large all is: `scale` is the share of the rows of the large tables.

    One contender's timed steps take `limit_s`, one model in all may take `job_s`, for what still
    fits the time limit. `tiny` are shapes for Triton's interpreter.
    """

    scale: float
    batch_sizes: tuple[int, ...] = (65_536, 8_192)
    limit_s: float = 1.5
    job_s: float = 8.0
    tiny: bool = False

    def model(self, skew: Skew) -> Model:
        """The tables."""
        model = dcnv2(skew, self.scale)
        return shrunk(model, 64, 2, 4, tables=3) if self.tiny else model

    def checked_model(self) -> Model:
        """A smaller one, to compare with the unplaced model on the CPU."""
        if self.tiny:
            return self.model("zipf-1.05")
        return shrunk(dcnv2("zipf-1.05", self.scale), 3_000, 20, 128, tables=26)

    @property
    def batches(self) -> int:
        """Distinct batches: as many as steps follow one another."""
        return 4 if self.tiny else WARM_UP_STEPS + LONG_WARM_UP_STEPS + TIMED_STEPS + 1

    def warm_up(self, lookup: Lookup) -> int:
        """Steps before the clock."""
        if self.tiny:
            return 0  # Nothing is compiled in the interpreter.
        return WARM_UP_STEPS + (0 if lookup in ("uva", "host") else LONG_WARM_UP_STEPS)


@dataclass(slots=True)
class Record:
    """One row of the table; what does not apply is None."""

    batch_size: int
    skew: str
    hbm_row_share: float  # Rows that live, or are cached, in HBM.
    contender: str
    step_s: float | None = None  # Mean; None where it was not timed, and `note` says why.
    seconds: tuple[float, ...] = ()
    samples_per_s: float | None = None
    # Samples per second × the bytes of DESIGN.md section 5, over the bytes per second of the copy
    # within HBM. Rows that several lookups read come from caches: it may pass 1.
    roofline_share: float | None = None
    moved_bytes_per_s: float | None = None  # Those bytes per second.
    distinct_rows: float | None = None
    # Distinct rows of a batch that are not among the rows in HBM, with their state: what has to
    # cross the link each way; and the time that a copy of so many takes over the step's.
    link_bytes: float | None = None
    link_share: float | None = None
    # Shares: of lookups whose row was in HBM before the step asked, and of those whose row lives
    # there for good; of lookups of staged or cached rows, those that were there from earlier steps,
    # and of distinct ones, those that found no room.
    hbm_hit_rate: float | None = None
    split_hit_rate: float | None = None
    pool_hit_rate: float | None = None
    in_place_share: float | None = None
    staging_rows: int | None = None
    host_waits: str = ""
    # HBM beside batches and their gradients, and what the plan says.
    hbm_peak_bytes: int | None = None
    hbm_plan_bytes: int | None = None
    failed: bool = False
    note: str = ""


@dataclass(slots=True)
class Bench:
    """State of a run, whose deadline is by `time.perf_counter`.

    `seen` gets every record as soon as it is there. `took_s` is what the longest model took in all,
    by lookup kind and batch size.
    """

    device: torch.device
    sizes: Sizes
    copies: Copies
    memory: HostMemory
    deadline_s: float
    seen: Callable[[Record], None]
    records: list[Record] = field(default_factory=list)
    equivalence: dict[str, Equivalence] = field(default_factory=dict)
    took_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def run(self) -> None:
        """Check, then time everything; what no longer fits the time is left out and says so."""
        self.equivalence = check_kinds(
            self.sizes.checked_model(), 8 if self.sizes.tiny else 256, self.device
        )
        self._free()
        # Modules stay: to look through them after each model takes a quarter of a second.
        gc.freeze()
        try:
            self._run()
        finally:
            gc.unfreeze()

    def _run(self) -> None:
        for is_rest in (False, True):
            for index, batch_size in enumerate(self.sizes.batch_sizes):
                for skew in SKEWS:
                    group = _Group(self, self.sizes.model(skew), batch_size, self.sizes.batches)
                    group.run(is_rest)
                    if not index and not is_rest:
                        group.run_training()
        # The slowest come last, the small batch first.
        for batch_size in sorted(self.sizes.batch_sizes):
            for skew in SKEWS:
                _Group(self, self.sizes.model(skew), batch_size, 4).run_slow()

    def add(self, record: Record) -> None:
        """Keep a record and tell of it."""
        self.records.append(record)
        self.seen(record)

    def fits(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return time.perf_counter() + seconds < self.deadline_s

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def free(self) -> int:
        """Give freed memory back, and start to look for the peak; bytes in use now."""
        self._free()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


class _Group:
    """All that is timed with one batch size and skew, over the same batches."""

    def __init__(self, bench: Bench, model: Model, batch_size: int, batches: int) -> None:
        self._bench, self._model, self._size = bench, model, batch_size
        self._number = batches
        self._drawn: tuple[Batches, list[Tensor]] | None = None

    def run(self, is_rest: bool) -> None:
        """The placed model in all kinds but one: those with a target, or the rest.

        `nn.EmbeddingBag` on the GPU is of the rest.
        """
        for share in HBM_SHARES:
            lookups: tuple[Lookup, ...] = ("staged", "cached", "uva")
            if share == 1:
                lookups = ("device",)
            elif not share:
                lookups = ("staged", "uva")  # A cache without a row is no cache.
            for lookup in lookups:
                has_target = share in WITH_TARGET and lookup in ("device", "staged")
                if has_target != is_rest:
                    self._placed(lookup, share)
        if is_rest:
            self._bags()

    def run_training(self) -> None:
        """Whole steps, dense layers included, with batches that a loader leaves on the host."""
        for share in WITH_TARGET:
            kind = "device" if share == 1 else "staged"
            record = self._record(share, f"training, {kind} + look-ahead")
            if self._skip(self._bench.sizes.job_s, record):
                continue
            try:
                drawn, _ = self._batches()
                plan = make_plan(self._model, kind, share, self._size)
                before = self._bench.free()
                model = placed(plan, self._bench.memory, self._bench.device)
                steps = TrainingSteps(model, on_host(drawn.batches))
                limit_s, warm_up = self._bench.sizes.limit_s, self._bench.sizes.warm_up("staged")
                timing = time_steps(steps, self._bench.device, limit_s, warm_up)
                record.seconds, record.step_s = timing.seconds, timing.mean_s
                record.samples_per_s = self._size / timing.mean_s
                if self._bench.device.type == "cuda":
                    record.hbm_peak_bytes = torch.cuda.max_memory_allocated() - before
            except Exception as error:  # Whatever breaks one model, the next is another.
                record = self._failed(record, why(error))
            self._bench.add(record)

    def run_slow(self) -> None:
        """Where the CPU pools, which may take seconds a step."""
        for share in HBM_SHARES:
            if share < 1:
                self._placed("host", share)

    def _batches(self) -> tuple[Batches, list[Tensor]]:
        """Drawn when first asked for: what is left out needs none."""
        if self._drawn is None:
            device = self._bench.device
            self._drawn = (
                draw(self._model, self._size, self._number, device, seed=1),
                gradients(self._model, self._size, device),
            )
        return self._drawn

    def _record(self, share: float, contender: str) -> Record:
        return Record(self._size, self._model.skew, share, contender)

    def _skip(self, seconds: float, *records: Record) -> bool:
        """Whether there is no time for them, which the table then says."""
        if self._bench.fits(seconds):
            return False
        for record in records:
            record.note = f"left out: no time for some {seconds:.0f} s"
            self._bench.add(record)
        return True

    def _placed(self, lookup: Lookup, share: float) -> None:
        """One model of the placed kind: with and without look-ahead where that matters."""
        bench = self._bench
        kinds = [kind for kind in KINDS if kind.lookup == lookup]
        records = {kind.name: self._record(share, kind.name) for kind in kinds}
        for kind in list(kinds):
            outcome = bench.equivalence[kind.name]
            if not outcome.equal:
                text = outcome.error or f"weights differ by {outcome.largest_difference}"
                bench.add(self._failed(records.pop(kind.name), f"not timed: {text}"))
                kinds.remove(kind)
        if not kinds:
            for record in records.values():
                bench.add(self._failed(record, "not timed: its kind failed"))
            return
        longest_s = bench.took_s.get((lookup, self._size), 0.0)
        if self._skip(max(bench.sizes.job_s, longest_s), *records.values()):
            return
        start = time.perf_counter()
        try:
            self._time_placed(lookup, share, kinds, records)
        except Exception as error:  # Whatever breaks one model, the next is another.
            told = {id(record) for record in bench.records}
            for record in records.values():
                if id(record) not in told:
                    bench.add(self._failed(record, why(error)))
        bench.took_s[lookup, self._size] = max(longest_s, time.perf_counter() - start)

    def _time_placed(
        self, lookup: Lookup, share: float, kinds: Sequence[Kind], records: dict[str, Record]
    ) -> None:
        bench, (drawn, grads) = self._bench, self._batches()
        plan = make_plan(self._model, lookup, share, self._size)
        before = bench.free()
        model = placed(plan, bench.memory, bench.device)
        for kind in kinds:
            record = records[kind.name]
            steps = PlacedSteps(model, drawn.batches, grads, kind.ahead)
            limit_s, warm_up = bench.sizes.limit_s, bench.sizes.warm_up(lookup)
            timing = time_steps(steps, bench.device, limit_s, warm_up, model.reset_hit_rates)
            self._timed(record, timing, before)
            planned = make_plan(self._model, lookup, share, self._size, kind.pipeline)
            record.hbm_plan_bytes = device_memory(planned)["gpu:0"].total_bytes
            record.staging_rows = sum(shard.staging_rows for shard in plan.shards)
            record.distinct_rows = drawn.distinct_rows()
            if share < 1:
                cold = drawn.distinct_rows(self._model.hottest(share))
                record.link_bytes = cold * self._model.row_bytes
                bound_s = record.link_bytes / bench.copies.both_bytes_per_s
                record.link_share = bound_s / timing.mean_s
            rates = model.hit_rates()
            if rates is not None:
                record.hbm_hit_rate = rates.hbm_hit_rate
                record.split_hit_rate = rates.home_lookups / rates.lookups
                record.pool_hit_rate = rates.row_cache.hit_rate
                record.in_place_share = rates.row_cache.in_place_share
            record.host_waits = host_waits(steps, bench.device)
            bench.add(record)

    def _bags(self) -> None:
        bench, record = self._bench, self._record(1.0, BAGS_IN_HBM)
        if self._skip(bench.sizes.job_s, record):
            return
        try:
            drawn = self._batches()
            before = bench.free()
            step = EmbeddingBags(self._model, *drawn)
            self._timed(record, time_steps(step, bench.device, bench.sizes.limit_s), before)
        except Exception as error:  # A rival that cannot run here is a row that says so.
            record.note = f"not timed: {why(error)}"
        bench.add(record)

    def _timed(self, record: Record, timing: Timing, before: int) -> None:
        """Note the times, and the peak of HBM since `before`."""
        if self._bench.device.type == "cuda":
            record.hbm_peak_bytes = torch.cuda.max_memory_allocated() - before
        record.seconds = timing.seconds
        record.step_s = timing.mean_s
        record.samples_per_s = self._size / timing.mean_s
        record.moved_bytes_per_s = record.samples_per_s * self._model.roofline_bytes
        record.roofline_share = record.moved_bytes_per_s / self._bench.copies.hbm_bytes_per_s

    def _failed(self, record: Record, note: str) -> Record:
        record.failed, record.note = True, note
        return record
