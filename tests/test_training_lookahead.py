"""Looking one batch ahead changes no bit of a run, and loops of one's own can do it too."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from checkpoint_cases import load
from executor_cases import assert_same_bits, contents
from fast_and_full import covering
from torch.utils.data import DataLoader
from training_cases import (
    QUICK,
    ArrayLog,
    Placement,
    assert_same_tensors,
    losses_of,
    plan_for,
    small_log,
)

from placer.data.log import Bags, Chunk
from placer.errors import DataError
from placer.executor import BagBatch, PlacedEmbeddings, PreparedBatch, look_ahead
from placer.tables import OptimizerName
from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.loop import train
from placer.training.reading import batches, in_background

LOG = small_log(640)  # 20 batches, two of them held out
CONFIG = replace(QUICK, epochs=2)


WAYS = ("split", "adagrad"), ("staged", "rowwise_adagrad"), ("cached", "adam")


def with_gaps(log: ArrayLog) -> ArrayLog:
    """Some samples of the log have no label, and all of several batches in a row."""
    rng = np.random.default_rng(5)
    bare = (rng.random(640) < 0.2) | np.isin(np.arange(640) // 32, [3, 4, 5, 8])
    labels = np.where(bare, np.float32(np.nan), log.chunk.labels)
    return replace(log, chunk=replace(log.chunk, labels=labels))


@pytest.mark.parametrize(
    ("backend", "placement", "optimizer"),
    covering((backend, *how) for backend in ("torch", "numba", "tiered") for how in WAYS),
)
def test_runs_are_equal_with_and_without(
    tmp_path: Path, placement: Placement, optimizer: OptimizerName, backend: str
) -> None:
    log, plan = with_gaps(LOG), plan_for(LOG, placement, optimizer=optimizer)
    results = []
    for ahead in (True, False):
        config = replace(CONFIG, backend=backend, look_ahead=ahead)
        policy = CheckpointPolicy(tmp_path / str(ahead), every_steps=7, keep=9)
        results.append(train(plan, log, config, checkpoints=policy))
    one, two = results
    assert one.steps > 20
    assert one.losses == two.losses
    assert (one.auc, one.log_loss) == (two.auc, two.log_loss)
    assert one.unlabelled_samples == two.unlabelled_samples
    names = sorted(path.name for path in (tmp_path / "True").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "False").iterdir())
    for name in names:
        assert_same_tensors(tmp_path / "True" / name, tmp_path / "False" / name)
        positions = {load(tmp_path / ahead / name).position for ahead in ("True", "False")}
        assert len(positions) == 1


def test_backends_with_and_without_memory_tiers_learn_alike() -> None:
    plan = plan_for(LOG, "cached")
    tiered = train(plan, LOG, replace(CONFIG, backend="tiered"))
    plain = train(plan, LOG, replace(CONFIG, backend="torch"))
    assert losses_of(tiered) == pytest.approx(losses_of(plain), abs=1e-5)
    assert plain.hit_rates is None
    rates = tiered.hit_rates
    # Every lookup of the samples trained on, each counted once and none of the evaluation's.
    lookups = sum(bags.ids.size for bags in LOG.chunk.features.values())
    tenths = [chunk for number, chunk in enumerate(batches(LOG, 32)) if number % 10 == 9]
    held_out = sum(bags.ids.size for chunk in tenths for bags in chunk.features.values())
    assert rates.lookups == 2 * (lookups - held_out)
    assert 0 < rates.home_lookups < rates.lookups
    assert 0 < rates.row_cache.hit_lookups < rates.row_cache.lookups
    assert rates.home_lookups + rates.row_cache.lookups <= rates.lookups


def test_errors_come_after_the_steps_before_them(tmp_path: Path) -> None:
    """As they did before anything looked ahead: the batches before a bad one are trained on."""
    ids = LOG.chunk.features["a"].ids.copy()
    ids[5 * 32 + 3] = 50
    features = {**LOG.chunk.features, "a": Bags(ids)}
    bad = replace(LOG, chunk=replace(LOG.chunk, features=features))
    labels = np.where(np.arange(640) == 163, 7, LOG.chunk.labels)
    wrong = replace(LOG, chunk=replace(LOG.chunk, labels=labels))
    for number, log in enumerate((bad, wrong)):
        policy = CheckpointPolicy(tmp_path / str(number), every_steps=1)
        with pytest.raises(DataError, match=r"id 50 is not a row|a label is 7"):
            train(plan_for(LOG, "staged"), log, QUICK, checkpoints=policy)
        assert load(tmp_path / str(number)).position.step == 5
        assert not readers()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "placer reader"]


# The pieces


def lookups_of(embeddings: PlacedEmbeddings, log: ArrayLog, size: int) -> list[BagBatch]:
    return [BagBatch.from_chunk(chunk, embeddings.feature_names) for chunk in batches(log, size)]


def trained(embeddings: PlacedEmbeddings, stream: Iterator[BagBatch | PreparedBatch]) -> None:
    for step, batch in enumerate(stream):
        outputs = embeddings(batch)
        sum((output * (step + 1)).sin().sum() for output in outputs.values()).backward()


def test_a_loop_of_ones_own_looks_ahead_and_stays_exact() -> None:
    states = []
    for ahead in (True, False):
        embeddings = PlacedEmbeddings(plan_for(LOG, "cached"), lr=0.1, backend="tiered")
        given = lookups_of(embeddings, LOG, 64)
        trained(embeddings, look_ahead(given, embeddings) if ahead else iter(given))
        states.append(contents(embeddings))
    assert_same_bits(*states)


class Recorder:
    """Notes what is prepared, as `PlacedEmbeddings` would."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def prefetch(self, batch: BagBatch) -> int:
        self.seen.append(batch.batch_size)
        if batch.batch_size == 13:
            raise DataError("a bad batch")
        return -batch.batch_size


