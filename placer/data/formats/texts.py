"""Tell what texts of a column hold: lists of ids, numbers, amounts, JSON objects, prose.

Lists are written as ``12|7|9``, ``[12, 7]``, ``{12,NULL}``, ``['a' 'b']``.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from placer.data.keys import list_offsets
from placer.data.layout import Decimal, IdType

_PLAIN_SEPARATORS = ("\x01", "\x02", "\x03", "|", "^")
"""They only ever separate ids. The first three are Hive's, the outermost first."""
_SEPARATORS = (*_PLAIN_SEPARATORS, ";", ",", " ")
_BRACKETS = r"^(?:\[([^\[\]]*)\]|\(([^()]*)\)|\{([^{}]*)\})$"
_WRAPPED = r"^[\w.]+\(([\[({].*[\])}])(?:,\s*dtype=[^()]*)?\)$|\bnp\.\w+\(([^()]*)\)"
"""A list or number as NumPy and PyTorch print it: ``array([1, 2])``, ``np.int64(1)``."""
_QUOTED_COMMA = r"['\"]\s*,\s*['\"]?|,\s*['\"]"
"""A separator between quoted texts. A comma without a quote beside it is part of a text."""
ELIDED = "..."
"""NumPy and pandas write it for omitted elements of a long list."""
_WHOLE, _PADDED = r"^-?[0-9]+$", r"^0[0-9]"
_NUMBER = r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
_CODE = r"^[\w-]*[0-9][\w-]*$"
"""Words between blanks are ids if they look like this, such as N412 or B00004U9JP."""
_CODES, _SINGLE_WORDS = 0.99, 3
"""Least share of such words; least mean number of one-word ids in a text that is a list."""
_ALONE = 0.9
"""Texts are lists if at least this share of their ids also stand alone in other texts."""
_LEAST_SHARE = 0.05
"""Texts are lists only if at least this share of them hold the separator."""
_MOST_SAMPLES = 2000
_LIST = re.compile(r"\s*[\[({].*[\])}]\s*|[^\s|^;,]+(?:[\s|^;,\x01-\x03]+[^\s|^;,]+)+", re.DOTALL)
THOUSANDS: dict[Decimal, str] = {".": "[,'’]", ",": "[. \u00a0\u202f]"}
"""Pattern of thousands separators, by decimal separator."""
GROUPED: dict[Decimal, str] = {
    decimal: rf"[-+]?[0-9]{{1,3}}(?:{between}[0-9]{{3}})+(?:[{decimal}][0-9]*)?"
    for decimal, between in THOUSANDS.items()
}
"""Pattern of numbers with thousands separators, by decimal separator."""
_NESTED = re.compile(r"[\[({]\s*[\[({]")
_NUMBERS = tuple(
    re.compile(rf"[-+]?([0-9]{{1,3}})((?:{thousands}[0-9]{{3}})*)(?:{decimals}[0-9]+)?")
    for thousands, decimals in ((",", r"\."), (r"\.", ","))
)
_UNITS = re.compile(r"[$€£¥%]")
_LEAST_TEXTS = 50
_PROSE_BYTES, _PROSE_WORDS, _PROSE_DISTINCT = 60, 8, 0.9
"""Least mean bytes, mean words and share of distinct texts of prose."""


def split_lists(texts: pa.Array, separator: str) -> pa.Array:
    """Split texts (large strings) into lists of texts; a missing text becomes an empty list.

    Brackets around a list, quotes and blanks around elements, and a separator at either end are
    removed. A blank as `separator` stands for any number of blanks and newlines.

    >>> split_lists(pa.array(["[1 2]", "3", "[]"], pa.large_string()), " ").to_pylist()
    [['1', '2'], ['3'], []]
    >>> split_lists(pa.array(["1|2|", "|"], pa.large_string()), "|").to_pylist()
    [['1', '2'], []]
    >>> split_lists(pa.array(["['a, b', 'c']"], pa.large_string()), ",").to_pylist()
    [['a, b', 'c']]
    """
    texts = _bare(texts)
    split = pc.ascii_split_whitespace
    if separator != " ":
        if separator == ",":
            quoted = pc.match_substring_regex(texts, r"^['\"]")
            if pc.any(quoted).as_py():
                separator = "\x1f"
                between = pc.replace_substring_regex(texts, _QUOTED_COMMA, separator)
                texts = pc.if_else(quoted, between, pc.replace_substring(texts, ",", separator))
        between = re.escape(separator)
        texts = pc.replace_substring_regex(texts, rf"^{between}|{between}\s*$", "")
        split = partial(pc.split_pattern, pattern=separator)
    lists = split(pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts))
    elements = pc.ascii_trim(lists.flatten(), " \t\r\n'\"")
    return pa.LargeListArray.from_arrays(list_offsets(lists), elements)


