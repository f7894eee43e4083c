"""Tables of results for the documentation, so that its figures are those of the files."""

from collections.abc import Sequence


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table; the first `texts` columns stand to the left, the others to the right."""
    rule = ["---" if place < texts else "---:" for place in range(len(headers))]
    lines = (headers, *rows)
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], f"|{'|'.join(rule)}|", *shown[1:]])
