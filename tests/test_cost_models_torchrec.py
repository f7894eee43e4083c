"""Cost model `torchrec` against TorchRec's own enumerator, estimators and rating."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine
from problem_cases import counted_table, plan_for, problem_of, unequal_machine, zipf_table

from cost_models import ShardingOption, TableShard, TorchRec, cost_model, shards_of
from placer import AccessCdf, Feature, Problem, Profile, Shard, Table, TableProfile, Topology
from placer.adapters.torchrec.sharding import even_blocks, sharding_of
from placer.errors import BackendError, PlanMismatchError, ProblemError, TopologyError
from placer.plan.fields import Lookup
from placer.plan.verify import violations
from placer.units import parse_bytes
from solvers import solve

needs_torchrec = pytest.mark.skipif(
    find_spec("torchrec") is None, reason="torchrec is not installed; see docs/torchrec.md"
)

CACHED = ShardingOption(cold="cached")
KERNELS = {"device": "fused", "uva": "fused_uvm", "cached": "fused_uvm_caching"}


@st.composite
def profiles(draw: st.DrawFn, name: str) -> TableProfile:
    """A table that TorchRec can have: all features pooled, or none."""
    rows = draw(st.integers(2, 60))
    pooling = draw(st.sampled_from(["sum", "none"]))
    features = tuple(
        Feature(f"{name}{number}", draw(st.floats(0, 8)), draw(st.floats(0, 1)), pooling)
        for number in range(draw(st.integers(1, 2)))
    )
    dim = draw(st.sampled_from([8, 16, 64, 128, 200]))
    dtype = draw(st.sampled_from(["float32", "float16"]))
    optimizer = draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam"]))
    table = Table(name, rows, dim, dtype, optimizer, features)
    return TableProfile(table, AccessCdf.zipf(rows, draw(st.floats(0, 2))))


def lookup_of(cache_rows: int, rows: int) -> dict[str, Any]:
    if cache_rows == 0:
        return {"memory": "dram", "lookup": "uva"}
    if cache_rows == rows:
        return {"memory": "hbm", "lookup": "device"}
    return {"memory": "dram", "lookup": "cached", "cache_rows": cache_rows}


@st.composite
def placements(draw: st.DrawFn) -> tuple[Problem, list[Shard], dict[str, dict[str, Any]], bool]:
    """A problem, shards of every kind that TorchRec has, and how TorchRec calls them."""
    topology = draw(st.sampled_from([machine(1), machine(2), machine(3), machine(2, 2)]))
    names = [f"t{number}" for number in range(draw(st.integers(1, 3)))]
    tables, batch_size = [draw(profiles(name)) for name in names], draw(st.integers(1, 200))
    problem = problem_of(*tables, topology=topology, batch_size=batch_size)
    gpus = [gpu.id for gpu in topology.gpus]
    shards, named = [], {}
    for profile in problem.profile:
        table = profile.table
        kind = draw(st.sampled_from(["table", "column", "row", "table_row", "grid", "replicas"]))
        if kind == "replicas" and len(gpus) > 1:
            shards.append(in_hbm(table.name, (0, table.rows, 1), (0, table.dim), *gpus))
            ranks = list(range(len(gpus)))
            named[table.name] = {"kind": "data_parallel", "kernel": "dense", "ranks": ranks}
            continue
        lookup = draw(st.sampled_from(["device", "uva", "cached"]))
        home = draw(st.integers(0, len(gpus) - 1))
        blocks, ranks, width = [(0, table.rows)], [home], table.dim
        sharding = "table_wise"
        local = len(topology.gpus_of("host:0"))
        if kind == "grid" and local > 1 and table.dim > 8 and table.features[0].pooling == "sum":
            sharding, width = "grid_shard", table.dim // 2
            hosts = [draw(st.integers(0, len(topology.hosts) - 1)) for _ in range(2)]
            ranks = [host * local + number for host in hosts for number in range(local)]
            blocks = even_blocks(table.rows, local) * 2
        if kind == "row" and len(gpus) > 1:
            sharding, ranks = "row_wise", list(range(len(gpus)))
        is_sum = table.features[0].pooling == "sum"
        # Two rows by rows on all ranks are the same plan as on the two ranks of a host.
        if kind == "table_row" and len(topology.hosts) > 1 and is_sum and table.rows > local:
            sharding, ranks = "table_row_wise", draw(st.sampled_from([[0, 1], [2, 3]]))
        if "row" in sharding:
            blocks = even_blocks(table.rows, len(ranks))
        if kind == "column":
            width = draw(st.sampled_from([w for w in (4, 8, 40, 64) if table.dim % w == 0]))
        if width < table.dim and sharding != "grid_shard":
            sharding = "column_wise"
            strips = table.dim // width
            ranks = draw(st.lists(st.integers(0, len(gpus) - 1), min_size=strips, max_size=strips))
        largest = blocks[0][1]
        cache_rows = draw(st.integers(1, largest)) if lookup == "cached" else 0
        factor = cache_rows / largest
        for number, rank in enumerate(ranks):
            by_rows = "row" in sharding or sharding == "grid_shard"
            start, stop = blocks[number] if by_rows else blocks[0]
            if start == stop:
                continue
            first = number * width if sharding == "column_wise" else 0
            if sharding == "grid_shard":
                first = number // local * width
            shard = in_dram(table.name, (start, stop, 1), (first, first + width), gpus[rank])
            own = min(stop - start, max(1, round(factor * (stop - start))))
            place = {"memory": "hbm" if lookup == "device" else "dram", "lookup": lookup}
            place["cache_rows"] = own if lookup == "cached" else 0
            shards.append(replace(shard, **place))
        named[table.name] = {
            "kind": sharding,
            "kernel": KERNELS[lookup],
            "ranks": ranks,
            "factor": factor if lookup == "cached" else None,
            "width": width if width < table.dim else None,
        }
    return problem, shards, named, draw(st.booleans())


def enumerated(problem: Problem, named: dict[str, dict[str, Any]], prefetch: bool) -> list[Any]:
    """The named options as TorchRec's enumerator makes and estimates them, on their ranks."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import TopologyFactory, TrainerConfig
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
    from torchrec.optim import RowWiseAdagrad

    from cost_models.torchrec.estimates import ProfileCacheStatistics

    optimizers = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rowwise_adagrad": RowWiseAdagrad,
        "adam": torch.optim.Adam,
    }
    meta, options = torch.device("meta"), []
    ranks, local = len(problem.topology.gpus), len(problem.topology.gpus_of("host:0"))
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=ranks, local_world_size=local)
    )
    for profile in problem.profile:
        table, name = profile.table, named[profile.name]
        pooled = table.features[0].pooling == "sum"
        config = (EmbeddingBagConfig if pooled else EmbeddingConfig)(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[feature.name for feature in table.features],
            data_type=DataType.FP32 if table.dtype == "float32" else DataType.FP16,
        )
        module = (EmbeddingBagCollection if pooled else EmbeddingCollection)(
            tables=[config], device=meta
        )
        for parameter in module.parameters():
            parameter._optimizer_classes = [optimizers[table.optimizer]]
        constraints = ParameterConstraints(
            sharding_types=[name["kind"]],
            compute_kernels=[name["kernel"]],
            min_partition=name.get("width"),
            pooling_factors=[feature.lookups_per_sample for feature in table.features],
            cache_params=CacheParams(
                load_factor=name.get("factor"),
                prefetch_pipeline=prefetch,
                stats=ProfileCacheStatistics(profile, problem.global_batch_size),
            ),
        )
        enumerator = EmbeddingEnumerator(
            topology, problem.batch_size, constraints={table.name: constraints}
        )
        sharder = EmbeddingBagCollectionSharder() if pooled else EmbeddingCollectionSharder()
        (option,) = enumerator.enumerate(module, [sharder])
        for shard, rank in zip(option.shards, name["ranks"], strict=True):
            shard.rank = rank
        options.append(option)
    return options


