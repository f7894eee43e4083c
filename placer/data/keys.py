"""Turn raw ids of a log into 64-bit keys.

A key depends on one value alone, so a column has the same keys in every file, format or chunk:

- an integer is its own key (two's complement);
- a text of exactly eight hexadecimal digits in lower case, as Criteo and Avazu write hashed
  categories, is the integer that it spells, as in the DLRM reference;
- any other text is the 64-bit FNV-1a hash of its UTF-8 bytes (Fowler, Noll, Vo;
  draft-eastlake-fnv). Two of n texts share a key with probability n² / 2⁶⁵: 4·10⁻⁵ at
  40 million;
- a missing value (null or empty text) is key 0, as in the DLRM reference, or no lookup.

Eight bytes of a text form a word, with the first byte lowest. Operations are vectorized: they work
on one word of each of many texts.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.layout import Missing
from placer.data.log import Keys, Offsets
from placer.errors import DataError

Bytes = npt.NDArray[np.uint8]

_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view())
_SHORT_BYTES = 16
"""Up to this mean length, hashing every text is faster than finding distinct texts in Arrow."""
_FIRST = 16384
"""Number of texts to compare first. If nearly all differ, as UUIDs do, hash every text."""
MOST_TEXT_BYTES = 8192
"""Longest text allowed as an id: texts are hashed byte by byte."""

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_FNV_INVERSE = np.uint64(pow(0x100000001B3, -1, 1 << 64))

_WORD = 8
_WORD_BITS = np.uint64(64)
_BYTE, _BYTE_BITS = np.uint64(0xFF), np.uint64(8)
_FIRST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], dtype=np.uint64)
"""For each n, a mask of the first n bytes of a word."""

_ONES = np.uint64(0x0101010101010101)
"""The lowest bit of each byte of a word."""


def is_text(kind: pa.DataType) -> bool:
    """Return whether ids of this Arrow type, or of a list of it, are texts."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return kind in _TEXTS or pa.types.is_fixed_size_binary(kind)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type holds a bag of ids per sample."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def can_be_ids(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type can be a categorical feature."""
    if is_list(kind) and pa.types.is_null(kind.value_type):
        return True  # Arrow's type of lists that are all empty.
    if is_list(kind) or pa.types.is_dictionary(kind):
        return not is_list(kind.value_type) and can_be_ids(kind.value_type)
    is_whole = pa.types.is_integer(kind) or is_whole_decimal(kind)
    return bool(is_text(kind) or is_whole or pa.types.is_boolean(kind))


def is_whole_decimal(kind: pa.DataType) -> bool:
    """Return whether a type is a decimal of scale 0, as Snowflake and Oracle write ids."""
    return bool(pa.types.is_decimal(kind) and kind.scale == 0)


def bags_from_arrow(array: pa.Array, missing: Missing) -> tuple[Keys, Offsets | None]:
    """Return keys and bag offsets of a column of integers, texts, or lists of these.

    `missing` says whether a missing value is key 0 or no lookup, in lists too. A missing list is
    always empty. Offsets are None if every sample has one key.
    """
    if is_list(array.type):
        offsets = list_offsets(array)
        keys, present = _keys(array.flatten())
        if missing == "zero" or present.all():
            return keys, offsets
        return keys[present], offsets_of(present)[offsets]
    keys, present = _keys(array)
    if missing == "zero" or present.all():
        return keys, None
    return keys[present], offsets_of(present)


def offsets_of(lengths: npt.NDArray[Any]) -> Offsets:
    """Return the offsets of bags with the given lengths, and the end of the last bag.

    >>> offsets_of(np.array([2, 0, 1]))
    array([0, 2, 2, 3])
    """
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def list_offsets(lists: pa.Array) -> Offsets:
    """Return the offsets of lists in their flattened elements. A missing list is empty."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return offsets_of(lengths.to_numpy(zero_copy_only=False))


def _keys(array: pa.Array) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Return the key of each value, 0 if missing, and which values are present."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        keys, present = _keys(array.dictionary)
        valid = _valid(array)
        index = pc.fill_null(array.indices, 0).to_numpy(zero_copy_only=False)
        if not keys.size:
            return np.zeros(len(array), dtype=np.uint64), valid
        present = present[index] & valid
        return np.where(present, keys[index], np.uint64(0)), present
    if is_text(kind):
        return _text_keys(array.cast(pa.large_binary()))
    if is_whole_decimal(kind):
        is_unsigned = (pc.max(array).as_py() or 0) >= 1 << 63
        try:
            return _keys(array.cast(pa.uint64() if is_unsigned else pa.int64()))
        except pa.ArrowInvalid as error:
            raise DataError(f"an id is beyond 64 bits: {error}; write it as text") from error
    if pa.types.is_null(kind):
        return np.zeros(len(array), dtype=np.uint64), np.zeros(len(array), dtype=bool)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        valid = _valid(array)
        values = array if array.null_count == 0 else pc.fill_null(array, pa.scalar(0).cast(kind))
        numbers = values.to_numpy(zero_copy_only=False)
        if numbers.dtype == np.uint64:
            return numbers, valid
        return numbers.astype(np.int64, copy=False).view(np.uint64), valid
    raise DataError(f"a column of type {kind} cannot hold ids; they are integers or texts")


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    if array.null_count == 0:
        return np.ones(len(array), dtype=bool)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)


