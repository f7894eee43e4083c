"""Reports of plans, comparisons and analyses; for the command line alone."""

from solvers.report.compare import CompareRow, compare_report, compare_row
from solvers.report.compare_plot import plot_compare
from solvers.report.explain import explain_report
from solvers.report.plan import plan_report
from solvers.report.replan import replan_report
from solvers.report.whatif import plot_front, whatif_report

__all__ = [
    "CompareRow",
    "compare_report",
    "compare_row",
    "explain_report",
    "plan_report",
    "plot_compare",
    "plot_front",
    "replan_report",
    "whatif_report",
]
