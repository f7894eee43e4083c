"""Tables, JSON, CSV and pictures from values; for the command line alone.

Every function returns a `Report`, which prints nothing by itself.
"""

from placer.report.calibration import calibration_report
from placer.report.compare import CompareRow, compare_report, compare_row
from placer.report.diff import diff_report
from placer.report.explain import explain_report
from placer.report.learned import learned_report
from placer.report.plan import plan_report
from placer.report.plot import plot_compare
from placer.report.profile import profile_report, workloads_report
from placer.report.replan import replan_report
from placer.report.reshard import reshard_report
from placer.report.section import Column, Report, Section, rows_to_csv
from placer.report.simulate import simulate_report
from placer.report.sweep import sweep_report, sweep_tables
from placer.report.sweep_plot import plot_sweep
from placer.report.topology import topology_report
from placer.report.training import hit_rate_report, trace_report
from placer.report.whatif import plot_front, whatif_report

__all__ = [
    "Column",
    "CompareRow",
    "Report",
    "Section",
    "calibration_report",
    "compare_report",
    "compare_row",
    "diff_report",
    "explain_report",
    "hit_rate_report",
    "learned_report",
    "plan_report",
    "plot_compare",
    "plot_front",
    "plot_sweep",
    "profile_report",
    "replan_report",
    "reshard_report",
    "rows_to_csv",
    "simulate_report",
    "sweep_report",
    "sweep_tables",
    "topology_report",
    "trace_report",
    "whatif_report",
    "workloads_report",
]
