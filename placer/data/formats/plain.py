"""Read blocks of delimited text without quotes, in less time than Arrow takes.

Separators are found in the block's bytes, and short numbers and texts are read in place. Blocks
with anything unusual, such as a quote, a carriage return or a missing field, are left to Arrow.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from placer.data.formats.text import Block, pieces
from placer.data.keys import (
    MOST_TEXT_BYTES,
    as_words,
    first_words,
    joined_digits,
    keys_in,
    offsets_of,
    text_keys,
)
from placer.data.layout import Columns, Missing
from placer.data.log import Keys, Offsets
from placer.data.source import RawBags, RawBatch

_UNUSUAL = b'"\r'
_NEWLINE = ord("\n")
_DIGIT = re.compile(rb"[0-9]")
_MOST_MISSES = 3
"""After this many blocks in a row that needed Arrow, leave all blocks to Arrow."""
_BYTES = np.uint64(0x0101010101010101)
"""The lowest bit of each byte of a word."""
_LOW_BITS = _BYTES * np.uint64(0x7F)
_SCALES = np.array([1.0, *(10.0**n for n in range(7, -1, -1))])
"""Divisors of digits, by the byte of the decimal point: none (0), the first (1) to the last."""


class PlainText:
    """Reads the columns of blocks with only short numbers and texts."""

    def __init__(self, columns: Columns, missing: Missing) -> None:
        layout = columns.layout
        self._separator = (layout.separator or ",").encode()
        self._columns, self._missing = columns, missing
        kinds = {layout.types.get(name, "integer") for name in columns.names}
        nulls = [one.encode() for one in layout.nulls]
        self._null_lengths = np.array([len(one) for one in nulls], dtype=np.int64)
        starts = np.cumsum(self._null_lengths) - self._null_lengths
        null_data = np.frombuffer(b"".join(nulls), dtype=np.uint8)
        self._null_keys = text_keys(null_data, starts, self._null_lengths)
        can_be = len(self._separator) == 1 and not layout.lists and kinds <= {"integer", "text"}
        # Leave decimal commas, and numbers that stand for missing values, to Arrow.
        can_be &= layout.decimal != "," and not any(map(_DIGIT.search, nulls))
        self._tries = _MOST_MISSES if can_be else 0
        # Ends of fields; every block reuses the memory.
        self._places = np.empty((2, 0), dtype=np.int64)

    def batch(self, block: Block, names: Sequence[str]) -> RawBatch | None:
        """Return the samples of a block with the named columns; None if Arrow must read it."""
        if not self._tries:
            return None
        found = self._batch(block, names)
        self._tries = self._tries - 1 if found is None else _MOST_MISSES
        return found

    def _batch(self, block: Block, names: Sequence[str]) -> RawBatch | None:
        if block.place.lines is not None or not set(self._columns.names) <= set(names):
            return None
        data = np.frombuffer(block.data, dtype=np.uint8)
        # Search the whole buffer of the block first: that is much faster.
        for byte in _UNUSUAL:
            if byte in block.data.obj and (data == byte).any():  # type: ignore[operator]
                return None
        ends = self._field_ends(data, block.samples, len(names))
        if ends is None:
            return None
        words = as_words(data)
        numbers = {name: number for number, name in enumerate(names)}

        def field(name: str) -> tuple[Offsets, Offsets]:
            """Return starts and lengths of a column's fields."""
            number = numbers[name]
            before = ends[number - 1] if number else np.concatenate(([-1], ends[-1, :-1]))
            starts = before + 1
            return starts, ends[number] - starts

        features = {}
        for name in self._columns.sparse:
            starts, lengths = field(name)
            if self._columns.is_text(name):
                if int(lengths.max()) > MOST_TEXT_BYTES:
                    return None
                keys = keys_in(words, starts, lengths)
                lengths = self._without_nulls(keys, lengths)
            else:
                ids = _ids(words, starts, lengths)
                if ids is None:
                    return None
                keys = ids
            present = lengths > 0
            if self._missing == "zero" or present.all():
                features[name] = RawBags(keys)
            else:
                features[name] = RawBags(keys[present], offsets_of(present))
        dense = np.empty((block.samples, len(self._columns.dense)), dtype=np.float32)
        for position, name in enumerate(self._columns.dense):
            values = _numbers(words, *field(name))
            if values is None:
                return None
            dense[:, position] = values
        labels = None
        if self._columns.label is not None:
            labels = _numbers(words, *field(self._columns.label))
            if labels is None:
                return None
        return RawBatch(block.place, block.samples, features, dense, labels)

    def _without_nulls(self, keys: Keys, lengths: Offsets) -> Offsets:
        """Return lengths, 0 for texts that stand for a missing value; set their keys to 0, too."""
        if not self._null_keys.size:
            return lengths
        short = np.flatnonzero(lengths <= self._null_lengths.max())
        if short.size and lengths[short].any():
            short = short[np.isin(keys[short], self._null_keys)]
            if short.size:
                lengths = lengths.copy()
                lengths[short], keys[short] = 0, 0
        return lengths

    def _field_ends(
        self, data: npt.NDArray[np.uint8], records: int, fields: int
    ) -> npt.NDArray[np.int64] | None:
        """Return ends of fields, shape (fields, records); None if a record has more or fewer."""
        if self._places.shape[1] < records * fields:
            self._places = np.empty((2, records * fields), dtype=np.int64)
        in_order, by_field = self._places[:, : records * fields]
        filled = 0
        for first, piece in pieces(data):
            found = piece == self._separator[0]
            found |= piece == _NEWLINE
            places = np.flatnonzero(found)
            if places.size > in_order.size - filled:
                return None
            np.add(places, first, out=in_order[filled : filled + places.size])
            filled += places.size
        if filled < in_order.size:
            return None
        ends = by_field.reshape(fields, records)
        np.copyto(ends, in_order.reshape(records, fields).T)
        # There are as many newlines as records, so each must end a record's last field.
        return ends if (data[ends[-1]] == _NEWLINE).all() else None


