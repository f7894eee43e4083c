"""Show the progress of a search, and describe its result in one line."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from placer.report.console import progress_bar
from placer.units import format_bytes, format_seconds
from solvers.result import Limits, SearchState, SolveResult, gap_of


@contextmanager
def search_progress(limits: Limits) -> Iterator[Limits]:
    """Show a progress bar on a terminal's stderr; yield search limits that update the bar."""
    started, best_s, remark = time.monotonic(), math.inf, ""
    with progress_bar("s of search") as update:

        def show() -> None:
            update(int(time.monotonic() - started), math.ceil(limits.time_limit_s), remark)

        def on_state(now: SearchState) -> None:
            nonlocal best_s, remark
            # A stage that starts again does not know earlier placements.
            best_s = min(best_s, math.inf if now.step_time_s is None else now.step_time_s)
            remark = state_in_words(now._replace(step_time_s=best_s))
            show()

        def stop() -> bool:
            show()
            return limits.stop is not None and limits.stop()

        yield replace(limits, stop=stop, on_state=on_state)


def state_in_words(state: SearchState) -> str:
    """Return the state of a search in one line.

    >>> state_in_words(SearchState("greedy", 0.0202, 0.02))
    'greedy: step 20.2 ms, at most 1.00% above the best possible'
    """
    if state.step_time_s is None or math.isinf(state.step_time_s):
        return f"{state.stage}: no placement yet"
    words = f"{state.stage}: step {format_seconds(state.step_time_s)}"
    gap = gap_of(state.step_time_s, max(0.0, state.bound_s))
    return words if gap is None else f"{words}, at most {gap:.2%} above the best possible"


def refusal(result: SolveResult) -> str:
    """Return the reason why there is no plan, and the missing memory of each device."""
    end = result.termination
    words = [f"no plan ({end.reason}): {end.detail}"]
    for short in end.shortages:
        size = f"{format_bytes(short.short_bytes)} ({short.short_bytes} bytes)"
        words.append(f"{short.device} short of {size} of {short.resource.upper()} ({short.detail})")
    return "; ".join(words)


def verdict(result: SolveResult) -> str:
    """Return a plan's step time, gap to the bound and search time in words."""
    seconds = f"found in {format_seconds(result.stats.get('seconds', 0.0))}"
    step = f"step {format_seconds(result.step_time_s or 0.0)}"
    if result.gap is None:
        return f"{step}, no bound was proven, {seconds}"
    return f"{step}, at most {result.gap:.2%} above the best possible, {seconds}"
