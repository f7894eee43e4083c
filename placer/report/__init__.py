"""Tables, JSON, CSV and pictures from values; for the command line alone.

Every function returns a `Report`, which prints nothing by itself.
"""

from placer.report.compare import CompareRow, compare_report, compare_row
from placer.report.plan import plan_report
from placer.report.plot import plot_compare
from placer.report.profile import profile_report, workloads_report
from placer.report.section import Column, Report, Section, rows_to_csv
from placer.report.topology import topology_report

__all__ = [
    "Column",
    "CompareRow",
    "Report",
    "Section",
    "compare_report",
    "compare_row",
    "plan_report",
    "plot_compare",
    "profile_report",
    "rows_to_csv",
    "topology_report",
    "workloads_report",
]
