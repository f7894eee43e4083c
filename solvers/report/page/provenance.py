"""Where the figures of a page come from."""

from placer import __version__
from placer.report.plain import plain
from placer.units import format_seconds
from solvers.report.page.answers import Answers


def provenance(answers: Answers) -> list[tuple[str, str]]:
    """Names and values, for people."""
    plan, facts = answers.plan, answers.shown.facts
    known = [
        ("Machine", plan.topology.name + (" (emulated)" if plan.topology.emulated else "")),
        ("Profile", plan.provenance.profile or "not named"),
        ("Samples per GPU and step", f"{plan.batch_size:,}"),
        ("Pipeline", plan.pipeline),
        (
            "Solver",
            f"{plan.solver.name}, seed {plan.solver.seed}, "
            f"{format_seconds(plan.solver.seconds)}, {plan.solver.status}",
        ),
        ("Cost model of the plan", plan.solver.cost_model or "not named"),
        ("Cost model of this page", str(facts["cost_model"])),
        ("Searched", plan.solver.search_space or "not named"),
        ("Plan made", plan.provenance.created or "not dated"),
        ("Made by placer", plan.provenance.placer_version or "not named"),
        ("This page by placer", __version__),
        ("Hash of the problem", plan.provenance.problem_sha256 or "none"),
    ]
    if not answers.bound_holds:
        known.append(
            (
                "Bound",
                "left out: profile, machine, constraints or cost model are not those that the "
                "plan was made for",
            )
        )
    return [(name, plain(value)) for name, value in known]
