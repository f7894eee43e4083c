"""Cost models: what every one of them promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import in_hbm
from problem_cases import (
    plan_for,
    problem_of,
    problems,
    table_profiles,
    unequal_machine,
    whole,
    zipf_table,
)

from cost_models import COST_MODELS, CostModel, CostReport, Roofline, cost_model
from placer import Problem, Shard, TableProfile
from placer.errors import PlacerError, PlanMismatchError
from placer.plan.buffers import staging_buffer_bytes
from placer.plan.memory import ROW_MAP_BYTES_PER_ROW
from placer.plan.plan import Lookup
from placer.plan.verify import violations
from solvers._build import build_plan
from solvers._instance import Instance, Piece, Placement

LOOKUPS: tuple[Lookup, ...] = ("device", "uva", "staged", "cached", "host")


def gpu_seconds(report: CostReport, gpu: int = 0) -> float:
    return report.gpus[gpu].total_s


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, list[Placement]]:
    """A problem, and pieces of one cut of each of its tables on GPUs of their own."""
    problem = draw(problems())
    instance = Instance(problem, Roofline())
    placements = []
    for table in range(instance.tables):
        cut = draw(st.sampled_from(instance.cuts_of(table)))
        gpus = draw(st.permutations(range(instance.gpus)))
        for piece, gpu in zip(instance.pieces(table, cut), gpus, strict=False):
            rows = len(range(piece.offset, problem.profile.tables[table].table.rows, cut.ways))
            placements.append(Placement(piece, gpu, draw(st.integers(0, rows))))
    return problem, placements


class CostModelContract:
    """What solvers and reports take for granted. A model's test class says which it is."""

    name: str

    @property
    def model(self) -> CostModel:
        return cost_model(self.name)

    def test_it_is_a_cost_model_by_its_name(self) -> None:
        assert isinstance(self.model, CostModel)
        assert self.model.name == self.name

    @given(placed())
    @settings(max_examples=80, deadline=None)
    def test_pieces_add_up_to_the_plan(self, case: tuple[Problem, list[Placement]]) -> None:
        problem, placements = case
        instance = Instance(problem, self.model)
        plan = build_plan(instance, placements)
        assert violations(plan) == []
        report = self.model.evaluate(problem, plan)
        topology = problem.topology
        gpu_s = dict.fromkeys((gpu.id for gpu in topology.gpus), 0.0)
        dram_s = dict.fromkeys((host.id for host in topology.hosts), 0.0)
        hbm_bytes, dram_bytes = dict(gpu_s), dict(dram_s)
        for placement in placements:
            gpu = topology.gpus[placement.gpu]
            curve = instance.curve(placement.piece, placement.gpu)
            hot = placement.hot_rows

            def at(values: np.ndarray) -> float:
                return float(np.interp(hot, curve.hot_rows, values))  # noqa: B023

            split = 0 < hot < curve.hot_rows[-1]
            gpu_s[gpu.id] += at(curve.gpu_s) + (curve.split_s if split else 0.0)
            dram_s[gpu.host] += at(curve.dram_s)
            hbm_bytes[gpu.id] += at(curve.hbm_bytes) + (curve.split_hbm_bytes if split else 0.0)
            dram_bytes[gpu.host] += at(curve.dram_bytes)
        for cost in report.gpus:
            assert cost.total_s == pytest.approx(gpu_s[cost.device], rel=1e-9, abs=1e-18)
        for host in report.hosts:
            assert host.dram_s == pytest.approx(dram_s[host.device], rel=1e-9, abs=1e-18)
            assert report.memory[host.device].total_bytes == round(dram_bytes[host.device])
        for gpu in topology.gpus:
            # Between its points a curve may understate staging buffers, and the row map of a
            # strip is not its own where another strip of the table is split.
            used = report.memory[gpu.id]
            spare = sum(
                float(staging_buffer_bytes(p.table, p.table.rows, p.table.dim))
                for p in problem.profile
            )
            maps = sum(ROW_MAP_BYTES_PER_ROW * p.table.rows for p in problem.profile)
            assert used.total_bytes >= hbm_bytes[gpu.id] - 1e-3
            assert used.total_bytes <= hbm_bytes[gpu.id] + spare + maps + len(plan.shards)

    @given(placed())
    @settings(max_examples=40, deadline=None)
    def test_memory_is_that_of_the_curve_at_its_points(
        self, case: tuple[Problem, list[Placement]]
    ) -> None:
        problem, placements = case
        instance = Instance(problem, self.model)
        for placement in placements:
            if placement.piece.cut.pieces > 1:
                continue
            curve = instance.curve(placement.piece, placement.gpu)
            for point, hot in enumerate(curve.hot_rows):
                plan = build_plan(instance, [replace(placement, hot_rows=int(hot))])
                used = self.model.evaluate(problem, plan).memory
                split = curve.split_hbm_bytes if 0 < hot < curve.hot_rows[-1] else 0.0
                gpu = problem.topology.gpus[placement.gpu]
                expected = curve.hbm_bytes[point] + split
                # Buffers of the hot and of the cold shard are rounded up to bytes, each by itself.
                assert expected - 1e-3 <= used[gpu.id].total_bytes <= expected + 2
                assert used[gpu.host].total_bytes == round(curve.dram_bytes[point])

    @given(problems(), st.data())
    @settings(max_examples=60, deadline=None)
    def test_curves_are_convex_and_fall(self, problem: Problem, data: st.DataObject) -> None:
        instance = Instance(problem, self.model)
        table = data.draw(st.integers(0, instance.tables - 1))
        for cut in instance.cuts_of(table):
            for piece in instance.pieces(table, cut):
                curve = instance.curve(piece, data.draw(st.integers(0, instance.gpus - 1)))
                hot = curve.hot_rows
                assert hot[0] == 0
                assert (np.diff(hot) > 0).all()
                assert hot[-1] == len(
                    range(piece.offset, problem.profile.tables[table].table.rows, cut.ways)
                )
                for times in (curve.gpu_s, curve.dram_s):
                    scale = 1e-12 * (1 + times[0])
                    slopes = np.diff(times) / np.diff(hot)
                    assert (slopes <= scale).all()
                    assert (np.diff(slopes) >= -scale).all()
                assert (np.diff(curve.dram_bytes) < 0).all()
                assert (curve.hbm_bytes >= 0).all()
                assert curve.split_s >= 0
                assert curve.split_hbm_bytes >= 0

    @given(problems(), st.data())
    @settings(max_examples=60, deadline=None)
    def test_more_rows_in_hbm_never_cost_more(self, problem: Problem, data: st.DataObject) -> None:
        """The launch of a second shard aside."""
        instance = Instance(problem, self.model)
        rows = problem.profile.tables[0].table.rows
        more = data.draw(st.integers(1, rows))
        less = data.draw(st.integers(0, more - 1))
        costs = []
        for hot in (less, more):
            plan = build_plan(instance, [Placement(Piece(0), 0, hot)])
            report = self.model.evaluate(problem, plan)
            costs.append((gpu_seconds(report) - report.gpus[0].launch_s, report.hosts[0].dram_s))
            assert report.gpus[0].launch_s >= problem.topology.gpus[0].launch_s
        # Taking the launch off leaves the rounding of a much larger number.
        assert costs[1][0] <= costs[0][0] * (1 + 1e-12) + 1e-18
        assert costs[1][1] <= costs[0][1] * (1 + 1e-12) + 1e-18

    @given(placed(), st.floats(1.0, 10.0))
    @settings(max_examples=40, deadline=None)
    def test_faster_hardware_never_costs_more(
        self, case: tuple[Problem, list[Placement]], factor: float
    ) -> None:
        problem, placements = case
        plan = build_plan(Instance(problem, self.model), placements)
        before = self.model.evaluate(problem, plan)
        topology = problem.topology
        links = tuple(replace(k, bytes_per_s=k.bytes_per_s * factor) for k in topology.links)
        gpus = tuple(replace(g, hbm_bytes_per_s=g.hbm_bytes_per_s * factor) for g in topology.gpus)
        hosts = tuple(
            replace(h, dram_bytes_per_s=h.dram_bytes_per_s * factor) for h in topology.hosts
        )
        for faster in (
            replace(topology, links=links),
            replace(topology, gpus=gpus),
            replace(topology, hosts=hosts),
        ):
            after = self.model.evaluate(replace(problem, topology=faster), plan)
            assert after.step_time_s <= before.step_time_s * (1 + 1e-12) + 1e-18
            for one, two in zip(after.gpus, before.gpus, strict=True):
                assert one.link_s <= two.link_s * (1 + 1e-12) + 1e-18

    @given(
        st.integers(1, 5000),
        st.floats(0, 1.8),
        st.floats(0, 1.8),
        st.floats(0, 1),
        st.floats(0.1, 20),
    )
    @settings(max_examples=60, deadline=None)
    def test_more_skew_never_costs_more_link_time_at_the_same_split(
        self, rows: int, one: float, two: float, hot_share: float, lookups: float
    ) -> None:
        hot = round(rows * hot_share)
        link_s = []
        for exponent in sorted((one, two)):
            problem = problem_of(zipf_table("t", rows, lookups=lookups, exponent=exponent))
            plan = build_plan(Instance(problem, self.model), [Placement(Piece(0), 0, hot)])
            link_s.append(self.model.evaluate(problem, plan).gpus[0].link_s)
        # Beyond its exact head a Zipf CDF is piecewise linear, to well under 1%.
        assert link_s[1] <= link_s[0] * (1 + (1e-9 if rows <= 256 else 1e-2)) + 1e-15

    @given(placed())
    @settings(max_examples=20, deadline=None)
    def test_the_same_question_has_the_same_answer(
        self, case: tuple[Problem, list[Placement]]
    ) -> None:
        problem, placements = case
        plan = build_plan(Instance(problem, self.model), placements)
        assert self.model.evaluate(problem, plan) == cost_model(self.name).evaluate(problem, plan)
        one, two = (
            self.model.piece_curve(problem, 0, 1, 0, problem.profile.tables[0].table.dim, 0)
            for _ in range(2)
        )
        np.testing.assert_array_equal(one.gpu_s, two.gpu_s)
        np.testing.assert_array_equal(one.hbm_bytes, two.hbm_bytes)

    @given(table_profiles("t"), st.sampled_from(LOOKUPS), st.integers(1, 4), st.booleans())
    @settings(max_examples=80, deadline=None)
    def test_every_way_to_read_rows_has_a_finite_cost(
        self, profile: TableProfile, lookup: Lookup, replicas: int, buffered: bool
    ) -> None:
        problem = problem_of(profile, topology=unequal_machine(), batch_size=16)
        assume(lookup != "cached" or profile.table.rows >= 2)
        devices = [gpu.id for gpu in problem.topology.gpus[:replicas]]
        shard = replace(whole(problem, lookup, *devices), buffer_bytes=1000 if buffered else 0)
        plan = plan_for(problem, shard)
        assert violations(plan) == []
        report = self.model.evaluate(problem, plan)
        for cost in report.gpus:
            parts = (cost.hbm_s, cost.link_s, cost.communication_s, cost.launch_s)
            assert all(math.isfinite(part) and part >= 0 for part in parts)
            assert cost.total_s == pytest.approx(sum(parts))
            serves = cost.device in devices
            assert (cost.launch_s > 0) == serves
            assert (report.memory[cost.device].buffer_bytes == 1000) == (serves and buffered)
        assert report.step_time_s >= max(cost.total_s for cost in report.gpus)
        assert 0 <= report.hbm_lookup_share <= 1 + 1e-12
        assert 0 < report.balance <= 1
        if lookup == "device":
            assert report.hbm_lookup_share == pytest.approx(1)
            assert all(host.dram_s == 0 for host in report.hosts)

    @pytest.mark.parametrize(
        ("shard", "words"),
        [
            (in_hbm("u", (0, 1, 1), (0, 1)), "'u', which the profile lacks"),
            (in_hbm("t", (0, 9, 1), (0, 16), "gpu:9"), "gpu:9, which the topology"),
        ],
    )
    def test_a_plan_of_another_problem(self, shard: Shard, words: str) -> None:
        problem = problem_of(zipf_table("t", 9))
        with pytest.raises(PlanMismatchError, match=words):
            self.model.evaluate(problem, plan_for(problem, shard))

    def test_a_plan_of_tables_of_other_sizes(self) -> None:
        plan = plan_for(problem_of(zipf_table("t", 9)), in_hbm("t", (0, 9, 1), (0, 16)))
        with pytest.raises(PlanMismatchError, match="9 × 16 in the plan but 10 × 16"):
            self.model.evaluate(problem_of(zipf_table("t", 10)), plan)
        with pytest.raises(PlanMismatchError, match="plan's list of tables lacks"):
            self.model.evaluate(problem_of(zipf_table("t", 9)), replace(plan, tables=()))


class TestRoofline(CostModelContract):
    name = "roofline"


def test_an_unknown_model_lists_those_there_are() -> None:
    with pytest.raises(PlacerError, match="no cost model is called 'magic'; choose from roofline"):
        cost_model("magic")
    assert set(COST_MODELS) == {COST_MODELS[name]().name for name in COST_MODELS}
