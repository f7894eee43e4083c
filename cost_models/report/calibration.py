"""What `placer calibrate` found out."""

from cost_models.calibrated.calibration import Calibration
from placer.report import section as form
from placer.report.section import Column, Report, Section
from placer.units import format_seconds


def calibration_report(found: Calibration) -> Report:
    """Constants with their error bars, how well they predict, and how steady the machine was."""
    noise = found.noise
    headline = [
        f"{found.cases} cases; step times of cases that a fit had not seen are off by "
        f"{form.share(found.relative_error)} on average, one of ten by more than "
        f"{form.share(found.p90_error)}",
        f"steps of a case spread by {form.share(noise.spread)}, a case measured again and again "
        f"by {form.share(noise.drift)}; {form.share(noise.wait)} of waiting for the processor",
    ]
    if found.noisy:
        headline.append("THE MACHINE WAS TOO NOISY to trust this: calibrate again when it is idle")
    return Report(
        title=f"Calibration of backend {found.setting.get('backend', '?')}",
        facts={
            "cases": found.cases,
            "relative_error": found.relative_error,
            "p90_error": found.p90_error,
            "spread": noise.spread,
            "drift": noise.drift,
            "wait": noise.wait,
            "noisy": found.noisy,
        },
        headline=tuple(headline),
        sections=(
            Section(
                "constants",
                "Constants",
                (
                    Column("constant", "constant"),
                    Column("value_s", "time of a unit", format_seconds),
                    Column("low_s", "at least", format_seconds),
                    Column("high_s", "at most", format_seconds),
                ),
                tuple(
                    {
                        "constant": name,
                        "value_s": constant.value_s,
                        "low_s": constant.low_s,
                        "high_s": constant.high_s,
                    }
                    for name, constant in found.constants.items()
                ),
            ),
        ),
    )
