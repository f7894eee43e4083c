"""Show a value briefly: in one line in a shell and in logs, as a small table in notebooks."""

import html
from abc import ABC, abstractmethod


class Summarized(ABC):
    """Base class of large values, which show only a few facts when printed.

    >>> class Box(Summarized):
    ...     def summary(self) -> dict[str, str]:
    ...         return {"things": "3", "weight": "2 kg"}
    >>> Box()
    Box(things: 3, weight: 2 kg)
    """

    __slots__ = ()

    @abstractmethod
    def summary(self) -> dict[str, str]:
        """Return the facts to show, as texts by name."""

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}: {value}" for name, value in self.summary().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        """Return an HTML table of the facts. Notebooks call this."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.summary().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"
