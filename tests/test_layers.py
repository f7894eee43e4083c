"""No module imports, directly or through others, what imports it."""

import grimp
import networkx as nx
import pytest

PACKAGES = ("placer", "solvers", "cost_models")

REMAINING = (
    {"placer.constraints.constraints", "placer.constraints.file"},
    {"placer.plan.io", "placer.plan.plan", "placer.plan.schema"},
    {"placer.profile.merge", "placer.profile.profile", "placer.profile.store"},
    {"placer.simulator.caches", "placer.simulator.policy"},
    {
        "placer.topology.detect",
        "placer.topology.file",
        "placer.topology.parse",
        "placer.topology.presets",
        "placer.topology.topology",
    },
    {"solvers", "solvers.torchrec_planner"},
)
"""Modules that still import each other. This list only shrinks."""


@pytest.fixture(scope="module")
def imports() -> nx.DiGraph:
    """Modules and what they import, inside functions too; not what only types need."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    return nx.DiGraph(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )


def test_no_circle_between_modules(imports: nx.DiGraph) -> None:
    circles = [found for found in nx.strongly_connected_components(imports) if len(found) > 1]
    assert [
        " > ".join(module for module, _ in nx.find_cycle(imports.subgraph(circle)))
        for circle in circles
        if not any(circle <= known for known in REMAINING)
    ] == []
