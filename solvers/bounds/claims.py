"""Proven claims, with the sharding options of the plans that they are about."""

from collections.abc import Sequence
from dataclasses import dataclass

from solvers.model.instance import Instance, ShardingOption

Options = Sequence[Sequence[ShardingOption]]
"""By table, the sharding options that it may take."""


def every_option(instance: Instance) -> Options:
    """All sharding options of an instance's tables."""
    return [instance.options_of(table) for table in range(instance.tables)]


@dataclass(frozen=True, slots=True)
class Claim:
    """A proof that no plan of some sharding options takes less than a step time.

    Whoever proves a bound says which options it looked at. `Search.prove` takes a claim only if it
    covers all options that are searched.

    Attributes
    ----------
    step_time_s : float
        0 if nothing is proven.
    options : sequence of sequences of ShardingOption
        By table. Options that the proof itself ruled out are among them.
    """

    step_time_s: float
    options: Options

    def covers(self, instance: Instance) -> bool:
        """Return whether the claim is about all plans of an instance."""
        return all(
            mine is every or set(every) <= set(mine)
            for mine, every in zip(self.options, every_option(instance), strict=True)
        )
