"""Keys become rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.data.encoding import Encoding, Hash, Identity, OutOfRange, Vocabulary
from placer.errors import DataError

KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=50)


def as_keys(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50, unique=True), KEYS)
def test_a_vocabulary_numbers_its_keys_and_sends_others_to_row_0(
    listed: list[int], keys: list[int]
) -> None:
    vocabulary = Vocabulary(as_keys(listed))
    rows = {key: row for row, key in enumerate(listed, start=1)}
    every = listed + keys
    assert vocabulary.map(as_keys(every)).tolist() == [rows.get(key, 0) for key in every]
    assert vocabulary.rows == len(listed) + 1
    assert vocabulary == Vocabulary(as_keys(listed))
    assert hash(vocabulary) == hash(Vocabulary(as_keys(listed)))


def test_a_vocabulary_lists_a_key_once() -> None:
    with pytest.raises(DataError, match="lists an id twice"):
        Vocabulary(as_keys([5, 5]))


def test_identity_tells_the_first_id_that_is_no_row() -> None:
    assert Identity(3).map(as_keys([0, 2])).tolist() == [0, 2]
    with pytest.raises(OutOfRange) as caught:
        Identity(3).map(as_keys([1, 3, 4]))
    assert (caught.value.position, caught.value.raw_id) == (1, 3)
    with pytest.raises(OutOfRange) as caught:
        Identity(3).map(as_keys([2**64 - 7]))
    assert caught.value.raw_id == -7


def test_an_encoding_survives_json() -> None:
    encoding = Encoding(
        feature_tables={"a": "x", "b": "x", "c": "y", "d": "z"},
        mappings={"x": Vocabulary(as_keys([7, 3])), "y": Hash(10), "z": Identity(4)},
        dense=("I1",),
        label="click",
        missing="empty",
    )
    again = Encoding.from_json(encoding.to_json(), encoding.vocabularies)
    assert again == encoding
    assert again.tables == {"x": 3, "y": 10, "z": 4}
    with pytest.raises(DataError, match="'x': id mapping 'vocabulary' cannot be rebuilt"):
        Encoding.from_json(encoding.to_json(), {})


def test_an_encoding_needs_a_mapping_for_every_table() -> None:
    with pytest.raises(DataError, match="no id mapping for tables y"):
        Encoding(feature_tables={"a": "y"}, mappings={})