@needs_torchrec
class TestAgainstTorchRec:
    @given(placements())
    @examples(60)
    def test_it_says_what_torchrec_says(self, case: Any) -> None:
        problem, shards, named, prefetch = case
        model = TorchRec(prefetch_pipeline=prefetch)
        shards = [buffered(model, problem, shard) for shard in shards]
        plan = plan_for(problem, *shards)
        assert violations(plan) == []
        report = model.evaluate(problem, plan)
        options = enumerated(problem, named, prefetch)
        seconds = [0.0] * len(problem.topology.gpus)
        hbm, ddr = list(seconds), dict.fromkeys(problem.topology.hosts_by_id, 0.0)
        for option in options:
            for shard in option.shards:
                seconds[shard.rank] += shard.perf.total / 1000
                # Of ranks without rows TorchRec counts buffers that no shard of ours stands for.
                if shard.size[0]:
                    hbm[shard.rank] += shard.storage.hbm
                    ddr[problem.topology.gpus[shard.rank].host] += shard.storage.ddr
        for gpu, cost in enumerate(report.gpus):
            assert cost.total_s == pytest.approx(seconds[gpu], rel=1e-12)
            assert report.memory[cost.device].total_bytes >= hbm[gpu]
        for host, needed in ddr.items():
            assert report.memory[host].total_bytes >= needed
        from torchrec.distributed.planner.perf_models import NoopPerfModel

        class Ranks:
            world_size = len(seconds)

        rating_ms = NoopPerfModel(Ranks).rate(options)  # type: ignore[arg-type]
        assert report.step_time_s == pytest.approx(rating_ms / 1000, rel=1e-12)

    @given(placements(), st.data())
    @examples(40)
    def test_curves_say_what_plans_cost(self, case: Any, data: st.DataObject) -> None:
        problem, _, _, prefetch = case
        model = TorchRec(prefetch_pipeline=prefetch, min_partition=8, replicate=True)
        gpus = [gpu.id for gpu in problem.topology.gpus]
        shards: list[Shard] = []
        seconds, hbm, dram = ([0.0] * len(gpus) for _ in range(3))
        for number, profile in enumerate(problem.profile):
            table = profile.table
            option = data.draw(st.sampled_from(model.sharding_options(problem, number)))
            if option.replicated_rows:
                shards.append(in_hbm(table.name, (0, table.rows, 1), (0, table.dim), *gpus))
                replica = TableShard.replica(number, option)
                for gpu in range(len(gpus)):
                    curve = model.cost_curve(problem, replica, gpu)
                    assert curve.hot_rows.tolist() == [table.rows]
                    seconds[gpu] += curve.gpu_s[0]
                    hbm[gpu] += curve.hbm_bytes[0]
                continue
            table_shards = shards_of(number, option, table.rows)
            if option.blocked:
                homes = [shard.home_gpu for shard in table_shards]
            else:
                homes = [data.draw(st.integers(0, len(gpus) - 1)) for _ in table_shards]
            largest = model.cost_curve(problem, table_shards[0], homes[0]).hot_rows
            chosen = data.draw(st.integers(0, len(largest) - 1))
            for table_shard, gpu in zip(table_shards, homes, strict=True):
                curve = model.cost_curve(problem, table_shard, gpu)
                rows = int(curve.hot_rows[-1])
                rounded = np.rint(largest * (rows / largest[-1]))
                hot = int(rounded[chosen])
                # A block of few rows has fewer points: each is the first that rounds to it.
                assume(hot not in rounded[:chosen])
                assume((hot == rows) == (chosen == len(largest) - 1))
                point = int(np.searchsorted(curve.hot_rows, hot))
                assert curve.hot_rows[point] == hot
                seconds[gpu] += curve.gpu_s[point]
                hbm[gpu] += curve.hbm_bytes[point]
                dram[gpu] += curve.dram_bytes[point]
                span, cols = table_shard.rows(table.rows), table_shard.columns(table.dim)
                shard = in_hbm(table.name, span, cols, gpus[gpu])
                shards.append(replace(shard, **lookup_of(hot, rows)))
        plan = plan_for(problem, *(buffered(model, problem, shard) for shard in shards))
        assert violations(plan) == []
        report = model.evaluate(problem, plan)
        for gpu, cost in enumerate(report.gpus):
            assert cost.total_s == pytest.approx(seconds[gpu], rel=1e-12)
            used = report.memory[cost.device].total_bytes
            assert hbm[gpu] - 1e-3 <= used <= hbm[gpu] + len(shards)
        on_hosts = sum(report.memory[host.id].total_bytes for host in problem.topology.hosts)
        assert on_hosts == sum(dram)

    @pytest.mark.parametrize("prefetch", [False, True])
    def test_many_load_factors_at_once_are_each_one_alone(self, prefetch: bool) -> None:
        rows = 4_999_999  # The last of four blocks has a row less than the others.
        table = zipf_table("t", rows, 64, lookups=20.0, exponent=1.05)
        problem = problem_of(table, topology=machine(4), batch_size=8192)
        model = TorchRec(prefetch_pipeline=prefetch)
        for option in (CACHED, ShardingOption(4, cold="cached", blocked=True)):
            table_shards = shards_of(0, option, rows)
            curves = [model.cost_curve(problem, p, gpu) for gpu, p in enumerate(table_shards)]
            points = len(curves[0].hot_rows)
            assert points > 40
            for point in (*range(0, points, 7), points - 1):
                shards = []
                for gpu, (p, curve) in enumerate(zip(table_shards, curves, strict=True)):
                    shard = in_hbm("t", p.rows(rows), (0, 64), f"gpu:{gpu}")
                    way = lookup_of(int(curve.hot_rows[point]), shard.row_count)
                    shards.append(replace(shard, **way))
                report = model.evaluate(problem, plan_for(problem, *shards))
                times = [gpu.total_s for gpu in report.gpus[: len(curves)]]
                expected = [curve.gpu_s[point] for curve in curves]
                assert times == pytest.approx(expected, rel=1e-12)
                on_hosts = sum(report.memory[one.id].total_bytes for one in problem.topology.hosts)
                assert on_hosts == sum(curve.dram_bytes[point] for curve in curves)


