"""Tables, JSON and CSV from values; for the command line and the reports of higher layers.

Every function returns a `Report`, which prints nothing by itself. `solvers.report` and
`cost_models.report` have the reports of their own values.
"""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.report.console import (
        Update,
        draw,
        print_report,
        print_seconds,
        print_stderr,
        print_title,
        print_training,
        print_violations,
        progress_bar,
        set_quiet,
        stoppable,
        this_command,
    )
    from placer.report.diff import diff_report
    from placer.report.estimate import estimate_report
    from placer.report.failures import one_line_errors
    from placer.report.profile import profile_report, unknown_words, workloads_report
    from placer.report.reshard import grown_report, reshard_report
    from placer.report.section import Column, Report, Section, rows_to_csv
    from placer.report.topology import topology_report
    from placer.report.training import parity_lines

__all__ = [
    "Column",
    "Report",
    "Section",
    "Update",
    "diff_report",
    "draw",
    "estimate_report",
    "grown_report",
    "one_line_errors",
    "parity_lines",
    "print_report",
    "print_seconds",
    "print_stderr",
    "print_title",
    "print_training",
    "print_violations",
    "profile_report",
    "progress_bar",
    "reshard_report",
    "rows_to_csv",
    "set_quiet",
    "stoppable",
    "this_command",
    "topology_report",
    "unknown_words",
    "workloads_report",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "placer.report.console": "Update draw print_report print_seconds print_stderr print_title "
        "print_training print_violations progress_bar set_quiet stoppable "
        "this_command",
        "placer.report.diff": "diff_report",
        "placer.report.estimate": "estimate_report",
        "placer.report.failures": "one_line_errors",
        "placer.report.profile": "profile_report unknown_words workloads_report",
        "placer.report.reshard": "grown_report reshard_report",
        "placer.report.section": "Column Report Section rows_to_csv",
        "placer.report.topology": "topology_report",
        "placer.report.training": "parity_lines",
    },
)
