"""`placer report`: a plan and the answers to questions about it as one page without a network."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from solvers.report.page.answers import Answers, ask
    from solvers.report.page.questions import QUESTION_FLAGS, Questions
    from solvers.report.page.render import page_html, write_page

__all__ = ["QUESTION_FLAGS", "Answers", "Questions", "ask", "page_html", "write_page"]

__getattr__ = lazy_exports(
    __name__,
    {
        "solvers.report.page.answers": "Answers ask",
        "solvers.report.page.questions": "QUESTION_FLAGS Questions",
        "solvers.report.page.render": "page_html write_page",
    },
)
