"""Tables, JSON and CSV from values; for the command line and the reports of higher layers.

Every function returns a `Report`, which prints nothing by itself. `solvers.report` and
`cost_models.report` have the reports of their own values.
"""

from placer.report.diff import diff_report
from placer.report.profile import profile_report, workloads_report
from placer.report.reshard import reshard_report
from placer.report.section import Column, Report, Section, rows_to_csv
from placer.report.topology import topology_report
from placer.report.training import hit_rate_report, trace_report

__all__ = [
    "Column",
    "Report",
    "Section",
    "diff_report",
    "hit_rate_report",
    "profile_report",
    "reshard_report",
    "rows_to_csv",
    "topology_report",
    "trace_report",
    "workloads_report",
]
