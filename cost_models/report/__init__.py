"""Reports of cost models and what is computed with them; for the command line alone."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from cost_models.report.calibration import calibration_report, calibration_warnings
    from cost_models.report.simulate import simulate_report
    from cost_models.report.sweep import sweep_report, sweep_tables
    from cost_models.report.sweep_plot import plot_sweep

__all__ = [
    "calibration_report",
    "calibration_warnings",
    "plot_sweep",
    "simulate_report",
    "sweep_report",
    "sweep_tables",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "cost_models.report.calibration": "calibration_report calibration_warnings",
        "cost_models.report.simulate": "simulate_report",
        "cost_models.report.sweep": "sweep_report sweep_tables",
        "cost_models.report.sweep_plot": "plot_sweep",
    },
)
