"""The verdict of a page in words: the step time, its bound, what binds, and advice."""

from collections.abc import Sequence
from typing import NamedTuple

from cost_models import CostReport
from placer.report import section as form
from placer.report.section import Row
from placer.units import counted, format_bytes, format_seconds, plain
from solvers.bounds.binding import Binding, Resource

NEAR = 0.05
"""Within this gap of the bound, do not advise a longer search."""

_NAMES: dict[Resource, str] = {
    "free hbm": "HBM that is left free",
    "hbm": "too little HBM",
    "dram": "too little host memory",
    "hbm bandwidth": "reading and writing HBM",
    "link": "the links between hosts and GPUs",
    "dram bandwidth": "the bandwidth of host memory",
    "peers": "exchanges between GPUs of a host",
    "network": "exchanges between hosts",
    "launches": "the launches of kernels",
    "drives": "the drives of the hosts",
    "dense": "the dense layers",
    "nothing": "nothing by itself",
}

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

_ROUNDING = 1e-5
"""Do not mention smaller gains."""

_BUYABLE: dict[Resource, str] = {
    "hbm": "HBM",
    "dram": "host memory",
    "hbm bandwidth": "HBM bandwidth",
    "link": "host link bandwidth",
    "dram bandwidth": "host memory bandwidth",
    "peers": "bandwidth between GPUs",
    "network": "network bandwidth",
}


class Tile(NamedTuple):
    """A figure at the top of a page: its key in the facts, its value, and texts for people."""

    key: str
    title: str
    value: object
    text: str
    note: str


class Verdict(NamedTuple):
    """The verdict of a plan: a summary, what binds with the evidence, advice and figures."""

    summary: str
    binds: str
    advice: tuple[str, ...]
    tiles: tuple[Tile, ...]


def verdict(
    facts: Row, cost: CostReport, binding: Binding, *, bound_holds: bool, memory: Sequence[Row]
) -> Verdict:
    """Return the verdict of a plan from its facts.

    `facts` and the rows of `memory` come from `solvers.report.plan_report`. `bound_holds` says
    whether the plan's bound is for this cost model and problem.
    """
    gap = facts["gap"] if bound_holds else None
    name = _NAMES[binding.resource]
    summary = f"A step takes {format_seconds(facts['step_time_s'])}"
    if gap is None:
        summary += "; no bound says how near the best possible that is."
    elif gap <= NEAR:
        summary += f", at most {form.share(gap)} more than the best possible placement."
    else:
        best = format_seconds(facts["bound_s"])
        summary += f"; no placement can take less than {best}, so there may be room."
    advice = [_ADVICE[binding.resource]]
    # Gains of 10% more of each resource that can be bought, largest first.
    gains = sorted(binding.gains.items(), key=lambda one: -one[1])
    known = [(_BUYABLE[of], gain) for of, gain in gains if of in _BUYABLE and gain > _ROUNDING]
    if known:
        words = ", ".join(f"{name} {form.share(gain)}" for name, gain in known)
        advice.append(f"A tenth more would gain, in samples a second: {words}.")
    if gap is not None and gap > NEAR:
        room = 1 - facts["bound_s"] / facts["step_time_s"]
        search = "with --solver auto" if str(facts["solver"]).startswith("greedy") else "for longer"
        longer = f"Searching {search} (placer plan --time-limit 300) can save at most "
        advice.insert(0, f"{longer}{form.share(room)} of the step.")
    over = [row for row in memory if row["total_bytes"] > row["capacity_bytes"]]
    if over:
        devices = counted(len(over), "device")
        advice.insert(0, f"{devices} would hold more than there is: make a new plan.")
    if cost.relative_error is not None and cost.cost_model == "roofline":
        advice.append(
            f"Times are a model's, and half of them off by more than "
            f"{form.share(cost.relative_error)}: placer calibrate measures your machine."
        )
    binds = f"{name[0].upper()}{name[1:]}. The step {plain(binding.words)}."
    return Verdict(summary, binds, tuple(advice), _tiles(facts, gap))


def _tiles(facts: Row, gap: float | None) -> tuple[Tile, ...]:
    error, bound_s = facts["relative_error"], facts["bound_s"]
    model = "" if error is None else f"± {form.share(error)}, {plain(str(facts['cost_model']))}"
    bound = "no bound" if gap is None or not bound_s else f"bound {format_seconds(bound_s)}"
    known = {**facts, "gap": gap}
    drives = ("ssd_used_bytes", "On SSD", format_bytes, "")
    return tuple(
        Tile(key, title, known[key], "–" if known[key] is None else show(known[key]), note)
        for key, title, show, note in (
            ("step_time_s", "Step time", format_seconds, model),
            ("gap", "Above the bound", form.share, bound),
            ("hbm_lookup_share", "Lookups from HBM", form.share, ""),
            ("balance", "Balance", form.fraction, "1 when no GPU waits"),
            ("hbm_used_bytes", "In HBM", format_bytes, "with buffers"),
            ("dram_used_bytes", "In DRAM", format_bytes, "with buffers"),
            *([drives] if facts.get("ssd_used_bytes") else []),
        )
    )
