"""What values print: one line whatever their size, and a table in notebooks."""

from plan_cases import in_hbm, machine
from torch import nn

from placer import Plan, Problem, Table, Topology, apply_plan
from placer.workloads import named_workload
from solvers import solve


def test_large_values_print_one_line_and_a_notebook_table() -> None:
    profile = named_workload("random-60@3")
    problem = Problem(profile, Topology.parse("8xh100"), batch_size=512)
    result = solve(problem, "greedy-size")
    assert result.plan is not None
    for value in (profile, problem, result, result.plan):
        line, table = repr(value), value._repr_html_()
        assert line.startswith(f"{type(value).__name__}(")
        assert len(line) < 160
        assert "\n" not in line
        assert table.startswith("<table>")
        assert table.count("<tr>") == len(value.summary()) >= 4
    assert "tables: 60" in repr(problem)
    assert "GPUs: 8" in repr(result.plan)
    assert "step: " in repr(result.plan)


def test_an_applied_model_prints_one_line() -> None:
    names = ["<a>", "b", "c", "d"]
    plan = Plan(
        tuple(Table(name, 5, 4, optimizer="sgd") for name in names),
        machine(1),
        tuple(in_hbm(name, (0, 5, 1), (0, 4)) for name in names),
    )
    model = nn.ModuleDict({name: nn.EmbeddingBag(5, 4, mode="sum") for name in names})
    applied = apply_plan(model, plan, backend="torch")
    assert repr(applied) == "AppliedPlan(tables: 4, named: <a>, b, c and 1 more)"
    assert "&lt;a&gt;, b, c and 1 more" in applied._repr_html_()