def find_lists(texts: Sequence[str], nulls: Sequence[str]) -> tuple[str, IdType | None] | None:
    """Return the separator and type of ids in texts that are lists; None if they are not.

    The type is None for lists of numbers that are not ids. Long texts are still lists, instead of
    prose, if they hold numbers or words with a digit, or are in brackets.

    >>> find_lists(["[12, 7]", "[]", "[3]"], ())
    (',', 'integer')
    >>> find_lists(["N412 N7 N9", "N7"], ())
    (' ', 'text')
    """
    together = "".join(texts[:_MOST_SAMPLES])
    if not texts or not any(one in together for one in (*_SEPARATORS, "[", "(", "{")):
        return None
    undecoded = sum("\ufffd" in text for text in texts)
    if "\0" in together or 2 * undecoded > len(texts):
        return None  # Bytes, such as those of UUIDs, and no texts.
    whole = pa.array(texts[:_MOST_SAMPLES], pa.large_string())
    bare = _bare(whole)
    closed = _share(whole, r"^[\w.]*\(*[\[({]")
    bracketed = closed > 0.5 and _share(bare, r"^[\[({]") < closed / 2
    bare = bare.filter(pc.not_equal(bare, ""))
    few = len(bare) * _LEAST_SHARE
    separators: tuple[str, ...] = (",", *_SEPARATORS) if bracketed else _SEPARATORS
    if bracketed and pc.any(_matches(bare, r"^['\"]")).as_py():
        # Texts in quotes may hold any separator. NumPy separates them by blanks, others by commas.
        separators = (" ",) if pc.any(_matches(bare, r"['\"]\s+['\"]")).as_py() else (",",)
    for separator in separators:
        is_last = separator == separators[-1]
        holding = pc.sum(pc.match_substring(bare, separator)).as_py() or 0
        if not holding and not (bracketed and is_last):
            continue
        lists = split_lists(bare, separator if holding else ",")
        ids = lists.flatten()
        if not bracketed and pc.max(pc.list_value_length(lists)).as_py() < 2:
            continue
        ids = ids.filter(pc.invert(pc.is_in(ids, pa.array(["", ELIDED, *nulls], ids.type))))
        if (whole := whole_type(ids)) is not None:
            return separator if holding else ",", whole
        if _share(ids, _NUMBER) == 1 and not pc.any(_matches(ids, _PADDED)).as_py():
            return separator, None
        if bracketed:
            return separator if holding else ",", "text"
        several = lists.filter(pc.greater(pc.list_value_length(lists), 1)).flatten()
        alone = pc.cast(pc.is_in(several, bare), pa.float64())
        if not is_last and (pc.mean(alone).as_py() or 0) >= _ALONE:
            return separator, "text"
        if holding < few:
            continue
        if separator in _PLAIN_SEPARATORS or (is_last and _share(ids, _CODE) >= _CODES):
            return separator, "text"
        if is_last:
            continue
        # Phrases have separators, too. In lists, distinct ids are far fewer than distinct texts, or
        # ids are single words, several a text.
        words = not pc.any(pc.match_substring(ids, " ")).as_py()
        if len(ids.unique()) < 0.5 * len(bare.unique()) or (
            words and len(ids) >= _SINGLE_WORDS * len(bare)
        ):
            return separator, "text"
    return None