def _text_keys(array: pa.Array) -> tuple[Keys, npt.NDArray[np.bool_]]:
    data, starts, lengths = _text_buffers(array)
    present = lengths > 0
    if data.size <= _SHORT_BYTES * lengths.size or len(array[:_FIRST].unique()) > 0.9 * _FIRST:
        return text_keys(data, starts, lengths), present
    # Most long texts repeat, as URLs do: make the key of each distinct text once.
    encoded = array.dictionary_encode()
    keys = np.append(text_keys(*_text_buffers(encoded.dictionary)), np.uint64(0))
    index = encoded.indices.fill_null(keys.size - 1)
    return keys[index.to_numpy(zero_copy_only=False)], present


def _text_buffers(array: pa.Array) -> tuple[Bytes, Offsets, Offsets]:
    """Return bytes, starts and lengths of an array of large binaries; a null has length 0."""
    _, offset_buffer, data_buffer = array.buffers()
    if not len(array):
        none = np.zeros(0, dtype=np.int64)
        return np.zeros(0, dtype=np.uint8), none, none
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[
        array.offset : array.offset + len(array) + 1
    ]
    first, end = int(offsets[0]), int(offsets[-1])
    data: Bytes = np.zeros(0, dtype=np.uint8)
    if end > first:
        data = np.frombuffer(data_buffer, dtype=np.uint8)[first:end]
    lengths: Offsets = np.diff(offsets)
    if array.null_count:
        lengths[~_valid(array)] = 0
    return data, offsets[:-1] - first, lengths


def text_keys(data: Bytes, starts: Offsets, lengths: Offsets) -> Keys:
    """Return keys of the texts ``data[starts[i]:starts[i] + lengths[i]]``; 0 for empty texts.

    Raises DataError if a text is longer than `MOST_TEXT_BYTES`.

    >>> data = np.frombuffer(b"0000002asite-7", dtype=np.uint8)
    >>> keys = text_keys(data, np.array([0, 8, 14]), np.array([8, 6, 0]))
    >>> [hex(key) for key in keys]
    ['0x2a', '0x2f80650177ed612a', '0x0']
    """
    return keys_in(as_words(data), starts, lengths)


def keys_in(words: Keys, starts: Offsets, lengths: Offsets) -> Keys:
    """Return the keys of texts as `text_keys` does, from the words of `as_words`."""
    eight = np.flatnonzero(lengths == _WORD)
    if eight.size == lengths.size:
        if eight.size and int(starts[-1]) == _WORD * (starts.size - 1):
            text = words[: starts.size]  # Texts without a gap between them.
        else:
            text = first_words(words, starts)
    else:
        text = first_words(words, starts[eight])
    keys, spelled = _hex_values(text)
    if not spelled.all():
        eight, keys = eight[spelled], keys[spelled]
    if eight.size == lengths.size:
        return keys
    others = lengths > 0
    others[eight] = False
    if others.all():
        return fnv1a(words, starts, lengths)
    hashed = np.flatnonzero(others)
    mixed = np.zeros(lengths.size, dtype=np.uint64)
    mixed[eight] = keys
    if hashed.size:
        mixed[hashed] = fnv1a(words, starts[hashed], lengths[hashed])
    return mixed


