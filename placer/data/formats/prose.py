"""Texts that are no ids: numbers, amounts, objects of JSON, and prose."""

import json
import re
from collections.abc import Sequence

from placer.data.layout import Decimal

THOUSANDS: dict[Decimal, str] = {".": "[,'’]", ",": "[. \u00a0\u202f]"}
"""What may stand between thousands, by what begins decimals."""
GROUPED: dict[Decimal, str] = {
    decimal: rf"[-+]?[0-9]{{1,3}}(?:{between}[0-9]{{3}})+(?:[{decimal}][0-9]*)?"
    for decimal, between in THOUSANDS.items()
}
"""Numbers with separators between thousands."""
_NESTED = re.compile(r"[\[({]\s*[\[({]")
_NUMBERS = tuple(
    re.compile(rf"[-+]?([0-9]{{1,3}})((?:{thousands}[0-9]{{3}})*)(?:{decimals}[0-9]+)?")
    for thousands, decimals in ((",", r"\."), (r"\.", ","))
)
_UNITS = re.compile(r"[$€£¥%]")
_LEAST_TEXTS = 50
_PROSE_BYTES, _PROSE_WORDS, _PROSE_DISTINCT = 60, 8, 0.9
"""Mean length, mean words and share of distinct texts from which on texts are prose."""


def no_ids(texts: Sequence[str]) -> str | None:
    """Return why texts of a column are no ids, and what to do about it; None if they may be some.

    >>> no_ids(["$1.50", "$12.00"])
    "it holds amounts such as '$1.50'; write them as numbers, such as 1234.5"
    """
    if not texts:
        return None
    if _are_amounts(texts):
        shown = next((text for text in texts if re.search(r"[^0-9]", text)), texts[0])
        if _UNITS.search("".join(texts)):
            return f"it holds amounts such as {shown!r}; write them as numbers, such as 1234.5"
        return f"it holds amounts such as {shown!r}; if they are numbers, make it dense (--dense)"
    nested = any(map(_NESTED.match, texts)) and all(text[0] in "[({" for text in texts)
    if nested or all(map(_is_object, texts)):
        return (
            "it holds objects of JSON, or lists of lists; write these as JSON lines, whose fields "
            "are columns"
        )
    return None


def prose(texts: Sequence[str], distinct_share: float) -> str | None:
    """Return why texts are prose, if they are; `distinct_share` is the share of distinct ones."""
    if len(texts) >= _LEAST_TEXTS and distinct_share > _PROSE_DISTINCT:
        length = sum(map(len, texts)) // len(texts)
        words = sum(len(text.split()) for text in texts) // len(texts)
        if length >= _PROSE_BYTES and words >= _PROSE_WORDS:
            return f"it holds prose, {words} words on average, and hardly a text twice"
    return None


def decimal_of(texts: Sequence[str]) -> Decimal | None:
    """Return what begins the decimals of numbers of which some have separators between thousands.

    None if some text is no number, or if they could be read in both ways.

    >>> decimal_of(["12.5", "1,484.20"]), decimal_of(["12,5", "1.484,20"]), decimal_of(["1,484"])
    ('.', ',', None)
    """
    found: list[Decimal] = []
    for decimal, grouped in GROUPED.items():
        point = re.escape(decimal)
        number = re.compile(rf"{grouped}|[-+]?[0-9]*(?:{point}[0-9]+)?(?:[eE][-+]?[0-9]+)?")
        if all(map(number.fullmatch, texts)):
            # 101,202 may be two ids: numbers are known by a decimal that is none of thousands.
            has_decimals = any(decimal in text for text in texts)
            if has_decimals and any(re.match(grouped, text) for text in texts):
                found.append(decimal)
    return found[0] if len(found) == 1 else None


def _are_amounts(texts: Sequence[str]) -> bool:
    """Return whether texts are numbers with a unit, or with separators between thousands."""
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
    """Return whether a text is an object of JSON."""
    if not text.startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