def whole_type(ids: pa.Array) -> IdType | None:
    """Return the type of ids if all are whole numbers; None if not, or if there are none.

    Numbers of more than 64 bits are texts. Ids with leading zeros are not numbers.

    >>> whole_type(pa.array(["7", "18446744073709551615"])), whole_type(pa.array(["07"]))
    ('unsigned', None)
    """
    if _share(ids, _WHOLE) < 1 or pc.any(_matches(ids, _PADDED)).as_py():
        return None
    kinds: tuple[tuple[IdType, pa.DataType], ...] = (
        ("integer", pa.int64()),
        ("unsigned", pa.uint64()),
    )
    for kind, held in kinds:
        with suppress(pa.ArrowInvalid):
            ids.cast(held)
            return kind
    return "text"


def separator_in(text: str) -> str | None:
    """Return the separator of ids in a text that looks like a list, else None.

    >>> separator_in("1|2"), separator_in("[7]"), separator_in("abc")
    ('|', ',', None)
    """
    if _LIST.fullmatch(text) is None:
        return None
    return next((one for one in _SEPARATORS if one in text), ",")


def _bare(texts: pa.Array) -> pa.Array:
    """Return texts without blanks and brackets around them."""
    texts = pc.ascii_trim_whitespace(texts)
    if pc.any(_matches(texts, r"[(][\[({]|\bnp\.")).as_py():
        texts = pc.replace_substring_regex(texts, _WRAPPED, r"\1\2")
    if pc.any(_matches(texts, r"^[\[({]")).as_py():
        bare = pc.replace_substring_regex(texts, _BRACKETS, r"\1\2\3")
        texts = pc.ascii_trim_whitespace(bare)
    return texts


def _matches(texts: pa.Array, pattern: str) -> pa.Array:
    return pc.match_substring_regex(texts, pattern)


def _share(texts: pa.Array, pattern: str) -> float:
    return (pc.sum(_matches(texts, pattern)).as_py() or 0) / max(len(texts), 1)


def no_ids(texts: Sequence[str]) -> str | None:
    """Return why texts of a column are not ids, and a remedy; None if they may be ids.

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
    """Return why texts are prose, else None. `distinct_share` is the share of distinct texts."""
    if len(texts) >= _LEAST_TEXTS and distinct_share > _PROSE_DISTINCT:
        length = sum(map(len, texts)) // len(texts)
        words = sum(len(text.split()) for text in texts) // len(texts)
        if length >= _PROSE_BYTES and words >= _PROSE_WORDS:
            return f"it holds prose, {words} words on average, and hardly a text twice"
    return None


def decimal_of(texts: Sequence[str]) -> Decimal | None:
    """Return the decimal separator of numbers, if some of them have thousands separators.

    None if some text is not a number, or if both decimal separators are possible.

    >>> decimal_of(["12.5", "1,484.20"]), decimal_of(["12,5", "1.484,20"]), decimal_of(["1,484"])
    ('.', ',', None)
    """
    found: list[Decimal] = []
    for decimal, grouped in GROUPED.items():
        point = re.escape(decimal)
        number = re.compile(rf"{grouped}|[-+]?[0-9]*(?:{point}[0-9]+)?(?:[eE][-+]?[0-9]+)?")
        if all(map(number.fullmatch, texts)):
            # 101,202 may be two ids: only a decimal separator proves numbers.
            has_decimals = any(decimal in text for text in texts)
            if has_decimals and any(re.match(grouped, text) for text in texts):
                found.append(decimal)
    return found[0] if len(found) == 1 else None


def _are_amounts(texts: Sequence[str]) -> bool:
    """Return whether texts are numbers with a unit, or with thousands separators."""
    has_units = any(map(_UNITS.search, texts))
    bare = [_UNITS.sub("", text).strip() for text in texts] if has_units else texts
    for number in _NUMBERS:
        if not number.fullmatch(bare[0]):
            continue  # For most columns, one text is enough.
        found = [number.fullmatch(text) for text in bare]
        # 101,202 may be a list of two ids; 1,234 has fewer digits first, so it is a number.
        grouped = any(one and one[2] and len(one[1]) < 3 for one in found)
        if all(found) and (has_units or grouped):
            return True
    return False


def _is_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
