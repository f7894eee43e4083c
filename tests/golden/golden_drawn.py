"""Drawn plans and problems with all memories, types and machines, and what is recorded of them."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import numpy as np
from golden_costs import random_shards, report_record, vary
from golden_problems import MIXED, constraints, counted, forbidding, model_of, problem, zipf
from plan_cases import machine
from tiny_problems import driven, tight_problem, tiny_problem, with_server

from cost_models import CostCurve, CostModel, Roofline, ShardingOption, shards_of
from cost_models.base import TableShard
from cost_models.roofline import EXECUTOR
from placer import Plan, Problem, Profile
from placer.dense import DenseLayers, MeasuredDense
from placer.growing import Growing
from placer.plan.diff import diff
from placer.plan.fields import Shard
from placer.plan.migration import migration
from placer.plan.peak_memory import largest_batch, peak_memory
from placer.plan.verify import violations
from placer.topology.devices import Drive
from solvers import solve
from solvers.bounds.binding import binding
from solvers.bounds.feasibility import impossible, rows_beyond_their_memories, usable_options
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.instance import Instance
from solvers.result import Limits, Termination
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import anneal, construct

# Plans with rows on drives, narrow rows, servers, types of exchanges, dense layers


@cache
def problems() -> dict[str, Problem]:
    """A problem of look-ahead on servers and unequal hosts, and one of serial steps on a host."""
    tables = (
        *MIXED,
        zipf("shared", 600, 32, lookups=1.5, pooling=("sum", "mean")),
        zipf("unpooled", 400, 16, lookups=3.0, coverage=0.6, pooling=("none",)),
        counted("log", 500, 64, lookups=2.0, seed=7),
        counted("grows", 400, 16, lookups=1.5, seed=8),
        zipf("large", 25_000, 16, lookups=2.0, exponent=0.7),
    )
    served, alone = machine(2, 2, servers=1), machine(2)
    drives = Drive(1 << 30, 2e6, 5e5), Drive(1 << 28, 1e6, 4e5), None
    gpus = [replace(one, hbm_bytes_per_s=one.hbm_bytes_per_s / (1 + n)) for n, one
            in enumerate(served.gpus)]  # fmt: skip
    hosts = [replace(one, drive=drive) for one, drive in zip(served.hosts, drives, strict=True)]
    served = replace(served, gpus=tuple(gpus), hosts=tuple(hosts))
    layers = DenseLayers((64, 1), (32, 16), 13, "concat", optimizer="adam", flops_per_s=1e12)
    profile, widths = Profile(tables, source="golden"), ("int8", "bfloat16", "float16")
    growing = {"grows": Growing(300, 2)}
    return {
        "served": Problem(profile, served, 48, dense=layers, widths=widths, growing=growing,
                          exchange_dtype="bfloat16"),
        "serial": Problem(profile, alone.with_memory(ssd="1GiB"), 64, pipeline="serial",
                          dense=MeasuredDense(1e-5), widths=widths, exchange_dtype="float16"),
    }  # fmt: skip


PLANS = 9
MODELS = "roofline", "calibrated", "executor"


@cache
def plans(name: str) -> tuple[Plan, ...]:
    """Random plans of a problem: sound but for what memories can hold."""
    problem = problems()[name]
    fields, made = problem.fields_of_plans, []
    for number in range(PLANS):
        rng = np.random.default_rng([77, number])
        shards = random_shards(fields["tables"], problem.topology, rng)
        vary(shards, fields["tables"], problem.topology, problem.widths, rng)
        found = [Shard(**{key: tuple(value) if isinstance(value, list) else value
                          for key, value in shard.items()}) for shard in shards]  # fmt: skip
        made.append(Plan(shards=tuple(found), **fields))
    return tuple(made)


def costs(name: str, model_name: str) -> list[Any]:
    """Costs of the random plans, and checksums of all curves, under one model."""
    problem, model = problems()[name], _model(model_name)
    found: list[Any] = []
    for plan in plans(name):
        report = model.evaluate(problem, plan)
        found.append([
            report_record(report), report.phase_s, np.asarray(report.parts_s).tolist(),
            {table: astuple(cost) for table, cost in report.tables.items()},
            [*map(astuple, report.phases)], report.longest_chain[0], report.has_dense_phase,
        ])  # fmt: skip
    gpus, serving = len(problem.topology.gpus), len(problem.topology.serving)
    for table, profile in enumerate(problem.profile):
        options = model.sharding_options(problem, table)
        curves = (
            model.cost_curve(problem, shard, gpu)
            for option in options
            for shard in _shards(table, option, profile.table.rows)
            for gpu in sorted({0, gpus - 1, serving - 1})
            if gpu < gpus or not shard.is_replica
        )
        found.append([profile.name, len(options), *_checksums(curves)])
    return found


def _shards(table: int, option: ShardingOption, rows: int) -> list[TableShard]:
    replica = [TableShard.replica(table, option)] if option.replicated_rows else []
    return [*shards_of(table, option, rows), *replica]


def _checksums(curves: Iterable[CostCurve]) -> list[float]:
    """Sums over all curves in which each point counts differently."""
    sums = np.zeros(8)
    for number, c in enumerate(curves, start=1):
        drive_s = np.zeros(1) if c.drive_s is None else c.drive_s
        phases = np.arange(1, len(c.phase_s) + 1)
        of_points = (c.hot_rows, phases @ c.phase_s, c.dram_s, c.hbm_bytes, c.dram_bytes,
                     np.atleast_1d(drive_s))  # fmt: skip
        each = [float(np.asarray(p) @ np.sqrt(np.arange(1, len(p) + 1))) for p in of_points]
        sums += np.sqrt(number) * np.array([*each, phases @ c.split_phase_s, c.split_hbm_bytes])
    return [float(one) for one in sums]


def options() -> list[Any]:
    """How many sharding options tables of several widths have on 16 GPUs, and their hash."""
    tables = [zipf(f"t{dim}", 30_000, dim, lookups=dim / 8) for dim in (8, 48, 144, 272, 512)]
    topology = machine(8, 2, hbm_bytes=1 << 24).with_memory(ssd="1GiB")
    asked = problem(*tables, counted("log", 900, 160, seed=9), topology=topology)
    asked = replace(asked, widths=("int8",))
    every = [Roofline().sharding_options(asked, table) for table in range(len(asked.profile))]
    return [[len(found), _sha256(found)] for found in every]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def placements(name: str) -> list[Any]:
    """What is said of each plan: memory, peaks, faults, and the moves from the plan before it."""
    profile, found = problems()[name].profile, []
    for before, plan in zip((plans(name)[-1], *plans(name)), plans(name), strict=False):
        change = diff(before, plan)
        moves = migration(change)
        peaks = [
            [
                peak.device,
                peak.free_bytes,
                peak.fullest.name,
                [phase.total_bytes for phase in peak.phases],
            ]
            for kind in ("cpu", "cuda")
            for peak in peak_memory(plan, profile, device_kind=kind)
        ]
        found.append([
            plan.summary(), [[v.rule, v.subject] for v in violations(plan)], peaks,
            largest_batch(plan, profile), [*map(astuple, change.tables)], change.changed_cells,
            change.compared_cells, change.kept_bytes, astuple(moves),
        ])  # fmt: skip
    return found


def _model(name: str) -> CostModel:
    return Roofline(EXECUTOR) if name == "executor" else model_of(name)


# Tiny problems of any kind, as `tiny_problems` draws them


class Annealed(StagedStrategy):
    """The cost greedy and annealing: the stages of `auto` without a simplex."""

    name = "annealed"

    def stages(self, instance: Instance) -> dict[str, Stage]:
        return {"greedy": construct, "annealed": lambda search: anneal(search, 1.0)}


def replicated(seed: int) -> Problem:
    """Tables that mostly fit as replicas alone, whose buffers are of a GPU's own samples."""
    tables = [zipf(f"t{n}", 20 + n, 64, lookups=30.0 + n, pooling=("none",)) for n in range(3)]
    topology = machine(4, hbm_bytes=(3000 + 400 * seed) << 10, dram_bytes=1 << 20)
    rules = constraints(**forbidding("row-wise", "column-wise"))
    return problem(*tables, topology=topology, asked=rules)


