"""Constants of `roofline` fitted to published times, and judged on sources that were left out.

A step is a sum of phases, each of which takes its slowest GPU, and each GPU's time in a phase is
linear in what `AMOUNTS` makes of the constants. So the model is asked once for every amount, and a
fit only weighs what it said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from _published import Measurement
from _published_plans import plan_of

from cost_models import Roofline
from cost_models.base import Float
from cost_models.cost_report import CostReport
from cost_models.dense import dense_step_s
from cost_models.roofline import RooflineConstants

FORWARD = ("ids", "copies", "lookup", "outputs")
"""Phases of a step before its dense layers."""

Values = Mapping[str, float]

FREE: dict[str, float] = {
    "update_share": 0.2,
    "update_bytes": 0.7,
    "repeat_share": 0.5,
    "probe_bytes": 0.5,
    "copy_share": 0.3,
    "step_s": 1.0,
    "exchange_step_s": 1.0,
    "eager_step_s": 1.0,
    "eager_embedding_s": 0.7,
    "dense_float32": 0.15,
    "dense_tensor": 0.2,
}
"""What is fitted, and by which factor (its logarithm) it may be off what is known beforehand.
Other constants are those of kernels that others have measured alone."""

BEFORE: dict[str, float] = {
    "update_share": 0.6,
    "update_bytes": 100.0,
    "repeat_share": 0.3,
    "probe_bytes": 6500.0,
    "copy_share": 0.75,
    "step_s": 0.5e-3,
    "exchange_step_s": 0.5e-3,
    "eager_step_s": 8e-3,
    "eager_embedding_s": 1.5e-3,
    "dense_float32": 1.0,
    "dense_tensor": 1.0,
}
"""What is known beforehand: 800 kernels of a DLRM at 10 us, shares of kernels, and so on."""

EAGER = {"eager_step_s": 17.5e-3, "eager_embedding_s": 1.9e-3}
"""Seconds that a step takes at least where Python launches each kernel: of a DLRM, and of a fused
lookup with its update. Trainers differ: it is no constant of the model."""

_PRIOR_WEIGHT = 0.03
_MOST_FACTOR = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A measurement, and what the model said of it for every amount.

    Attributes
    ----------
    report : CostReport
        For the constants as they are.
    base : float64, shape (phases, GPUs)
        Phase times that no amount changes.
    by_amount : float64, shape (amounts, phases, GPUs)
    dense_s : float
        Of the report's fixed time, that of the dense layers.
    """

    measurement: Measurement
    report: CostReport
    base: Float
    by_amount: Float
    dense_s: float

    def predicted_s(self, values: Values) -> float:
        """The step with other constants."""
        found = self.measurement
        own = RooflineConstants()
        amounts = _amounts(replace(own, **{n: values[n] for n in FREE if hasattr(own, n)}))
        phases = self.base + np.tensordot(amounts, self.by_amount, 1)
        schedule = self.report.schedule
        if found.kind == "forward":
            ahead = [schedule.phases.index(name) for name in FORWARD]
            return float(phases[ahead].max(axis=1).sum()) + self.forward_latency_s
        fixed = list(schedule.fixed_s)
        if found.dense is not None:
            several = len(phases[0]) > 1
            math = "dense_float32" if found.math == "float32" else "dense_tensor"
            fixed[0] += values["step_s"] - own.step_s
            fixed[0] += several * (values["exchange_step_s"] - own.exchange_step_s)
            fixed[0] += self.dense_s * (1 / values[math] - 1)
        step_s = replace(schedule, fixed_s=tuple(fixed)).step_time_s(phases)
        step_s = max(step_s, max((host.dram_s for host in self.report.hosts), default=0.0))
        if found.eager:
            step_s = max(step_s, values[f"eager_{found.kind}_s"])
        return step_s

    @property
    def forward_latency_s(self) -> float:
        """What the collectives before the dense layers take besides their bytes."""
        return 3 * self.measurement.topology().exchange_latency_s