def fnv1a(words: Keys, starts: Offsets, lengths: Offsets) -> Keys:
    """Return 64-bit FNV-1a hashes of texts, from the words of `as_words`."""
    longest = int(lengths.max(initial=0))
    if longest > MOST_TEXT_BYTES:
        raise DataError(
            f"an id is a text of {longest} bytes, and at most {MOST_TEXT_BYTES} are read"
        )
    if not longest:
        return np.full(lengths.size, _FNV_OFFSET, dtype=np.uint64)
    if longest * lengths.size <= 2 * int(lengths.sum()) + _WORD * lengths.size:
        return _similar_hashes(words, starts, lengths)
    # Hash texts of up to 8, 16, 32, … bytes separately, so that short texts take fewer steps.
    hashes = np.full(lengths.size, _FNV_OFFSET, dtype=np.uint64)
    shorter, most = 0, _WORD
    while shorter < longest:
        group = np.flatnonzero((lengths > shorter) & (lengths <= most))
        if group.size:
            hashes[group] = _similar_hashes(words, starts[group], lengths[group])
        shorter, most = most, 2 * most
    return hashes


def _similar_hashes(words: Keys, starts: Offsets, lengths: Offsets) -> Keys:
    """Return hashes of texts of similar lengths, with one step for each byte of the longest.

    A step beyond a text's end hashes a zero byte, which only multiplies by the prime. The prime is
    odd, so multiplying by its inverse modulo 2^64 undoes the step.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    hashes = np.full(lengths.size, _FNV_OFFSET, dtype=np.uint64)
    byte = np.empty_like(hashes)
    for first, word in zip(range(0, longest, _WORD), _words_of(words, starts), strict=False):
        if shortest < first + _WORD:
            word &= _FIRST_BYTES.take(lengths - first, mode="clip")
        for place in range(min(_WORD, longest - first)):
            np.bitwise_and(word, _BYTE, out=byte)
            hashes ^= byte
            hashes *= _FNV_PRIME
            if place + 1 < longest - first:
                word >>= _BYTE_BITS
    if shortest < longest:
        undone = np.full(longest - shortest + 1, _FNV_INVERSE)
        undone[0] = 1
        hashes *= np.multiply.accumulate(undone).take(longest - lengths)
    return hashes


def _hex_values(text: Keys) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Return values of texts of eight characters, and which texts are hexadecimal.

    Digits are bytes 0x30 to 0x39, and letters are 0x61 to 0x66. The value of a byte is its lower
    half, plus 9 for a letter. A text is hexadecimal if writing its values, all below 16, gives it.
    """
    values = text >> np.uint64(6)
    values &= _ONES
    values *= np.uint64(9)
    other = text & (_ONES * np.uint64(0x0F))
    values += other
    np.add(values, _ONES * np.uint64(6), out=other)
    other >>= np.uint64(4)
    other &= _ONES
    other *= np.uint64(0x61 - 0x30 - 10)
    other += _ONES * np.uint64(0x30)
    other += values
    other ^= text
    other |= values & (_ONES * np.uint64(0x10))
    return joined_digits(values, 16), other == 0


def joined_digits(digits: Keys, base: int) -> Keys:
    """Return the numbers of words of eight digits, the highest digit in the lowest byte.

    >>> word = np.frombuffer(bytes([0, 0, 0, 0, 2, 0, 2, 6]), dtype="<u8").copy()
    >>> joined_digits(word, 10)
    array([2026], dtype=uint64)
    """
    # In place: join neighbours, then pairs, then fours. The lower half has the higher digits.
    digits *= np.uint64(1 + (base << 8))
    digits >>= np.uint64(8)
    digits &= np.uint64(0x00FF00FF00FF00FF)
    digits *= np.uint64(1 + (base**2 << 16))
    digits >>= np.uint64(16)
    digits &= np.uint64(0x0000FFFF0000FFFF)
    digits *= np.uint64(1 + (base**4 << 32))
    digits >>= np.uint64(32)
    return digits


def first_words(words: Keys, starts: Offsets) -> Keys:
    """Return the eight bytes from each start on, even beyond a text's end."""
    return next(_words_of(words, starts))


def as_words(data: Bytes) -> Keys:
    """Return a copy of bytes as words, with one more word beyond the last byte."""
    words = np.zeros(data.size // _WORD + 2, dtype=np.uint64)
    words.view(np.uint8)[: data.size] = data
    return words if words.dtype.byteorder != ">" else words.byteswap()


def _words_of(words: Keys, starts: Offsets) -> Iterator[Keys]:
    """Yield the first eight bytes of each text, then the next eight, and so on."""
    place = starts >> 3
    below = (starts.view(np.uint64) & np.uint64(_WORD - 1)) << np.uint64(3)
    above = _WORD_BITS - below
    following = words.take(place, mode="clip")
    while True:
        word = np.right_shift(following, below, out=following)
        place += 1
        following = words.take(place, mode="clip")
        word |= following << above
        yield word
