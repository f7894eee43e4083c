"""Raw ids become keys by a rule that looks at one value alone, and keys become rows."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.data.encoding import Encoding, Hash, Identity, OutOfRange, Vocabulary
from placer.data.keys import bags_from_arrow, can_be_ids, fnv1a, is_text
from placer.data.vocabulary import mixed_bits
from placer.errors import DataError


def reference_key(value: object) -> int:
    """The documented rule, one value at a time."""
    if value is None or value in ("", b""):
        return 0
    if isinstance(value, int):
        return value % 2**64
    text = value if isinstance(value, bytes) else str(value).encode()
    if len(text) == 8 and set(text) <= set(b"0123456789abcdef"):
        return int(text, 16)
    result = 0xCBF29CE484222325
    for byte in text:
        result = (result ^ byte) * 0x100000001B3 % 2**64
    return result


def keys_of(array: pa.Array, missing: str = "zero") -> tuple[list[int], list[int] | None]:
    keys, offsets = bags_from_arrow(array, missing)  # type: ignore[arg-type]
    return keys.tolist(), None if offsets is None else offsets.tolist()


TEXTS = st.lists(
    st.none() | st.text(max_size=12) | st.from_regex(r"\A[0-9a-f]{8}\Z"), min_size=1, max_size=40
)


@given(TEXTS, st.integers(0, 5))
def test_texts_follow_the_rule(values: list[str | None], cut: int) -> None:
    expected = [reference_key(value) for value in values[cut:]]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert keys_of(pa.array(values, kind)[cut:])[0] == expected
    assert keys_of(pa.array(values, pa.string()).dictionary_encode()[cut:])[0] == expected


NEARLY_HEX = st.lists(st.sampled_from(b"09af/:`g@AFO\x00\xff"), min_size=8, max_size=8).map(bytes)
LENGTHS = st.sampled_from([0, 1, 7, 8, 9, 15, 16, 17, 33, 100])
BYTES = st.lists(
    st.none() | NEARLY_HEX | LENGTHS.flatmap(lambda n: st.binary(min_size=n, max_size=n)),
    max_size=12,
)


@given(BYTES, st.integers(0, 3))
def test_texts_of_all_lengths_beside_each_other(values: list[bytes | None], cut: int) -> None:
    expected = [reference_key(value) for value in values[cut:]]
    for kind in (pa.binary(), pa.large_binary()):
        assert keys_of(pa.array(values, kind)[cut:])[0] == expected


@pytest.mark.parametrize("length", [1, 8, 20, 8192])
def test_texts_of_equal_length(length: int) -> None:
    values = [f"{number:0{length}d}" for number in (0, 7, 3, 7)]
    assert keys_of(pa.array(values))[0] == [reference_key(value) for value in values]


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_integers_are_their_own_keys(values: list[int | None]) -> None:
    assert keys_of(pa.array(values, pa.int64()))[0] == [reference_key(value) for value in values]


@given(st.lists(st.none() | st.integers(0, 100) | st.just(0), min_size=1))
def test_missing_values_can_be_empty_bags(values: list[int | None]) -> None:
    keys, offsets = keys_of(pa.array(values, pa.int32()), "empty")
    assert keys == [value for value in values if value is not None]
    if None in values:
        assert np.diff(offsets).tolist() == [int(value is not None) for value in values]
    else:
        assert offsets is None


@given(st.lists(st.none() | st.lists(st.integers(0, 9), max_size=4), min_size=1), st.integers(0, 3))
def test_lists_are_bags(values: list[list[int] | None], cut: int) -> None:
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int32())):
        keys, offsets = keys_of(pa.array(values, kind)[cut:])
        kept = values[cut:]
        assert keys == [item for bag in kept for item in bag or []]
        assert np.diff(offsets).tolist() == [len(bag or []) for bag in kept]


@given(st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4), min_size=1))
def test_missing_values_in_lists_can_be_no_lookups(values: list[list[int | None] | None]) -> None:
    kept = [[item for item in bag or [] if item is not None] for bag in values]
    numbers = pa.array(values, pa.list_(pa.int64()))
    keys, offsets = keys_of(numbers, "empty")
    assert keys == [item for bag in kept for item in bag]
    assert np.diff(offsets or []).tolist() == [len(bag) for bag in kept]
    texts = numbers.cast(pa.list_(pa.string()))
    assert keys_of(texts, "empty")[1] == offsets
    assert len(keys_of(numbers, "zero")[0]) == sum(len(bag or []) for bag in values)


def test_lists_of_texts_and_of_fixed_size() -> None:
    texts = pa.array([["68fd1e64", "x"], []])
    assert keys_of(texts) == ([0x68FD1E64, reference_key("x")], [0, 2, 2])
    fixed = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    assert keys_of(fixed) == ([1, 2, 3, 4], [0, 2, 4])


def test_an_unsigned_id_beyond_63_bits_keeps_its_value() -> None:
    assert keys_of(pa.array([2**64 - 1], pa.uint64()))[0] == [2**64 - 1]


@pytest.mark.parametrize("distinct", [100, 20_000])
def test_long_texts_have_the_same_keys_whether_or_not_they_repeat(distinct: int) -> None:
    texts = [f"https://shop.example/item/{number % distinct}" for number in range(20_000)]
    keys, offsets = keys_of(pa.array([*texts, None]))
    assert keys[:50] == [reference_key(text) for text in texts[:50]]
    assert len(set(keys[:-1])) == distinct
    assert keys[-1] == reference_key(None)
    assert offsets is None


def test_a_dictionary_of_nulls_alone() -> None:
    nulls = pa.array([None, None], pa.dictionary(pa.int32(), pa.string()))
    assert keys_of(nulls) == ([0, 0], None)


@pytest.mark.parametrize("place", range(8))
def test_only_hexadecimal_digits_in_lower_case_are_numbers(place: int) -> None:
    digits = b"0123abcd"
    texts = [digits[:place] + bytes([byte]) + digits[place + 1 :] for byte in range(256)]
    keys, _ = keys_of(pa.array([*texts, b"WXYZWXYZ", b"_" * 8, b"?:;<=>?@"], pa.binary()))
    assert keys == [reference_key(text) for text in [*texts, b"WXYZWXYZ", b"_" * 8, b"?:;<=>?@"]]


def test_fnv1a_gives_the_published_values() -> None:
    # From the test vectors of draft-eastlake-fnv.
    data = np.frombuffer(b"afoobar", dtype=np.uint8)
    hashes = fnv1a(data, np.array([0, 0, 1]), np.array([0, 1, 6]))
    assert hashes.tolist() == [0xCBF29CE484222325, 0xAF63DC4C8601EC8C, 0x85944171F73967E8]


def test_bits_are_mixed_as_splitmix64_does() -> None:
    # The first outputs of its generator from seed 0, which mixes multiples of the golden ratio.
    multiples = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mixed_bits(multiples).tolist() == published


def test_kinds_of_columns() -> None:
    assert is_text(pa.list_(pa.string()))
    assert is_text(pa.dictionary(pa.int8(), pa.string()))
    assert not is_text(pa.int64())
    assert can_be_ids(pa.bool_())
    assert not can_be_ids(pa.float64())
    assert not can_be_ids(pa.list_(pa.float32()))
    with pytest.raises(DataError, match="type double cannot hold ids"):
        bags_from_arrow(pa.array([1.5]), "zero")


# Rows -------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("other", [[3, 7], [7], [7, 4]])
def test_vocabularies_of_other_keys_or_of_another_order_differ(other: list[int]) -> None:
    assert Vocabulary(as_keys([7, 3])) != Vocabulary(as_keys(other))


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
