"""The outcome of a search in one line."""

from placer.units import format_bytes, format_seconds
from solvers.result import SolveResult


def refusal(result: SolveResult) -> str:
    """Why there is no plan, and what is short on which device."""
    end = result.termination
    short = [
        f"{short.device} short of {format_bytes(short.short_bytes)} ({short.short_bytes} bytes) of "
        f"{short.resource.upper()} ({short.detail})"
        for short in end.shortages
    ]
    return "; ".join([f"no plan ({end.reason}): {end.detail}", *short])


def verdict(result: SolveResult) -> str:
    """How good a plan is."""
    seconds = f"found in {format_seconds(result.stats.get('seconds', 0.0))}"
    step = f"step {format_seconds(result.step_time_s or 0.0)}"
    if result.gap is None:
        return f"{step}, no bound was proven, {seconds}"
    return f"{step}, at most {result.gap:.2%} above the best possible, {seconds}"