def _ids(words: Keys, starts: Offsets, lengths: Offsets) -> Keys | None:
    """Return whole numbers as keys, 0 for empty fields; None if Arrow must read them."""
    text, lengths, negative = _without_sign(words, starts, lengths)
    values = _digits(text, lengths)
    if values is None:
        return None
    numbers = values.view(np.int64)
    np.negative(numbers, out=numbers, where=negative)
    return values


def _numbers(words: Keys, starts: Offsets, lengths: Offsets) -> npt.NDArray[np.float32] | None:
    """Return numbers such as -1.50, NaN for empty fields; None if Arrow must read them."""
    empty = lengths == 0
    text, lengths, negative = _without_sign(words, starts, lengths)
    # Set the highest bit in the byte of a text's decimal point.
    point = text ^ (_BYTES * np.uint64(ord(".")))
    point = ~(((point & _LOW_BITS) + _LOW_BITS) | point | _LOW_BITS)
    has_point = point != 0
    before = np.right_shift(point, np.uint64(7)) - np.uint64(1)  # All bits without a point.
    if has_point.any():
        if (point & (point - has_point)).any() or (lengths[has_point] < 2).any():
            return None
        behind = ~(before | (before << np.uint64(8)) | np.uint64(0xFF))
        text = ((text & before) << (has_point * np.uint64(8))) | (text & behind)
        lengths = lengths - has_point
    digits = _digits(text, lengths)
    if digits is None:
        return None
    # Dividing in float64 gives the float32 nearest to the eight digits.
    values: npt.NDArray[np.float64] = digits / _SCALES.take(
        np.frexp(point.astype(np.float64))[1] >> 3
    )
    np.negative(values, out=values, where=negative)
    values[empty] = np.nan
    return values.astype(np.float32)


def _without_sign(
    words: Keys, starts: Offsets, lengths: Offsets
) -> tuple[Keys, Offsets, npt.NDArray[np.bool_]]:
    """Return fields without a leading minus as words, their lengths, and which had a minus.

    The last character is the highest byte. The word of a field over eight characters is no number.
    """
    text = first_words(words, starts)
    negative = (text & np.uint64(0xFF) == np.uint64(ord("-"))) & (lengths > 1)
    if negative.any():
        text[negative] >>= np.uint64(8)
        lengths = lengths - negative
    text <<= np.uint64(64) - (lengths.view(np.uint64) << np.uint64(3))
    return text, lengths, negative


def _digits(text: Keys, lengths: Offsets) -> Keys | None:
    """Return values of words of digits; None if a word has others, or more than eight."""
    if int(lengths.max(initial=0)) > 8:
        return None
    text = text ^ (
        (_BYTES * np.uint64(0x30)) << (np.uint64(64) - (lengths.view(np.uint64) << np.uint64(3)))
    )
    if (((text + _BYTES * np.uint64(0x80 - 10)) | text) & ~_LOW_BITS).any():
        return None
    return joined_digits(text, 10)
