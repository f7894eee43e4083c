"""No module imports, directly or through others, what imports it."""

import grimp
import networkx as nx
import pytest

PACKAGES = ("placer", "solvers", "cost_models")


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
    ] == []
