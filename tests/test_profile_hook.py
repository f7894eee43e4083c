"""Counting what a program feeds its model."""

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from placer.data import open_log
from placer.data.log import Bags
from placer.errors import DataError
from placer.profile.count import profile_log
from placer.profile.hook import CountedLoader, as_bags, profile_batches


def loader() -> "DataLoader[dict[str, torch.Tensor]]":
    samples = [{"user": torch.tensor(i % 4), "items": torch.tensor([i % 3, 2])} for i in range(10)]
    return DataLoader(samples, batch_size=4)  # type: ignore[arg-type]


def test_a_dataloader_is_counted() -> None:
    tables = {"user": 4, "items": 3}
    options = {"tables": tables, "dim": 16, "pooling": "mean"}
    profile = profile_batches(loader(), lambda batch: batch, **options)
    assert profile.samples == 10
    assert profile["user"].counts.counts.tolist() == [3, 3, 2, 2]
    assert profile["items"].counts.counts.tolist() == [4, 3, 13]
    assert profile["items"].table.features[0].pooling_factor == 2
    assert profile["items"].table.dim == 16
    assert profile_batches(islice(loader(), 2), tables=tables).samples == 8


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


def test_distinct_rows_are_counted_in_the_order_of_batches() -> None:
    """As of the same log, however it comes in batches; and though their memory is used again."""
    rng = np.random.default_rng(0)
    users = np.repeat(rng.integers(0, 500, 200), 5)  # Sessions of five samples.
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 3, users.size))])
    items = rng.integers(0, 90, offsets[-1])
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(items))
    log = open_log(pa.table({"user": users, "items": lists}), rows={"user": 500, "items": 90})
    expected = {table.name: table.locality for table in profile_log(log)}
    assert [one.samples for one in expected["user"]] == [256]

    memory = np.zeros(64, np.int64)

    def batches() -> Iterator[dict[str, object]]:
        for start in range(0, users.size, 64):
            part = users[start : start + 64]
            memory[: part.size] = part
            own = offsets[start : start + 65]
            ids = (items[own[0] : own[-1]], own - own[0])
            yield {"user": torch.from_numpy(memory)[: part.size], "items": ids}
            memory[:] = 7

    loader = CountedLoader(batches(), tables=dict(log.tables))
    assert sum(1 for _ in loader) == 16
    assert {table.name: table.locality for table in loader.profile()} == expected


def test_shapes_of_ids() -> None:
    offsets = np.array([0, 1, 3, 3])
    same = [
        as_bags("a", Bags(np.array([5, 6, 7]), offsets)),
        as_bags("a", (np.array([5, 6, 7], dtype=np.int32), offsets)),
        as_bags("a", (torch.tensor([5, 6, 7]), torch.tensor(offsets))),
    ]
    for bags in same:
        assert bags.ids.tolist() == [5, 6, 7]
        assert bags.offsets.tolist() == offsets.tolist()
        assert bags.samples == 3
    assert as_bags("a", [3, 4]).offsets is None
    assert as_bags("a", []).samples == 0
    square = as_bags("a", np.array([[1, 2], [3, 4]]))
    assert (square.ids.tolist(), square.samples) == ([1, 2, 3, 4], 2)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([0.5]), "are integers, not float64"),
        (np.zeros((1, 1, 1), int), r"ids of shape \(1, 1, 1\)"),
        ((np.array([1, 2]), np.array([0, 1])), "from 0 to 2, the number of ids"),
        ((np.array([1, 2]), np.array([0, 3, 2])), "must not decrease"),
        (np.array([7]), "has id 7, but its table has rows 0..2"),
        ([[1, 2], [0]], r"differ in length are a pair \(ids, offsets\)"),
    ],
)
def test_ids_that_cannot_be_counted(ids: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        profile_batches([{"a": ids}], tables={"a": 3})


class _Clicks(torch.utils.data.Dataset[dict[str, object]]):
    """Samples as mappings, with a list, and with what is no feature."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"user": index % 3, "history": [index % 2, 1], "label": index % 2, "price": 0.5}


def test_what_a_dataloader_makes_of_samples() -> None:
    tables = {"user": 3, "history": 2}
    profile = profile_batches(DataLoader(_Clicks(), batch_size=4), tables=tables)
    assert profile.samples == 10
    assert profile["user"].counts.hottest().tolist() == [0, 1, 2]
    assert profile["history"].counts.counts.tolist() == [5, 15]
    assert profile["history"].table.features[0].pooling_factor == 2
    pairs = DataLoader([({"user": i}, float(i)) for i in range(3)], batch_size=2)
    assert profile_batches(pairs, tables={"user": 3})["user"].lookups == 3
    lists = DataLoader(torch.utils.data.TensorDataset(torch.arange(3)))
    with pytest.raises(DataError, match="a batch, a list, has no feature 'user'; give extract="):
        profile_batches(lists, tables={"user": 3})


@pytest.mark.slow
def test_keyed_jagged_tensors() -> None:
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is missing")
    bags = sparse.KeyedJaggedTensor(
        keys=["a", "b"], values=torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 0, 2])
    )
    held = SimpleNamespace(sparse_features=bags, labels=torch.zeros(2))
    for batch in (bags, (torch.zeros(2), bags), held, {"sparse": bags}):
        profile = profile_batches([batch], tables={"a": 5, "b": 5})
        assert profile.samples == 2
        assert profile["a"].counts.ids.tolist() == [1, 2]
        assert profile["b"].table.features[0].coverage == 0.5
        assert profile["b"].counts.ids.tolist() == [3, 4]
