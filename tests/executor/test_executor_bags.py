"""Batches: joined from features or chunks, and refused when malformed."""

from typing import Any

import numpy as np
import pytest
import torch

from placer.data.log import Bags, Chunk
from placer.errors import BackendError, DataError, PlanMismatchError
from placer.executor import BagBatch


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_features_are_joined_feature_major_in_the_order_asked_for() -> None:
    features = {
        "a": (ints(1, 2, 3), ints(0, 2, 2, 3), None),
        "unused": (ints(9), None, None),
        "b": (ints(7, 8, 9), None, torch.tensor([0.5, 1.5, 2.5])),
    }
    bags = {
        "a": Bags(np.array([1, 2, 3]), np.array([0, 2, 2, 3])),
        "b": Bags(np.array([7, 8, 9]), weights=np.array([0.5, 1.5, 2.5], "f4")),
    }
    chunk = Chunk(3, bags, np.zeros((3, 0), "f4"))
    for batch in (
        BagBatch.from_features(features, ["b", "a"]),
        BagBatch.from_chunk(chunk, ["b", "a"]),
    ):
        assert batch.batch_size == 3
        assert batch.ids.tolist() == [7, 8, 9, 1, 2, 3]
        assert batch.offsets.tolist() == [0, 1, 2, 3, 5, 5, 6]
        assert batch.weights.tolist() == [0.5, 1.5, 2.5, 1, 1, 1]
    assert BagBatch.from_chunk(chunk, ["a"]).weights is None


def test_the_last_offset_may_be_left_out() -> None:
    with_last = {"a": (ints(1, 2, 3), ints(0, 2, 2, 3), None)}
    without = {"a": (ints(1, 2, 3), ints(0, 2, 2), None)}
    expected = BagBatch.from_features(with_last, ["a"])
    actual = BagBatch.from_features(without, ["a"], include_last_offset=False)
    assert torch.equal(actual.offsets, expected.offsets)
    assert actual.batch_size == expected.batch_size == 3
    with pytest.raises(DataError, match=r"last offset must be 3.*include_last_offset=False"):
        BagBatch.from_features({"a": (ints(1, 2, 3), ints(0, 2), None)}, ["a"])


def test_gradients_reach_the_weights_of_a_feature() -> None:
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    batch = BagBatch.from_features(
        {"a": (ints(1), None, None), "b": (ints(5, 6), ints(0, 2), weights)}, ["a", "b"]
    )
    batch.weights.sum().backward()
    assert weights.grad.tolist() == [1.0, 1.0]


def test_id_types_are_kept_or_widened() -> None:
    narrow = ints(1).int()
    assert BagBatch.from_features({"a": (narrow, None, None)}, ["a"]).ids.dtype == torch.int32
    mixed = {"a": (narrow, None, None), "b": (ints(2), None, None)}
    assert BagBatch.from_features(mixed, ["a", "b"]).ids.dtype == torch.int64
    mixed["a"] = torch.tensor([2.0**24 + 1]), None, None
    with pytest.raises(DataError, match=r"'a': ids are integers, not torch\.float32"):
        BagBatch.from_features(mixed, ["a", "b"])


def test_no_features_make_an_empty_batch() -> None:
    batch = BagBatch.from_features({}, [])
    assert (batch.batch_size, batch.ids.numel(), batch.offsets.tolist()) == (0, 0, [0])


def test_missing_features_are_named() -> None:
    with pytest.raises(PlanMismatchError, match=r"lacks features \['b'\].*'a'"):
        BagBatch.from_features({"a": (ints(1), None, None)}, ["a", "b"])
    chunk = Chunk(1, {"a": Bags(np.array([1]))}, np.zeros((1, 0), "f4"))
    with pytest.raises(PlanMismatchError, match=r"lacks features \['b'\].*'a'"):
        BagBatch.from_chunk(chunk, ["a", "b"])


def test_features_of_different_lengths_are_refused() -> None:
    features = {"a": (ints(1, 2), None, None), "b": (ints(1), None, None)}
    with pytest.raises(DataError, match="'a': 2, 'b': 1"):
        BagBatch.from_features(features, ["a", "b"])
    chunk = Chunk(2, {"b": Bags(np.array([1]))}, np.zeros((2, 0), "f4"))
    with pytest.raises(DataError, match="'b' has 1 bags in a chunk of 2"):
        BagBatch.from_chunk(chunk, ["b"])
    with pytest.raises(DataError, match="'a': its first offset is 1"):
        BagBatch.from_features({"a": (ints(1, 2), ints(1, 2), None)}, ["a"])