def buffered(model: TorchRec, problem: Problem, shard: Shard) -> Shard:
    number = problem.profile.table_names.index(shard.table)
    found = model.with_buffers(problem, number, shard, returns_bags=True)
    assert found == replace(shard, buffer_bytes=found.buffer_bytes)  # It stages no rows.
    return found


@needs_torchrec
class TestWhatTorchRecKnows:
    def test_a_cache_of_more_rows_misses_less(self) -> None:
        from cost_models.torchrec.estimates import ProfileCacheStatistics

        counts = [50, 20, 10, 10, 5, 5, 0, 0]
        profile = counted_table("t", counts, lookups=3.0)
        statistics = ProfileCacheStatistics(profile, 20)
        touched = [1 - (1 - count / 100) ** 60 for count in counts]
        assert statistics.expected_lookups == pytest.approx(sum(touched))
        rates = [statistics.expected_miss_rate(rows / 8) for rows in range(9)]
        expected = [sum(touched[rows:]) / sum(touched) for rows in range(9)]
        assert rates == pytest.approx(expected)
        area = sum((a + b) / 2 for a, b in pairwise(rates)) / 8
        assert statistics.cacheability == pytest.approx(area)
        unread = ProfileCacheStatistics(counted_table("t", [0, 0, 0]), 20)
        assert unread.expected_lookups == unread.expected_miss_rate(0.5) == unread.cacheability == 0
        flat, steep = (
            ProfileCacheStatistics(zipf_table("t", 1000, exponent=exponent), 64).cacheability
            for exponent in (0.1, 1.5)
        )
        assert 0 < steep < flat < 1

    def test_options(self) -> None:
        problem = problem_of(
            zipf_table("narrow", 1000, 64),
            zipf_table("wide", 1000, 512),
            zipf_table("few", 3, 64),
            zipf_table("none", 0, 64),
            topology=machine(4),
        )
        whole, rows = CACHED, ShardingOption(4, cold="cached", blocked=True)
        all_rows, few_rows = (whole._replace(replicated_rows=number) for number in (1000, 3))
        strips = ShardingOption(1, (128,) * 4, cold="cached")
        model = TorchRec(replicate=True)
        assert [model.sharding_options(problem, table) for table in range(4)] == [
            (whole, rows, all_rows),
            (whole, strips, rows, all_rows),
            (whole, few_rows),
            (whole,),
        ]
        narrow = TorchRec(min_partition=32).sharding_options(problem, 0)
        assert ShardingOption(1, (32, 32), cold="cached") in narrow
        # TorchRec does not apply an optimizer of the backward pass to replicas.
        assert TorchRec().sharding_options(problem, 0) == (whole, rows)
        small = replace(problem, topology=problem.topology.with_memory(hbm=parse_bytes("1KiB")))
        assert model.sharding_options(small, 0) == (whole, rows)
        alone = replace(problem, topology=machine(1))
        assert all(model.sharding_options(alone, number) == (whole,) for number in range(4))

    def test_options_of_hosts(self) -> None:
        topology = Topology.parse("2x2xh100")
        tables = zipf_table("t", 1000, 256), zipf_table("few", 1, 64)
        problem = problem_of(*tables, topology=topology)
        options = TorchRec().sharding_options(problem, 0)
        by_host = [option for option in options if option.blocked and option.row_slices == 2]
        places = [(option.first_gpu, len(option.column_widths)) for option in by_host]
        assert places == [(0, 0), (0, 2), (2, 0)]
        assert {(option.replicated_rows, option.cold) for option in by_host} == {(0, "cached")}
        homes = [[s.home_gpu for s in shards_of(0, option, 1000)] for option in by_host[1:]]
        assert homes == [[0, 1, 2, 3], [2, 3]]
        assert not any(option.blocked for option in TorchRec().sharding_options(problem, 1))

    def test_solvers_place_rows_on_the_gpus_of_a_host(self) -> None:
        topology = Topology.parse("2x2xh100", hbm="4MiB")
        tables = [zipf_table(f"t{n}", 20_000, 64, lookups=40.0) for n in range(2)]
        problem = problem_of(*tables, topology=topology, batch_size=512)
        result = solve(problem, "greedy-cost", cost_model="torchrec", time_limit_s=5)
        assert violations(result.plan) == []
        kinds = {
            sharding_of(topology, table.table, result.plan.shards_by_table[table.table.name]).kind
            for table in tables
        }
        assert "table_row_wise" in kinds

    def test_an_empty_table_costs_a_finite_time(self) -> None:
        problem = problem_of(zipf_table("t", 0))
        curve = TorchRec().cost_curve(problem, TableShard(0, CACHED), 0)
        assert curve.hot_rows.tolist() == [0]
        shard = replace(in_dram("t", (0, 0, 1), (0, 16)), lookup="uva")
        report = TorchRec().evaluate(problem, plan_for(problem, shard))
        assert report.step_time_s == pytest.approx(curve.gpu_s[0])
        assert report.step_time_s > 0

    def test_the_prefetching_pipeline_makes_caches_fast(self) -> None:
        problem = problem_of(zipf_table("t", 1_000_000, 64, lookups=20.0), batch_size=8192)
        plain, ahead = (
            cost_model(name).cost_curve(problem, TableShard(0, CACHED), 0)
            for name in ("torchrec", "torchrec-prefetch")
        )
        assert (ahead.gpu_s[1:-1] < plain.gpu_s[1:-1]).all()
        assert ahead.gpu_s[[0, -1]] == pytest.approx(plain.gpu_s[[0, -1]])
        shard = replace(in_dram("t", (0, 1_000_000, 1), (0, 64)), lookup="cached", cache_rows=9)
        plan = plan_for(problem, shard)
        parts = [
            cost_model(name).evaluate(problem, plan) for name in ("torchrec", "torchrec-prefetch")
        ]
        assert parts[0].bottleneck == "gpu:0 link"
        assert parts[0].gpus[0].hbm_s == 0 < parts[1].gpus[0].hbm_s
        assert 0 < parts[0].hbm_lookup_share == parts[1].hbm_lookup_share < 1

    def test_bandwidths_of_the_machine(self) -> None:
        problem = problem_of(zipf_table("t", 1000, 64), batch_size=8192)
        shard = in_hbm("t", (0, 1000, 1), (0, 64))
        own = TorchRec(bandwidths="topology")
        slow = own.evaluate(problem, plan_for(problem, shard)).gpus[0]
        gpus = tuple(
            replace(gpu, hbm_bytes_per_s=2 * gpu.hbm_bytes_per_s) for gpu in problem.topology.gpus
        )
        faster = replace(problem, topology=replace(problem.topology, gpus=gpus))
        fast = own.evaluate(faster, plan_for(faster, shard)).gpus[0]
        assert fast.hbm_s == pytest.approx(slow.hbm_s / 2)
        assert fast.communication_s == slow.communication_s
        default = TorchRec()
        before, after = (default.evaluate(p, plan_for(p, shard)) for p in (problem, faster))
        assert before == after
        with pytest.raises(TopologyError, match="one HBM bandwidth for all GPUs"):
            own.sharding_options(replace(problem, topology=unequal_machine()), 0)
        hosts = machine(1, 2)
        links = (replace(link, bytes_per_s=2 * link.bytes_per_s) for link in hosts.links)
        sent = []
        for topology in (hosts, replace(hosts, links=tuple(links))):
            over = replace(problem, topology=topology)
            sent.append(own.evaluate(over, plan_for(over, shard)).gpus[0].communication_s)
        assert 0 < sent[0] == pytest.approx(2 * sent[1])

    def test_hosts_of_unequal_sizes(self) -> None:
        topology = machine(2, 2)
        odd = replace(topology, gpus=topology.gpus[:3], links=topology.links[:3])
        mixed = replace(topology, gpus=tuple(topology.gpus[n] for n in (0, 2, 1, 3)))
        for other, words in ((odd, "equally many GPUs"), (mixed, "host by host")):
            problem = problem_of(zipf_table("t", 9), topology=other)
            with pytest.raises(TopologyError, match=words):
                TorchRec().sharding_options(problem, 0)

    @pytest.mark.parametrize("poolings", [("max",), ("sum", "none")])
    def test_tables_that_it_has_no_module_for(self, poolings: tuple[Any, ...]) -> None:
        features = tuple(Feature(f"f{n}", pooling=name) for n, name in enumerate(poolings))
        profile = TableProfile(Table("t", 9, 16, features=features), AccessCdf.zipf(9, 1.0))
        problem = Problem(Profile((profile,)), machine())
        with pytest.raises(ProblemError, match=r"table 't' has features with pooling .*; TorchRec"):
            TorchRec().cost_curve(problem, TableShard(0, CACHED), 0)

    @pytest.mark.parametrize("option", [
        CACHED._replace(row_slices=2),
        CACHED._replace(replicated_rows=5),
        CACHED._replace(row_slices=2, column_widths=(8, 8)),
        ShardingOption(),
    ])  # fmt: skip
    def test_options_that_it_does_not_have(self, option: ShardingOption) -> None:
        problem = problem_of(zipf_table("t", 10), topology=machine(2))
        with pytest.raises(ProblemError, match="TorchRec"):
            TorchRec().cost_curve(problem, TableShard(0, option), 0)


