"""Texts that are no ids: amounts, objects of JSON, and prose."""

import json
import re
from collections.abc import Sequence

_NUMBERS = tuple(
    re.compile(rf"[-+]?([0-9]{{1,3}})((?:{thousands}[0-9]{{3}})*)(?:{decimals}[0-9]+)?")
    for thousands, decimals in ((",", r"\."), (r"\.", ","))
)
_UNITS = re.compile(r"[$€£¥%]")
_LEAST_TEXTS = 50
_PROSE_BYTES, _PROSE_WORDS, _PROSE_DISTINCT = 60, 8, 0.9
"""Mean length, mean words and share of distinct texts from which on texts are prose."""


def no_ids(texts: Sequence[str], distinct_share: float = 0.0) -> str | None:
    """Why texts of a column are no ids, and what to do about it; None if they may be some.

    `distinct_share` is that of the distinct texts in all.

    >>> no_ids(["$1.50", "$12.00"])
    "it holds amounts such as '$1.50'; write them as numbers, such as 1234.5"
    """
    if not texts:
        return None
    if _are_amounts(texts):
        return f"it holds amounts such as {texts[0]!r}; write them as numbers, such as 1234.5"
    if all(map(_is_object, texts)):
        return "it holds objects of JSON; write these as JSON lines, whose fields are columns"
    if len(texts) >= _LEAST_TEXTS and distinct_share > _PROSE_DISTINCT:
        length = sum(map(len, texts)) // len(texts)
        words = sum(len(text.split()) for text in texts) // len(texts)
        if length >= _PROSE_BYTES and words >= _PROSE_WORDS:
            return f"it holds prose, {words} words on average, and hardly a text twice"
    return None


def _are_amounts(texts: Sequence[str]) -> bool:
    """Whether texts are numbers with a unit, or with separators between thousands."""
    has_units = any(map(_UNITS.search, texts))
    bare = [_UNITS.sub("", text).strip() for text in texts] if has_units else texts
    for number in _NUMBERS:
        if not number.fullmatch(bare[0]):
            continue  # Of most columns no further text is looked at.
        found = [number.fullmatch(text) for text in bare]
        # 101,202 may be a list of two ids; in 1,234 the first digits are fewer.
        grouped = any(one and one[2] and len(one[1]) < 3 for one in found)
        if all(found) and (has_units or grouped):
            return True
    return False


def _is_object(text: str) -> bool:
    """Whether a text is an object of JSON, or a list of such."""
    if not text.startswith(("{", "[{")):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or bool(value)