DRAWN: dict[str, Callable[[int], Problem]] = {
    "tiny": tiny_problem,
    "served": with_server,
    "drives": driven,
    "served drives": lambda seed: replace(
        driven(seed, served=True),
        dense=MeasuredDense(10.0 ** (seed % 6 - 7)),
        exchange_dtype="bfloat16",
    ),
    "tight": tight_problem,
    "replicated": replicated,
}
SEEDS = dict.fromkeys(DRAWN, range(14)) | {"tight": range(2, 13), "replicated": range(5)}


OTHERS = "beam", "dp", "greedy-lookup", "greedy-dim", "greedy-size-lookup"
MODEL_OF = {"drives": "executor", "tight": "calibrated"}


def drawn(kind: str, seed: int) -> list[Any]:
    """Bounds of a drawn problem, the proof that it has no plan, and its plan with its limits."""
    problem, model = DRAWN[kind](seed), _model(MODEL_OF.get(kind, "roofline"))
    instance = Instance(problem, model)
    failure = impossible(instance) or rows_beyond_their_memories(instance)
    usable = usable_options(instance)
    found: list[Any] = [
        _failure(failure),
        _failure(usable) if isinstance(usable, Termination) else [*map(len, usable)],
    ]
    if failure:
        return found
    bound = lagrangian_bound(instance)
    options = [one for of in bound.cheapest for one in of]
    found += [
        bound.step_time_s, bound.price_s_per_byte, bound.dram_price, bound.server_share,
        bound.part_s, sum(bound.enough_from_s), len(options),
        sum(one.longest_s for one in options), sum(one.priced_s for one in options),
    ]  # fmt: skip
    result = Annealed().solve(problem, model, Limits(3600.0, max_steps=60, threads=1, gap=1e-6))
    found += [_failure(result.termination), result.step_time_s, result.bound_s]
    if result.plan is not None:
        found += [_sha256([*map(astuple, result.plan.shards)]),
                  dict(binding(problem, result.plan, model).gains)]  # fmt: skip
    other = OTHERS[seed % len(OTHERS)]
    alone = solve(problem, other, model, time_limit_s=3600.0, max_steps=20, threads=1)
    return [*found, other, _failure(alone.termination), alone.step_time_s, alone.bound_s]


def _failure(ended: Termination | None) -> list[Any]:
    return [] if ended is None else [ended.reason, *map(astuple, ended.shortages)]
