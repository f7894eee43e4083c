"""The verdict of a page in words: the step time, its bound, and advice."""

from collections.abc import Sequence

from placer.report import section as form
from placer.report.section import Row
from placer.units import counted, format_seconds
from solvers.bounds.binding import Binding, Resource

NEAR = 0.05
"""Within this gap of the bound, do not advise a longer search."""

_ADVICE: dict[Resource, str] = {
    "free hbm": "Rows that are in DRAM fit there: make a new plan, or search for longer.",
    "hbm": "More HBM on each GPU, more GPUs or a smaller type of the weights make room for more "
    "hot rows. --hbm-steps shows what other budgets give.",
    "dram": "Give hosts more memory, or tables a smaller type: rows now take the HBM of others.",
    "hbm bandwidth": "The work is the GPUs' own: faster memory, a smaller dim or a smaller type "
    "shorten it.",
    "link": "A faster link shortens the step. --whatif says by how much.",
    "dram bandwidth": "Hosts with more memory channels, or a smaller type of the weights, shorten "
    "the step.",
    "peers": "Faster links between them, or a smaller dim, shorten the step.",
    "network": "A faster network, a smaller dim or tables kept within one host shorten the step.",
    "launches": "A larger batch spreads them over more samples; tables of fewer widths and types "
    "need fewer.",
    "drives": "Faster drives, or more host memory, shorten the step.",
    "dense": "No placement shortens them: smaller layers, bfloat16 products or more GPUs do.",
    "nothing": "No single resource is worth buying. A larger batch spreads what every step takes.",
}


def summary(facts: Row) -> str:
    """Return a plan's step time, and how far from the best it may be, from its facts."""
    words, gap = f"A step takes {format_seconds(facts['step_time_s'])}", facts["gap"]
    if gap is None:
        return f"{words}; no bound says how near the best possible that is."
    if gap <= NEAR:
        return f"{words}, at most {form.share(gap)} more than the best possible placement."
    best = format_seconds(facts["bound_s"])
    return f"{words}; no placement can take less than {best}, so there may be room."


def advice(facts: Row, binding: Binding, memory: Sequence[Row]) -> list[str]:
    """Return sentences that say how a step may become shorter.

    `facts` and the rows of `memory` come from `solvers.report.plan_report`.
    """
    words = [_ADVICE[binding.resource]]
    gains = sorted(binding.gains.items(), key=lambda one: -one[1])
    # Leave out free HBM, which the machine has already, and gains too small to mention.
    more = (one for one in gains if one[0] != "free hbm" and one[1] > 1e-5)
    known = [f"{resource} {form.share(gain)}" for resource, gain in more]
    if known:
        words.append(f"A tenth more would gain, in samples a second: {', '.join(known)}.")
    gap = facts["gap"]
    if gap is not None and gap > NEAR:
        room = 1 - facts["bound_s"] / facts["step_time_s"]
        search = "with --solver auto" if str(facts["solver"]).startswith("greedy") else "for longer"
        longer = f"Searching {search} (placer plan --time-limit 300) can save at most "
        words.insert(0, f"{longer}{form.share(room)} of the step.")
    over = sum(row["total_bytes"] > row["capacity_bytes"] for row in memory)
    if over:
        words.insert(
            0, f"{counted(over, 'device')} would hold more than there is: make a new plan."
        )
    return words
