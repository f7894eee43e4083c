"""Cost models: what every one of them promises."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
from calibration_cases import SECONDS, calibration, saved
from fast_and_full import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import in_hbm, machine
from problem_cases import (
    counted_table,
    plan_for,
    problem_of,
    problems,
    table_profiles,
    unequal_machine,
    whole,
    zipf_table,
)

from cost_models import (
    COST_MODELS,
    Calibrated,
    Cold,
    CostCurve,
    CostModel,
    CostReport,
    ShardingOption,
    TableShard,
    cost_model,
)
from cost_models.roofline import EXECUTOR, Roofline
from placer import Feature, Plan, Problem, TableProfile
from placer.errors import PlacerError, PlanMismatchError
from placer.plan.fields import Lookup
from placer.plan.memory import row_map_bytes, staging_buffer_bytes
from placer.plan.verify import violations
from placer.tables import Table
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement

LOOKUPS: tuple[Lookup, ...] = ("device", "uva", "staged", "cached", "host")

PRICES = np.concatenate(([0.0], np.geomspace(1e-16, 1e-4, 61)))
"""Seconds per byte of HBM: from far less than any row is worth to far more."""


@dataclass(frozen=True)
class Placed:
    """A problem, and where every piece of its tables is."""

    problem: Problem
    placements: list[Placement]
    replicas: list[TableShard]

    def plan(self, model: CostModel) -> Plan:
        return build_plan(Instance(self.problem, model), self.placements, self.replicas)


@st.composite
def any_options(
    draw: st.DrawFn, table: Table, gpus: int, colds: Sequence[Cold], *, replicated_rows: bool = True
) -> ShardingOption:
    """A cut of any kind, whether a model would search it or not."""
    replicated = draw(st.integers(0, table.rows)) if replicated_rows and gpus > 1 else 0
    inner = draw(st.sets(st.integers(1, table.dim - 1), max_size=gpus - 1))
    edges = [0, *sorted(inner), table.dim]
    column_widths = tuple(right - left for left, right in pairwise(edges)) if inner else ()
    most = min(gpus // max(1, len(column_widths)), table.rows - replicated)
    return ShardingOption(
        draw(st.integers(1, max(1, most))),
        column_widths,
        replicated,
        draw(st.sampled_from(colds)),
        draw(st.booleans()),
    )


def gpu_seconds(report: CostReport, gpu: int = 0) -> float:
    return report.gpus[gpu].total_s


def at(curve: CostCurve, values: np.ndarray, hot_rows: int) -> float:
    return float(np.interp(hot_rows, curve.hot_rows, values))


def least_priced(instance: Instance, shard: TableShard, seconds: str = "gpu_s") -> np.ndarray:
    """Least seconds + price × bytes of a shard, its hottest rows in HBM, at each of `PRICES`."""
    curves = [instance.curve(shard, gpu) for gpu in instance.kinds]
    priced = [getattr(c, seconds) + PRICES[:, None] * c.hbm_bytes for c in curves]
    return np.min([one.min(axis=1) for one in priced], axis=0)


def least_undivided(instance: Instance, single: TableShard, seconds: str = "gpu_s") -> np.ndarray:
    """The same of what stands for all ways to divide a shard: see `sharding_overhead_s`."""
    least, stand_in = least_priced(instance, single, seconds), single.stand_in()
    if stand_in == single:
        return least
    for gpu in instance.kinds:
        curve = instance.curve(stand_in, gpu)
        total = np.stack([getattr(curve, seconds)] * PRICES.size)
        # Any rows may be in HBM: each that pays.
        steps = np.diff(total + PRICES[:, None] * curve.hbm_bytes, axis=1)
        first = total[:, 0] + PRICES * curve.hbm_bytes[0]
        least = np.minimum(least, first + np.where(steps < 0, steps, 0.0).sum(axis=1))
    return least


def is_split(curve: CostCurve, hot_rows: int) -> bool:
    return 0 < hot_rows < int(curve.hot_rows[-1])


class CostModelContract:
    """What solvers and reports take for granted. A model's test class says which it is.

    Tests draw their cases from the methods below, which a model that knows fewer cuts, or
    fewer tables, overrides.
    """

    name: str

    colds: tuple[Cold, ...] = ("staged", "uva", "host", "cached")
    """Ways to read cold rows that the model knows."""

    lookups = LOOKUPS
    launches = True
    """Whether every shard costs a launch."""

    upkeep_s = 0.0
    """What room for a row in a cache costs, whatever is in it."""

    @property
    def model(self) -> CostModel:
        return cost_model(self.name)

    def problem(self, data: st.DataObject) -> Problem:
        return data.draw(problems())

    def table(self, data: st.DataObject) -> TableProfile:
        return data.draw(table_profiles("t"))

    def can_replicate(self, lookup: Lookup, replicas: int) -> bool:
        """Whether so many of four GPUs may hold a table that is read in this way."""
        return True

    def option(
        self, data: st.DataObject, problem: Problem, table: int, *, replicated_rows: bool = True
    ) -> ShardingOption:
        """A cut of the search space, or any other that the model knows."""
        spec = problem.profile.tables[table].table
        options = self.model.sharding_options(problem, table)
        searched = [c for c in options if replicated_rows or not c.replicated_rows]
        gpus = len(problem.topology.gpus)
        others = any_options(spec, gpus, self.colds, replicated_rows=replicated_rows)
        return data.draw(st.sampled_from(searched) | others)

    def hot_rows(self, data: st.DataObject, curves: list[CostCurve]) -> list[int]:
        """Rows in HBM of each piece of a table: often at a point of its curve."""
        points = [curve.hot_rows.tolist() for curve in curves]
        return [data.draw(st.sampled_from(one) | st.integers(0, one[-1])) for one in points]

    def homes(self, data: st.DataObject, option: ShardingOption, gpus: int) -> list[int]:
        """GPUs for the pieces of a table, each its own."""
        return data.draw(st.permutations(range(gpus)))

    def placed(self, data: st.DataObject) -> Placed:
        problem, model = self.problem(data), self.model
        instance = Instance(problem, model)
        placements, replicas = [], []
        for table in range(instance.tables):
            option = self.option(data, problem, table)
            shards = instance.shards(table, option)
            replicas += instance.replicas(table, option)
            homes = self.homes(data, option, instance.gpus)[: len(shards)]
            curves = [instance.curve(p, gpu) for p, gpu in zip(shards, homes, strict=True)]
            hot_rows = self.hot_rows(data, curves)
            placements += map(Placement, shards, homes, hot_rows)
        return Placed(problem, placements, replicas)

    def test_it_is_a_cost_model_by_its_name(self) -> None:
        assert isinstance(self.model, CostModel)
        assert self.model.name == self.name

    @given(st.data())
    @examples(60)
    def test_shards_add_up_to_the_plan(self, data: st.DataObject) -> None:
        case, model = self.placed(data), self.model
        problem, instance = case.problem, Instance(case.problem, model)
        topology, gpus = problem.topology, range(len(problem.topology.gpus))
        plan = case.plan(model)
        assert violations(plan) == []
        report = model.evaluate(problem, plan)
        of_devices = [defaultdict[str, float](float) for _ in range(4)]
        dram_s, hbm_bytes, dram_bytes, unsure = of_devices
        phase_s = np.zeros((len(instance.objective.schedule.phases), len(gpus)))
        served: list[list[TableShard]] = [[] for _ in gpus]
        parts = [(p.shard, p.gpu, p.hot_rows) for p in case.placements]
        parts += [(one, gpu, one.option.replicated_rows) for one in case.replicas for gpu in gpus]
        for shard, number, hot in parts:
            gpu, curve = topology.gpus[number], instance.curve(shard, number)
            split = is_split(curve, hot)
            phase_s[:, number] += [at(curve, of, hot) for of in curve.phase_s]
            phase_s[:, number] += curve.split_phase_s if split else 0.0
            served[number].append(shard)
            dram_s[gpu.host] += at(curve, curve.dram_s, hot)
            used = at(curve, curve.hbm_bytes, hot) + split * curve.split_hbm_bytes
            hbm_bytes[gpu.id] += used
            dram_bytes[gpu.host] += at(curve, curve.dram_bytes, hot)
            # Buffers of each shard are rounded up to bytes. Between its points a curve may
            # understate them, and the map that another piece of the table asks for.
            spec = problem.profile.tables[shard.table].table
            unsure[gpu.id] += 3
            if hot not in curve.hot_rows:
                unsure[gpu.id] += float(staging_buffer_bytes(spec, spec.rows, spec.dim))
            if shard.option.shard_count > 1:
                unsure[gpu.id] += row_map_bytes(spec)
        for number in gpus:
            phase_s[:, number] += len(instance.arenas(served[number])) * instance.launches_s[number]
            placed = [(p.shard, p.hot_rows) for p in case.placements if p.gpu == number]
            phase_s[:, number] += instance.arena_times.seconds(number, placed, case.replicas)
        assert report.phase_times_s == pytest.approx(phase_s, rel=1e-9, abs=1e-18)
        of_gpus_s = sum(gpu.total_s for gpu in report.gpus)
        of_tables_s = sum(table.gpu_s for table in report.tables.values())
        assert of_tables_s == pytest.approx(of_gpus_s, rel=1e-9, abs=1e-18)
        assert report.tables.keys() == {shard.table for shard in plan.shards}
        for cost in report.gpus:
            total = report.memory[cost.device].total_bytes
            counted = hbm_bytes[cost.device]
            assert counted - 1e-3 <= total <= counted + unsure[cost.device]
        for host in report.hosts:
            assert host.dram_s == pytest.approx(dram_s[host.device], rel=1e-9, abs=1e-18)
            assert report.memory[host.device].total_bytes == round(dram_bytes[host.device])

    @given(st.data())
    @examples(30)
    def test_memory_is_that_of_the_curve_at_its_points(self, data: st.DataObject) -> None:
        problem, model = self.problem(data), self.model
        instance = Instance(problem, model)
        table = data.draw(st.integers(0, instance.tables - 1))
        option = self.option(data, problem, table, replicated_rows=False)
        assume(option.shard_count == 1)
        (shard,) = instance.shards(table, option)
        number = data.draw(st.integers(0, instance.gpus - 1))
        gpu, curve = problem.topology.gpus[number], instance.curve(shard, number)
        for point, hot in enumerate(curve.hot_rows.tolist()):
            plan = build_plan(instance, [Placement(shard, number, hot)])
            used = model.evaluate(problem, plan).memory
            expected = curve.hbm_bytes[point] + is_split(curve, hot) * curve.split_hbm_bytes
            # Buffers of the hot and of the cold rows are rounded up to bytes, each by itself.
            assert expected - 1e-3 <= used[gpu.id].total_bytes <= expected + 2
            assert used[gpu.host].total_bytes == round(curve.dram_bytes[point])

    @given(st.data())
    @examples(40)
    def test_curves_are_as_promised(self, data: st.DataObject) -> None:
        problem, model = self.problem(data), self.model
        instance = Instance(problem, model)
        table = data.draw(st.integers(0, instance.tables - 1))
        rows, dim = instance.rows(table), problem.profile.tables[table].table.dim
        gpu = data.draw(st.integers(0, instance.gpus - 1))
        for option in (*model.sharding_options(problem, table), self.option(data, problem, table)):
            shards = instance.shards(table, option)
            cells = sum(len(range(*p.rows(rows))) * int(np.ptp(p.columns(dim))) for p in shards)
            assert cells == (rows - option.replicated_rows) * dim
            for shard in shards:
                curve = instance.curve(shard, gpu)
                assert curve.hot_rows[0] == 0
                assert curve.hot_rows[-1] == len(range(*shard.rows(rows)))
                self.check_curve(curve, self.upkeep_s if option.cold == "cached" else 0.0)
                if option.cold in ("staged", "uva"):
                    self.check_convex(curve)
            for replica in instance.replicas(table, option):
                curve = instance.curve(replica, gpu)
                assert curve.hot_rows.tolist() == [option.replicated_rows]
                assert curve.dram_s == curve.dram_bytes == [0.0]
                assert curve.split_s == curve.split_hbm_bytes == 0
                self.check_curve(curve)

    def check_curve(self, curve: CostCurve, upkeep_s: float = 0.0) -> None:
        """What holds of every curve: see the docstring of `CostCurve`."""
        parts = (curve.gpu_s, curve.dram_s, curve.hbm_bytes, curve.dram_bytes)
        for values in parts:
            assert values.shape == curve.hot_rows.shape
            assert np.isfinite(values).all()
            assert (values >= 0).all()
        assert curve.split_s >= 0
        assert curve.split_hbm_bytes >= 0
        assert (np.diff(curve.hot_rows) > 0).all()
        assert (np.diff(curve.dram_s) <= 1e-12 * curve.dram_s[0]).all()
        assert (np.diff(curve.dram_bytes) <= 0).all()
        assert curve.dram_bytes[-1] == 0
        smaller = np.diff(curve.hbm_bytes) < -1e-6
        more_s = np.diff(curve.gpu_s)[smaller]
        assert (more_s <= 1e-12 * curve.gpu_s[0] + upkeep_s * curve.hot_rows[-1]).all()

    def check_convex(self, curve: CostCurve) -> None:
        """What holds where cold rows are staged or read in place."""
        for times in (curve.gpu_s, curve.dram_s):
            scale = 1e-12 * (1 + times[0])
            slopes = np.diff(times) / np.diff(curve.hot_rows)
            assert (slopes <= scale).all()
            assert (np.diff(slopes) >= -scale).all()
        assert (np.diff(curve.dram_bytes) < 0).all()

    @given(st.data())
    @examples(80)
    def test_cutting_adds_what_it_is_said_to_add(self, data: st.DataObject) -> None:
        """At any price of HBM, and each piece on the kind of GPU that is best for it."""
        problem, model = self.problem(data), self.model
        instance = Instance(problem, model)
        extra_s = instance.sharding_overhead_s
        if extra_s is None:
            return
        table = data.draw(st.integers(0, instance.tables - 1))
        option = self.option(data, problem, table)
        shards = instance.shards(table, option)
        assume(len(shards) > 1)
        undivided = ShardingOption(replicated_rows=option.replicated_rows, cold=option.cold)
        (single,) = instance.shards(table, undivided)

        def least_bytes(shard: TableShard, *, dram: bool) -> float:
            curves = [instance.curve(shard, gpu) for gpu in instance.kinds]
            return min(float((c.hbm_bytes + dram * c.dram_bytes).min()) for c in curves)

        # Pieces with caches may be better than one cache: see `CostModel.sharding_overhead_s`.
        more = [("gpu_s", extra_s), ("dram_s", 0.0)] if option.cold != "cached" else []
        for seconds, more_s in more:
            together = sum(least_priced(instance, shard, seconds) for shard in shards)
            alone = least_undivided(instance, single, seconds) + more_s
            assert (together >= alone * (1 - 1e-9) - 1e-18).all()
        for dram in (False, True):
            together = sum(least_bytes(shard, dram=dram) for shard in shards)
            assert together >= least_bytes(single, dram=dram) * (1 - 1e-9)

    @given(st.data())
    @examples(40)
    def test_more_rows_in_hbm_never_cost_more(self, data: st.DataObject) -> None:
        """The launch of a second shard aside, and the row map that a split of counted rows needs.

        A cache has at least one row.
        """
        problem, model = self.problem(data), self.model
        instance = Instance(problem, model)
        rows = instance.rows(0)
        cold = data.draw(st.sampled_from(self.colds))
        has_map = problem.profile.tables[0].counts is not None
        shard, least = TableShard(0, ShardingOption(cold=cold)), int(cold == "cached" or has_map)
        assume(cold != "host" and rows > least)
        assume(cold != "cached" or not self.upkeep_s)
        less = data.draw(st.integers(least, rows - 1))
        more = data.draw(st.integers(less + 1, rows))
        costs = []
        for hot in (less, more):
            plan = build_plan(instance, [Placement(shard, 0, hot)])
            report = model.evaluate(problem, plan)
            costs.append((gpu_seconds(report) - report.gpus[0].launch_s, report.hosts[0].dram_s))
            if self.launches:
                assert report.gpus[0].launch_s >= problem.topology.gpus[0].launch_s
        # Taking the launch off leaves the rounding of a much larger number.
        assert costs[1][0] <= costs[0][0] * (1 + 1e-12) + 1e-18
        assert costs[1][1] <= costs[0][1] * (1 + 1e-12) + 1e-18

    @given(st.data())
    @examples(20)
    def test_no_split_beats_all_rows_in_hbm(self, data: st.DataObject) -> None:
        """What the best split costs can only fall as HBM grows, to all rows in it."""
        problem = self.problem(data)
        instance = Instance(problem, self.model)
        cold = data.draw(st.sampled_from([cold for cold in self.colds if cold != "host"]))
        table = data.draw(st.integers(0, instance.tables - 1))
        gpu = data.draw(st.integers(0, instance.gpus - 1))
        curve = instance.curve(TableShard(table, ShardingOption(cold=cold)), gpu)
        assert curve.gpu_s[-1] <= curve.gpu_s.min() * (1 + 1e-12)

    @given(st.data(), st.floats(1.0, 10.0))
    @examples(20)
    def test_faster_hardware_never_costs_more(self, data: st.DataObject, factor: float) -> None:
        case = self.placed(data)
        problem, plan = case.problem, case.plan(self.model)
        before = self.model.evaluate(problem, plan)
        topology = problem.topology
        links = tuple(replace(k, bytes_per_s=k.bytes_per_s * factor) for k in topology.links)
        gpus = tuple(replace(g, hbm_bytes_per_s=g.hbm_bytes_per_s * factor) for g in topology.gpus)
        hosts = [replace(h, dram_bytes_per_s=h.dram_bytes_per_s * factor) for h in topology.hosts]
        for faster in ({"links": links}, {"gpus": gpus}, {"hosts": tuple(hosts)}):
            machine = replace(topology, **faster)
            after = self.model.evaluate(replace(problem, topology=machine), plan)
            assert after.step_time_s <= before.step_time_s * (1 + 1e-12) + 1e-18
            for one, two in zip(after.gpus, before.gpus, strict=True):
                assert one.link_s <= two.link_s * (1 + 1e-12) + 1e-18

    @given(st.data(), st.integers(1, 5000), st.lists(st.floats(0, 1.8), min_size=2, max_size=2))
    @examples(30)
    def test_more_skew_never_costs_more_at_the_same_split(
        self, data: st.DataObject, rows: int, exponents: list[float]
    ) -> None:
        hot, lookups = round(rows * data.draw(st.floats(0, 1))), data.draw(st.floats(0.1, 20))
        shard = TableShard(0, ShardingOption(cold=data.draw(st.sampled_from(self.colds))))
        link_s, total_s = [], []
        for exponent in sorted(exponents):
            problem = problem_of(zipf_table("t", rows, lookups=lookups, exponent=exponent))
            plan = build_plan(Instance(problem, self.model), [Placement(shard, 0, hot)])
            (gpu,) = self.model.evaluate(problem, plan).gpus[:1]
            link_s.append(gpu.link_s)
            total_s.append(gpu.total_s)
        # Beyond its exact head a Zipf CDF is piecewise linear, to well under 1%.
        slack = 1 + (1e-9 if rows <= 256 else 1e-2)
        assert link_s[1] <= link_s[0] * slack + 1e-15
        # A host may be the cheaper one, so that more work for the GPU costs more.
        assert total_s[1] <= total_s[0] * slack + 1e-15 or shard.option.cold == "host"

    @given(st.data())
    @examples(20)
    def test_the_same_question_has_the_same_answer(self, data: st.DataObject) -> None:
        case = self.placed(data)
        problem, model, other = case.problem, self.model, self.model
        plan = case.plan(model)
        assert model.evaluate(problem, plan) == other.evaluate(problem, plan)
        assert model.sharding_overhead_s(problem) == other.sharding_overhead_s(problem)
        for table in range(len(problem.profile)):
            options = model.sharding_options(problem, table)
            assert options == other.sharding_options(problem, table)
            assert len(set(options)) == len(options)
        for placed in case.placements:
            one, two = (m.cost_curve(problem, placed.shard, placed.gpu) for m in (model, other))
            np.testing.assert_array_equal(one.gpu_s, two.gpu_s)
            np.testing.assert_array_equal(one.hbm_bytes, two.hbm_bytes)

    @given(st.data())
    @examples(30)
    def test_options_that_are_searched_can_be_placed(self, data: st.DataObject) -> None:
        """On GPUs of their own, and whole tables always; no piece is empty unless its table is."""
        problem, model = self.problem(data), self.model
        gpus, instance = len(problem.topology.gpus), Instance(problem, model)
        for table in range(instance.tables):
            options, rows = model.sharding_options(problem, table), instance.rows(table)
            assert any(option.shard_count == 1 and not option.replicated_rows for option in options)
            for option in options:
                shards = instance.shards(table, option)
                assert len(shards) <= gpus
                assert 0 <= option.replicated_rows <= rows
                assert not option.replicated_rows or gpus > 1
                assert all(len(range(*shard.rows(rows))) or not rows for shard in shards)

    @given(st.data())
    @examples(40)
    def test_buffers_of_shards(self, data: st.DataObject) -> None:
        """Whole bytes; only one of a table's shards on a GPU is charged for its pooled output.

        What a shard said of its buffers before does not matter.
        """
        case, model = self.placed(data), self.model
        plan, names = case.plan(model), case.problem.profile.table_names
        seen = set()
        for shard in plan.shards:
            table = names.index(shard.table)
            other = replace(shard, staging_rows=0, buffer_bytes=data.draw(st.integers(0, 9)))
            with_bags, without = (
                model.with_buffers(case.problem, table, other, returns_bags=bags)
                for bags in (True, False)
            )
            assert isinstance(with_bags.buffer_bytes, int)
            assert with_bags.buffer_bytes >= without.buffer_bytes >= 0
            place = (shard.table, shard.cols, shard.devices)
            assert shard == (without if place in seen else with_bags)
            seen.add(place)

    @given(st.data(), st.integers(1, 4), st.booleans())
    @examples(40)
    def test_every_way_to_read_rows_has_a_finite_cost(
        self, data: st.DataObject, replicas: int, buffered: bool
    ) -> None:
        problem = problem_of(self.table(data), topology=unequal_machine(), batch_size=16)
        lookup = data.draw(st.sampled_from(self.lookups))
        assume(lookup != "cached" or problem.profile.tables[0].table.rows >= 2)
        assume(self.can_replicate(lookup, replicas))
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
            assert (cost.launch_s > 0) == (serves and self.launches)
            assert (report.memory[cost.device].buffer_bytes == 1000) == (serves and buffered)
        assert report.step_time_s >= max(report.gpu_s) * (1 - 1e-9)
        assert 0 <= report.hbm_lookup_share <= 1 + 1e-12
        assert 0 < report.balance <= 1
        if lookup == "device":
            assert report.hbm_lookup_share == pytest.approx(1)
            assert all(host.dram_s == 0 for host in report.hosts)

    def test_a_plan_of_another_problem(self) -> None:
        problem, larger = (problem_of(zipf_table("t", rows)) for rows in (9, 10))
        plan = plan_for(problem, in_hbm("t", (0, 9, 1), (0, 16)))
        for asked, other, words in (
            (
                problem,
                plan_for(problem, in_hbm("u", (0, 1, 1), (0, 1))),
                "'u', which the profile l",
            ),
            (
                problem,
                plan_for(problem, whole(problem, "device", "gpu:9")),
                "gpu:9, which the topo",
            ),
            (larger, plan, "9 × 16 in the plan but 10 × 16"),
            (problem, replace(plan, tables=()), "plan's list of tables lacks"),
        ):
            with pytest.raises(PlanMismatchError, match=words):
                self.model.evaluate(asked, other)


class TestRoofline(CostModelContract):
    name = "roofline"


class TestExecutor(CostModelContract):
    """`Roofline` with constants of placer's own executor."""

    name = "roofline"

    @property
    def model(self) -> CostModel:
        return Roofline(EXECUTOR)