def batch_of(samples: int) -> BagBatch:
    return BagBatch(torch.zeros(samples, dtype=torch.int64), torch.arange(samples + 1), samples)


def test_each_batch_is_prepared_before_its_predecessor_is_handed_out() -> None:
    recorder = Recorder()
    items = look_ahead((batch_of(size) for size in (1, 2, 3)), recorder)
    seen = [(item, list(recorder.seen)) for item in items]
    assert seen == [(-1, [1, 2]), (-2, [1, 2, 3]), (-3, [1, 2, 3])]


def test_other_elements_are_handed_on_and_gaps_are_looked_past() -> None:
    recorder = Recorder()
    items = [(batch_of(1), "a"), (None, "b"), (batch_of(2), "c"), (None, "d"), (None, "e"),
             (None, "f"), (batch_of(3), "g")]  # fmt: skip
    seen = [(*item, len(recorder.seen)) for item in look_ahead(items, recorder)]
    assert [(item, name) for item, name, _ in seen] == [
        (-1, "a"), (None, "b"), (-2, "c"), (None, "d"), (None, "e"), (None, "f"), (-3, "g"),
    ]  # fmt: skip
    # The second batch is prepared before the first is trained on; the third lies too far ahead.
    assert [count for _, _, count in seen] == [2, 2, 2, 2, 3, 3, 3]


class Clicks(NamedTuple):
    lookups: BagBatch
    labels: torch.Tensor


def test_batches_come_as_loaders_make_them() -> None:
    items = [(batch_of(size), torch.ones(size)) for size in (1, 2)]
    loader = DataLoader(items, batch_size=None)  # type: ignore[arg-type]
    assert [item[0] for item in look_ahead(loader, Recorder())] == [-1, -2]
    named = look_ahead([Clicks(*item) for item in items], Recorder())
    assert [(one.lookups, len(one.labels)) for one in named] == [(-1, 1), (-2, 2)]


def test_nothing_and_one_batch() -> None:
    assert list(look_ahead([], Recorder())) == []
    assert list(look_ahead([batch_of(4)], Recorder())) == [-4]


def test_an_error_waits_for_its_turn() -> None:
    def failing() -> Iterator[BagBatch]:
        yield batch_of(1)
        raise OSError("the disk is gone")

    for source, message in (
        (failing(), "the disk is gone"),
        (iter([batch_of(1), batch_of(13)]), "a bad batch"),
        (iter([batch_of(1), "text"]), "not str"),
        (iter([batch_of(1), (7, batch_of(2))]), "not tuple"),
    ):
        stream = look_ahead(source, Recorder())  # type: ignore[call-overload]
        assert next(stream) == -1
        with pytest.raises((OSError, DataError), match=message):
            next(stream)


def test_leaving_the_loop_closes_what_it_reads() -> None:
    closed = []

    def source() -> Iterator[BagBatch]:
        try:
            while True:
                yield batch_of(1)
        finally:
            closed.append(True)

    stream = look_ahead(source(), Recorder())
    next(stream)
    stream.close()
    assert closed == [True]


def test_a_thread_gives_all_items_in_order_and_is_never_far_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            yield number

    taken = []
    for number in in_background(items, depth=3):
        taken.append(number)
        assert len(made) <= number + 1 + 3
    assert taken == list(range(50))
    assert not readers()


def test_a_thread_works_ahead_of_the_loop() -> None:
    """The second item is made while the loop is busy with the first."""
    second = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    stream = in_background(items, depth=1)
    assert next(stream) == 1
    assert second.wait(timeout=60)
    assert list(stream) == [2]


def test_a_threads_error_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise DataError("line 2 is ragged")

    stream = in_background(items)
    assert next(stream) == 1
    with pytest.raises(DataError, match="line 2 is ragged"):
        next(stream)
    assert not readers()


def test_leaving_early_ends_the_thread_and_closes_what_it_reads() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            number = 0
            while True:
                yield (number := number + 1)
        finally:
            closed.append(threading.current_thread().name)

    stream = in_background(items, depth=2)
    assert next(stream) == 1
    time.sleep(0.01)  # The thread is likely to wait for room by now; either way it must end.
    stream.close()
    assert closed == ["placer reader"]
    assert not readers()


def test_a_log_that_fails_to_open_is_told_of() -> None:
    class Missing(ArrayLog):
        def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
            raise DataError("there is no such file")

    log = Missing(LOG.chunk, LOG.tables, LOG.feature_tables, LOG.dense_names)
    with pytest.raises(DataError, match="there is no such file"):
        train(plan_for(LOG), log, TrainConfig())
    assert not readers()