def _amounts(constants: RooflineConstants) -> Float:
    """What times of phases are linear in."""
    c = constants
    return np.array(
        (
            1 / c.lookup_share,
            c.lookup_bytes / c.lookup_share,
            c.repeat_share / c.lookup_share,
            1 / c.update_share,
            c.update_bytes / c.update_share,
            c.probe_bytes,
            1 / c.copy_share,
            1 / c.in_place_share,
            c.repeat_share / c.in_place_share,
            1 / c.in_place_update_share,
        )
    )


def _moved() -> list[RooflineConstants]:
    """Constants, as many as there are amounts, that tell them all apart."""
    own = RooflineConstants()
    return [
        replace(own, lookup_share=own.lookup_share / 2),
        replace(own, lookup_bytes=own.lookup_bytes * 2),
        replace(own, repeat_share=own.repeat_share * 2),
        replace(own, update_share=own.update_share / 2),
        replace(own, update_bytes=own.update_bytes * 2),
        replace(own, probe_bytes=own.probe_bytes * 2),
        replace(own, copy_share=own.copy_share / 2),
        replace(own, in_place_share=own.in_place_share / 2),
        replace(own, in_place_share=own.in_place_share / 2, repeat_share=own.repeat_share * 2),
        replace(own, in_place_update_share=own.in_place_update_share / 2),
    ]


def ask(measurement: Measurement) -> Asked:
    """What the model says of a measurement for every amount."""
    problem = measurement.problem()
    plan = plan_of(problem, measurement.placement)
    own = RooflineConstants()
    first = Roofline(own).evaluate(problem, plan)
    phases, amounts = np.array(first.phase_s), _amounts(own)
    changes, moved = [], []
    for constants in _moved():
        report = Roofline(constants).evaluate(problem, plan)
        moved.append(np.array(report.phase_s) - phases)
        changes.append(_amounts(constants) - amounts)
    rates = np.tensordot(np.linalg.inv(np.array(changes)), np.array(moved), 1)
    dense_s = dense_step_s(problem) or 0.0
    return Asked(measurement, first, phases - np.tensordot(amounts, rates, 1), rates, dense_s)


def as_they_are() -> dict[str, float]:
    """The model's constants, and what only published trainers have."""
    own = RooflineConstants()
    known = {name: float(getattr(own, name)) for name in FREE if hasattr(own, name)}
    return {**known, **EAGER, "dense_float32": 1.0, "dense_tensor": 1.0}


def loss(values: Values, rows: Sequence[Asked]) -> float:
    """Mean logarithm of factors off, sources weighed by the root of their rows, and the prior."""
    sources = [row.measurement.source for row in rows]
    weights = np.array([sources.count(source) ** -0.5 for source in sources])
    off = [abs(np.log(row.predicted_s(values) / row.measurement.measured_s)) for row in rows]
    prior = [(np.log(values[name] / BEFORE[name]) / by) ** 2 for name, by in FREE.items()]
    capped = np.minimum(off, np.log(_MOST_FACTOR))
    return float(capped @ weights / weights.sum() + _PRIOR_WEIGHT * np.mean(prior))


def fit(rows: Sequence[Asked]) -> dict[str, float]:
    """Constants with the least `loss`, found by changing one at a time."""
    values = dict(BEFORE)
    best, steps = loss(values, rows), dict.fromkeys(FREE, 0.3)
    while max(steps.values()) > 0.02:
        for name in FREE:
            for step in (steps[name], -steps[name]):
                changed = {**values, name: values[name] * float(np.exp(step))}
                if (found := loss(changed, rows)) < best - 1e-6:
                    best, values = found, changed
                    steps[name] *= 1.3
                    break
            else:
                steps[name] /= 2
    return values


def left_out(rows: Sequence[Asked], judged: frozenset[str]) -> dict[str, dict[str, float]]:
    """By source, constants fitted to all others; sources in `judged` are never fitted to."""
    sources = dict.fromkeys(row.measurement.source for row in rows)
    return {
        source: fit([r for r in rows if r.measurement.source not in {source, *judged}])
        for source in sources
    }
