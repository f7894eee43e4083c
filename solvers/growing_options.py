"""Options of tables that take any id. Only `cli.py` uses this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import click

import placer
from placer.click_types import Seconds
from placer.knobs import option
from solvers.options import usage_errors

if TYPE_CHECKING:
    from placer.growing import Growing


@dataclass(frozen=True, slots=True)
class GrowingRows:
    """Tables that take any id, with numbers of rows that the user gives."""

    HEADING: ClassVar[str] = "Growing tables"

    growing: tuple[str, ...] = option(
        (),
        "Let a table take any id: with N rows, with rows for a hit rate of P%, or with as many "
        "rows as fit (auto, the default, which only `placer plan` has). lru evicts the id that was "
        "read longest ago; admit=N gives an id a row at its Nth read; ttl=N takes it back after N "
        "steps without a read.",
        metavar="TABLE[=N|P%|auto][:lru][:admit=N][:ttl=N]",
    )

    def rows(self, profile: placer.Profile) -> Mapping[str, Growing]:
        """Return the tables that grow. Raise UsageError if a number of rows is missing."""
        growing, chosen = self._parsed(profile)
        if chosen:
            name = chosen[0]
            raise click.UsageError(
                f"--growing {name} lacks its rows: write {name}=2000000 or {name}=99%; only "
                "`placer plan` chooses them, and says how many"
            )
        return growing

    def _parsed(self, profile: placer.Profile) -> tuple[dict[str, Growing], list[str]]:
        from placer.profile.growing_tables import growing_of

        with usage_errors("--growing"):
            return growing_of(profile, self.growing)


@dataclass(frozen=True, slots=True)
class GrowingOptions(GrowingRows):
    """Tables that take any id, with numbers of rows that may be chosen."""

    miss_price: Any = option(
        None,
        "With --growing TABLE=auto: step time that 1% more hits is worth, such as 50us. Rows that "
        "cost more step time than their hits are worth are left out.",
        kind=Seconds(or_none=True),
    )

    def of(self, profile: placer.Profile) -> tuple[dict[str, Growing], list[str]]:
        """Return the tables that grow, and the names of those whose capacity is to be chosen."""
        growing, chosen = self._parsed(profile)
        if self.miss_price is not None and not chosen:
            raise click.UsageError(
                "--miss-price is for --growing TABLE=auto, which chooses capacities"
            )
        return growing, chosen
