"""Reports of cost models and what is computed with them; for the command line alone."""

from cost_models.report.calibration import calibration_report
from cost_models.report.learned import learned_report
from cost_models.report.simulate import simulate_report
from cost_models.report.sweep import sweep_report, sweep_tables
from cost_models.report.sweep_plot import plot_sweep

__all__ = [
    "calibration_report",
    "learned_report",
    "plot_sweep",
    "simulate_report",
    "sweep_report",
    "sweep_tables",
]
