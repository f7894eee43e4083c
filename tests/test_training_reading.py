"""Batches of a log, however it is read; samples without a label are left out of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import load
from fast_and_full import examples, mostly_slow
from hypothesis import example, given
from hypothesis import strategies as st
from training_cases import QUICK, ArrayLog, plan_for, small_log

from placer.data.log import Bags, Chunk, joined, slice_chunk
from placer.errors import DataError
from placer.training.config import CheckpointPolicy
from placer.training.loop import train
from placer.training.pilot import compare_training
from placer.training.reading import batches, labelled

LOG = small_log(1600)
PLAN = plan_for(LOG, "split")
SHORT = small_log(60)


def without_labels(log: ArrayLog, unlabelled: np.ndarray) -> ArrayLog:
    labels = np.where(unlabelled, np.float32(np.nan), log.chunk.labels)
    return replace(log, chunk=replace(log.chunk, labels=labels))


@examples(40)
@given(st.lists(st.booleans(), min_size=40, max_size=40), st.booleans())
def test_the_labelled_samples_are_kept_as_they_are(known: list[bool], weighted: bool) -> None:
    chunk = slice_chunk(LOG.chunk, 0, 40)
    if weighted:
        weights = {
            name: np.arange(bags.ids.size, dtype=np.float32)
            for name, bags in chunk.features.items()
        }
        features = {
            name: Bags(bags.ids, bags.offsets, weights[name])
            for name, bags in chunk.features.items()
        }
        chunk = replace(chunk, features=features)
    assert chunk.labels is not None
    labels = np.where(known, chunk.labels, np.float32(np.nan))
    kept = labelled(replace(chunk, labels=labels))
    assert kept.samples == sum(known)
    if not any(known):
        return
    one_by_one = joined([slice_chunk(chunk, i, i + 1) for i in range(40) if known[i]])
    np.testing.assert_array_equal(kept.labels, one_by_one.labels)
    np.testing.assert_array_equal(kept.dense, one_by_one.dense)
    for name, bags in one_by_one.features.items():
        assert kept.features[name].samples == sum(known)
        for part in ("ids", "offsets", "weights"):
            np.testing.assert_array_equal(
                getattr(kept.features[name], part), getattr(bags, part), err_msg=f"{name} {part}"
            )


def test_a_batch_with_all_labels_is_not_copied() -> None:
    assert labelled(LOG.chunk) is LOG.chunk
    bare = Chunk(LOG.chunk.samples, LOG.chunk.features, LOG.chunk.dense)
    assert labelled(bare) is bare


def test_samples_without_a_label_have_no_influence(tmp_path: Path) -> None:
    # Whole batches without a label: the others are trained on as if these were not there.
    batch = np.arange(1600) // 32
    bare = np.isin(batch, [0, 7, 8, 49])
    result = train(PLAN, without_labels(LOG, bare), replace(QUICK, holdout_every=0))
    kept = [
        slice_chunk(LOG.chunk, 32 * b, 32 * b + 32) for b in range(50) if b not in (0, 7, 8, 49)
    ]
    alone = train(PLAN, replace(LOG, chunk=joined(kept)), replace(QUICK, holdout_every=0))
    assert result.losses == alone.losses
    assert (result.steps, result.samples, result.unlabelled_samples) == (46, 46 * 32, 4 * 32)
    assert alone.unlabelled_samples == 0


def test_they_are_not_evaluated() -> None:
    bare = np.arange(1600) % 4 == 0
    result = train(PLAN, without_labels(LOG, bare), QUICK)
    assert result.samples == 45 * 24
    assert result.eval_samples == 5 * 24
    assert result.unlabelled_samples == 400
    assert result.auc is not None
    twice = train(PLAN, without_labels(LOG, bare), replace(QUICK, epochs=2), eval_log=LOG)
    assert twice.unlabelled_samples == 800
    assert twice.eval_samples == 1600


@pytest.mark.parametrize("stop", mostly_slow([1, 7, 20, 33], 33))
def test_a_resumed_run_is_equal(tmp_path: Path, stop: int) -> None:
    rng = np.random.default_rng(5)
    log = without_labels(LOG, (rng.random(1600) < 0.3) | (np.arange(1600) // 32 % 6 == 2))
    whole = train(PLAN, log, replace(QUICK, epochs=2))
    first = train(
        PLAN, log, replace(QUICK, epochs=2, max_steps=stop), checkpoints=CheckpointPolicy(tmp_path)
    )
    assert load(tmp_path).position.samples % 32 == 0
    rest = train(PLAN, log, replace(QUICK, epochs=2), resume=tmp_path)
    assert first.losses + rest.losses == whole.losses
    assert rest.auc == whole.auc
    assert first.unlabelled_samples + rest.unlabelled_samples == whole.unlabelled_samples


def test_placed_and_unplaced_leave_out_the_same() -> None:
    bare = np.arange(1600) >= 800
    result = compare_training(PLAN, without_labels(LOG, bare), replace(QUICK, epochs=2))
    assert result.equal
    assert result.steps == 2 * 23
    assert result.samples == result.steps * 32
    assert result.unlabelled_samples == 1600
    assert result.eval_samples == 2 * 32
    assert result.placed_auc == pytest.approx(result.unplaced_auc, abs=1e-3)


def test_a_log_without_any_label_is_refused() -> None:
    bare = without_labels(LOG, np.full(1600, True))
    for run in (train, compare_training):
        with pytest.raises(DataError, match="none of the 1600 samples of the log has a label"):
            run(PLAN, bare, replace(QUICK, epochs=3))
    with pytest.raises(DataError, match="no sample of the evaluation log has a label"):
        train(PLAN, LOG, replace(QUICK, max_steps=1), eval_log=bare)
    column = replace(LOG, chunk=replace(LOG.chunk, labels=None))
    with pytest.raises(DataError, match="the evaluation log has no label column"):
        train(PLAN, LOG, replace(QUICK, max_steps=1), eval_log=column)


@dataclass(frozen=True)
class UnevenLog(ArrayLog):
    """A log whose chunks end where its files do, as `Log` allows."""

    ends: tuple[int, ...] = ()

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        start = skip
        for end in sorted({*self.ends, self.chunk.samples}):
            while start < end:
                yield slice_chunk(self.chunk, start, min(start + samples, end))
                start = min(start + samples, end)


def assert_equal(one: Chunk, two: Chunk) -> None:
    assert one.samples == two.samples
    np.testing.assert_array_equal(one.dense, two.dense)
    np.testing.assert_array_equal(one.labels, two.labels)
    for name, bags in one.features.items():
        np.testing.assert_array_equal(bags.ids, two.features[name].ids)
        np.testing.assert_array_equal(lengths(bags), lengths(two.features[name]))
        np.testing.assert_array_equal(bags.weights, two.features[name].weights)


def lengths(bags: Bags) -> np.ndarray:
    return np.ones(bags.ids.size) if bags.offsets is None else np.diff(bags.offsets)


@example(ends=[7, 25], size=10, done=1)
@given(
    ends=st.lists(st.integers(1, 59), max_size=5),
    size=st.integers(1, 70),
    done=st.integers(0, 6),
)
def test_uneven_chunks_and_skipping_give_the_same_batches(
    ends: list[int], size: int, done: int
) -> None:
    uneven = UnevenLog(
        SHORT.chunk, SHORT.tables, SHORT.feature_tables, SHORT.dense_names, tuple(ends)
    )
    whole = list(batches(SHORT, size))
    assert [batch.samples for batch in whole[:-1]] == [size] * (len(whole) - 1)
    assert len(whole) == math.ceil(SHORT.chunk.samples / size)
    again = list(batches(uneven, size, skip=done * size))
    assert len(again) == max(len(whole) - done, 0)
    for one, two in zip(whole[done:], again, strict=True):
        assert_equal(one, two)


@given(st.integers(0, 60))
def test_a_cut_chunk_can_be_joined_again(where: int) -> None:
    bags = SHORT.chunk.features["b"]
    weighted = replace(bags, weights=np.linspace(0, 1, bags.ids.size, dtype=np.float32))
    chunk = replace(SHORT.chunk, features={**SHORT.chunk.features, "b": weighted})
    assert_equal(joined([slice_chunk(chunk, 0, where), slice_chunk(chunk, where, 60)]), chunk)
