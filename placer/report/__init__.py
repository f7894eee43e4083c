"""Reports: show values as tables, JSON and CSV, for the command line and higher layers."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.report.console import print_drawn as print_drawn
    from placer.report.console import print_report as print_report
    from placer.report.console import print_stderr as print_stderr
    from placer.report.console import print_training as print_training
    from placer.report.console import print_violations as print_violations
    from placer.report.console import progress_bar as progress_bar
    from placer.report.console import stoppable as stoppable
    from placer.report.console import this_command as this_command
    from placer.report.inputs import growing_words as growing_words
    from placer.report.inputs import profile_report as profile_report
    from placer.report.inputs import topology_report as topology_report
    from placer.report.inputs import unknown_words as unknown_words
    from placer.report.inputs import workloads_report as workloads_report
    from placer.report.moves import diff_report as diff_report
    from placer.report.moves import grown_report as grown_report
    from placer.report.training import parity_lines as parity_lines
    from placer.report.training import pilot_report as pilot_report

__getattr__, __all__ = lazy_exports(__name__)
