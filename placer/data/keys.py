"""Raw ids, as a log has them, to 64-bit keys.

The rule looks at one value alone, so that a column gives the same keys whichever file,
format or chunk it is read from:

- an integer is its own key (two's complement);
- a text of exactly eight hexadecimal digits in lower case, which is how Criteo and Avazu
  write their hashed categories, is the integer that it spells, as in the DLRM reference;
- any other text is the 64-bit FNV-1a hash of its UTF-8 bytes (Fowler, Noll, Vo;
  draft-eastlake-fnv). Two of n texts share a key with probability n² / 2⁶⁵: 4·10⁻⁵ at
  40 million;
- a missing value (null or empty text) is key 0, as in the DLRM reference, or no lookup.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from placer.errors import DataError

Keys = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]
Missing = Literal["zero", "empty"]

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)

MOST_TEXT_BYTES = 8192
"""Longest text that is an id: their hashes are made byte by byte."""

_LOW, _LETTERS, _ONES = (np.uint64(byte * 0x0101010101010101) for byte in (0x0F, 0x40, 0x01))
"""Of each of eight bytes: the lower half, the bit that letters have, and the lowest bit."""


def is_text(kind: pa.DataType) -> bool:
    """Whether ids of this Arrow type, or of a list of it, are texts."""
    if is_list(kind):
        return is_text(kind.value_type)
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type holds a bag of ids per sample."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def can_be_ids(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type can be a categorical feature."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return not is_list(kind.value_type) and can_be_ids(kind.value_type)
    return bool(is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def bags_from_arrow(array: pa.Array, missing: Missing) -> tuple[Keys, Offsets | None]:
    """Keys and bag offsets of a categorical column.

    Parameters
    ----------
    array : pyarrow.Array
        Integers, texts, a dictionary of these, or lists of these, one entry a sample.
    missing : {"zero", "empty"}
        Whether a missing value is key 0 or an empty bag. A missing list is always empty,
        and a missing value within a list always key 0.

    Returns
    -------
    keys : uint64, shape (lookups,)
    offsets : int64, shape (samples + 1,), or None
        None when every sample has one key.
    """
    if is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        keys, _ = _keys(array.flatten())
        return keys, _cumulative(lengths)
    keys, present = _keys(array)
    if missing == "zero" or present.all():
        return keys, None
    return keys[present], _cumulative(present)


def fnv1a(data: npt.NDArray[np.uint8], starts: Offsets, lengths: Offsets) -> Keys:
    """64-bit FNV-1a hashes of the texts ``data[starts[i]:starts[i] + lengths[i]]``."""
    longest = int(lengths.max(initial=0))
    if longest > MOST_TEXT_BYTES:
        raise DataError(
            f"an id is a text of {longest} bytes, and at most {MOST_TEXT_BYTES} are read"
        )
    # Longest first, so that the texts that still have a j-th byte are always a prefix.
    order = np.argsort(-lengths, kind="stable")
    places, descending = starts[order], -lengths[order]
    hashes = np.full(order.size, _FNV_OFFSET, dtype=np.uint64)
    for active in np.searchsorted(descending, -np.arange(longest), side="left").tolist():
        having = hashes[:active]
        having ^= data[places[:active]]
        having *= _FNV_PRIME
        places += 1
    result = np.empty_like(hashes)
    result[order] = hashes
    return result


def _cumulative(lengths: npt.NDArray[Any]) -> Offsets:
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _keys(array: pa.Array) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Key of each value, and which values are present; a missing value has key 0."""
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
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        valid = _valid(array)
        values = array if array.null_count == 0 else pc.fill_null(array, _zero(kind))
        numbers = values.to_numpy(zero_copy_only=False)
        if numbers.dtype == np.uint64:
            return numbers, valid
        return numbers.astype(np.int64, copy=False).view(np.uint64), valid
    raise DataError(f"a column of type {kind} cannot hold ids; they are integers or texts")


