"""Each Triton kernel against float64, in Triton's interpreter; and compiled for a GPU."""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from fast_and_full import combinations, fewer, mostly_slow
from torch import Tensor

from placer.errors import BackendError
from placer.executor import Policy
from placer.executor.backends import make_backend
from placer.executor.backends.torch_kernels import RowReads, SegmentTable
from placer.executor.backends.triton import triton_backend
from placer.executor.backends.triton.staging import Resolved
from placer.executor.backends.triton.triton_backend import TritonBackend
from placer.executor.lookups.steps import CHUNK, Ticket
from placer.executor.memory.arena import TieredRows
from placer.executor.memory.layout import SlotRange
from placer.executor.memory.row_cache import Moves, RowCache
from placer.executor.optimizers import Rule, stochastic_round
from placer.tables import OptimizerName

CPU = torch.device("cpu")
LR, EPS = 0.1, 1e-6
LONG = 3 * CHUNK + 5


@pytest.fixture(scope="module")
def kernels() -> TritonBackend:
    return TritonBackend(CPU)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def split(matrix: Tensor, home: int) -> TieredRows:
    """A matrix in two memories; places are its rows."""
    return TieredRows(matrix[:home].clone(), matrix[home:].clone(), home)


def joined(rows: TieredRows) -> Tensor:
    return torch.cat([rows.hbm, rows.dram])


def reads_of(
    slots: Tensor, gradients: Tensor, sources: Tensor, scales: Tensor | None = None
) -> RowReads:
    """What an update gets for a step's lookups, where a row's place is its slot."""
    runs = TritonBackend(CPU).find_runs(slots)
    # Beyond the number of runs the places mean nothing; here they would be found out.
    places = torch.full_like(slots, 10**6)
    places[: int(runs.count)] = slots.sort().values[runs.starts[: int(runs.count)]]
    ordered = None if scales is None else scales[runs.order]
    return RowReads(runs, places, sources[runs.order], ordered, gradients)


def row_gradients(reads: RowReads, rows: int) -> tuple[Tensor, Tensor]:
    """Summed gradient of each row in float64, and which rows have one."""
    lookups = reads.gradients.double()[reads.sources.long()]
    if reads.scales is not None:
        lookups *= reads.scales.double()[:, None]
    count = int(reads.runs.count)
    lengths = reads.runs.starts[: count + 1].diff()
    slots = reads.places[:count].repeat_interleave(lengths).long()
    sums = torch.zeros(rows + 1, lookups.shape[1], dtype=torch.float64)
    sums.index_add_(0, slots + 1, lookups)  # Slot −1 is nobody's.
    touched = torch.zeros(rows + 1, dtype=torch.bool)
    touched[slots + 1] = True
    return sums[1:], touched[1:]


def rule_of(optimizer: OptimizerName, updates: int = 3, stochastic: bool = False) -> Rule:
    return Rule(optimizer, torch.tensor(LR), EPS, torch.tensor(updates), stochastic=stochastic)


def state_shape(optimizer: OptimizerName, width: int) -> tuple[int, ...]:
    shapes = {"adagrad": (width,), "rowwise_adagrad": (), "adam": (2 * width,)}
    return shapes[optimizer]


class TestTranslate:
    @pytest.mark.parametrize("kind", [torch.int32, torch.int64])
    def test_slots_follow_ids_or_a_map(
        self, kernels: TritonBackend, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triton_backend, "BLOCK", 16)
        # 40 lookups of a table of 9 rows, the first 4 from slot 100 on, the others from slot 204;
        # 0 of another; 3 with a map.
        ids = torch.cat([torch.arange(2), torch.arange(40) % 9, torch.tensor([2, 0, 1])]).to(kind)
        slot_map = torch.tensor([7, 7, 5, 3, 4], dtype=kind)
        rows = [
            [2, 3, 40, 9, 100, 4, 200, -1],
            [42, 43, 0, 1, 0, 1, 0, -1],
            [42, 0, 3, 3, 0, 3, 0, 2],
        ]
        out, fault = torch.full((43,), -7, dtype=kind), torch.full((1,), 10**9)
        kernels.translate(ids, SegmentTable(torch.tensor(rows), 40), slot_map, out, fault)
        assert out.tolist() == [4, 5, 3, *((100 if i % 9 < 4 else 200) + i % 9 for i in range(40))]
        assert fault.item() == 10**9

    def test_the_first_bad_id_is_found(self, kernels: TritonBackend) -> None:
        ids = torch.tensor([0, 1, 5, -1, 2])
        out, fault = torch.empty(5, dtype=torch.int64), torch.full((1,), 10**9)
        rows = torch.tensor([[3, 0, 2, 3, 0, 3, 0, -1], [0, 2, 3, 5, 10, 5, 10, -1]])
        kernels.translate(ids, SegmentTable(rows, 3), out[:0], out, fault)
        assert out.tolist() == [-1, 2, 10, 11, -1]
        assert fault.item() == 2


