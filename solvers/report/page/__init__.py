"""`placer report`: an HTML page of a plan and its analyses that needs no network."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from solvers.report.page.answers import Answers as Answers
    from solvers.report.page.answers import ask as ask
    from solvers.report.page.render import write_page as write_page

__getattr__, __all__ = lazy_exports(__name__)
