"""Counting what a program feeds its model."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from placer.data.log import Bags
from placer.errors import DataError
from placer.profile.hook import CountedLoader, as_bags, profile_batches, profile_dataloader


def loader() -> "DataLoader[dict[str, torch.Tensor]]":
    samples = [{"user": torch.tensor(i % 4), "items": torch.tensor([i % 3, 2])} for i in range(10)]
    return DataLoader(samples, batch_size=4)  # type: ignore[arg-type]


def test_a_dataloader_is_counted() -> None:
    profile = profile_dataloader(
        loader(), lambda batch: batch, tables={"user": 4, "items": 3}, dim=16, pooling="mean"
    )
    assert profile.samples == 10
    assert profile["user"].counts is not None
    assert profile["items"].counts is not None
    assert profile["user"].counts.counts.tolist() == [3, 3, 2, 2]
    assert profile["items"].counts.counts.tolist() == [4, 3, 13]
    assert profile["items"].table.features[0].pooling_factor == 2
    assert profile["items"].table.dim == 16
    first = profile_dataloader(
        loader(), lambda batch: batch, tables={"user": 4, "items": 3}, max_batches=2
    )
    assert first.samples == 8


def test_a_trainer_sees_its_batches_unchanged() -> None:
    counted = CountedLoader(loader(), lambda batch: {"u": batch["user"]}, tables={"u": 4})
    assert len(counted) == 3
    with pytest.raises(DataError, match="no sample has passed"):
        counted.profile()
    for ours, theirs in zip(counted, loader(), strict=True):
        assert torch.equal(ours["items"], theirs["items"])
    assert counted.profile(source="training").source == "training"
    assert counted.profile()["u"].lookups == 10
    for _ in counted:
        pass
    assert counted.profile().samples == 20, "epochs add up"


def test_shapes_of_ids() -> None:
    offsets = np.array([0, 1, 3, 3])
    same = [
        as_bags("a", Bags(np.array([5, 6, 7]), offsets)),
        as_bags("a", (np.array([5, 6, 7], dtype=np.int32), offsets)),
        as_bags("a", (torch.tensor([5, 6, 7]), torch.tensor(offsets))),
    ]
    for bags in same:
        assert bags.ids.tolist() == [5, 6, 7]
        assert bags.offsets is not None
        assert bags.offsets.tolist() == offsets.tolist()
        assert bags.samples == 3
    assert as_bags("a", [3, 4]).offsets is None
    square = as_bags("a", np.array([[1, 2], [3, 4]]))
    assert (square.ids.tolist(), square.samples) == ([1, 2, 3, 4], 2)


def test_features_may_share_a_table() -> None:
    profile = profile_batches(
        [{"a": np.array([0, 1]), "b": (np.array([1]), np.array([0, 0, 1]))}],
        tables={"t": 2},
        feature_tables={"a": "t", "b": "t"},
    )
    assert profile["t"].counts is not None
    assert profile["t"].counts.counts.tolist() == [1, 2]
    assert [f.coverage for f in profile["t"].table.features] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([0.5]), "are integers, not float64"),
        (np.zeros((1, 1, 1), int), r"ids of shape \(1, 1, 1\)"),
        ((np.array([1, 2]), np.array([0, 1])), "from 0 to 2, the number of ids"),
        ((np.array([1, 2]), np.array([0, 3, 2])), "must not decrease"),
        (np.array([7]), "has id 7, but its table has rows 0..2"),
    ],
)
def test_ids_that_cannot_be_counted(ids: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        profile_batches([{"a": ids}], tables={"a": 3})