class TestPool:
    @combinations(
        "weighted, dtype, width",
        [False, True],
        [torch.float32, torch.float16, torch.bfloat16],
        [1, 3, 16, 100, 300],
    )
    def test_sums_of_bags(
        self,
        kernels: TritonBackend,
        random: torch.Generator,
        width: int,
        dtype: torch.dtype,
        weighted: bool,
    ) -> None:
        table = torch.randn(30, width, generator=random).to(dtype)
        lengths = torch.tensor([0, 1, 2, 0, 9, 3, 0])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        places = torch.randint(-1, 30, (15,), generator=random, dtype=torch.int32)
        weights = torch.randn(15, generator=random) if weighted else None
        out = torch.full((7, width), 9.0)
        kernels.pool(split(table, 11), places, offsets, weights, out)
        read = table.double()[places.clamp(min=0).long()] * (places >= 0)[:, None]
        read *= 1 if weights is None else weights.double()[:, None]
        expected = torch.zeros(7, width, dtype=torch.float64)
        expected.index_add_(0, torch.arange(7).repeat_interleave(lengths), read)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("width", [5, 300])
    def test_gradients_of_weights(
        self, kernels: TritonBackend, random: torch.Generator, width: int
    ) -> None:
        table = torch.randn(30, width, generator=random)
        places = torch.randint(-1, 30, (40,), generator=random)
        bags = torch.randint(0, 6, (40,), generator=random, dtype=torch.int32)
        gradients, out = torch.randn(6, width, generator=random), torch.full((40,), 9.0)
        kernels.dot_rows(split(table, 11), places, bags, gradients, out)
        rows = table.double()[places.clamp(min=0)] * (places >= 0)[:, None]
        expected = (rows * gradients.double()[bags.long()]).sum(1)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    def test_nothing_to_do(self, kernels: TritonBackend) -> None:
        rows, none = split(torch.randn(4, 3), 2), torch.empty(0, dtype=torch.int64)
        nothing, fault = torch.empty(0, 3), torch.full((1,), 8)
        kernels.pool(rows, none, torch.zeros(1, dtype=torch.int64), None, nothing)
        kernels.dot_rows(rows, none, none, nothing, torch.empty(0))
        segments = SegmentTable(torch.tensor([[0, 0, 0, 4, 0, 4, 0, -1]]), 0)
        kernels.translate(none, segments, none, none, fault)
        before = joined(rows)
        reads = reads_of(none, nothing, none)
        kernels.squares(reads, torch.empty(0))
        kernels.update_rows(rows, None, reads, rule_of("sgd"))
        kernels.exchange([rows], Moves(none.int(), none, none, torch.zeros(1, dtype=torch.int32)))
        assert fault.item() == 8
        assert torch.equal(joined(rows), before)


