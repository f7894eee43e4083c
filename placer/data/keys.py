"""Turn raw ids of a log into 64-bit keys.

A key depends on one value alone, so a column has the same keys in every file, format or chunk:

- an integer is its own key (two's complement);
- a text of exactly eight hexadecimal digits in lower case, as Criteo and Avazu write hashed
  categories, is the integer that it spells, as in the DLRM reference;
- any other text is the 64-bit FNV-1a hash of its UTF-8 bytes (Fowler, Noll, Vo;
  draft-eastlake-fnv). Two of n texts share a key with probability n² / 2⁶⁵: 4·10⁻⁵ at
  40 million;
- a missing value (null or empty text) is key 0, as in the DLRM reference, or no lookup.
"""

from collections.abc import Sequence
from functools import cache
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
_HEX_DIGITS = 8


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


def bags_from_arrow(
    array: pa.Array, missing: Missing, nulls: Sequence[str] = ()
) -> tuple[Keys, Offsets | None]:
    """Return keys and bag offsets of a column of integers, texts, or lists of these.

    `missing` says whether a missing value is key 0 or no lookup, in lists too. A missing list is
    always empty. Texts among `nulls` are missing, too. Offsets are None if every sample has one
    key.
    """
    offsets = list_offsets(array) if is_list(array.type) else None
    keys, present = _keys(array if offsets is None else array.flatten(), nulls)
    if missing == "zero" or present.all():
        return keys, offsets
    kept = offsets_of(present)
    return keys[present], kept if offsets is None else kept[offsets]


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


def _keys(array: pa.Array, nulls: Sequence[str]) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Return the key of each value, 0 if missing, and which values are present."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        keys, present = _keys(array.dictionary, nulls)
        valid = _valid(array)
        index = pc.fill_null(array.indices, 0).to_numpy(zero_copy_only=False)
        if not keys.size:
            return np.zeros(len(array), dtype=np.uint64), valid
        present = present[index] & valid
        return np.where(present, keys[index], np.uint64(0)), present
    if is_text(kind):
        keys, lengths = _text_keys(array.cast(pa.large_binary()))
        known, longest = _keys_of_nulls(tuple(nulls))
        short = np.flatnonzero((lengths > 0) & (lengths <= longest))
        if short.size:
            absent = short[np.isin(keys[short], known)]
            keys[absent], lengths[absent] = 0, 0
        return keys, lengths > 0
    if is_whole_decimal(kind):
        is_unsigned = (pc.max(array).as_py() or 0) >= 1 << 63
        try:
            return _keys(array.cast(pa.uint64() if is_unsigned else pa.int64()), nulls)
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


@cache
def _keys_of_nulls(nulls: tuple[str, ...]) -> tuple[Keys, int]:
    """Return the keys of texts that stand for a missing value, and the length of the longest."""
    texts = pa.array([one.encode() for one in nulls], pa.large_binary())
    keys, lengths = _text_keys(texts)
    return keys, int(lengths.max(initial=0))


def _text_keys(array: pa.Array) -> tuple[Keys, Offsets]:
    """Return keys and lengths of large binaries; 0 for empty and missing ones."""
    data, starts, lengths = _text_buffers(array)
    if data.size <= _SHORT_BYTES * lengths.size or len(array[:_FIRST].unique()) > 0.9 * _FIRST:
        return text_keys(data, starts, lengths), lengths
    # Most long texts repeat, as URLs do: make the key of each distinct text once.
    encoded = array.dictionary_encode()
    keys = np.append(text_keys(*_text_buffers(encoded.dictionary)), np.uint64(0))
    index = encoded.indices.fill_null(keys.size - 1)
    return keys[index.to_numpy(zero_copy_only=False)], lengths


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
    longest = int(lengths.max(initial=0))
    if longest > MOST_TEXT_BYTES:
        raise DataError(
            f"an id is a text of {longest} bytes, and at most {MOST_TEXT_BYTES} are read"
        )
    keys, others = np.zeros(lengths.size, dtype=np.uint64), lengths > 0
    eight = np.flatnonzero(lengths == _HEX_DIGITS)
    text = data  # As it is if no text has another length, as in Criteo's logs.
    if data.size != _HEX_DIGITS * eight.size:
        text = data[starts[eight, None] + np.arange(_HEX_DIGITS)].reshape(-1)
    keys[eight], is_hex = _hex_values(text)
    others[eight[is_hex]] = False
    if others.any():
        keys[others] = fnv1a(data, starts[others], lengths[others])
    return keys


def fnv1a(data: Bytes, starts: Offsets, lengths: Offsets) -> Keys:
    """Return 64-bit FNV-1a hashes of texts."""
    # By length, longest first: texts that have an n-th byte come first. Two bytes sort the fastest.
    order = np.argsort(lengths.astype(np.uint16), kind="stable")[::-1]
    starts = starts[order]
    longest = int(lengths.max(initial=0))
    counts = lengths.size - np.searchsorted(lengths[order][::-1], np.arange(longest), side="right")
    hashes = np.full(lengths.size, _FNV_OFFSET, dtype=np.uint64)
    for place, count in enumerate(counts):
        hashed = hashes[:count]
        hashed ^= data[starts[:count] + place]
        hashed *= _FNV_PRIME
    found = np.empty_like(hashes)
    found[order] = hashes
    return found


def _hex_values(text: Bytes) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Return values of texts of eight characters, and which are hexadecimal in lower case."""
    digits, letters = text - np.uint8(ord("0")), text - np.uint8(ord("a"))  # Bytes wrap below zero.
    is_letter = letters < 6
    is_digit = (digits < 10) | is_letter
    digits -= is_letter * np.uint8(ord("a") - ord("0") - 10)
    is_hex = is_digit.view("<u8") == 0x0101010101010101
    pairs = digits.view("<u2")
    values = (pairs << np.uint16(4) | pairs >> np.uint16(8)).astype(np.uint8)
    return values.view(">u4").astype(np.uint64), is_hex
