"""Reports of plans, comparisons and analyses, for the command line only."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from solvers.report.compare import compare_report as compare_report
    from solvers.report.compare import fleet_report as fleet_report
    from solvers.report.compare import plot_compare as plot_compare
    from solvers.report.compare import plot_fleet as plot_fleet
    from solvers.report.explain import explain_report as explain_report
    from solvers.report.explain import memory_report as memory_report
    from solvers.report.plan import plan_report as plan_report
    from solvers.report.progress import refusal as refusal
    from solvers.report.progress import search_progress as search_progress
    from solvers.report.progress import verdict as verdict
    from solvers.report.whatif import plot_front as plot_front
    from solvers.report.whatif import replan_report as replan_report
    from solvers.report.whatif import whatif_report as whatif_report

__getattr__, __all__ = lazy_exports(__name__)