class TestCalibrated(CostModelContract):
    """Of constants in a file: about those of a CPU, where a host pools fastest."""

    upkeep_s = SECONDS["cache_row"]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def constants(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.name = saved(tmp_path_factory.mktemp("calibration") / "machine.json")


@pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is not installed")
class TestTorchRec(CostModelContract):
    """It reads rows in place or through caches, and knows no cuts but those that it searches."""

    name = "torchrec"
    colds = ("cached",)
    lookups = ("device", "uva", "cached")
    launches = False

    def table(self, data: st.DataObject) -> TableProfile:
        return self.pooled_alike(data, data.draw(table_profiles("t", least_rows=1)))

    def problem(self, data: st.DataObject) -> Problem:
        problem = data.draw(problems())
        tables = tuple(self.pooled_alike(data, profile) for profile in problem.profile)
        return replace(problem, profile=replace(problem.profile, tables=tables))

    def pooled_alike(self, data: st.DataObject, profile: TableProfile) -> TableProfile:
        """TorchRec has a module for tables whose features are all pooled, or none."""
        pooling = data.draw(st.sampled_from(["sum", "none"]))
        features = tuple(replace(f, pooling=pooling) for f in profile.table.features)
        features = features or (Feature(f"{profile.name}0", 1.0),)
        return replace(profile, table=replace(profile.table, features=features))

    def option(
        self, data: st.DataObject, problem: Problem, table: int, *, replicated_rows: bool = True
    ) -> ShardingOption:
        options = self.model.sharding_options(problem, table)
        searched = [c for c in options if replicated_rows or not c.replicated_rows]
        return data.draw(st.sampled_from(searched))

    def hot_rows(self, data: st.DataObject, curves: list[CostCurve]) -> list[int]:
        """A table has one load factor, and curves are exact at their points."""
        if not curves:
            return []
        point = data.draw(st.sampled_from([0, -1, 1]))
        least = min(curve.hot_rows.size for curve in curves)
        alike = len({int(curve.hot_rows[-1]) for curve in curves}) == 1
        point = point if alike and least > 2 else -abs(point)
        return [int(curve.hot_rows[point]) for curve in curves]

    def homes(self, data: st.DataObject, option: ShardingOption, gpus: int) -> list[int]:
        return list(range(gpus)) if option.blocked else super().homes(data, option, gpus)

    def can_replicate(self, lookup: Lookup, replicas: int) -> bool:
        return replicas == 1 or (lookup == "device" and replicas == 4)


@pytest.mark.parametrize("replicated_rows", [0, 13])
def test_a_shard_without_its_host_may_save_more_than_dividing_adds(replicated_rows: int) -> None:
    """Lookups of rows in HBM pay for those that the host pools, if they are in one shard."""
    counts = [*[30_000] * replicated_rows, 20_000, *[100] * 3]
    counted = counted_table("t", counts, dim=3, lookups=8.0)
    features = Feature("a", 8.0, 1.0, "none"), Feature("b", 8.0, 1.0, "none")
    table = replace(counted.table, optimizer="sgd", features=features)
    problem = problem_of(replace(counted, table=table), topology=machine(2, 2), batch_size=20_000)
    instance = Instance(problem, Calibrated(calibration()))
    option = ShardingOption(2, replicated_rows=replicated_rows, cold="host", blocked=True)
    (single,) = instance.shards(0, option._replace(row_slices=1, blocked=False))
    together = sum(least_priced(instance, shard) for shard in instance.shards(0, option))
    extra_s = instance.sharding_overhead_s
    assert (together < least_priced(instance, single) + extra_s).any()
    assert (together >= (least_undivided(instance, single) + extra_s) * (1 - 1e-9)).all()


def test_an_unknown_model_lists_those_there_are() -> None:
    with pytest.raises(PlacerError, match="no cost model is called 'magic'; choose from roofline"):
        cost_model("magic")
    assert set(COST_MODELS) == {COST_MODELS[name]().name for name in COST_MODELS}