def _zero(kind: pa.DataType) -> pa.Scalar:
    """What stands for a missing value."""
    return pa.scalar(False) if pa.types.is_boolean(kind) else pa.scalar(0, kind)


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    if array.null_count == 0:
        return np.ones(len(array), dtype=bool)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)


def _text_keys(array: pa.Array) -> tuple[Keys, npt.NDArray[np.bool_]]:
    data, starts, lengths = _text_buffers(array)
    present = lengths > 0
    is_eight = lengths == 8
    if 2 * np.count_nonzero(is_eight) <= np.count_nonzero(present):
        return _keys_by_text(array), present
    # Most may be numbers, which are read in less time than a text is looked up.
    keys = np.zeros(lengths.size, dtype=np.uint64)
    others = present & ~is_eight
    if is_eight.all():
        keys, spelled = _hex_keys(data, starts)
        others = ~spelled
    else:
        eight = np.flatnonzero(is_eight)
        keys[eight], spelled = _hex_keys(data, starts[eight])
        others[eight[~spelled]] = True
    if others.any():
        keys[others] = _keys_by_text(array if others.all() else array.filter(pa.array(others)))
    return keys, present


def _keys_by_text(array: pa.Array) -> Keys:
    """Keys of texts, each distinct one's made once: categories repeat more than they differ."""
    encoded = array.dictionary_encode()
    data, starts, lengths = _text_buffers(encoded.dictionary)
    keys = np.zeros(lengths.size + 1, dtype=np.uint64)  # The last is of missing ones.
    others = lengths > 0
    eight = np.flatnonzero(lengths == 8)
    if eight.size:
        keys[eight], spelled = _hex_keys(data, starts[eight])
        others[eight[spelled]] = False
    hashed = np.flatnonzero(others)
    keys[hashed] = fnv1a(data, starts[hashed], lengths[hashed])
    index = encoded.indices.fill_null(lengths.size)
    result: Keys = keys[index.to_numpy(zero_copy_only=False)]
    return result


def _text_buffers(array: pa.Array) -> tuple[npt.NDArray[np.uint8], Offsets, Offsets]:
    """Bytes, starts and lengths of an array of large binaries; a null has length 0."""
    _, offset_buffer, data_buffer = array.buffers()
    if not len(array):
        none = np.zeros(0, dtype=np.int64)
        return np.zeros(0, dtype=np.uint8), none, none
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[
        array.offset : array.offset + len(array) + 1
    ]
    size = int(offsets[-1])
    data = np.frombuffer(data_buffer, dtype=np.uint8)[:size] if size else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    if array.null_count:
        lengths[~_valid(array)] = 0
    return data, offsets[:-1], lengths


def _hex_keys(data: npt.NDArray[np.uint8], starts: Offsets) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Values of texts of eight characters, and which of them are hexadecimal.

    The eight bytes of a text are one integer, on whose bytes the operations work at once: a
    digit is 0x30 to 0x39, a letter 0x61 to 0x66.
    """
    first, last = int(starts[0]), int(starts[-1]) + 8
    if last - first == 8 * starts.size:
        characters = data[first:last]
    else:
        characters = data[starts[:, None] + np.arange(8)].reshape(-1)
    text = np.ascontiguousarray(characters).view(">u8").astype(np.uint64)
    letter = (text & _LETTERS) >> np.uint64(6)
    low = text & _LOW
    # The upper half of a byte is 3, or 6 for letters; the lower at most 9, or 1 to 6.
    wrong = (text ^ (_ONES * np.uint64(0x30) + letter * np.uint64(0x30))) & ~_LOW
    wrong |= (low + _ONES * np.uint64(6) + letter * np.uint64(3)) & (_ONES << np.uint64(4))
    wrong |= letter & ~((low + _LOW) >> np.uint64(4))
    spelled = wrong == 0
    values = low + letter * np.uint64(9)
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        values = (values | (values >> np.uint64(shift))) & np.uint64(mask)
    values[~spelled] = 0
    return values, spelled
