"""Reports of plans, comparisons and analyses; for the command line alone."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from solvers.report.compare import compare_report, plot_compare
    from solvers.report.explain import explain_report
    from solvers.report.fleet import fleet_report, plot_fleet
    from solvers.report.memory import memory_report
    from solvers.report.plan import hbm_shares, plan_report
    from solvers.report.progress import refusal, search_progress, verdict
    from solvers.report.replan import replan_report
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
        "solvers.report.compare": "compare_report plot_compare",
        "solvers.report.explain": "explain_report",
        "solvers.report.fleet": "fleet_report plot_fleet",
        "solvers.report.memory": "memory_report",
        "solvers.report.plan": "hbm_shares plan_report",
        "solvers.report.progress": "refusal search_progress verdict",
        "solvers.report.replan": "replan_report",
        "solvers.report.whatif": "plot_front whatif_report",
    },
)