@pytest.mark.parametrize(
    ("ids", "offsets", "size", "message"),
    [
        (torch.tensor([1.0]), ints(0, 1), 1, "int64 or int32"),
        (ints(1), ints(0, 1).int(), 1, "offsets must be a vector of int64"),
        (ints(1, 2), ints(0, 1, 2), 3, "3 offsets are not features × 3"),
        (ints(1), ints(0, 1), 0, "2 offsets are not features × 0"),
        (ints(1), ints(), 1, "0 offsets"),
        (ints(1, 2), ints(0, 1), 1, "from 0 to the number of lookups, 2"),
        (ints(1, 2), ints(0, 2, 1, 2), 3, "number of lookups, 2; after 2 comes 1"),
    ],
)
def test_malformed_batches_are_refused(
    ids: torch.Tensor, offsets: torch.Tensor, size: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        BagBatch(ids, offsets, size)


def test_each_lookup_needs_a_weight() -> None:
    with pytest.raises(DataError, match=r"weights of shape \(1,\) for 2 lookups"):
        BagBatch(ints(1, 2), ints(0, 2), 1, torch.ones(1))
    with pytest.raises(DataError, match="float64 weights"):
        BagBatch(ints(1, 2), ints(0, 2), 1, torch.ones(2, dtype=torch.float64))


# What the host knows of a batch on a device. "meta" stands for one: its values cannot be read.


def two_features() -> BagBatch:
    features = {
        "a": (ints(1, 2, 3), ints(0, 2, 2, 3), None),
        "b": (ints(7, 8, 9, 5), ints(0, 1, 1, 4), None),
    }
    return BagBatch.from_features(features, ["a", "b"])


def test_bounds_of_features_are_taken_from_offsets_on_a_cpu() -> None:
    batch = two_features()
    assert batch.bounds == (0, 3, 7)
    wrong = BagBatch(batch.ids, batch.offsets, batch.batch_size, bounds=(0, 5, 7))
    assert wrong.bounds == (0, 3, 7)
    chunk = Chunk(2, {"a": Bags(np.array([4, 5]))}, np.zeros((2, 0), "f4"))
    assert BagBatch.from_chunk(chunk, ["a"]).bounds == (0, 2)
    assert BagBatch.from_features({}, []).bounds == (0,)


def test_bounds_go_with_a_batch_to_another_device() -> None:
    batch = two_features()
    assert batch.to("cpu") is batch
    moved = batch.to("meta", non_blocking=True)
    assert moved.ids.device.type == moved.offsets.device.type == "meta"
    assert (moved.bounds, moved.batch_size, moved.weights) == ((0, 3, 7), 3, None)
    weighted = BagBatch(ints(1, 2), ints(0, 1, 2), 1, torch.ones(2)).to("meta")
    assert weighted.weights.device.type == "meta"


def test_a_batch_made_on_a_device_is_joined_without_reading_it() -> None:
    features = {
        "a": (ints(1, 2, 3).to("meta"), ints(0, 2, 2, 3).to("meta"), None),
        "b": (ints(7, 8, 9).to("meta"), None, torch.ones(3, device="meta")),
    }
    batch = BagBatch.from_features(features, ["b", "a"])
    assert batch.bounds == (0, 3, 6)
    assert batch.offsets.shape == (7,)
    assert batch.weights is not None
    starts = {"a": (ints(1, 2, 3).to("meta"), ints(0, 2, 2).to("meta"), None)}
    assert BagBatch.from_features(starts, ["a"], include_last_offset=False).bounds == (0, 3)


@pytest.mark.parametrize("bounds", [(0, 7), (0, 8, 7), (1, 3, 7), (0, 3, 6), (0, 3, 7, 7)])
def test_bounds_that_cannot_be_are_refused_without_reading_the_offsets(
    bounds: tuple[int, ...],
) -> None:
    batch = two_features().to("meta")
    with pytest.raises(DataError, match="bounds of 2 features must be 3 numbers"):
        BagBatch(batch.ids, batch.offsets, batch.batch_size, bounds=bounds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU memory can be pinned")
def test_memory_is_pinned_for_a_gpu_alone() -> None:
    with pytest.raises(BackendError, match="torch finds none here"):
        two_features().pin_memory()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pinned_batch_is_copied_without_waiting() -> None:
    batch = two_features().pin_memory()
    assert batch.ids.is_pinned()
    assert batch.offsets.is_pinned()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.bounds == batch.bounds
    assert torch.equal(moved.ids.cpu(), batch.ids)


def test_what_joining_features_would_hide_is_refused() -> None:
    one, two = ints(1, 2, 3), ints(0, 3)
    wrong = {"a": (one, two, torch.rand(2)), "b": (one, two, torch.rand(4))}
    with pytest.raises(DataError, match=r"'a': weights of shape \(2,\) for 3 lookups"):
        BagBatch.from_features(wrong, ["a", "b"])
    with pytest.raises(DataError, match=r"'a': ids are a vector, not of shape \(3, 1\)"):
        BagBatch.from_features({"a": (one.view(3, 1), None, None)}, ["a"])
    with pytest.raises(DataError, match=r"'a': offsets are integers, not torch\.float32"):
        BagBatch.from_features({"a": (one, torch.tensor([0.0, 1.7, 3.0]), None)}, ["a"])
    for odd in (one, (one, two), (one.tolist(), two, None), (one.numpy(), two, None)):
        features: dict[str, Any] = {"a": odd}
        with pytest.raises(DataError, match="'a' is a tuple of tensors: ids, offsets or None, w"):
            BagBatch.from_features(features, ["a"])