def uneven_slots(random: torch.Generator) -> Tensor:
    """Runs around every limit, long ones side by side, a few of nobody's, in no order."""
    lengths = [CHUNK - 1, CHUNK, CHUNK + 1, 1, 3 * CHUNK + 7, 2 * CHUNK, 2 * CHUNK + 1, 9 * CHUNK]
    lengths = lengths[: fewer(8, 5)]
    slots = torch.arange(4, 4 + len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = torch.cat([slots, torch.randint(-1, 40, (60,), generator=random)])
    return slots[torch.randperm(slots.numel(), generator=random)]


class TestUpdate:
    @combinations("width, optimizer", [1, 6], ["sgd", "adagrad", "rowwise_adagrad", "adam"])
    def test_against_float64(
        self,
        kernels: TritonBackend,
        random: torch.Generator,
        optimizer: OptimizerName,
        width: int,
    ) -> None:
        slots = uneven_slots(random).to(torch.int32 if width == 1 else torch.int64)
        gradients = torch.randn(50, width, generator=random)
        sources = torch.randint(0, 50, slots.shape, generator=random).to(slots.dtype)
        scales = torch.rand(slots.shape, generator=random) if width == 6 else None
        reads = reads_of(slots, gradients, sources, scales)
        weights = torch.randn(40, width, generator=random)
        rows, state, tiers = split(weights, 8), torch.empty(0), None
        if optimizer != "sgd":
            state = torch.rand(40, *state_shape(optimizer, width), generator=random)
            tiers = split(state, 8)
        kernels.update_rows(rows, tiers, reads, rule_of(optimizer))

        gradient, touched = row_gradients(reads, 40)
        step, new_state = expected_step(optimizer, gradient, state.double())
        expected = torch.where(touched[:, None], weights.double() - step, weights.double())
        torch.testing.assert_close(joined(rows).double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(joined(rows)[~touched], weights[~touched])
        if tiers is not None:
            got = joined(tiers)
            torch.testing.assert_close(
                got.double()[touched], new_state[touched], rtol=1e-4, atol=1e-4
            )
            assert torch.equal(got[~touched], state[~touched])

    @pytest.mark.parametrize(
        ("before", "lookups"),
        mostly_slow(
            [
                *product([0, CHUNK - 1], [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, LONG]),
                (1, CHUNK + 1),
            ],
            (CHUNK - 1, 1),
            (1, CHUNK + 1),
            (0, LONG),
        ),
    )
    def test_a_run_sums_alike_wherever_it_lies(
        self, kernels: TritonBackend, random: torch.Generator, lookups: int, before: int
    ) -> None:
        gradients = torch.randn(lookups + before, 4, generator=random)
        alone = split(torch.zeros(3, 4), 3)
        later = split(torch.zeros(3, 4), 0)
        sources = torch.arange(before, before + lookups)
        reads = reads_of(torch.full((lookups,), 2), gradients, sources)
        kernels.update_rows(alone, None, reads, rule_of("sgd"))
        slots = torch.cat([torch.zeros(before, dtype=torch.int64), torch.full((lookups,), 2)])
        reads = reads_of(slots, gradients, torch.arange(before + lookups))
        kernels.update_rows(later, None, reads, rule_of("sgd"))
        assert torch.equal(alone.hbm[2], later.dram[2])
        expected = -LR * gradients.double()[before:].sum(0)
        torch.testing.assert_close(alone.hbm[2].double(), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("column_slices", [(3, 4), (7,)])
    def test_the_mean_over_several_column_slices(
        self, kernels: TritonBackend, random: torch.Generator, column_slices: Sequence[int]
    ) -> None:
        slots = uneven_slots(random)
        gradients = torch.randn(50, 7, generator=random)
        sources = torch.randint(0, 50, slots.shape, generator=random)
        parts = [part.contiguous() for part in gradients.split(list(column_slices), 1)]
        reads = [reads_of(slots, part, sources) for part in parts]
        squares = torch.zeros(slots.numel())
        for part in reads:
            own = torch.full((slots.numel(),), torch.nan)
            kernels.squares(part, own)
            squares += own
        tiers = [split(torch.zeros(40, width), 20) for width in column_slices]
        for rows, part in zip(tiers, reads, strict=True):
            state = split(torch.zeros(40), 20)
            kernels.update_rows(rows, state, part, rule_of("rowwise_adagrad"), squares / 7)
        gradient, _ = row_gradients(reads_of(slots, gradients, sources), 40)
        expected, _ = expected_step(
            "rowwise_adagrad", gradient, torch.zeros(40, dtype=torch.float64)
        )
        got = torch.cat([joined(rows) for rows in tiers], 1).double()
        torch.testing.assert_close(got, -expected, rtol=1e-4, atol=1e-5)

    def test_rows_of_nobody_have_no_square(self, kernels: TritonBackend) -> None:
        """What is added up over ranks and column slices must be a number."""
        slots = torch.cat([torch.full((CHUNK + 2,), -1), torch.tensor([3, 3, 1])])
        reads = reads_of(slots, torch.ones(1, 2), torch.zeros_like(slots))
        out = torch.full((slots.numel(),), torch.nan)
        kernels.squares(reads, out)
        assert out[: int(reads.runs.count)].tolist() == [0.0, 2.0, 8.0]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_stochastic_rounding_is_that_of_the_executor(
        self, kernels: TritonBackend, random: torch.Generator, dtype: torch.dtype
    ) -> None:
        weights = torch.randn(12, 5, generator=random) * torch.logspace(-9, 3, 12)[:, None]
        weights = weights.to(dtype)
        weights[0] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
        gradients = torch.randn(12, 5, generator=random) * weights.float().abs() / 50
        gradients[0] = 0
        gradients += 0.0  # A sum that starts at 0 is never −0.
        rows, slots = split(weights, 6), torch.arange(12)
        reads = reads_of(slots, gradients, slots)
        for updates in (1, 2):
            before = joined(rows).float()
            rule = rule_of("sgd", updates, stochastic=True)
            kernels.update_rows(rows, None, reads, rule)
            expected = stochastic_round(before - gradients * rule.lr, dtype, rule.updates)
            got = joined(rows)
            assert torch.equal(got.view(torch.int16)[1:], expected.view(torch.int16)[1:])
            torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, equal_nan=True)

    @pytest.mark.slow
    def test_any_size_of_tile_gives_the_same_sums(
        self, kernels: TritonBackend, random: torch.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slots = uneven_slots(random)
        gradients = torch.randn(50, 12, generator=random)
        sources = torch.randint(0, 50, slots.shape, generator=random)
        reads = reads_of(slots, gradients, sources)
        gradient, _ = row_gradients(reads, 40)
        small = {"UPDATE_ELEMENTS": 16, "CHUNK_UNROLL": 1, "SUM_ELEMENTS": 32, "SCAN": 2, "ROWS": 4}
        wide = {"UPDATE_ELEMENTS": 4096, "UPDATE_UNROLL": 8, "SUM_ELEMENTS": 64, "SCAN": 64}
        for sizes in (small, {**wide, "ROWS": 32, "CHUNK_UNROLL": 4}):
            for name, size in sizes.items():
                monkeypatch.setattr(triton_backend, name, size)
            rows = split(torch.zeros(40, 12), 20)
            kernels.update_rows(rows, None, reads, rule_of("sgd"))
            torch.testing.assert_close(joined(rows).double(), -LR * gradient, rtol=1e-4, atol=1e-5)


def expected_step(
    optimizer: OptimizerName, gradient: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What is subtracted from the weights, and the state afterwards, in float64."""
    if optimizer == "sgd":
        return LR * gradient, state
    if optimizer == "adam":
        width = gradient.shape[1]
        first = 0.9 * state[:, :width] + 0.1 * gradient
        second = 0.999 * state[:, width:] + 0.001 * gradient**2
        rate = LR * (1 - 0.999**3) ** 0.5 / (1 - 0.9**3)
        return rate * first / (second.sqrt() + EPS), torch.cat([first, second], 1)
    row_wise = optimizer == "rowwise_adagrad"
    state = state + ((gradient**2).mean(1) if row_wise else gradient**2)
    scale = state.sqrt() + EPS
    return LR * gradient / (scale[:, None] if row_wise else scale), state


class TestExchange:
    @pytest.mark.parametrize("width", [1, 3, 8, 5000])
    def test_rows_leave_and_enter(
        self,
        kernels: TritonBackend,
        random: torch.Generator,
        width: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(triton_backend, "EXCHANGE_BYTES", 64)
        home, pool, cold = 3, 6, 9
        weights = TieredRows(
            torch.randn(home + pool, width, generator=random).half(),
            torch.randn(cold, width, generator=random).half(),
            home,
        )
        state = replace(weights, hbm=weights.hbm[:, 0].float(), dram=weights.dram[:, 0].float())
        before = [rows.hbm.clone() for rows in (weights, state)]
        cold_before = [rows.dram.clone() for rows in (weights, state)]
        moves = Moves(
            torch.tensor([4, 0, 2, -1, -1], dtype=torch.int32),
            torch.tensor([5, 11, 8, -1, -1]),
            torch.tensor([7, -1, 10, -1, -1]),
            torch.tensor([3], dtype=torch.int32),
        )
        kernels.exchange([weights, state], moves)
        for rows, hbm, dram in zip((weights, state), before, cold_before, strict=True):
            pool_rows = hbm[home:].clone()
            hbm[home + torch.tensor([4, 0, 2])] = dram[torch.tensor([5, 11, 8]) - home]
            dram[torch.tensor([7, 10]) - home] = pool_rows[torch.tensor([4, 2])]
            assert torch.equal(rows.hbm, hbm)
            assert torch.equal(rows.dram, dram)


@pytest.mark.parametrize("policy", ["lfu", "rank"])
def test_rows_enter_and_leave_as_in_the_row_cache(random: torch.Generator, policy: Policy) -> None:
    """Also: of two open steps, in the order of age and of priority."""
    parts = [SlotRange(10, 60, 12, 0), SlotRange(60, 90, 0, 4)]
    cache, expected = (RowCache(parts, 10, CPU, policy) for _ in range(2))
    kernels, tickets = TritonBackend(CPU, policy), deque[Ticket](maxlen=2)
    for number in range(20):
        tickets.append(kernels.window.open())
        slots = torch.randperm(80, generator=random)[: 2 + number % 6].sort().values.int() + 10
        counts = torch.randint(1, 9, slots.shape, generator=random).int()
        most, first = slots.numel(), torch.tensor(0).int()
        resolved = Resolved(slots, first, first + most, most)
        found = kernels._resolve(cache, 10, resolved, slots, counts, [], number)
        wanted = expected.resolve(slots, counts, number, kernels.window.oldest)
        assert torch.equal(found[0], wanted[0])
        assert found[1].count.dtype == wanted[1].count.dtype
        for name in ("entries", "incoming", "outgoing"):
            moved = getattr(found[1], name)[: int(wanted[1].count)]
            assert torch.equal(moved, getattr(wanted[1], name)), name
        for each, (entries, _) in ((cache, found), (expected, wanted)):
            each.mark_dirty(entries[number % 2 :: 2])
        for name in ("slots", "last_used", "priority", "dirty", "sorted_slots"):
            held = (getattr(each.directory, name)[: cache.entries] for each in (cache, expected))
            assert torch.equal(*held), name
    assert cache.stats() == expected.stats()


class TestWithoutAGpu:
    def test_triton_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "triton", None)
        with pytest.raises(BackendError, match=r"pip install 'embedding-placer\[gpu\]'"):
            make_backend("triton", CPU)

    @pytest.mark.slow
    def test_kernels_compile_for_hopper(self, tmp_path: Path) -> None:
        """Down to machine code: registers suffice, and rows are read 16 bytes at once."""
        triton = pytest.importorskip("triton")
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        if not (tools / "ptxas").exists():
            pytest.skip("this Triton carries no assembler for NVIDIA's GPUs")
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
        del environment["TRITON_INTERPRET"]
        script = Path(__file__).with_name("compile_for_hopper.py")
        command = [sys.executable, "-W", "ignore", str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "set TRITON_INTERPRET=1" in done.stderr, "on a CPU it needs the interpreter"
        reports = json.loads(done.stdout)
        assert {report["kernel"] for report in reports} == {
            "translate",
            "pool",
            "weight_gradients",
            "update_runs",
            "sum_chunks",
            "update_long_runs",
            "exchange",
            "place_runs",
            "read_rows",
            "find_rows",
            "bar_rows",
            "admit_rows",
            "find_edges",
            "order_entries",
            "leaving_slots",
            "fill_entries",
            "move_to_entries",
            "place_lookups",
            "mark_runs",
            "start_runs",
            "find_long_runs",
            "find",
            "readers",
            "note_reads",
        }
        of_rows = {"pool", "weight_gradients", "update_runs", "sum_chunks"}
        hot = [report for report in reports if report["kernel"] in of_rows]
        assert {(report["LDG"], report["spills"]) for report in hot} == {(128, 0)}
