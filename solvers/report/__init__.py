"""Reports of plans, comparisons and analyses; for the command line alone."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from solvers.report.compare import compare_report
    from solvers.report.compare_plot import plot_compare
    from solvers.report.explain import explain_report
    from solvers.report.fleet import fleet_report, plot_fleet
    from solvers.report.memory import memory_report
    from solvers.report.outcome import refusal, verdict
    from solvers.report.plan import plan_report
    from solvers.report.progress import search_progress
    from solvers.report.replan import replan_report
    from solvers.report.training import hbm_shares
    from solvers.report.whatif import plot_front, whatif_report

__all__ = [
    "compare_report",
    "explain_report",
    "fleet_report",
    "hbm_shares",
    "memory_report",
    "plan_report",
    "plot_compare",
    "plot_fleet",
    "plot_front",
    "refusal",
    "replan_report",
    "search_progress",
    "verdict",
    "whatif_report",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "solvers.report.compare": "compare_report",
        "solvers.report.compare_plot": "plot_compare",
        "solvers.report.explain": "explain_report",
        "solvers.report.fleet": "fleet_report plot_fleet",
        "solvers.report.memory": "memory_report",
        "solvers.report.outcome": "refusal verdict",
        "solvers.report.plan": "plan_report",
        "solvers.report.progress": "search_progress",
        "solvers.report.replan": "replan_report",
        "solvers.report.training": "hbm_shares",
        "solvers.report.whatif": "plot_front whatif_report",
    },
)
