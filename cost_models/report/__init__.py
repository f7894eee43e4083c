"""Reports of simulations, calibrations and sweeps, for the command line only."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from cost_models.report.measured import calibration_report as calibration_report
    from cost_models.report.measured import hbm_shares as hbm_shares
    from cost_models.report.measured import simulate_report as simulate_report
    from cost_models.report.sweep import plot_sweep as plot_sweep
    from cost_models.report.sweep import sweep_report as sweep_report
    from cost_models.report.sweep import sweep_tables as sweep_tables

__getattr__, __all__ = lazy_exports(__name__)