ROWS, COLS = (0, 10, 1), (0, 16)


HALVES = (0, 5, 1), (5, 10, 1)


def hbm(rows: tuple[int, int, int], *gpus: str, cols: tuple[int, int] = COLS) -> Shard:
    return in_hbm("t", rows, cols, *gpus)


def dram(lookup: Lookup, rows: tuple[int, int, int] = ROWS, gpu: int = 0, cache: int = 0) -> Shard:
    shard = in_dram("t", rows, COLS, f"gpu:{gpu}")
    return replace(shard, lookup=lookup, cache_rows=cache)


@needs_torchrec
@pytest.mark.parametrize(("words", "shards"), [
    ("lookup 'staged'", [dram("staged")]),
    ("lookup 'host'", [dram("host")]),
    (r"rows \[0, 10, 2\] are strided", [hbm((n, 10, 2), f"gpu:{n}") for n in range(2)]),
    (r"different ways \(device, uva\)", [hbm((0, 3, 1)), dram("uva", (3, 10, 1))]),
    ("are replicated on 2 GPUs", [hbm((0, 3, 1), "gpu:0", "gpu:1"), hbm((3, 10, 1))]),
    ("column slices of 12, 4 of its 16 columns are not even",
     [hbm(ROWS, cols=(0, 12)), hbm(ROWS, "gpu:1", cols=(12, 16))]),
    ("row blocks of 6, 4 rows", [hbm((0, 6, 1)), hbm((6, 10, 1), "gpu:1")]),
    ("the i-th on the i-th GPU", [hbm(HALVES[0], "gpu:1"), hbm(HALVES[1], "gpu:0")]),
    ("TorchRec has grids of even column slices",
     [hbm(HALVES[r], f"gpu:{(r + c) % 2}", cols=(8 * c, 8 * c + 8))
      for r in range(2) for c in range(2)]),
    ("a table has one load factor", [dram("cached", HALVES[n], n, 1 + 2 * n) for n in range(2)]),
])  # fmt: skip
def test_placements_that_torchrec_does_not_have(words: str, shards: list[Shard]) -> None:
    problem = problem_of(zipf_table("t", 10), topology=machine(2))
    plan = plan_for(problem, *shards)
    assert violations(plan) == []
    with pytest.raises(PlanMismatchError, match=rf"cannot place table 't' so: .*{words}"):
        TorchRec().evaluate(problem, plan)


@needs_torchrec
def test_buffers_of_lookups_that_torchrec_does_not_have() -> None:
    problem = problem_of(zipf_table("t", 10))
    with pytest.raises(PlanMismatchError, match="table 't': TorchRec has no lookup 'staged'"):
        TorchRec().with_buffers(problem, 0, in_dram("t", ROWS, COLS), returns_bags=True)


def test_without_torchrec_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.delitem(sys.modules, "cost_models.torchrec.estimates", raising=False)
    with pytest.raises(BackendError, match=r"pip install 'embedding-placer\[torchrec\]'"):
        cost_model("torchrec").sharding_options(problem_of(zipf_table("t", 9)), 0)
