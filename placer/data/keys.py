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

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.layout import Missing
from placer.data.text_keys import Bytes, Keys, Offsets, text_keys
from placer.errors import DataError

_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view())
_SHORT_BYTES = 16
"""Mean length up to which texts are hashed in less time than Arrow looks them up in."""


def is_text(kind: pa.DataType) -> bool:
    """Return whether ids of this Arrow type, or of a list of it, are texts."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return kind in _TEXTS


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type holds a bag of ids per sample."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def can_be_ids(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type can be a categorical feature."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return not is_list(kind.value_type) and can_be_ids(kind.value_type)
    is_whole = pa.types.is_integer(kind) or is_whole_decimal(kind)
    return bool(is_text(kind) or is_whole or pa.types.is_boolean(kind))


def is_whole_decimal(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is of decimals of scale 0, as Snowflake and Oracle write ids."""
    return bool(pa.types.is_decimal(kind) and kind.scale == 0)


def bags_from_arrow(array: pa.Array, missing: Missing) -> tuple[Keys, Offsets | None]:
    """Return keys, uint64, and bag offsets of a column of integers, texts, or lists of these.

    `missing` says whether a missing value is key 0 or an empty bag. A missing list is always empty,
    and a missing value within a list always key 0. Offsets are None where every sample has one key.
    """
    if is_list(array.type):
        return _keys(array.flatten())[0], list_offsets(array)
    keys, present = _keys(array)
    if missing == "zero" or present.all():
        return keys, None
    return keys[present], offsets_of(present)


def offsets_of(lengths: npt.NDArray[Any]) -> Offsets:
    """Return where bags of some lengths begin, and the end of the last.

    >>> offsets_of(np.array([2, 0, 1]))
    array([0, 2, 2, 3])
    """
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def list_offsets(lists: pa.Array) -> Offsets:
    """Return offsets of lists' elements as `flatten` gives them; a missing list is empty."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return offsets_of(lengths.to_numpy(zero_copy_only=False))


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
    if is_whole_decimal(kind):
        try:
            return _keys(array.cast(pa.int64()))
        except pa.ArrowInvalid as error:
            raise DataError(f"an id is beyond 64 bits: {error}; write it as text") from error
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
    if data.size <= _SHORT_BYTES * lengths.size:
        return text_keys(data, starts, lengths), present
    # Categories repeat more than they differ: of long texts, each distinct one's is made once.
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
