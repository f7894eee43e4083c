"""`placer train`: what a plan counts on, to hold a run against."""

from cost_models import Roofline
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.profile.profile import Profile


def hbm_shares(plan: Plan, profile: Profile | None) -> dict[str | None, float]:
    """The shares of lookups from HBM that a plan counts on: of each table, and of all under None.

    They follow from the profile's counts and the rows in HBM alone, whatever the cost model. There
    are none without a profile.
    """
    if profile is None:
        return {}
    problem = Problem.of_plan(plan, profile).in_plan_order(plan)
    cost = Roofline().evaluate(problem, plan)
    return {None: cost.hbm_lookup_share} | {
        table: own.hbm_lookup_share for table, own in cost.tables.items()
    }
