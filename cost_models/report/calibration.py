"""`placer calibrate`: constants, and how well they predict."""

from cost_models.calibrated.calibration import Calibration
from placer.report import section as form
from placer.report.section import Report, attributes, columns, table_of


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
    constants = table_of(
        [(name, one.value_s, one.low_s, one.high_s) for name, one in calibration.constants.items()],
        "constants",
        "Constants",
        *columns(constant="constant", value_s="time of a unit", low_s="at least", high_s="at most"),
    )
    facts = {
        **attributes(calibration, "cases", "relative_error", "p90_error"),
        **attributes(noise, "spread", "drift", "wait"),
        "noisy": calibration.noisy,
    }
    backend = calibration.setting.get("backend", "?")
    return Report(f"Calibration of backend {backend}", (constants,), facts, tuple(headline))
