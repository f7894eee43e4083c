"""`placer calibrate`: constants, and how well they predict."""

from cost_models.calibrated.calibration import Calibration
from placer.report import section as form
from placer.report.section import Column, Report, attributes, table_of


def calibration_warnings(calibration: Calibration) -> list[str]:
    """Return what stands against the use of the constants."""
    if not calibration.noisy:
        return []
    return [
        "the machine was too noisy to trust these constants; calibrate again "
        "with nothing else running, or with --clock cpu"
    ]


def calibration_report(calibration: Calibration) -> Report:
    """Report constants with error bars, how well they predict, and how the machine varied."""
    noise = calibration.noise
    headline = [
        f"{calibration.cases} cases; step times of cases that a fit had not seen are off by "
        f"{form.share(calibration.relative_error)} on average, one of ten by more than "
        f"{form.share(calibration.p90_error)}",
        f"steps of a case spread by {form.share(noise.spread)}, a case measured again and again "
        f"by {form.share(noise.drift)}; {form.share(noise.wait)} of waiting for the processor",
    ]
    if calibration.noisy:
        headline.append("THE MACHINE WAS TOO NOISY to trust this: calibrate again when it is idle")
    return Report(
        title=f"Calibration of backend {calibration.setting.get('backend', '?')}",
        facts={
            **attributes(calibration, "cases", "relative_error", "p90_error"),
            **attributes(noise, "spread", "drift", "wait"),
            "noisy": calibration.noisy,
        },
        headline=tuple(headline),
        sections=(
            table_of(
                calibration.constants.items(),
                "constants",
                "Constants",
                Column("constant", "constant", of=lambda item: item[0]),
                Column("value_s", "time of a unit", of=lambda item: item[1].value_s),
                Column("low_s", "at least", of=lambda item: item[1].low_s),
                Column("high_s", "at most", of=lambda item: item[1].high_s),
            ),
        ),
    )
