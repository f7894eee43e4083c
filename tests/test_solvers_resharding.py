"""Tables that are sharded anew: ways to do so are rated together."""

from dataclasses import replace

import numpy as np
import pytest
from fast_and_full import fewer
from plan_cases import machine
from problem_cases import problem_of, unequal_machine, zipf_table
from test_solvers import with_hbm

from cost_models import Roofline
from placer import AccessCdf, Feature, Table, TableProfile, Topology
from solvers import solve
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.instance import Instance
from solvers.search.construction import construct
from solvers.search.moves import resharded
from solvers.search.resharding import Without


@pytest.mark.parametrize(
    "topology",
    [unequal_machine(2 << 20), pytest.param(machine(2, 2), marks=pytest.mark.slow)],
)
def test_ways_to_shard_a_table_are_rated_together_as_one_by_one(topology: Topology) -> None:
    tables = [
        zipf_table(f"t{n}", 3000 + 2000 * n, (16, 32)[n % 2], lookups=4.0)
        for n in range(fewer(5, 4))
    ]
    problem = problem_of(*tables, topology=topology, batch_size=256)
    instance = Instance(with_hbm(problem, 0.5), Roofline())
    bound = lagrangian_bound(instance)
    assignment = construct(instance, bound, bound.step_time_s)
    kept = [list(shards) for shards in assignment.shards]
    checked = 0
    for table in range(instance.tables):
        options = instance.options_of(table)
        together = Without(assignment, table).rated(options)
        for option, key_s in zip(options, together, strict=True):
            spread = Without(assignment, table).spread(option)
            assert (spread is None) == (key_s == np.inf)
            changed = resharded(assignment, table, option)
            if spread is None or changed is None:
                assert changed is None
                continue
            change, _ = spread
            assert changed.option_of[table] == option
            assert all(changed.shards[gpu] == shards for gpu, shards in change.items())
            true_s = instance.objective.key_s(changed.phase_s)
            assert key_s == pytest.approx(true_s, rel=0.05)
            checked += 1
    assert checked > 5 * instance.tables
    assert assignment.shards == kept
    # GPUs that held nothing else are left empty.
    alone = Instance(problem_of(tables[0], topology=topology, batch_size=256), Roofline())
    bound = lagrangian_bound(alone)
    assignment = construct(alone, bound, bound.step_time_s)
    left = Without(assignment, 0).kept
    assert sorted(left) == [gpu for gpu, shards in enumerate(assignment.shards) if shards]
    assert not any(left.values())


@pytest.mark.filterwarnings("error")
def test_what_a_shard_leaves_is_never_less_than_nothing() -> None:
    """A power that rounding had made negative was no number, with a warning."""
    topology = Topology.parse("2xt4+2xcpu", hbm=1_051_501, dram="1GiB")
    unread = Table("t0", 2, 6, "float16", "adam", (Feature("t0", 1.0, 0.0),))
    read = Table("t1", 6, 129, "bfloat16", "adam", (Feature("t1", 20.0, 0.5, "mean"),))
    counts = (unread, [5, 3]), (read, [7, 3, 1, 1, 0, 0])
    tables = (TableProfile(one, AccessCdf.from_counts(of)) for one, of in counts)
    problem = problem_of(*tables, topology=topology, batch_size=8192)
    problem = replace(problem, widths=("float16",), exchange_dtype="bfloat16")
    assert solve(problem, "greedy-cost", max_steps=5, threads=1).plan is not None
