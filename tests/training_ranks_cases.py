"""What ranks do in the tests of training with many of them."""

import resource
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_cases import QUICK, ArrayLog, ctrl_c_after, losses_of, plan_for, small_log, tensors_of

from placer.data.log import Chunk, slice_chunk
from placer.errors import CheckpointError, DataError, PlacerError
from placer.plan.plan import Plan
from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.loop import TrainResult, train

LOG = small_log(650)  # 21 batches of 32, of which two are held out; the last one has 10 samples
CONFIG = replace(QUICK, report_every=1, activation="gelu")
"""Of one process; of two each has half the batch. GELU, because ReLU's kink amplifies rounding."""


def sparsely_labelled() -> ArrayLog:
    """Where most lack a label: batches of odd sizes, of one sample, and of none."""
    labels = LOG.chunk.labels.copy()
    labels[np.random.default_rng(1).random(labels.size) < 0.4] = np.nan
    labels[33:64] = np.nan
    labels[96:128] = np.nan
    return replace(LOG, chunk=replace(LOG.chunk, labels=labels))


@dataclass(frozen=True)
class Case:
    plan: Plan
    log: ArrayLog
    config: TrainConfig = CONFIG


CASES = {
    "hot rows on one rank, cold ones on the other": Case(plan_for(LOG, "split"), LOG),
    "strided": Case(
        plan_for(LOG, "strided", optimizer="adam"), LOG, replace(CONFIG, optimizer="adam")
    ),
    "sparsely labelled": Case(
        plan_for(LOG, "split", optimizer="adagrad"), sparsely_labelled(), replace(CONFIG, epochs=2)
    ),
    "staged": Case(
        plan_for(LOG, "staged"), LOG, replace(CONFIG, backend="tiered", look_ahead=False)
    ),
    "bfloat16": Case(
        plan_for(LOG, "hbm", optimizer="sgd"), LOG, replace(CONFIG, optimizer="sgd", amp="bfloat16")
    ),
}


def halved(config: TrainConfig) -> TrainConfig:
    """Of each of two ranks."""
    return replace(config, batch_size=config.batch_size // 2)


# What runs on each rank -------------------------------------------------------------------------


def trains(rank: int, world: int, case: Case, folder: Path) -> TrainResult:
    return train(case.plan, case.log, halved(case.config), checkpoints=CheckpointPolicy(folder))


def stops_and_goes_on(rank: int, world: int, case: Case, folder: Path) -> tuple[TrainResult, ...]:
    """Ctrl-C reaches one rank alone."""
    policy, config = CheckpointPolicy(folder), halved(case.config)
    interrupt = ctrl_c_after(5) if rank == 1 else None
    stopped = train(case.plan, case.log, config, checkpoints=policy, on_progress=interrupt)
    rest = train(case.plan, case.log, config, checkpoints=policy, resume=folder)
    return stopped, rest


def goes_on(rank: int, world: int, case: Case, folder: Path) -> TrainResult:
    policy = CheckpointPolicy(folder)
    return train(case.plan, case.log, halved(case.config), checkpoints=policy, resume=folder)


@dataclass(frozen=True)
class BrokenLog(ArrayLog):
    """A disk that fails at the second chunk."""

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        yield from ArrayLog.chunks(shortened(self, 64), samples, skip)
        raise DataError("the disk of this rank is broken")


def shortened(log: ArrayLog, samples: int) -> ArrayLog:
    return ArrayLog(
        slice_chunk(log.chunk, 0, samples), log.tables, log.feature_tables, log.dense_names
    )


def refuses(rank: int, world: int, what: str) -> str:
    """An error that one rank meets is one of all."""
    log, plan = LOG, plan_for(LOG, "split")
    labels = LOG.chunk.labels.copy()
    match what:
        case "broken disk" if rank == 1:
            log = BrokenLog(LOG.chunk, LOG.tables, LOG.feature_tables, LOG.dense_names)
        case "shorter log" if rank == 1:
            log = shortened(LOG, 600)
        case "bad label":
            labels[100] = 3  # In the part of one of them.
            log = replace(LOG, chunk=replace(LOG.chunk, labels=labels))
        case "other plan" if rank == 1:
            plan = plan_for(LOG, "hbm")
    with pytest.raises(PlacerError) as error:
        train(plan, log, halved(CONFIG))
    return f"{error.type.__name__}: {error.value}"


def full_disk(rank: int, world: int, folder: Path) -> str:
    """The first rank cannot write; the second learns of it, and both can go on."""
    plan = plan_for(LOG, "split", dim=256)
    config = halved(replace(CONFIG, max_steps=4))
    train(plan, LOG, config, checkpoints=CheckpointPolicy(folder))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    with pytest.raises(CheckpointError) as error:
        train(plan, LOG, halved(CONFIG), checkpoints=CheckpointPolicy(folder), resume=folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert train(plan, LOG, config, resume=folder).steps == 4
    return str(error.value)


REFUSALS = ("broken disk", "shorter log", "bad label", "other plan")


def trained_alone(cases: Mapping[str, Case], folder: Path) -> dict[str, TrainResult]:
    """Cases in one process, with the whole batch; the first is saved early, to go on with more."""
    first = next(iter(cases.values()))
    early = CheckpointPolicy(folder / "from one")
    train(first.plan, first.log, replace(first.config, max_steps=7), checkpoints=early)
    return {
        name: train(
            case.plan, case.log, case.config, checkpoints=CheckpointPolicy(folder / "one" / name)
        )
        for name, case in cases.items()
    }


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds but the state of random numbers."""
    held = tensors_of(path)
    return {name: tensor for name, tensor in held.items() if not name.startswith("random/")}


def close(one: Path, two: Path, tolerance: float = 2e-5) -> None:
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=tolerance, msg=name)


def assert_same_training(
    found: TrainResult, expected: TrainResult, tolerance: float = 2e-5
) -> None:
    """Up to the rounding of sums; `auc` jumps where two samples change places."""
    assert [step for step, _ in found.losses] == [step for step, _ in expected.losses]
    assert losses_of(found) == pytest.approx(losses_of(expected), abs=tolerance)
    assert found.auc == pytest.approx(expected.auc, abs=1e-3 if tolerance < 1e-3 else 1e-2)
    assert found.log_loss == pytest.approx(expected.log_loss, abs=tolerance)
    for figure in ("eval_samples", "steps", "samples", "unlabelled_samples"):
        assert getattr(found, figure) == getattr(expected, figure)
